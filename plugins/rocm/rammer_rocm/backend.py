"""The opened OpenCL device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from rammer.codegen.generators import generator_hash
from rammer.device.manifest import Array, Backend, Binding, Hardware, Loaded, OpenOptions
from rammer.errors import BadInput, DeviceUnavailable
from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel, ROperator, compared
from rammer.ir.program import RProgram
from rammer.tile.search import candidates as tile_candidates
from rammer.tile.traffic import task_cost

from rammer_rocm.build import Builder, standard, version
from rammer_rocm.executor import OpenClProgram
from rammer_rocm.kernels import PANEL, written
from rammer_rocm.kernels.choose import panel_candidates
from rammer_rocm.profiler import OpenClProfiler
from rammer_rocm.units import hardware, kind_of, opencl, units, virtual_device

#: ``--option executor=...``: one launch a wave, or one launch a program (CPUs only).
EXECUTORS = ("single", "waves")
#: Panel tiles offered to the tuner, before the generic ones.
PANEL_TILES = 6
#: What a panel can be configured with: rows and vectors of its register tile, and whether one padded copy serves all taps.
PANEL_CONFIGS = {"mr": range(1, 65), "nv": range(1, 17), "window": range(2)}
#: Generic tiles offered to the tuner.
GENERIC_TILES = 4
#: More than either has.
EVERY = 1 << 20
#: Share of the peak that generic contractions reach: 15 to 23 of 500 GFLOP/s on two Zen 5 cores.
GENERIC_RATE = 0.05


def open_backend(options: OpenOptions) -> Backend:
    """The unit that ``options`` name. DeviceUnavailable where there is none or it is of another kind."""
    found = units()
    if options.index >= len(found):
        raise DeviceUnavailable(
            f"rocm:{options.index} does not exist, {len(found)} OpenCL unit(s) found",
            hint="on a machine without a GPU driver: pip install intel-opencl-rt intel-cmplr-lib-rt",
        )
    device = found[options.index]
    if options.require and kind_of(device) != options.require:
        raise DeviceUnavailable(
            f"rocm:{options.index} is a {kind_of(device)} ({device.name.strip()}), not a {options.require}",
            hint="leave out --require, or name another unit (rammer devices lists them)",
        )
    return OpenClBackend(device, options)


class OpenClBackend:
    """One OpenCL unit with a context and an in-order queue."""

    def __init__(self, device: Any, options: OpenOptions) -> None:
        cl = opencl()
        self.vdevice: VDevice = virtual_device(device)
        self.hardware: Hardware = hardware(options.index, device)
        self.single = _single(options.options, self.vdevice.threads == 1 and version(device) >= (2, 0))
        try:
            self.context = cl.Context([device])
            self.queue = cl.CommandQueue(self.context)
            self.builder = Builder(self.context, standard(device))
        except cl.Error as problem:
            raise DeviceUnavailable(f"{device.name.strip()} cannot be opened: {problem}") from problem

    @property
    def profiler(self) -> OpenClProfiler:
        """Real measurements on this unit."""
        return OpenClProfiler(self.vdevice, self.load)

    @cached_property
    def fingerprint(self) -> str:
        """Device, driver and the text of the kernel generators."""
        detail = self.hardware.detail
        return f"rocm {self.hardware.name} {detail['platform_version']} {detail['driver']} {generator_hash('rammer_rocm')}"

    @property
    def families(self) -> Mapping[str, Mapping[str, range]]:
        """The generic kernels and, on CPUs, panels."""
        return {"": {}, **({PANEL: PANEL_CONFIGS} if self.vdevice.threads == 1 else {})}

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Tiles and families, best predicted first."""
        panels = panel_candidates(operator, binding, self.vdevice, PANEL_TILES) if self.vdevice.threads == 1 else []
        return [*(c.operator for c in panels), *tile_candidates(operator, binding, self.vdevice, GENERIC_TILES)]

    def offered(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Every panel and many generic tiles, whatever their prediction."""
        panels = panel_candidates(operator, binding, self.vdevice, EVERY) if self.vdevice.threads == 1 else []
        return [*(c.operator for c in panels), *tile_candidates(operator, binding, self.vdevice, EVERY)]

    def rate(self, operator: ROperator, binding: Binding) -> float:
        """What the generic kernel reaches of the peak where an operand is held: the panel family reads its operands from
        memory."""
        return GENERIC_RATE if operator.holds_operand else 1.0

    def prologue_rate(self, operator: ROperator, binding: Binding) -> float:
        """The panel family computes the maps while it gathers the columns: the seconds without them over those with them."""
        if self.vdevice.threads != 1:
            return GENERIC_RATE
        seconds = [panel_candidates(o, binding, self.vdevice, 1) for o in compared(operator)]
        return min(1.0, seconds[0][0].total / seconds[1][0].total) if all(seconds) else GENERIC_RATE

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        """Text and predicted times. It is compiled when measured or loaded, together with its neighbours: a
        build costs more by its number than by its length."""
        cost = task_cost(operator, binding.types, self.vdevice)
        return RKernel(operator, lambda: written(operator, binding, self.vdevice), cost.alone, cost.crowded)

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        """The program, compiled and resident."""
        return OpenClProgram(self.builder, self.queue, self.vdevice, program, constants, self.single)

    def close(self) -> None:
        """Free the queue, built kernels and the context, which is this object's own."""
        self.queue.finish()
        del self.builder, self.queue, self.context


def _single(options: Mapping[str, str], able: bool) -> bool:
    """Whether one launch runs the whole program: on CPUs whose OpenCL C has acquire and release (2.0)."""
    unknown = sorted(set(options) - {"executor"})
    if unknown:
        raise BadInput(f"device rocm has no option {unknown[0]!r}", hint="known: executor=single|waves")
    executor = options.get("executor", "single" if able else "waves")
    if executor not in EXECUTORS:
        raise BadInput(f"unknown executor {executor!r}", hint=f"one of: {', '.join(EXECUTORS)}")
    if executor == "single" and not able:
        raise BadInput("executor=single needs a CPU with OpenCL C 2.0", hint="use executor=waves")
    return executor == "single"
