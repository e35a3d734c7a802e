"""What a kernel family is: which operators it sees, the tiles it would give them and what it expects of each, and its text.

A device has a tuple of them, and a loop over it is all that its backend knows of families (``FamilySearch``). What others must
know of a family, it says here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from rammer.codegen.task_parameters import TaskCode, Unsuited
from rammer.device.manifest import Binding
from rammer.ir.at_length import shrink_to_parts
from rammer.ir.operator import ROperator

#: How a device describes itself, its kernels, and what its own executors know of some families.
Unit = TypeVar("Unit")
Code = TypeVar("Code", bound=TaskCode)
Own = TypeVar("Own")


class Choice(NamedTuple):
    """A tiled operator with its predicted seconds for all tasks, launch included."""

    seconds: float
    operator: ROperator


@dataclass(frozen=True, eq=False)
class KernelFamily(Generic[Unit, Code, Own]):
    """One family of kernels.

    ``configs`` are the values that a loaded file may have, by key; what of them goes together ``kernel`` decides.
    ``candidates`` are choices for an untiled operator, the most promising first; none where the family does not suit. Some
    of them ``kernel`` may refuse. ``seconds`` predicts all tasks of a tiled operator without the launch, and is what schedules
    are made by, too. ``kernel`` writes it. Both raise Unsuited where the operator is none of the family.

    ``spread`` says how many vEUs one task of a tiled operator keeps busy, where that is not one: blocks that share a sum.
    ``needs`` says of a unit whether it has what the kernels use. ``most`` choices are offered of it, of all matrix products
    together as many (``product``). ``first`` says of an operator whether only this family is offered where it has
    candidates. ``last`` is true of a family that can write everything and is offered behind all others, in its own order:
    it counts bytes, and operations at the peak, so schedules never take it for less work than the best of the others.
    ``beside`` is true of families whose kernels may stand beside others' in one launch, ``holds`` of those that keep a product's
    operand on chip. ``times`` predicts seconds of one round of tasks,
    alone and crowded, where that is no share of ``seconds``. ``own`` is for the device's executors. ``threads`` tells those that
    compute a task of a tiled operator before its kernel is written, where a family can; Unsuited as ``kernel``.
    ``operand_rounding`` names the format to which kernels round float32 operands before they multiply them ("" if they keep all
    bits): two families give the same numbers, up to the order of sums, only if this field is equal.
    """

    name: str
    configs: Mapping[str, range]
    candidates: Callable[[ROperator, Binding, Unit], Iterable[Choice]]
    seconds: Callable[[ROperator, Binding, Unit], float]
    kernel: Callable[[ROperator, Binding], Code]
    needs: Callable[[Unit], bool] = lambda unit: True
    most: int = 6
    product: bool = False
    first: Callable[[ROperator, Binding, Unit], bool] | None = None
    last: bool = False
    holds: bool = False
    beside: bool = False
    times: Callable[[ROperator, Binding, Unit], tuple[float, float]] | None = None
    own: Own | None = None
    spread: Callable[[ROperator], int] = lambda operator: 1
    threads: Callable[[ROperator, Binding], int] | None = None
    operand_rounding: str = ""

    def round(self, operator: ROperator, binding: Binding, unit: Unit, veus: int) -> tuple[float, float]:
        """Predicted seconds of one round of a tiled operator's tasks on ``veus`` vEUs, alone and crowded."""
        if self.times is not None:
            return self.times(operator, binding, unit)
        return (self.seconds(operator, binding, unit) / -(-operator.task_count * self.spread(operator) // veus),) * 2


class Formed(Protocol):
    """What a family sees in an operator."""

    @property
    def operator(self) -> ROperator: ...


class Launching(Protocol):
    """A unit that knows what a launch takes."""

    @property
    def launch(self) -> float: ...


Form = TypeVar("Form", bound=Formed)
Launched = TypeVar("Launched", bound=Launching)


def by_seconds(choices: Iterable[Choice]) -> Sequence[Choice]:
    """Best predicted first; equal ones in an order that repeats."""
    return sorted(choices, key=lambda c: (c.seconds, c.operator.tile, c.operator.config))


@dataclass(frozen=True)
class Forms(Generic[Form, Launched, Code]):
    """How a family goes about the operators that have its form, tiled or not.

    ``recognise`` finds it, or says by Unsuited why there is none; ``tilings`` are those of tiled copies that are worth trying, in
    any order; ``price`` predicts the seconds of all tasks of a tiled one, without the launch; ``write`` writes its kernel, or
    raises Unsuited where its config is no possible one. ``order`` is that in which choices are offered.
    Tasks of a program for a range that end ``inside`` are priced by what a length leaves of them.
    """

    recognise: Callable[[ROperator, Binding], Form]
    tilings: Callable[[Form, Launched], Iterable[Form]]
    price: Callable[[Form, Binding, Launched], float]
    write: Callable[[Form, Binding], Code]
    order: Callable[[Iterable[Choice]], Sequence[Choice]] = by_seconds
    inside: bool = False

    def family(self, name: str, configs: Mapping[str, range]) -> KernelFamily[Launched, Code, Any]:
        """The family of these forms."""
        return KernelFamily(name, configs, self._order_tilings, self._predict_seconds, self._write_kernel)

    def _order_tilings(self, operator: ROperator, binding: Binding, unit: Launched) -> Sequence[Choice]:
        try:
            form = self.recognise(operator, binding)
        except Unsuited:
            return []
        return self.order(Choice(self._mean_price(f, binding, unit) + unit.launch, f.operator) for f in self.tilings(form, unit))

    def _mean_price(self, form: Form, binding: Binding, unit: Launched) -> float:
        """The price of a tiled form; of an operator of a program for a range the mean over lengths."""
        own, found = self.price(form, binding, unit), list[float]()
        for short in shrink_to_parts(form.operator, binding.parts, self.inside) if form.operator.lengths else ():
            try:
                found.append(self.price(self.recognise(short, binding), binding, unit))
            except Unsuited:  # as the form is at the bound alone
                found.append(own)
        return sum(found) / len(found) if found else own

    def _predict_seconds(self, operator: ROperator, binding: Binding, unit: Launched) -> float:
        return self.price(self.recognise(operator, binding), binding, unit)

    def _write_kernel(self, operator: ROperator, binding: Binding) -> Code:
        return self.write(self.recognise(operator, binding), binding)
