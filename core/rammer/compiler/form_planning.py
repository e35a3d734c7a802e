"""Programs for a device's execution forms: kernels that a form can run, placed and verified like any others."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from typing import Final, TypeAlias

from rammer.compiled.segments import ProgramSegment
from rammer.device.execution_forms import ExecutionForm
from rammer.device.manifest import Backend, Binding
from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel, ROperator
from rammer.ir.program import RProgram, dense
from rammer.plan.arena import with_private_buffers
from rammer.plan.program_builder import Interface, PlacedTensors, build_program
from rammer.plan.waits import find_dependences
from rammer.schedule.ios import IOS
from rammer.schedule.policy import Memory, OperatorGraph, Policy, Schedule, rows_of
from rammer.schedule.policy_registry import parse_policy
from rammer.schedule.split_reductions import PartedSum, SplitSum, split_sums
from rammer.verify.in_place_state import state_pairs
from rammer.verify.verifier import VerifyError, verify

__all__ = ["FormPlanner", "cut_phases"]

#: Processor seconds, for all forms, in which IOS searches stages of a program whose tasks are placed again: for ResNeXt-29 (16
#: branches) one second finds the same as sixty.
SEARCH: Final = 5


def cut_phases(program: RProgram, held: Collection[str]) -> dict[str, int] | None:
    """Return the phase of each operator: 1 for the operators in ``held`` and all between them, 0 before and 2 after.

    Returns None if all operators are in one phase. Also returns None for inseparable phases (a buffer that two of them write,
    iterations, states, lengths)."""
    separable = not program.homes and not state_pairs(program) and not any(o.skips for o in program.operators)
    if not held or not separable or program.repeat is not None:
        return None
    after = find_dependences(program.operators, program.storage)
    reached, needed = set[str](), set(held)
    for o in program.operators:
        if o.name in held or not reached.isdisjoint(after[o.name]):
            reached.add(o.name)
    for o in reversed(program.operators):
        if o.name in needed:
            needed.update(after[o.name])
    phase = {o.name: 0 if o.name not in reached else 1 if o.name in needed else 2 for o in program.operators}
    writer = dict[str, int]()
    written = ((program.storage[t].buffer, phase[o.name]) for o in program.operators for t in o.outputs)
    separate = all(writer.setdefault(buffer, number) == number for buffer, number in written)
    return phase if separate and {*phase.values()} != {1} else None


#: The kernel choices of operators, by operator name, and the kernels that were chosen.
Kernels: TypeAlias = Mapping[str, tuple[RKernel, ...]]


@dataclass
class FormPlanner:
    """A planner of one program for the other forms of a device than the first, for which it was built. ``extra`` are the policies
    of plugins."""

    segment: ProgramSegment
    backend: Backend
    extra: Sequence[Policy] = ()
    memory: Memory = field(default_factory=Memory)
    _known: dict[tuple[Hashable, ...], tuple[RKernel, ...]] = field(default_factory=dict)
    _made: dict[tuple[Hashable, ...], tuple[RProgram, Kernels]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.program: RProgram = self.segment.program
        self.binding = Binding.of(self.program, self.segment.constants)
        self.held = frozenset(o.name for o in self.program.operators if self.backend.holds_constants(o))

    @cached_property
    def phases(self) -> dict[str, int] | None:
        """The phase of each operator, or None if the program has only one."""
        return cut_phases(self.program, self.held)

    def plan_group(self, forms: Sequence[ExecutionForm]) -> ProgramSegment | None:
        """Return the program for one of ``forms``, which are of one group; None if none of them suits."""
        usable = [f for f in forms if not f.phases or self.phases is not None]
        made = [self.plan(form) for form in (usable if usable and usable[0].similar < inf else usable[:1])]
        best = min((m.program.predicted for m in made), default=0.0)
        return next((m for m, f in zip(made, usable, strict=False) if m.program.predicted <= f.similar * best), None)

    def plan(self, form: ExecutionForm) -> ProgramSegment:
        """Return the verified program for a form. Operators keep their kernels and their table if these suit the form and have no
        alternative."""
        block = form.threads, form.rows, form.keeps, form.phases
        if block not in self._made:
            self._made[block] = self._place(form)
        made, kernels = self._made[block]
        made = replace(made, form=form.name)
        private = with_private_buffers(made) if form.private and self.held else made
        made = private if private.arena_bytes <= form.private else made
        verify(made, self.backend.vdevice)
        return replace(self.segment, program=made, kernels=kernels)

    def _place(self, form: ExecutionForm) -> tuple[RProgram, Kernels]:
        """Return the program with kernels for ``form``, and the kernels."""
        p, phases = self.program, self.phases if form.phases else None
        inner = [o for o in p.operators if phases is None or phases[o.name] == 1]
        chosen = {o.name: self._form_kernels(form, o, self.binding) for o in inner}
        same = all(len(ks) == 1 and ks[0].operator == o for o, ks in zip(inner, chosen.values(), strict=True))
        if p.repeat is not None or (same and phases is None and form.rows * self.backend.vdevice.veus == p.veus):
            return p, self.segment.kernels
        tensors = PlacedTensors.of(p)
        if same and phases is not None:
            own = tuple(ks[0] for ks in chosen.values())
            schedule = Schedule(own, tuple((n,) for n in chosen), _rows_of(p, chosen), False, p.predicted)
        else:
            schedule, tensors = self._schedule(form, chosen, tensors)
        if phases is not None:
            schedule = self._with_launches(schedule, phases)
        constants = [s.tensor for s in p.storages if s.tensor in self.binding.constants]
        interface, device = Interface(p.name, p.inputs, p.outputs, constants), self._rows_device(form)
        try:
            made = build_program(interface, schedule, tensors, policy=p.policy, vdevice=device, precision=p.precision)
        except VerifyError:  # built by hand, for example with parts of an output unwritten: its table stays
            return p, self.segment.kernels
        return made, {k.operator.name: (k,) for k in schedule.kernels}

    def _schedule(self, form: ExecutionForm, chosen: Kernels, tensors: PlacedTensors) -> tuple[Schedule, PlacedTensors]:
        """Return the schedule of the program's policy for these kernels, and the tensors with parts of sums."""
        after = find_dependences(self.program.operators, self.program.storage)
        inside = {n: tuple(p for p in after[n] if p in chosen) for n in chosen}
        sums = partial(self._sums, form, chosen)
        graph = OperatorGraph(chosen, inside, self.binding.constants, memory=self.memory, sums=sums)
        schedule = self.policy(graph, self._rows_device(form))
        parts = [k.operator.anchor for k in schedule.kernels if k.operator.name not in chosen]
        return schedule, tensors.with_others({dense(c.name, c.name, c.shape): c.dtype for c in parts})

    def _with_launches(self, schedule: Schedule, phases: Mapping[str, int]) -> Schedule:
        """Return the schedule of phase 1 between the operators of phases 0 and 2, which keep their kernels and rows."""
        kernels, stages, rows = list[RKernel](), list[tuple[str, ...]](), [list[tuple[str, int]]() for _ in self.program.rows]
        for phase in range(3):
            if phase == 1:
                kernels += schedule.kernels
                stages += schedule.stages
                mine = schedule.rows
            else:
                names = [n for n, number in phases.items() if number == phase]
                kernels += [self.backend.kernel(self.program.operator[n], self.binding) for n in names]
                stages += [(n,) for n in names]
                mine = _rows_of(self.program, names)
            for row, more in zip(rows, mine, strict=True):
                row += more
        return Schedule(tuple(kernels), tuple(stages), rows_of(rows), False, self.program.predicted)

    def _rows_device(self, form: ExecutionForm) -> VDevice:
        veus = form.rows * self.backend.vdevice.veus
        return replace(self.backend.vdevice, veus=veus, resident=veus)

    @cached_property
    def policy(self) -> Policy:
        """The program's policy, limited to ``SEARCH`` seconds."""
        found = parse_policy(self.program.policy, self.extra)
        return replace(found, seconds=min(found.seconds, SEARCH)) if isinstance(found, IOS) else found

    def _form_kernels(
        self, form: ExecutionForm, operator: ROperator, binding: Binding, part: bool = False
    ) -> tuple[RKernel, ...]:
        """Return the kernels of an operator in a form; equal operators have the same ones."""
        key = form.threads, form.rows, form.keeps, part, binding.key(operator)
        if key not in self._known:
            self._known[key] = tuple(self.backend.form_kernels(form, operator, binding, part))
        return tuple([k.made_for(operator) for k in self._known[key]])

    def _sums(self, form: ExecutionForm, chosen: Kernels) -> dict[str, list[PartedSum]]:
        """Return the sums in parts of each operator that is long enough; equal operators have the same kernels."""
        known, result, veus = dict[str, list[PartedSum]](), dict[str, list[PartedSum]](), self._rows_device(form).veus
        for name, kernels in chosen.items():
            operator = self.program.operator[name]
            if form.keeps or kernels[0].operator_time(veus) < form.split:
                continue
            key, splits = self.binding.key(operator), list(split_sums(operator, self.binding))
            if key not in known:
                known[key] = [self._parted(form, s) for s in splits]
            result[name] = [s.made_for(split) for s, split in zip(known[key], splits, strict=True)]
        return result

    def _parted(self, form: ExecutionForm, split: SplitSum) -> PartedSum:
        binding = split.binding(self.binding)
        first, rest = (self._form_kernels(form, half, binding, True) for half in (split.partial, split.rest))
        return PartedSum(split, first, rest)


def _rows_of(program: RProgram, names: Collection[str]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Return the tasks of these operators in the rows of ``program``."""
    wanted = {*names}
    return tuple(tuple((t.operator, t.index) for t in row if t.operator in wanted) for row in program.rows)
