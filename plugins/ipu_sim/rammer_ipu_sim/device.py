"""The backend of an opened simulated chip. Its methods that compile import the compiler, which may be absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from rammer.device.manifest import Array, Backend, Binding, Hardware, IterationCost, OpenOptions, Recorded, Span
from rammer.device.shared_constants import SharedConstants
from rammer.errors import DeviceFailure, DeviceUnavailable
from rammer.ir.at_length import shrink_to_parts
from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel, ROperator, Written
from rammer.ir.program import RProgram

from rammer_ipu_sim.chip import NO_STREAM, Chip, configure_chip, make_hardware, make_vdevice
from rammer_ipu_sim.executor import HeldConstant, LoadedProgram
from rammer_ipu_sim.profiler import SimulatedProfiler, counted_seconds, operator_times, task_resources
from rammer_ipu_sim.supersteps import lengths_of, mask_batch

#: Version of the generated codelets and the cycle accounts; increment it when either changes.
GENERATOR = 1

#: Number of tilings returned for an operator.
CANDIDATES = 8
#: More than the number of tilings.
EVERY = 1 << 20


class SimulatorBackend(Backend):
    """A backend of an opened simulated chip."""

    def __init__(self, options: OpenOptions) -> None:
        if options.require not in ("", "simulator"):
            raise DeviceUnavailable(f"ipu_sim is a simulator, not a {options.require}", "--require")
        if options.index != 0:
            raise DeviceUnavailable(f"ipu_sim has no unit {options.index}", "ipu_sim", "use ipu_sim:0")
        self.chip: Chip = configure_chip(options.options)
        self.stream = not options.value(NO_STREAM)
        self.constants: SharedConstants[HeldConstant] = SharedConstants()
        self.profiler = SimulatedProfiler(self.chip, self.stream)
        self.iteration_cost = IterationCost()  # the supersteps of an iteration can be repeated

    @cached_property
    def vdevice(self) -> VDevice:
        """The VDevice with one vEU per tile."""
        return make_vdevice(self.chip)

    @cached_property
    def hardware(self) -> Hardware:
        """The simulated hardware, with the sources of its figures."""
        return make_hardware(self.chip)

    @cached_property
    def fingerprint(self) -> str:
        """A hash key that changes with the chip's figures and the generator."""
        return f"ipu_sim generator {GENERATOR} {self.chip!r}"

    @cached_property
    def families(self) -> Mapping[str, Mapping[str, range]]:
        """The kernel families: only the generic family."""
        return {"": {}}

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Return tilings whose tasks fit in a tile, best predicted first. Ranged operators are ranked by their counted times at
        several lengths."""
        from rammer.fusion.tile_search import candidates

        found = candidates(operator, binding, self.vdevice, CANDIDATES)
        return sorted(found, key=lambda o: self._tiled_seconds(o, binding)) if operator.lengths else found

    def all_candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Return every tiling that the search considers."""
        from rammer.fusion.tile_search import candidates

        return candidates(operator, binding, self.vdevice, EVERY)

    def _tiled_seconds(self, operator: ROperator, binding: Binding) -> float:
        """Return the counted seconds of all tasks of a tiled operator; for a ranged operator, the mean over lengths."""
        whole = shrink_to_parts(operator) if operator.lengths else (operator,)
        return sum(counted_seconds(o, binding.types, self.chip) for o in whole) / len(whole)

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        """Return codelet text, resources and counted times. Raises DeviceFailure if a task exceeds a tile's memory."""
        from rammer_ipu_sim.codelet import emit_codelet

        need = task_resources(operator, binding.types, self.chip)
        limit = self.chip.sram
        if need.local_bytes > limit:
            what = f"out of memory: task {operator.name}[0] needs {need.local_bytes} bytes"
            raise DeviceFailure(f"{what}; the limit is {limit} bytes", operator.head(), "use smaller tiles")
        alone, crowded = operator_times(operator, binding.types, self.chip)
        return RKernel(operator, lambda: Written(emit_codelet(operator, binding)[0], need), alone, crowded, "simulated")

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> LoadedProgram:
        """Place buffers in the tiles and plan all supersteps. Raises DeviceFailure if memory is insufficient."""
        return LoadedProgram(program, constants, self.chip, self.stream, shared=self.constants)

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        """Return the compute interval and tile of each task of a run, by the simulated clock."""
        return Recorded(program, trace(self.load(program, constants), inputs))

    def close(self) -> None:
        """Do nothing: a simulated chip has no resources."""


def trace(loaded: LoadedProgram, inputs: Mapping[str, Array]) -> list[Span]:
    """Return the tasks of a run with these inputs, in seconds by the chip's clock. All other phases of a superstep (streaming,
    syncs, exchanges both ways) are drawn before its compute phases. Tasks past a run's length take no time."""
    accountant, clock, now, spans = loaded.accountant, loaded.chip.clock, 0.0, list[Span]()
    point = lengths_of(loaded.program, loaded.lengths, inputs)
    for group, step in zip(loaded.whole, loaded.at(inputs), strict=True):
        kept = [b for whole in group for b in (mask_batch(whole, point) if point else [whole])]
        begin = now + step.cycles.total - step.cycles.compute
        times = accountant.compute_times(kept) if kept else []
        spans += [Span(t.tile, t.operator, t.index, (begin + t.start) / clock, (begin + t.end) / clock) for t in times]
        here = {(t.operator, t.index) for t in times}
        all_tasks = ((b.operator.name, int(i), int(v)) for b in group for v, i in zip(b.veus.flat, b.tasks.flat, strict=True))
        spans += [Span(v, name, i, begin / clock, begin / clock) for name, i, v in all_tasks if (name, i) not in here]
        now += step.cycles.total
    return spans
