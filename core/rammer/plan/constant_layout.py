"""Axis order of constants that kernels read in place: summed axes innermost, or columns innermost.

Kernel families pack constants, so the model's order does not affect them. A generic kernel reads them in place. The better
innermost axis depends on the device and the extents. With columns innermost, the predicted time of a recurrent cell of 64 units
is 1.13 times that with sums innermost on an H200. On a CPU it is 0.84 times. Both orders are therefore priced for constants that
multiply few rows, regardless of the model's order. A cell written with products is treated like an LSTM. If another order is
better, operators read a transposed copy of the constant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final, TypeAlias

from rammer.device.manifest import Binding
from rammer.fusion.tile_graph import TileGraph
from rammer.ir import expr as ex
from rammer.ir.compute import Compute, contraction_operands
from rammer.ir.expr import Expr, Load
from rammer.ir.names import Names, make_identifier
from rammer.ir.operator import ROperator
from rammer.ir.parts import Storage
from rammer.ir.types import TensorType, row_major
from rammer.plan.storage import StoragePlan

#: Seconds of an untiled operator on the device; infinite if no kernel supports it.
Seconds: TypeAlias = Callable[[ROperator, Binding], float]
#: Rows of a product from which the bytes of its weights no longer dominate: families that pack them are faster there.
FEW_ROWS: Final = 64


def order_constants(plan: StoragePlan, tile: TileGraph, binding: Binding, seconds: Seconds) -> tuple[StoragePlan, TileGraph]:
    """Return ``plan`` and ``tile`` with the constants of products of few rows in their fastest axis orders. ``binding`` binds
    both and is passed to ``seconds`` with each unchanged operator. Results change only by the order of sums."""
    orders = _Orders(plan, tile, binding, seconds)
    chosen = dict[str, TurnedConstant]()
    for names in orders.groups():
        chosen |= orders.best(names)
    chosen = {n: t for n, t in chosen.items() if t.name != n}
    return orders.applied(chosen) if chosen else (plan, tile)


@dataclass(frozen=True, slots=True)
class TurnedConstant:
    """A constant with permuted axes under a new name, or under its old name if the order is unchanged."""

    name: str
    order: tuple[int, ...]

    def load(self, load: Load) -> Load:
        """Return ``load`` redirected to the permuted constant."""
        return Load(self.name, tuple(load.indices[d] for d in self.order), load.fill)


Chosen: TypeAlias = "Mapping[str, TurnedConstant]"


@dataclass
class _Orders:
    plan: StoragePlan
    tile: TileGraph
    binding: Binding
    seconds: Seconds
    known: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.readers: dict[str, list[ROperator]] = {}
        for o in self.tile.operators:
            for name in o.inputs:
                self.readers.setdefault(name, []).append(o)
        lying = [self.plan.storages[n].buffer for n in self.readers]
        self.shared = {b for b in lying if lying.count(b) > 1}
        self.taken = Names(self.plan.graph.types)
        self.orders = dict(self._candidate_orders())
        types, storages = dict(self.binding.types), dict(self.binding.storages)
        for name, turned in ((n, t) for n, ways in self.orders.items() for t in ways if t.name != n):
            types[turned.name], storages[turned.name] = self._permuted_type(name, turned), self._permuted_storage(name, turned)
        same = {t.name: n for n, ways in self.orders.items() for t in ways}
        constants = self.binding.constants | {*same}
        reused = self.binding.reused | {t for t, n in same.items() if n in self.binding.reused}
        self.both = replace(self.binding, types=types, storages=storages, constants=constants, reused=reused)

    def _candidate_orders(self) -> Iterator[tuple[str, tuple[TurnedConstant, TurnedConstant]]]:
        """Yield constants that support both orders: columns innermost, sums innermost."""
        seen = set[str]()
        for o in self.tile.operators:
            for weights, summed in _weight_loads(o, self.binding.constants):
                name = weights.tensor
                if name in seen or not self._is_sole_constant(self.plan.storages[name]):
                    continue
                seen.add(name)
                depth = [d for d, i in enumerate(weights.indices) if ex.axes_of(i) & summed]
                width = [d for d in range(len(weights.indices)) if d not in depth]
                yield name, (self._turned(name, (*depth, *width)), self._turned(name, (*width, *depth)))

    def _is_sole_constant(self, storage: Storage) -> bool:
        """Return True if a constant alone fills its buffer, in the model's order."""
        whole = prod(storage.shape) == self.plan.buffers[storage.buffer][1]
        return storage.row_major and whole and not storage.offset and storage.buffer not in self.shared

    def _turned(self, name: str, order: tuple[int, ...]) -> TurnedConstant:
        shape = self.plan.graph.types[name].shape
        if [d for d in order if shape[d] > 1] == [d for d in range(len(shape)) if shape[d] > 1]:
            return TurnedConstant(name, tuple(range(len(shape))))
        return TurnedConstant(make_identifier(f"{name}_turned", self.taken), order)

    def groups(self) -> list[list[str]]:
        """Return groups of constants that are decided together, because the same operators read them."""
        found = list[set[str]]()
        for name in self.orders:
            mine = {n for o in self.readers[name] for n in o.inputs if n in self.orders}
            found = [g for g in found if not g & mine] + [mine.union(*(g for g in found if g & mine))]
        return [sorted(g) for g in found]

    def best(self, names: Sequence[str]) -> dict[str, TurnedConstant]:
        """Return the fastest orders: the better of all constants in one order or the other, then greedily improved one by one."""
        best = min(({n: self.orders[n][way] for n in names} for way in (0, 1)), key=self._layout_cost)
        improved = len(names) > 1
        while improved:
            improved = False
            for name in names:
                one, other = self.orders[name]
                turned = {**best, name: other if best[name] == one else one}
                if self._layout_cost(turned) < self._layout_cost(best):
                    best, improved = turned, True
        return best if self._layout_cost(best) < self._layout_cost({n: TurnedConstant(n, ()) for n in names}) else {}

    def _layout_cost(self, chosen: Chosen) -> float:
        """Return the seconds of operators that read the constants in these orders."""
        return sum(self._operator_cost(o, chosen) for o in {o.name: o for n in chosen for o in self.readers[n]}.values())

    def _operator_cost(self, operator: ROperator, chosen: Chosen) -> float:
        """Return the seconds of one operator. An operator with equal cost for both orders of all its constants is not priced for
        mixed orders."""
        names = [n for n in operator.inputs if n in chosen]
        key = operator.name, tuple(chosen[n].name for n in names)
        if key not in self.known:
            either = {self.known.get((operator.name, tuple(self.orders[n][way].name for n in names))) for way in (0, 1)}
            if len(either) == 1 and None not in either:
                return self.known[operator.name, tuple(self.orders[n][0].name for n in names)]
            own = all(chosen[n].name == n for n in names)
            self.known[key] = self.seconds(_read_permuted(operator, chosen), self.binding if own else self.both)
        return self.known[key]

    def _permuted_type(self, name: str, turned: TurnedConstant) -> TensorType:
        kind = self.plan.graph.types[name]
        return TensorType(kind.dtype, tuple(kind.shape[d] for d in turned.order))

    def _permuted_storage(self, name: str, turned: TurnedConstant) -> Storage:
        shape = self._permuted_type(name, turned).shape
        return Storage(turned.name, turned.name, 0, shape, row_major(shape))

    def applied(self, chosen: Chosen) -> tuple[StoragePlan, TileGraph]:
        """Return the plan and operators with the chosen constants."""
        graph, constants = self.plan.graph, dict(self.plan.graph.constants)
        types, storages, buffers = dict(graph.types), dict(self.plan.storages), dict(self.plan.buffers)
        for name, turned in chosen.items():
            constants[turned.name] = constants.pop(name).transpose(turned.order)
            types[turned.name], storages[turned.name] = self._permuted_type(name, turned), self._permuted_storage(name, turned)
            buffers[turned.name] = buffers.pop(storages.pop(name).buffer)
        computes = tuple(_permute_loads(c, chosen) for c in graph.computes)
        graph = replace(graph, computes=computes, types=types, constants=constants)
        operators = tuple(_read_permuted(o, chosen) for o in self.tile.operators)
        return replace(self.plan, graph=graph, storages=storages, buffers=buffers), replace(
            self.tile, graph=graph, operators=operators
        )


def _weight_loads(operator: ROperator, constants: Collection[str]) -> Iterator[tuple[Load, frozenset[str]]]:
    """Yield the constants by which ``operator`` multiplies few rows, with the summed axes."""
    for c in operator.computes:
        for weights in contraction_operands(c) or ():
            rows = prod(a.extent for a in c.axes if a.name not in ex.axes_of(weights))
            if weights.tensor in constants and weights.fill is None and rows <= FEW_ROWS:
                yield weights, frozenset(a.name for a in c.reduce)


def _read_permuted(operator: ROperator, chosen: Chosen) -> ROperator:
    """Return ``operator`` with its loads redirected to the chosen constants."""
    if chosen.keys().isdisjoint(operator.inputs):
        return operator
    return replace(operator, computes=tuple(_permute_loads(c, chosen) for c in operator.computes))


def _permute_loads(c: Compute, chosen: Chosen) -> Compute:
    if chosen.keys().isdisjoint(c.reads):
        return c

    def load(e: Expr) -> Load | None:
        return (
            chosen[e.tensor].load(e) if isinstance(e, Load) and e.tensor in chosen and chosen[e.tensor].name != e.tensor else None
        )

    return replace(c, body=ex.transform(c.body, load), used=None)
