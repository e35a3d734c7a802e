"""The block of a persistent kernel, and a program whose every task that block can call.

One launch has one block shape. Kernels of more threads, or of several blocks per task, cannot be called from it. Their operators
get callable kernels, and the program's policy places all tasks again. Of a few shapes, the one whose program has the best
prediction is chosen.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from types import MappingProxyType

from rammer.codegen import Choice, Unsuited
from rammer.device.manifest import Binding
from rammer.errors import BadInput
from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel, ROperator, Written
from rammer.ir.program import RProgram
from rammer.plan.program_builder import Interface, build_program
from rammer.plan.waits import find_dependences
from rammer.schedule.ios import IOS
from rammer.schedule.policy import Memory, OperatorGraph, Policy
from rammer.schedule.policy_registry import parse_policy
from rammer.schedule.task_placement import fastest_kernel, leanest_kernel, side_by_side
from rammer.schedule.wavefront import Wavefront
from rammer.verify import VerifyError

from rammer_cuda.families import FAMILIES, family_of
from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.part import dynamic_bytes
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.persistent.bodies import callable_part
from rammer_cuda.persistent.partition import MixedParts, ProgramStorages, cut_around
from rammer_cuda.persistent.split_reductions import SplitSum, split_sums
from rammer_cuda.source import Writer

#: Blocks that are tried: threads, and blocks per SM, each with a separate row. While one of an SM's rows waits, another works, as
#: blocks of several launches do. But they share its registers (of 65,536) and its shared memory.
SHAPES = ((256, 1), (384, 1), (512, 1), (128, 2))
#: The first shape whose prediction is near the best is chosen: small blocks have more registers per thread, and rows that share
#: an SM gain less than predicted. On an H200 this is the fastest of six shapes for NASNet-A, SqueezeNet and ResNeXt-29 (16
#: branches).
NEAR = 1.1
#: Choices of an operator: the number of fastest ones, and the limits of tasks per row for each of which the fastest is added.
#: During a long operator, a short one should have few tasks, on rows that would be idle.
FAST, FEWER = 3, (1.0, 0.5, 0.25, 0.125, 0.0625)
#: The same numbers for the halves of a split sum, which is tried for several numbers of parts.
HALVES = (2, FEWER[:1])
#: Seconds from one task's end until the next one on its row is as advanced as a starting block of a launch. Measured on an H200
#: without waits (SqueezeNet's expanding convolutions, 0.77 us).
BETWEEN = 0.75e-6
#: Weight of the total time of a wave's tasks, relative to its end. With many equal tasks a single change rarely moves the end.
CROWD = 0.1
#: Maximum choices of an operator whose text is written to check that a block can call them.
WRITTEN = 24
#: Processor seconds, for all shapes, in which IOS searches stages of a program whose tasks are placed again: for ResNeXt-29 (16
#: branches) one second finds the same as sixty.
SEARCH = 5
#: Minimum seconds of a product whose sum is also offered in parts: one more wave costs more than half of a shorter one.
WORTH = 3.5e-6
#: Bytes of shared memory for the block's table entries.
ENTRIES = 4 << 10


@dataclass(frozen=True)
class Fitted:
    """A ``program`` for ``blocks`` per SM of at most ``threads``; if it is a part, ``cut`` is the whole."""

    program: RProgram
    threads: int
    blocks: int
    cut: MixedParts | None = None


def fit_program(program: RProgram, binding: Binding, gpu: Gpu) -> Fitted:
    """Return ``program`` for the block with the best prediction; unchanged if all kernels are callable or have no alternative."""
    held = max((own.threads for o in program.operators if (own := family_of(o).persistent)), default=0)
    if held or program.repeat is not None:
        return _Shape(program, binding, gpu, *max(s for s in SHAPES if s[1] == 1 and s[0] >= held), kept=True).placed()
    known = _Known()
    found = [_Shape(program, binding, gpu, *shape, known).placed() for shape in SHAPES]
    best = min(f.program.predicted for f in found)
    return next(f for f in found if f.program.predicted <= NEAR * best)


def partition_program(program: RProgram, constants: Collection[str], gpu: Gpu) -> Fitted | None:
    """Return the part of ``program`` for one kernel that holds constants, or None if that is all or nothing. The rest is launched
    before and after it."""
    cut = cut_around(program)
    return None if cut is None else replace(fit_program(cut.rows, Binding.of(cut.rows, constants), gpu), cut=cut)


@dataclass(frozen=True)
class _Known:
    """Data shared by all block shapes of a program, by operator key. It has alternative kernels, best prediction first, the
    predicted time of all tasks of a tiled operator, and its block's threads."""

    ranked: dict[str, list[Choice]] = field(default_factory=dict)
    prices: dict[str, float] = field(default_factory=dict)
    threads: dict[str, float] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    writer: Writer = field(default_factory=Writer)


@dataclass
class _Shape:
    """The kernels of a program's operators in blocks of ``threads``; with ``kept``, callable kernels stay unchanged."""

    program: RProgram
    binding: Binding
    gpu: Gpu
    threads: int
    blocks: int
    known: _Known = field(default_factory=_Known)
    kept: bool = False
    chosen: dict[str, tuple[Choice, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known: dict[str, tuple[Choice, ...]] = {}
        for o in self.program.operators:
            key = self.binding.key(o)
            if key not in known:
                known[key] = self._operator_choices(o)
            self.chosen[o.name] = tuple(Choice(c.seconds, _tiled_as(o, c.operator)) for c in known[key])

    @property
    def veus(self) -> int:
        """The number of rows."""
        return self.gpu.sms * self.blocks

    def _in_parts(self, operator: ROperator, known: dict[str, list[PartedSum]]) -> list[PartedSum]:
        """Return the operator's sum in parts with callable kernels; ``known`` are the sums of equal operators."""
        if self.kept or self.chosen[operator.name][0].seconds < WORTH:
            return []
        key, splits = self.binding.key(operator), split_sums(operator, self.binding)
        if key not in known:
            known[key] = [self._make_parted_sum(s) for s in splits]
            return known[key]
        return [s.made_for(split) for s, split in zip(known[key], splits, strict=True)]

    def _make_parted_sum(self, split: SplitSum) -> PartedSum:
        both = replace(self, binding=split.binding(self.binding), program=replace(self.program, operators=()), chosen={})
        first, rest = (
            tuple([self._price_choice(c) for c in both._alternative_choices(half, HALVES)])
            for half in (split.partial, split.rest)
        )
        return PartedSum(split, first, rest)

    def _operator_choices(self, operator: ROperator) -> tuple[Choice, ...]:
        """Return the operator unchanged or with callable kernels, the best predicted first."""
        family = family_of(operator)
        if operator.skips and family.name and not family.persistent:  # a block cannot call it: the core's emitter writes it
            return (Choice(self._price_operator(replace(operator, family="", config=())), operator),)
        if not operator.task_count or family.persistent or not family.name:
            return (Choice(self._price_operator(operator), operator),)
        mine = self._callable_kernel(operator)
        if mine is not None and self.kept and operator.task_count <= self.veus:
            return (Choice(self._serial_seconds(operator, mine), operator),)
        found = self._alternative_choices(operator)
        found |= dict.fromkeys([Choice(self._serial_seconds(operator, mine), operator)] if mine is not None else [])
        return tuple(sorted(found, key=lambda c: c.seconds)) or (Choice(self._price_operator(operator), operator),)

    def _alternative_choices(
        self, operator: ROperator, kinds: tuple[int, tuple[float, ...]] = (FAST, FEWER)
    ) -> dict[Choice, None]:
        """Return other callable kernels: the fastest ones and some of few tasks."""
        ranked, (fast, fewer) = self._rank_alternatives(operator), kinds
        found = dict.fromkeys(islice(self._callable_choices(operator, ranked), fast))
        for share in fewer:
            few = (c for c in ranked if c.operator.task_count <= share * self.veus)
            found |= dict.fromkeys(islice(self._callable_choices(operator, islice(few, WRITTEN)), 1))
        return found

    def _rank_alternatives(self, operator: ROperator) -> list[Choice]:
        """Return other kernels of one block per task, best predicted first."""
        key = self.binding.key(operator)
        if key not in self.known.ranked:
            self.known.ranked[key] = self._rank_families(operator)
        return self.known.ranked[key]

    def _rank_families(self, operator: ROperator) -> list[Choice]:
        # Results must not depend on which executor wins a measurement: kernels that round operands differently are excluded.
        bare, rounding = replace(operator, tile=(), family="", config=()), family_of(operator).operand_rounding
        usable = [
            f
            for f in FAMILIES
            if f.supported_by(self.gpu) and not f.is_fallback and f.persistent is None and f.operand_rounding == rounding
        ]
        ranked = heapq.merge(*(f.candidates(bare, self.binding, self.gpu) for f in usable), key=lambda c: c.seconds)
        return [c for c in ranked if family_of(c.operator).spread(c.operator) == 1]

    def _callable_choices(self, operator: ROperator, choices: Iterable[Choice]) -> Iterator[Choice]:
        """Yield the callable choices with their serial times; choices may be of an equal operator."""
        for c in choices:
            mine = _tiled_as(operator, c.operator)
            if kernel := self._callable_kernel(mine):
                yield Choice(self._serial_seconds(mine, kernel), mine)

    def _callable_kernel(self, operator: ROperator) -> TaskKernel | None:
        if self._block_threads(operator) > self.threads:
            return None
        kernel = callable_part(operator, self.binding, self.threads, self.known.writer.written)
        return kernel if kernel and dynamic_bytes(kernel) <= self._shared_capacity else None

    def _block_threads(self, operator: ROperator) -> float:
        """Return the threads of the operator's block, as far as known before its kernel is written. Most kernels considered have
        too many threads."""
        family, key = family_of(operator), self.binding.key(operator)
        if family.threads is not None and key not in self.known.threads:
            try:
                self.known.threads[key] = family.threads(operator, self.binding)
            except Unsuited:
                self.known.threads[key] = inf
        return self.known.threads.get(key, 0)

    @property
    def _shared_capacity(self) -> int:
        """Shared memory for a task: the system uses 1 KiB of each block (CUDA C++ programming guide, "Shared Memory 9.x")."""
        return (self.gpu.shared + 1024) // self.blocks - 1024 - ENTRIES

    def _price_operator(self, operator: ROperator) -> float:
        key = self.binding.key(operator)
        if key not in self.known.prices:
            seconds = family_of(operator).seconds(operator, self.binding, self.gpu) if operator.task_count else 0.0
            self.known.prices[key] = seconds
        return self.known.prices[key]

    def _serial_seconds(self, operator: ROperator, kernel: TaskKernel) -> float:
        """Return the seconds if a vEU runs in sequence the tasks that a launch would run concurrently on its SM."""
        rounds = -(-operator.task_count // self.veus)
        return self._price_operator(operator) * max(1, min(rounds, self.gpu.threads // kernel.threads // self.blocks))

    def placed(self) -> Fitted:
        """Return the program with these operators, placed by its policy, or unchanged if they are unchanged."""
        p, own = (
            self.program,
            all(len(c) == 1 and c[0].operator is o for o, c in zip(self.program.operators, self.chosen.values(), strict=True)),
        )
        if p.repeat is not None or (own and self.veus == p.veus):
            return Fitted(p, self.threads, self.blocks)
        constants, device = frozenset(self.binding.constants), replace(self.gpu.vdevice, veus=self.veus, resident=self.veus)
        kernels = {name: tuple(map(self._price_choice, choices)) for name, choices in self.chosen.items()}
        graph = OperatorGraph(kernels, find_dependences(p.operators, p.storage), constants, memory=self.known.memory)
        policy = _program_policy(p)
        held = ProgramStorages.of(p)
        if policy == Wavefront():
            known: dict[str, list[PartedSum]] = {}
            sums = {o.name: self._in_parts(o, known) for o in p.operators}
            graph, taken = choose_together(graph, device, sums)
            held = held.with_others({t.split.storage: t.split.partial.anchor.dtype for t in taken})
        schedule = policy(graph, device)
        interface = Interface(p.name, p.inputs, p.outputs, [s.tensor for s in p.storages if s.tensor in constants])
        try:
            made = build_program(interface, schedule, held, policy=p.policy, vdevice=device, precision=p.precision)
        except VerifyError:  # built by hand, for example with parts of an output unwritten: its table stays
            return Fitted(p, self.threads, self.blocks)
        return Fitted(made, self.threads, self.blocks)

    def _price_choice(self, choice: Choice) -> RKernel:
        """Return the kernel priced for the policy: a round of tasks, one on each vEU. Blocks of one SM share its lanes."""
        o = choice.operator
        alone = choice.seconds / max(1, -(-o.task_count // self.veus)) + BETWEEN
        share = self.blocks * o.flops / max(o.task_count, 1) / self.gpu.flops
        return RKernel(o, _reject_writing, alone, max(alone, share))


@dataclass(frozen=True)
class PartedSum:
    """A ``split`` sum with the available kernels for its parts and for the rest."""

    split: SplitSum
    first: tuple[RKernel, ...]
    rest: tuple[RKernel, ...]

    def made_for(self, split: SplitSum) -> PartedSum:
        """Return the same kernels for an equal operator's sum."""
        halves = ((self.first, split.partial), (self.rest, split.rest))
        first, rest = (tuple([replace(k, operator=_tiled_as(o, k.operator)) for k in kernels]) for kernels, o in halves)
        return PartedSum(split, first, rest)


def choose_together(
    graph: OperatorGraph, device: VDevice, sums: Mapping[str, Sequence[PartedSum]] = MappingProxyType({})
) -> tuple[OperatorGraph, list[PartedSum]]:
    """Return ``graph`` with one choice per operator, which ends each wave earliest, and the sums used in parts.

    The search changes one choice at a time, starting from the fastest ones. Wavefront itself selects only the fastest or the
    leanest of all. An operator is replaced by one of its ``sums`` in parts if the two waves then end before the one did."""
    chosen: dict[str, tuple[RKernel, ...]] = {}
    after, all_taken, waves = dict(graph.after), list[PartedSum](), _Waves(device)
    for level in graph.levels():
        taken: dict[str, PartedSum] = {}
        best = waves.of(graph, level, taken)
        while True:
            tried = [{**taken, **change} for change in _sum_changes(graph, level, sums) if not change.items() <= taken.items()]
            cost, kernels, others = min(
                ((*waves.of(graph, level, t), t) for t in tried), key=lambda o: o[0], default=(*best, taken)
            )
            if cost >= best[0]:
                break
            best, taken = (cost, kernels), others
        chosen |= {k.operator.name: (k,) for k in best[1]}
        for name, s in taken.items():
            part = s.split.partial.name
            after[part], after[name] = after[name], (*after[name], part)
        all_taken += taken.values()
    return replace(graph, kernels=chosen, after=after), all_taken


def _sum_changes(
    graph: OperatorGraph, level: Sequence[str], sums: Mapping[str, Sequence[PartedSum]]
) -> Iterator[dict[str, PartedSum]]:
    """Yield changes that compute sums of a wave in parts, together for all equal operators, which branches often have."""
    alike: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name in level:
        alike.setdefault(_known_as(graph.kernels[name]), []).append(name)
    for names in alike.values():
        each = [sums.get(n, ()) for n in names]
        yield from (dict(zip(names, some, strict=True)) for some in zip(*each, strict=False) if some[0].first and some[0].rest)


def _known_as(kernels: Sequence[RKernel]) -> tuple[tuple[int, float], ...]:
    """Return a key that is equal for choices of equal cost."""
    return tuple([(k.operator.task_count, k.alone) for k in kernels])


@dataclass
class _Waves:
    """The choices of waves, computed once for equal ones."""

    device: VDevice
    known: dict[tuple[tuple[tuple[int, float], ...], ...], tuple[float, list[int]]] = field(default_factory=dict)

    def of(self, graph: OperatorGraph, level: Sequence[str], taken: Mapping[str, PartedSum]) -> tuple[float, list[RKernel]]:
        """Return the cost of a wave with the operators in ``taken`` in parts, and its kernels with those of the adding wave."""
        cost, first = self._choose_wave([taken[n].first if n in taken else graph.kernels[n] for n in level])
        more, rest = self._choose_wave([s.rest for s in taken.values()]) if taken else (0.0, [])
        return cost + more, [*first, *rest]

    def _choose_wave(self, choices: Sequence[Sequence[RKernel]]) -> tuple[float, list[RKernel]]:
        key = tuple(map(_known_as, choices))
        if key not in self.known:
            self.known[key] = _best_together(choices, self.device)
        cost, places = self.known[key]
        return cost, [some[i] for some, i in zip(choices, places, strict=True)]


def _best_together(choices: Sequence[Sequence[RKernel]], device: VDevice) -> tuple[float, list[int]]:
    """Return the cost of a wave and each operator's choice."""

    def cost(places: Sequence[int]) -> float:
        chosen = [some[i] for some, i in zip(choices, places, strict=True)]
        return side_by_side(chosen, {}, device) + CROWD * sum(k.busy_time() for k in chosen) / device.veus

    starts = [
        [some.index(kind(some)) for some in choices] for kind in (lambda some: fastest_kernel(some, device), leanest_kernel)
    ]
    best, places = min((cost(s), s) for s in starts)
    while True:
        changes = ((k, i) for k, some in enumerate(choices) for i in range(len(some)) if i != places[k])
        others = ([*places[:k], i, *places[k + 1 :]] for k, i in changes)
        found = min(((cost(o), o) for o in others), default=(best, places))
        if found[0] >= best:
            return best, places
        best, places = found


def _tiled_as(operator: ROperator, other: ROperator) -> ROperator:
    """Return ``operator`` with the kernel of an equal one, or unchanged if the kernel is the same."""
    same = (operator.tile, operator.family, operator.config) == (other.tile, other.family, other.config)
    return operator if same else replace(operator, tile=other.tile, family=other.family, config=other.config)


def _reject_writing() -> Written:
    raise AssertionError("schedules need no kernel text")


def _program_policy(program: RProgram) -> Policy:
    """Return the program's policy, limited to ``SEARCH`` seconds, or wavefront if the core does not know it."""
    try:
        found = parse_policy(program.policy)
    except BadInput:
        return Wavefront()
    return replace(found, seconds=min(found.seconds, SEARCH)) if isinstance(found, IOS) else found
