"""The description of a kernel family: its operators, its tiles with their predicted times, and its text.

A device has a tuple of families, and its backend only loops over them (``FamilyBackend``). Every fact that other modules need
about a family is a field here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from rammer.codegen.task_parameters import TaskCode, Unsuited
from rammer.device.manifest import Binding, FusedForm
from rammer.ir.at_length import shrink_to_parts
from rammer.ir.operator import ROperator

#: The types of a device's description, of its kernels, and of the family data of its executors.
Unit = TypeVar("Unit")
Code = TypeVar("Code", bound=TaskCode)
Own = TypeVar("Own")


class Choice(NamedTuple):
    """A tiled operator with its predicted seconds for all tasks, launch included."""

    seconds: float
    operator: ROperator


@dataclass(frozen=True, eq=False)
class KernelFamily(Generic[Unit, Code, Own]):
    """A parameterised kernel: recogniser, configurations, cost formula and text.

    ``configs`` are the values that a loaded file may have, by key; ``kernel`` checks their combinations. ``candidates`` returns
    choices for an untiled operator, the most promising first, or nothing if the family does not suit. ``kernel`` may refuse some
    of them. ``seconds`` predicts all tasks of a tiled operator without the launch, also for schedules. ``kernel`` writes it. Both
    raise Unsuited if the operator does not suit the family.

    ``spread`` is the number of vEUs that one task of a tiled operator occupies, if not one: blocks that share a sum.
    ``supported_by`` returns True if a unit has the features that the kernels use. At most ``max_candidates`` choices are
    offered; matrix products (``product``) share one limit. ``exclusive`` returns True for an operator if only this family is
    offered, provided it has candidates.

    ``is_fallback`` is set for a family that can write everything and is offered after all others, in its order. It counts
    bytes, and operations at the peak. Schedules never assume less work for it than for the best of the other families.

    ``packable``: the kernels may share a launch with those of other families. ``keeps_operand_on_chip``: the kernels keep a
    product's operand on chip. ``times`` overrides the seconds of one round of tasks (idle device, full device). The default is
    ``seconds`` divided by the number of rounds. ``persistent`` is for the device's executors. ``threads`` returns the threads
    of a task of a tiled operator before its kernel is written, if the family can. It raises Unsuited as ``kernel`` does.

    ``fused_forms`` are those that the kernels compute around the family's own form (``Backend.fused_forms``).

    ``operand_rounding`` names the format to which kernels round float32 operands before they multiply them ("" if they keep all
    bits). Two families give the same numbers, up to the order of sums, only if this field is equal.
    """

    name: str
    configs: Mapping[str, range]
    candidates: Callable[[ROperator, Binding, Unit], Iterable[Choice]]
    seconds: Callable[[ROperator, Binding, Unit], float]
    kernel: Callable[[ROperator, Binding], Code]
    supported_by: Callable[[Unit], bool] = lambda unit: True
    max_candidates: int = 6
    product: bool = False
    exclusive: Callable[[ROperator, Binding, Unit], bool] | None = None
    is_fallback: bool = False
    keeps_operand_on_chip: bool = False
    packable: bool = False
    times: Callable[[ROperator, Binding, Unit], tuple[float, float]] | None = None
    persistent: Own | None = None
    spread: Callable[[ROperator], int] = lambda operator: 1
    threads: Callable[[ROperator, Binding], int] | None = None
    operand_rounding: str = ""
    fused_forms: frozenset[FusedForm] = frozenset({"trailing maps"})

    def round(self, operator: ROperator, binding: Binding, unit: Unit, veus: int) -> tuple[float, float]:
        """Return the predicted seconds of one round of a tiled operator's tasks on ``veus`` vEUs: idle device, full device."""
        if self.times is not None:
            return self.times(operator, binding, unit)
        return (self.seconds(operator, binding, unit) / -(-operator.task_count * self.spread(operator) // veus),) * 2


class Formed(Protocol):
    """The form in which a family recognises an operator."""

    @property
    def operator(self) -> ROperator: ...


class Launching(Protocol):
    """A unit with a launch time."""

    @property
    def launch(self) -> float: ...


Form = TypeVar("Form", bound=Formed)
Launched = TypeVar("Launched", bound=Launching)


def by_seconds(choices: Iterable[Choice]) -> Sequence[Choice]:
    """Sort choices by predicted seconds; ties have a reproducible order."""
    return sorted(choices, key=lambda c: (c.seconds, c.operator.tile, c.operator.config))


@dataclass(frozen=True)
class Forms(Generic[Form, Launched, Code]):
    """A kernel family defined by the form of its operators, tiled or not.

    ``recognise`` returns the form, or raises Unsuited with the reason. ``tilings`` are the tiled copies that are worth trying, in
    any order. ``price`` predicts the seconds of all tasks of a tiled form, without the launch. ``write`` writes its kernel, or
    raises Unsuited if its config is invalid. ``order`` sorts the offered choices. Tasks of a ranged program that stop ``inside``
    a length are priced by the part that the length leaves.
    """

    recognise: Callable[[ROperator, Binding], Form]
    tilings: Callable[[Form, Launched], Iterable[Form]]
    price: Callable[[Form, Binding, Launched], float]
    write: Callable[[Form, Binding], Code]
    order: Callable[[Iterable[Choice]], Sequence[Choice]] = by_seconds
    inside: bool = False

    def family(self, name: str, configs: Mapping[str, range]) -> KernelFamily[Launched, Code, Any]:
        """Return the kernel family of these forms."""
        return KernelFamily(name, configs, self._order_tilings, self._predict_seconds, self._write_kernel)

    def _order_tilings(self, operator: ROperator, binding: Binding, unit: Launched) -> Sequence[Choice]:
        try:
            form = self.recognise(operator, binding)
        except Unsuited:
            return []
        return self.order(Choice(self._mean_price(f, binding, unit) + unit.launch, f.operator) for f in self.tilings(form, unit))

    def _mean_price(self, form: Form, binding: Binding, unit: Launched) -> float:
        """Return the price of a tiled form; for a ranged operator the mean over lengths."""
        own, found = self.price(form, binding, unit), list[float]()
        for short in shrink_to_parts(form.operator, binding.parts, self.inside) if form.operator.lengths else ():
            try:
                found.append(self.price(self.recognise(short, binding), binding, unit))
            except Unsuited:  # the form exists at the bound only
                found.append(own)
        return sum(found) / len(found) if found else own

    def _predict_seconds(self, operator: ROperator, binding: Binding, unit: Launched) -> float:
        return self.price(self.recognise(operator, binding), binding, unit)

    def _write_kernel(self, operator: ROperator, binding: Binding) -> Code:
        return self.write(self.recognise(operator, binding), binding)
