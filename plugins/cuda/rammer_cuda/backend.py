"""The opened CUDA device: a GPU, or an architecture to compile for."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from threading import Thread
from typing import TYPE_CHECKING

from rammer.codegen.generators import generator_hash
from rammer.codegen.task import Unsuited
from rammer.device.lazily import Lazily
from rammer.device.manifest import Array, Backend, Binding, Hardware, Loaded, OpenOptions, Span
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable
from rammer.ir.device import VDevice
from rammer.ir.operator import Resources, RKernel, ROperator, Written, compared
from rammer.ir.program import RProgram
from rammer.tile.search import candidates as tile_candidates

from rammer_cuda.cell.recognise import MOST_ROWS
from rammer_cuda.compile import compile_cubin, version
from rammer_cuda.families import FAMILIES, family_of
from rammer_cuda.family import Choice, Family
from rammer_cuda.generic.cost import SHARE
from rammer_cuda.gpu import TARGETS, Gpu
from rammer_cuda.profiler import CudaProfiler
from rammer_cuda.ranking import Queue, leaders_first
from rammer_cuda.source import Writer, refusal, translation_unit

if TYPE_CHECKING:
    from rammer_cuda.executor import CudaProgram
    from rammer_cuda.select import Execution

#: Tiles offered to the tuner, which measures a dozen at most: of matrix products, and generic ones where no family suits.
GEMM_TILES, GENERIC_TILES = 14, 12
#: The least share of the peak that generic kernels reach which keep a contraction's operand on chip (measured on an H200: 0.001
#: to 0.034, 165 kernels of NASNet-A). Times are predicted by what is typical, fusions by the least: a wrong one costs many times
#: what a missed one does.
LEAST_SHARE = 0.001


def open_backend(options: OpenOptions) -> Backend:
    """A GPU, or a target without one. BadInput for an unknown target, DeviceUnavailable for --require."""
    if options.require and options.require != "gpu":
        raise DeviceUnavailable(f"cuda:{options.index} is a gpu, not a {options.require}")
    from rammer_cuda.select import Execution

    how = Execution.of(options.options)
    if options.target:
        if options.target not in TARGETS:
            raise BadInput(f"unknown CUDA target {options.target!r}", hint=f"one of: {', '.join(TARGETS)}")
        unit = Hardware(0, f"{TARGETS[options.target].name} (compile only)", "gpu", 0)
        return CudaBackend(TARGETS[options.target], unit, False, how)
    from rammer_cuda.hardware import create_context, gpu_of, probe_gpus

    unit = probe_gpus()[options.index]
    opened = CudaBackend(gpu_of(unit), unit, True, how)
    opened.context = create_context(options.index)
    return opened


class CudaBackend:
    """One GPU (``present``) or one to compile for; ``how`` programs are to be run there."""

    def __init__(self, gpu: Gpu, hardware: Hardware, present: bool, how: Execution) -> None:
        self.gpu, self.hardware, self.present = gpu, hardware, present
        self.how, self.writer = how, Writer()
        self.context: Thread | None = None  #: Creates the GPU's context.

    @cached_property
    def vdevice(self) -> VDevice:
        """What the core compiles for."""
        return replace(self.gpu.vdevice, few_rows=MOST_ROWS)

    @property
    def profiler(self) -> CudaProfiler:
        """Measurements on the GPU; resources from ptxas."""
        return CudaProfiler(self)

    @cached_property
    def fingerprint(self) -> str:
        """Hardware, architecture, compiler and the text of the kernel generators."""
        return f"cuda {self.hardware.name} {self.gpu.architecture} nvrtc {version()} {generator_hash('rammer_cuda')}"

    @property
    def families(self) -> Mapping[str, Mapping[str, range]]:
        """What kernels there are texts for."""
        return {f.name: f.configs for f in FAMILIES}

    @cached_property
    def usable(self) -> tuple[Family, ...]:
        """The families whose kernels the GPU can run."""
        return tuple(f for f in FAMILIES if f.needs(self.gpu))

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Tiles and families whose shared memory fits: the best predicted of each family, then the rest, best first."""
        for family in self.usable:
            if family.first is not None and family.first(operator, binding, self.gpu):
                found = Lazily(islice(self.choices(operator, binding, family), family.most))
                if found:
                    return Lazily(c.operator for c in found)
        return Lazily(self._ranked(operator, binding))

    def _ranked(self, operator: ROperator, binding: Binding) -> Iterator[ROperator]:
        """``candidates`` of the families that go before no others, one by one: a kernel is written to see whether it fits."""
        groups = [[f for f in self.usable if f.product], *([f] for f in self.usable if f.first is None and not f.product)]
        possible = partial(self.fits, binding=binding)
        queues = [
            Queue(self._predicted(operator, binding, fs), possible, GEMM_TILES if fs[0].product else fs[0].most) for fs in groups
        ]
        found = False
        for choice in leaders_first(queues):
            found = True
            yield choice.operator
        if not found:
            yield from filter(possible, tile_candidates(operator, binding, self.vdevice, GENERIC_TILES))

    def _predicted(self, operator: ROperator, binding: Binding, families: Iterable[Family]) -> Iterator[Choice]:
        """Every choice of some families, best predicted first; for some there may be no kernel."""
        return heapq.merge(*(f.candidates(operator, binding, self.gpu) for f in families), key=lambda c: c.seconds)

    def choices(self, operator: ROperator, binding: Binding, *families: Family) -> Iterator[Choice]:
        """Every choice of some families that can be written and whose shared memory fits, best predicted first."""
        return (c for c in self._predicted(operator, binding, families) if self.fits(c.operator, binding))

    def offered(self, operator: ROperator, binding: Binding) -> Iterator[ROperator]:
        """Every choice of every family, whatever its prediction; nothing is kept from those that go before others."""
        for family in self.usable:
            yield from (c.operator for c in family.candidates(operator, binding, self.gpu))
        yield from tile_candidates(operator, binding, self.vdevice, GENERIC_TILES)

    def fits(self, operator: ROperator, binding: Binding) -> bool:
        """Whether the operator's family can write its kernel, and an SM has the shared memory for it."""
        try:
            return self.writer.written(operator, binding).shared <= self.gpu.shared
        except DeviceFailure:
            return False

    def rate(self, operator: ROperator, binding: Binding) -> float:
        """The predicted rate of the best kernel family, or what the generic kernel reaches."""
        asked = [f for f in self.usable if (f.holds if operator.holds_operand else f.first is None)]
        seconds = self._best(operator, binding, asked) - self.gpu.launch  # whoever asks counts launches himself
        return max(LEAST_SHARE, operator.flops / max(seconds, 1e-9) / (self.gpu.flops * self.gpu.sms))

    def _best(self, operator: ROperator, binding: Binding, families: Iterable[Family]) -> float:
        """Predicted seconds of the best choice of some families; infinite where none suits."""
        return min((c.seconds for c in islice(self.choices(operator, binding, *families), 1)), default=float("inf"))

    def prologue_rate(self, operator: ROperator, binding: Binding) -> float:
        """The seconds of the best matrix-product kernel, or of another family's, without the maps over those with them."""
        bare, whole = compared(operator)
        for seconds, tiled in self.choices(whole, binding, *(f for f in self.usable if f.product)):
            same = replace(bare, tile=tiled.tile, family=tiled.family, config=tiled.config)
            alike = family_of(tiled).seconds(same, binding, self.gpu) + self.gpu.launch
            others = [f for f in self.usable if f.first is None and not f.product]
            return min(1.0, min(alike, self._best(bare, binding, others)) / seconds)
        return SHARE

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        """Text and predicted times; ``profiler.resources`` compiles it."""
        try:
            alone, crowded = family_of(operator).round(operator, binding, self.gpu)
        except Unsuited as problem:
            raise refusal(operator, problem) from problem
        return RKernel(operator, lambda: self._text(operator, binding), alone, crowded)

    def _text(self, operator: ROperator, binding: Binding) -> Written:
        made = self.writer.written(operator, binding)
        return Written(made.text, Resources(made.threads, local_bytes=made.shared))

    def resources(self, operator: ROperator, binding: Binding) -> Resources:
        """Registers, shared memory and spills from ptxas for this architecture."""
        made = self.writer.written(operator, binding)
        found = compile_cubin(translation_unit([made]), self.gpu.architecture).resources[made.entry]
        local = found.shared + made.dynamic  # ptxas knows only what is static
        return Resources(made.threads, found.registers, local, found.spills)

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        """The program, compiled and resident, for the executor asked for or measured to be the faster."""
        self._need_hardware()
        from rammer_cuda.select import open_executor

        return open_executor(program, constants, self.gpu, self.hardware.index, self.how, self.writer)

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Sequence[Span]:
        """Every block of one run with the SM that ran it, from kernels that record it."""
        from rammer_cuda.executor import CudaProgram
        from rammer_cuda.persistent.executor import PersistentProgram
        from rammer_cuda.trace import trace, trace_persistent

        loaded = self.load(program, constants)
        try:
            if isinstance(loaded, PersistentProgram):
                return trace_persistent(loaded, inputs).spans
            assert isinstance(loaded, CudaProgram)
            return trace(loaded, inputs).spans
        finally:
            loaded.close()

    def open_program(self, program: RProgram, constants: Mapping[str, Array], repeat: int = 1) -> CudaProgram:
        """The program as a CUDA graph, ``repeat`` copies of it chained."""
        self._need_hardware()
        from rammer_cuda.executor import CudaProgram

        return CudaProgram(program, constants, self.gpu, self.hardware.index, repeat, self.writer)

    def _need_hardware(self) -> None:
        """DeviceUnavailable without a GPU; its context is there when this returns."""
        if not self.present:
            raise DeviceUnavailable(
                f"target {self.gpu.architecture} was compiled for, but there is no such GPU to run on",
                hint="leave out --target to use the GPU of this machine",
            )
        if self.context is not None:
            self.context.join()
