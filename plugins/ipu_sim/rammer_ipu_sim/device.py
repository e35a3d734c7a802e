"""The backend: an opened simulated chip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rammer.device.manifest import Array, Binding, Hardware, OpenOptions, Recorded, Span
from rammer.device.shared_constants import SharedConstants
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable
from rammer.fusion.tile_search import candidates
from rammer.ir.at_length import shrink_to_parts
from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel, ROperator, Written, prologue_variants
from rammer.ir.program import RProgram

from rammer_ipu_sim.chip import Chip, configure_chip, make_hardware, make_vdevice
from rammer_ipu_sim.codelet import emit_codelet
from rammer_ipu_sim.executor import HeldConstant, LoadedProgram
from rammer_ipu_sim.profiler import SimulatedProfiler, counted_seconds, operator_times, task_resources
from rammer_ipu_sim.supersteps import lengths_of, mask_batch

#: Raised whenever generated codelets or the cycle accounts change.
GENERATOR = 1

#: Tilings returned for an operator.
CANDIDATES = 8
#: Of the peak; what is counted to reach less is told as this.
LEAST_RATE = 1e-4
#: More than there are.
EVERY = 1 << 20

OPTIONS = ("tiles", "sram", "chips", "no_stream")


class SimulatorBackend:
    """An opened simulated chip."""

    def __init__(self, options: OpenOptions) -> None:
        unknown = sorted(set(options.options) - set(OPTIONS))
        if unknown:
            raise BadInput(f"unknown option {unknown[0]!r}", "ipu_sim", f"known: {', '.join(OPTIONS)}")
        if options.require not in ("", "simulator"):
            raise DeviceUnavailable(f"ipu_sim is a simulator, not a {options.require}", "--require")
        if options.index != 0:
            raise DeviceUnavailable(f"ipu_sim has no unit {options.index}", "ipu_sim", "use ipu_sim:0")
        self.chip: Chip = configure_chip(options.options)
        self.stream = not _parse_flag(options.options.get("no_stream", "0"))
        self.constants: SharedConstants[HeldConstant] = SharedConstants()
        self._profiler = SimulatedProfiler(self.chip, self.stream)

    @property
    def vdevice(self) -> VDevice:
        """One vEU a tile."""
        return make_vdevice(self.chip)

    @property
    def hardware(self) -> Hardware:
        """What is simulated, with the sources of its figures."""
        return make_hardware(self.chip)

    @property
    def profiler(self) -> SimulatedProfiler:
        """Cycle counts, always labelled simulated."""
        return self._profiler

    @property
    def fingerprint(self) -> str:
        """Changes with the chip's figures and with the generator."""
        return f"ipu_sim generator {GENERATOR} {self.chip!r}"

    @property
    def families(self) -> Mapping[str, Mapping[str, range]]:
        """Codelets are generic."""
        return {"": {}}

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Tilings whose tasks fit in a tile, best predicted first; of a program for a range by what they are counted to take at
        several lengths."""
        found = candidates(operator, binding, self.vdevice, CANDIDATES)
        return sorted(found, key=lambda o: self._tiled_seconds(o, binding)) if operator.lengths else found

    def offered(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Every tiling that the search looks at."""
        return candidates(operator, binding, self.vdevice, EVERY)

    def rate(self, operator: ROperator, binding: Binding) -> float:
        """What the best tiling is counted to reach of the peak, its exchange among the seconds: maps and reductions along rows
        run at an eighth of the rate of products, and a task that holds rows receives all weights."""
        peak = operator.flops / (self.vdevice.flops * self.chip.tiles)
        return max(LEAST_RATE, peak / max(self._best_seconds(operator, binding), 1 / self.chip.clock))

    def prologue_rate(self, operator: ROperator, binding: Binding) -> float:
        """The counted seconds of the best tiling without the maps, which every task computes anew, over those with them."""
        without, whole = (self._best_seconds(o, binding) for o in prologue_variants(operator))
        return min(1.0, without / whole)

    def _best_seconds(self, operator: ROperator, binding: Binding) -> float:
        """Seconds of all tasks in the best of the likely tilings; infinite where none fits."""
        tiled = candidates(operator, binding, self.vdevice, CANDIDATES)
        return min((self._tiled_seconds(t, binding) for t in tiled), default=float("inf"))

    def _tiled_seconds(self, operator: ROperator, binding: Binding) -> float:
        """Counted seconds of all tasks of a tiled operator; of one of a program for a range the mean over lengths."""
        whole = shrink_to_parts(operator) if operator.lengths else (operator,)
        return sum(counted_seconds(o, binding.types, self.chip) for o in whole) / len(whole)

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        """Codelet text, resources and counted times. DeviceFailure when a task exceeds a tile's memory."""
        need = task_resources(operator, binding.types, self.chip)
        limit = self.chip.sram
        if need.local_bytes > limit:
            what = f"out of memory: task {operator.name}[0] needs {need.local_bytes} bytes"
            raise DeviceFailure(f"{what}; the limit is {limit} bytes", operator.head(), "use smaller tiles")
        alone, crowded = operator_times(operator, binding.types, self.chip)
        return RKernel(operator, lambda: Written(emit_codelet(operator, binding)[0], need), alone, crowded, "simulated")

    @property
    def repeats(self) -> bool:
        """The supersteps of a turn run again and again."""
        return True

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> LoadedProgram:
        """Place buffers in the tiles and plan all supersteps. DeviceFailure when memory does not suffice."""
        return LoadedProgram(program, constants, self.chip, self.stream, shared=self.constants)

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        """When and on which tile each task of a run computes, by the simulated clock."""
        return Recorded(program, trace(self.load(program, constants), inputs))

    def close(self) -> None:
        """A description holds nothing."""


def _parse_flag(text: str) -> bool:
    if text.lower() not in ("", "0", "1", "true", "false", "yes", "no"):
        raise BadInput(f"option no_stream={text}: not a truth value", "ipu_sim", "--option no_stream=1")
    return text.lower() in ("", "1", "true", "yes")


def trace(loaded: LoadedProgram, inputs: Mapping[str, Array]) -> list[Span]:
    """The tasks of a run with these inputs, in seconds by the chip's clock.

    Of a superstep, what goes before and behind (streaming, syncs, exchanges both ways) is drawn before all compute phases. Tasks
    that end at a run's length take no time.
    """
    accountant, clock, now, spans = loaded.accountant(), loaded.chip.clock, 0.0, list[Span]()
    point = lengths_of(loaded.program, loaded.lengths, inputs)
    for group, step in zip(loaded.whole, loaded.at(inputs), strict=True):
        kept = [b for whole in group for b in (mask_batch(whole, point)[0] if point else [whole])]
        begin = now + step.cycles.total - step.cycles.compute
        times = accountant.compute_times(kept) if kept else []
        spans += [Span(t.tile, t.operator, t.index, (begin + t.start) / clock, (begin + t.end) / clock) for t in times]
        here = {(t.operator, t.index) for t in times}
        all_tasks = ((b.operator.name, int(i), int(v)) for b in group for v, i in zip(b.veus.flat, b.tasks.flat, strict=True))
        spans += [Span(v, name, i, begin / clock, begin / clock) for name, i, v in all_tasks if (name, i) not in here]
        now += step.cycles.total
    return spans
