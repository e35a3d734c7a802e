"""The candidates and kernels of a backend, as a loop over its kernel families.

A kernel is written only when its candidate is next."""

from __future__ import annotations

import fnmatch
import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from math import inf, isfinite
from typing import Final, Generic, TypeVar

from rammer.codegen.kernel_family import Choice, KernelFamily
from rammer.codegen.task_parameters import Argument, TaskCode, Unsuited
from rammer.codegen.writer import KernelWriter, make_refusal
from rammer.device.lazy_sequence import LazySequence
from rammer.device.manifest import Backend, Binding, FusedForm
from rammer.errors import BadInput, DeviceFailure
from rammer.ir.at_length import shrink_to_parts
from rammer.ir.operator import Resources, RKernel, ROperator, Written

#: Limits on a family's best prediction to be measured among the first: factor over the best of all, and seconds.
LEADING, NEAR = 1.3, 2e-6


@dataclass
class Option:
    """A candidate whose kernel is written and checked on demand."""

    choice: Choice
    possible: Callable[[ROperator], bool]

    @cached_property
    def fits(self) -> bool:
        """Return True if the kernel can be written and fits. The first call writes it."""
        return self.possible(self.choice.operator)

    @property
    def refused(self) -> bool:
        """Return True if ``fits`` was evaluated and is False."""
        return self.__dict__.get("fits") is False


class Queue:
    """A queue of candidates, best predicted first: at most ``most`` that are not refused."""

    def __init__(self, choices: Iterable[Choice], possible: Callable[[ROperator], bool], most: int) -> None:
        self._rest, self._possible, self._most = iter(choices), possible, most
        self._out, self._head = list[Option](), list[Option]()

    def head(self) -> Option | None:
        """Return the next candidate, or None if the queue is empty or ``most`` were taken."""
        if sum(not o.refused for o in self._out) >= self._most:
            return None
        if not self._head:
            self._head += [Option(c, self._possible) for c in [next(self._rest, None)] if c is not None]
        return self._head[0] if self._head else None

    def take(self) -> Option:
        """Remove and return the candidate at the head."""
        self._out.append(self._head.pop())
        return self._out[-1]


def leaders_first(queues: Sequence[Queue]) -> Iterator[Choice]:
    """Yield the candidates that fit by predicted seconds, but each family's best before every second best.

    Tuning measures only the first few, and predictions of different families are less comparable than those of one family. The
    best of a much slower family keeps its rank."""
    later, seen, limit = list[Option](), set[str](), float("inf")
    while (option := _pop_best(queues, [], limit)) is not None:
        family = option.choice.operator.family
        if family in seen:
            later.append(option)
        elif option.fits:
            limit = min(limit, LEADING * option.choice.seconds + NEAR)
            seen.add(family)
            yield option.choice
    while (option := _pop_best(queues, later)) is not None:
        if option.fits:
            yield option.choice


def _pop_best(queues: Sequence[Queue], later: list[Option], limit: float = float("inf")) -> Option | None:
    """Remove and return the best predicted of ``later`` and the heads of ``queues``, or None if it exceeds ``limit``."""
    heads = [(q, head) for q in queues if (head := q.head()) is not None]
    found = min(heads, key=lambda h: h[1].choice.seconds, default=None)
    if later and (found is None or later[0].choice.seconds <= found[1].choice.seconds):
        return later.pop(0)
    return found[0].take() if found is not None and found[1].choice.seconds <= limit else None


Unit = TypeVar("Unit")
Code = TypeVar("Code", bound=TaskCode)
Own = TypeVar("Own")


@dataclass(frozen=True)
class Limits:
    """The local memory of a kernel (bytes; 0: any), and the number of candidates of all matrix products."""

    room: int = 0
    products: int = 0


ANY = Limits()
#: Maximum time of a resource-efficient kernel, as a multiple of the best prediction.
SLOWER: Final = 1.5


class FamilyBackend(Backend, Generic[Unit, Code, Own]):
    """Base class that implements kernels and their capabilities on top of a list of kernel families.

    ``kinds`` are the families, for a ``unit`` of ``veus`` vEUs. The unnamed family is the fallback for unknown family names.
    ``needs`` returns the resources of a kernel on a vEU; ``limits`` bound all that is offered."""

    def __init__(
        self,
        kinds: Sequence[KernelFamily[Unit, Code, Own]],
        unit: Unit,
        veus: int,
        writer: KernelWriter[Code],
        needs: Callable[[Code], Resources],
        limits: Limits = ANY,
    ) -> None:
        self.kinds = {f.name: f for f in kinds}
        self.usable = tuple(f for f in kinds if f.supported_by(unit))  #: Families whose kernels the unit can run.
        self.excluded: tuple[str, ...] = ()  #: Families that a user left out.
        self.unit, self.veus, self._writer = unit, veus, writer
        self._needs, self._limits = needs, limits
        self._asked: tuple[ROperator, Binding, dict[str, Sequence[Choice]]] | None = None  #: See ``_family_choices``.

    @cached_property
    def families(self) -> Mapping[str, Mapping[str, range]]:
        """The configuration values of every kernel family, by name."""
        return {f.name: f.configs for f in self.kinds.values()}

    @property
    def fused_forms(self) -> Mapping[str, frozenset[FusedForm]]:
        """The forms of fusion that the kernels of every usable family compute."""
        return {f.name: f.fused_forms for f in self.usable}

    def exclude_families(self, patterns: Sequence[str]) -> None:
        """Offer no kernels of families whose name matches one of ``patterns``. The fallback without a name stays. Raises BadInput
        for a pattern that matches none."""
        names = [f.name for f in self.usable if f.name]
        for pattern in patterns:
            if not fnmatch.filter(names, pattern):
                raise BadInput(f"no kernel family matches {pattern!r}", "--exclude-family", f"families: {', '.join(names)}")
        self.excluded = tuple(sorted({n for p in patterns for n in fnmatch.filter(names, p)}))
        self.usable = tuple(f for f in self.usable if f.name not in self.excluded)

    def otherwise(self, operator: ROperator, binding: Binding) -> Iterable[ROperator]:
        """Return tilings by the unnamed family for an operator that suits no family. The default is ()."""
        return ()

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Return tiled operators that can be written and fit: the best predicted of each family, then the rest, best first. If an
        exclusive family claims the operator, only its candidates are returned."""
        for family in self.usable:
            if family.exclusive is not None and family.exclusive(operator, binding, self.unit):
                found = LazySequence(islice(self.choices(operator, binding, family), family.max_candidates))
                if found:
                    return LazySequence(c.operator for c in found)
        return LazySequence(self._rank_candidates(operator, binding))

    def _rank_candidates(self, operator: ROperator, binding: Binding) -> Iterator[ROperator]:
        """Yield the ``candidates`` of the families that are not exclusive. Each kernel is written to check that it fits."""
        plain = [f for f in self.usable if f.exclusive is None and not f.product and not f.is_fallback]
        groups = [(self._limits.products, [f for f in self.usable if f.product]), *((f.max_candidates, [f]) for f in plain)]
        possible, found = partial(self.fits, binding=binding), False
        queues = [Queue(self._merge_choices(operator, binding, families), possible, most) for most, families in groups]
        for choice in leaders_first(queues):
            found = True
            yield choice.operator
        for family in (f for f in self.usable if f.is_fallback):
            for choice in islice(family.candidates(operator, binding, self.unit), family.max_candidates):
                found = True
                yield choice.operator
        if not found:
            yield from filter(possible, self.otherwise(operator, binding))

    def _merge_choices(
        self, operator: ROperator, binding: Binding, families: Iterable[KernelFamily[Unit, Code, Own]]
    ) -> Iterator[Choice]:
        """Merge the choices of some families, best predicted first. Some may have no kernel."""
        return heapq.merge(*(self._family_choices(f, operator, binding) for f in families), key=lambda c: c.seconds)

    def _family_choices(self, family: KernelFamily[Unit, Code, Own], operator: ROperator, binding: Binding) -> Sequence[Choice]:
        """Return a family's choices, best predicted first. The choices of the last operator are cached: its fastest and its
        leanest kernels are among the same choices, and predicting them is most of a search."""
        known = self._asked
        if known is None or known[0] != operator or known[1] is not binding:
            known = self._asked = (operator, binding, {})
        if family.name not in known[2]:
            known[2][family.name] = LazySequence(family.candidates(operator, binding, self.unit))
        return known[2][family.name]

    def choices(self, operator: ROperator, binding: Binding, *families: KernelFamily[Unit, Code, Own]) -> Iterator[Choice]:
        """Return the choices of some families that can be written and fit, best predicted first."""
        return (c for c in self._merge_choices(operator, binding, families) if self.fits(c.operator, binding))

    def all_candidates(self, operator: ROperator, binding: Binding) -> Iterator[ROperator]:
        """Yield every choice of every family, whatever its prediction. Exclusive families do not exclude others."""
        for family in self.usable:
            yield from (c.operator for c in family.candidates(operator, binding, self.unit))
        yield from self.otherwise(operator, binding)

    def best(self, operator: ROperator, binding: Binding, families: Iterable[KernelFamily[Unit, Code, Own]]) -> float:
        """Return the predicted seconds of the best choice of some families, or infinity if none suits."""
        return min((c.seconds for c in islice(self.choices(operator, binding, *families), 1)), default=float("inf"))

    def smallest_kernel(self, operator: ROperator, binding: Binding) -> ROperator | None:
        """Return the kernel of least vEU time among the families, or None for exclusive families and fallbacks."""
        families = [f for f in self.usable if f.exclusive is None and not f.is_fallback]
        if self.kinds.get(operator.family) not in families:
            return None
        found, most = list[Choice](), inf
        for choice in self._merge_choices(replace(operator, tile=(), family="", config=()), binding, families):
            most = min(most, SLOWER * choice.seconds)
            if choice.seconds > most:
                break
            found.append(choice)
        return next((c.operator for c in sorted(found, key=self._total_task_seconds) if self.fits(c.operator, binding)), None)

    def _total_task_seconds(self, choice: Choice) -> float:
        """Return the vEU seconds of all tasks together, from the choice's predicted time in rounds of all vEUs."""
        shares = choice.operator.task_count * self.kinds[choice.operator.family].spread(choice.operator)
        return choice.seconds / -(-shares // self.veus) * shares

    def arrangements(self, operator: ROperator, binding: Binding) -> frozenset[str]:
        """Return the keys of the constant arrangements that the kernel of a tiled operator reads."""
        arguments = (a for a in self._writer.written(operator, binding).arguments if isinstance(a, Argument))
        return frozenset(a.packing.key for a in arguments if a.packing is not None)

    def same_packing(self, operator: ROperator, binding: Binding, held: Collection[str], within: float) -> ROperator | None:
        """Return the best choice of a tiled operator's family that needs only arrangements of ``held``, or None. Its predicted
        time is at most 1 + ``within`` times that of the family's best."""
        family, untiled = self.kinds.get(operator.family), replace(operator, tile=(), family="", config=())
        most = inf
        for choice in self.choices(untiled, binding, family) if family is not None and not family.is_fallback else ():
            most = min(most, choice.seconds * (1 + within))
            if choice.seconds > most:
                break
            if self.arrangements(choice.operator, binding) <= {*held}:
                return choice.operator
        return None

    def retile_for(self, operator: ROperator, binding: Binding, within: float) -> ROperator:
        """Return the operator with the best tile at the lengths of ``binding``. An operator of an exclusive family or a fallback
        keeps its family."""
        own, family = self._mean_seconds(operator, binding), self.kinds[operator.family]
        families = [f for f in self.usable if f.exclusive is None and not f.is_fallback]
        found = [family] if family not in families else families
        if not operator.family or family not in self.usable:
            return operator
        allowed = self.arrangements(operator, binding)
        for choice in self.choices(replace(operator, tile=(), family="", config=()), binding, *found):
            if self._mean_seconds(choice.operator, binding) >= own * (1 - within):
                return operator
            if self.arrangements(choice.operator, binding) <= allowed:
                return choice.operator
        return operator

    def _mean_seconds(self, operator: ROperator, binding: Binding) -> float:
        """Return the mean predicted seconds of a tiled operator over its lengths."""
        family, times = self.kinds[operator.family], list[float]()
        for short in shrink_to_parts(operator, binding.parts):
            try:
                times.append(family.seconds(short, binding, self.unit))
            except Unsuited:  # suited at the bound only
                times.append(family.seconds(operator, binding, self.unit))
        return sum(times) / len(times)

    def fits(self, operator: ROperator, binding: Binding) -> bool:
        """Return True if the operator's family can write its kernel, and a vEU has the local memory for it."""
        try:
            made = self._writer.written(operator, binding)
        except DeviceFailure:
            return False
        return not self._limits.room or self._needs(made).local_bytes <= self._limits.room

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        """Return the kernel with predicted times; its text is written on demand. Raises DeviceFailure if the operator does not
        suit its family."""
        try:
            family = self.kinds.get(operator.family) or self.kinds[""]
            alone, crowded = family.round(operator, binding, self.unit, self.veus)
        except Unsuited as problem:
            raise make_refusal(operator, problem) from problem
        least = self._least_task_seconds(operator, binding) if family.is_fallback else 0.0
        spread = family.spread(operator)
        return RKernel(
            operator, lambda: self.write_kernel(operator, binding), max(alone, least), max(crowded, least), spread=spread
        )

    def _least_task_seconds(self, operator: ROperator, binding: Binding) -> float:
        """Return task seconds whose total is at least that of the best choice of the families that are no fallback."""
        untiled = replace(operator, tile=(), family="", config=())
        seconds = self.best(untiled, binding, [f for f in self.usable if not f.is_fallback])
        return seconds * self.veus / operator.task_count if isfinite(seconds) and operator.task_count else 0.0

    def write_kernel(self, operator: ROperator, binding: Binding) -> Written:
        """Return the text of a tiled operator's kernel and its needs. Raises DeviceFailure if its family cannot write it."""
        made = self._writer.written(operator, binding)
        return Written(made.text, self._needs(made))
