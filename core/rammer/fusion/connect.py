"""Graph connecting: the grouping of Computes into ROperators, and the memory layers at which their edges meet.

First connect, then schedule (Welder, section 4.1): every edge starts at the device layer, and groups grow forwards from a seed:

- A contraction or window connects to element-wise consumers at thread level (epilogue fusion).
- A reduction or map also connects to row-wise consumers at vEU level. Softmax and layer normalisation thus become one operator
  (FusionStitching's block composition).
- A contraction connects at vEU level to another contraction that reads its tile, so intermediate layers stay on chip. Reductions
  along its rows may come between, as in attention's softmax. They count only together with the contraction that reads them.
- A contraction computes element-wise maps on one of its operands at thread level, if they have no other readers. Every task then
  recomputes the maps that it reads. A contraction that begins layers that stay on chip is excluded.

A group is accepted if the predicted time of its best tile does not exceed that of its parts.

Products of a few rows with weights (a recurrent cell's) are bound by the bytes of the weights. Such a group may also include a
second product that the next map adds. It may connect maps that read several of its values at vEU level, and write several
results. A whole LSTM cell is thus one operator.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from rammer.device.manifest import Binding
from rammer.fusion.tile_graph import ConnectionTrial, TileGraph, device_edges
from rammer.fusion.tile_search import ranked_tiles
from rammer.fusion.topological_order import sort_topologically
from rammer.ir import expr as ex
from rammer.ir.compute import Compute, ComputeGraph, contraction_operands, identity_load
from rammer.ir.device import Scope, VDevice
from rammer.ir.expr import Ref
from rammer.ir.operator import Connection, ROperator, prologue_variants
from rammer.ir.prefix_set import PrefixSet

#: Longest chain of Computes that meet at thread level: longer chains only cost registers and compile time.
LONGEST_CHAIN = 24
#: Longest chain of contractions that meet at vEU level.
MOST_CONTRACTIONS = 16

#: A rate that a device reports for an operator (``Backend.rate`` and ``Backend.prologue_rate``).
Rate: TypeAlias = Callable[[ROperator], float]


def peak_rate(operator: ROperator) -> float:
    """Return the rate of a device whose kernels are equally good for all operators."""
    return 1.0


def static_operator(operator: ROperator) -> ROperator:
    """Return ``operator`` unchanged: a program for one length has no masked tasks."""
    return operator


@dataclass(frozen=True)
class CostModel:
    """The inputs of prices besides the device's figures.

    ``rate`` and ``prologue_rate`` are those of the device; ``binding`` defaults to types and constants. ``ended`` adds endings to
    operators of a ranged program, which are priced at several lengths."""

    rate: Rate = peak_rate
    prologue_rate: Rate = peak_rate
    binding: Binding | None = None
    ended: Callable[[ROperator], ROperator] = static_operator


#: The cost model of a device without rates.
AT_PEAK: Final = CostModel()


def connect(
    graph: ComputeGraph,
    device: VDevice,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    asked: CostModel = AT_PEAK,
    fusion: str = "full",
) -> TileGraph:
    """Group the Computes of ``graph`` into operators for ``device``. ``fusion`` is the option of that name.

    ``aliases`` maps a tensor that no Compute writes to the tensors whose memory it shares (views and concatenations, from the
    storage pass). Its readers depend on the producers of those tensors, which must be written to memory. Operators of equal keys
    share the results of the cost model ``asked``.
    """
    binding = asked.binding or Binding(graph.types, {}, frozenset(graph.constants))
    state = _Connector(graph, device, dict(aliases or {}), asked, binding, fusion)
    operators = tuple(state.grow(c) for c in state.seeds() if c.name not in state.owner)
    ordered = sort_topologically(operators, state.position, state.roots)
    between = device_edges(graph, state.owner)
    reasons = {(e.producer, e.consumer): state.reason(e) for e in between}
    return TileGraph(graph, ordered, tuple(state.decisions), tuple(e for o in ordered for e in o.connections) + between, reasons)


@dataclass
class _Connector:
    graph: ComputeGraph
    device: VDevice
    aliases: dict[str, tuple[str, ...]]
    asked: CostModel
    binding: Binding
    fusion: str
    owner: dict[str, str] = field(default_factory=dict)
    decisions: list[ConnectionTrial] = field(default_factory=list)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)  #: Reasons by producer and consumer.
    prices: dict[str, float] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    bound: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.consumers = self.graph.consumers()
        self.producers = self.graph.producers
        self.position = {c.name: i for i, c in enumerate(self.graph.computes)}
        self.escaping = set(self.graph.outputs) | {t for sources in self.aliases.values() for t in sources}
        self.ancestors = self._find_ancestors()
        self.recent = deque[tuple[ROperator, bool, str]](maxlen=4)
        self.typed = Binding(self.graph.types, {})  # the price at the device's peak depends on nothing else

    def roots(self, tensor: str) -> tuple[str, ...]:
        """Return the tensors whose memory ``tensor`` reads: itself unless it is a view."""
        return self.aliases.get(tensor, (tensor,))

    def _find_ancestors(self) -> dict[str, PrefixSet]:
        """Return, by Compute, the positions of the Computes that it depends on, itself included."""
        result: dict[str, PrefixSet] = {}
        for i, c in enumerate(self.graph.computes):
            known = PrefixSet()
            for root in (r for name in c.reads for r in self.roots(name) if r in result):
                known |= result[root]
            result[c.name] = known.having(i)
        return result

    def seeds(self) -> list[Compute]:
        """Return the Computes in the order in which groups start, those independent of products first. Otherwise a mask computed
        between the products of an attention would prevent their fusion."""
        downstream = set[str]()
        for c in self.graph.computes:
            if c.kind == "contraction" or any(r in downstream for name in c.reads for r in self.roots(name)):
                downstream.add(c.name)
        return sorted(self.graph.computes, key=lambda c: c.name in downstream)

    def grow(self, seed: Compute) -> ROperator:
        """Form the operator that starts at ``seed`` and record its Computes."""
        best = self._grow_group(seed)
        for c in best.computes:
            self.owner[c.name] = best.name
        return best

    def _grow_group(self, seed: Compute) -> ROperator:
        """Return the longest legal and profitable group from ``seed``."""
        best = _make_operator((seed,), ())
        group, connections = [seed], list[Connection]()
        while self.fusion != "none" and _chain_length(group) < LONGEST_CHAIN:
            readers = self._outside_readers(group)
            if not readers:
                break
            c = self.producers[min(readers, key=self.position.__getitem__)]
            joined = [*group, *self._partner_products(group, c)]
            layer, why = self._meeting_layer(joined, c)
            if layer is None or self._depends_around(joined, c):
                self._refuse(group, c, why or "it also reads a value that depends on the operator")
                break
            inside = {g.name for g in joined}
            connections += [Connection(p, c.name, layer) for p in c.reads if p in inside]
            group = [*joined, c]
            written = () if self._is_awaiting_product(group) else self._group_outputs(group)
            if written:
                wider = ROperator(c.name, tuple(group), tuple(connections), written)
                if not self._is_profitable(best, wider, layer):
                    self._refuse(best.computes, c, "recomputation or memory costs more")
                    break
                best = wider
        else:
            longest = "fusion is off" if self.fusion == "none" else f"an operator has at most {LONGEST_CHAIN} Computes in a chain"
            for name in self._outside_readers(group):
                self._refuse(group, self.producers[name], longest)
        for c in group:
            if c not in best.computes:
                self._refuse(best.computes, c, "no operator from here on may write its results")
        return best

    def _refuse(self, group: Sequence[Compute], c: Compute, why: str) -> None:
        """Record why ``c``, and with it all later readers of ``group``, meet the group in device memory."""
        for name in self._outside_readers(group):
            reason = why if name == c.name else f"the operator ends before {c.name}"
            self.refused |= {(p.name, name): reason for p in group if name in map(_name_of, self.consumers[p.name])}

    def reason(self, edge: Connection) -> str:
        """Return the reason why an edge between two operators meets in device memory."""
        found = self.refused.get((edge.producer, edge.consumer))
        return found or f"{edge.consumer} continues the operator of another operand"

    def _outside_readers(self, group: Sequence[Compute]) -> set[str]:
        inside = {c.name for c in group}
        readers = (r.name for c in group for r in self.consumers[c.name])
        return {r for r in readers if r not in inside}

    def _partner_products(self, group: list[Compute], c: Compute) -> list[Compute]:
        """Return the products of a few rows that only ``c`` reads, to be added to the group."""
        inside = {g.name for g in group}
        if self.fusion != "full" or not all(self._weight_bound(g) for g in group if g.kind == "contraction"):
            return []
        found = (self.producers[n] for n in c.reads if n in self.producers and n not in inside and n not in self.owner)
        return [
            p
            for p in found
            if p.kind == "contraction"
            and self._weight_bound(p)
            and p.name not in self.escaping
            and [r.name for r in self.consumers[p.name]] == [c.name]
            and not self._depends_around(group, p)
        ]

    def _many_rows(self, c: Compute) -> bool:
        return c.kind == "contraction" and not self._weight_bound(c)

    def _weight_bound(self, c: Compute) -> bool:
        """Return True if ``c`` is a product of constant weights, each used for at most ``few_rows`` results."""
        if c.name not in self.bound:
            weights = [ld for ld in contraction_operands(c) or () if ld.tensor in self.graph.constants]
            axes = map(ex.axes_of, weights)
            self.bound[c.name] = any(math.prod(a.extent for a in c.axes if a.name not in w) <= self.device.few_rows for w in axes)
        return self.bound[c.name]

    def _is_awaiting_product(self, group: list[Compute]) -> bool:
        """Return True if the group ends in row-wise work that pays only before another product of many rows."""
        following = group[_last_product(group) + 1 :]
        return self._many_rows(group[0]) and not all(is_elementwise(c, group) for c in following)

    def _group_outputs(self, group: list[Compute]) -> tuple[str, ...]:
        """Return the outputs of the group: its last value and, where supported, partitioned values with outside readers. Returns
        () if another value has outside readers."""
        inside = {c.name for c in group}
        leaving = [c for c in group[:-1] if c.name in self.escaping or any(r.name not in inside for r in self.consumers[c.name])]
        # Kernel families for products of many rows write one result.
        several = any(c.kind == "contraction" for c in group) and not any(self._many_rows(c) for c in group)
        if leaving and not (several and all(self._is_partitioned(c, group) for c in leaving)):
            return ()
        return (*(c.name for c in leaving), group[-1].name)

    def _is_partitioned(self, c: Compute, group: list[Compute]) -> bool:
        """Return True if every task needs exactly its part of ``c``: the group reads it element by element."""
        readers = [r for r in group if c.name in r.reads]
        whole = all(identity_load(ld, r) for r in readers for ld in r.loads if ld.tensor == c.name)
        return c.shape == group[-1].shape and whole and all(r is group[-1] or self._is_partitioned(r, group) for r in readers)

    def _depends_around(self, group: list[Compute], c: Compute) -> bool:
        """Return True if ``c`` reads an outside value that depends on the group (the group would not be convex)."""
        inside = {g.name for g in group}
        places = [self.position[g.name] for g in group]
        outside = [r for n in c.reads if n not in inside for r in self.roots(n)]
        unplaced = any(n in self.position and n not in self.owner for n in outside)
        return unplaced or any(p in self.ancestors[n] for n in outside if n in self.ancestors for p in places)

    def _meeting_layer(self, group: list[Compute], c: Compute) -> tuple[Scope | None, str]:
        """Return the highest layer at which ``c`` can meet the group; or None and the reason."""
        produced = {g.name: g for g in group}
        inner = [ld for ld in c.loads if ld.tensor in produced]
        if is_elementwise(c, group):
            return "thread", ""
        if self.fusion == "elementwise":
            return None, "fusion is element-wise only"
        if _can_be_prologue(group, c) and not self._weight_bound(c):
            return (None, "it begins products that stay on chip") if self._can_start_layers(c) else ("thread", "")
        aligned = all(ld.fill is None and all(isinstance(i, Ref | ex.Const) for i in ld.indices) for ld in inner)
        if not aligned or not inner:
            return None, "it reads windows or moved elements"
        # Kernel families cannot hold a row of results on chip if the weights are quantised.
        rows = all(self._many_rows(g) and g.decoded is None for g in (c, *group) if g.kind == "contraction")
        if c.kind == "contraction" and _is_layer_chain(group) and rows:
            full = sum(g.kind == "contraction" for g in group) >= MOST_CONTRACTIONS
            return (None, f"an operator has at most {MOST_CONTRACTIONS} products") if full else ("veu", "")
        reduced = any(g.kind == "reduction" for g in (*group[_last_product(group) + 1 :], c))
        if c.kind in ("reduction", "map") and _is_layer_chain(group) and rows and reduced:
            return "veu", ""
        if c.kind in ("contraction", "window") or any(g.kind == "window" or self._many_rows(g) for g in group):
            return None, f"no kernel computes a {c.kind} after a {group[0].kind} in one task"
        return "veu", ""

    def _can_start_layers(self, c: Compute) -> bool:
        """Return True if ``c`` would begin layers that stay on chip, which pay more than a prologue."""
        logged, refused = len(self.decisions), dict(self.refused)
        found = self._grow_group(c).holds_operand
        del self.decisions[logged:]
        self.refused = refused
        return found

    def _is_profitable(self, narrow: ROperator, wide: ROperator, layer: Scope) -> bool:
        """Predict both variants with their best tiles, log the decision and return True if ``wide`` is not slower."""
        rated = wide.holds_operand or (self.device.spills and _has_epilogue_reduction(wide))
        together = self._price_operator(wide, rated)
        separate = sum(self._price_operator(part, rated) for part in (narrow, *_remaining_operators(narrow, wide)))
        kept = together <= separate and math.isfinite(together)
        why = "fewer bytes and launches" if kept else "recomputation or memory costs more"
        subject = " + ".join(c.name for c in wide.computes)
        self.decisions.append(ConnectionTrial(subject, layer, separate, together, kept, why))
        return kept

    def _price_operator(self, operator: ROperator, rated: bool) -> float:
        """Return predicted seconds with the best tile, infinite if none fits; ``rated`` applies the kernels' rates."""
        key = self._price_key(operator, rated)
        if key not in self.prices:
            ended = self.asked.ended(operator)
            ranked = ranked_tiles(ended, self.graph.types, self._rated_device(ended) if rated else self.device)
            self.prices[key] = ranked[0][0] / self._prologue_rate(ended) if ranked else float("inf")
        return self.prices[key]

    def _price_key(self, operator: ROperator, rated: bool) -> str:
        """Return a key that is equal for operators of equal price. The last keys are cached, since growing groups repeat them."""
        found = next((key for known, how, key in self.recent if known is operator and how == rated), None)
        if found is None:
            asked = self.binding if rated or operator.prologue else self.typed
            found = f"{rated} {asked.key(self.asked.ended(operator))}"
            self.recent.append((operator, rated, found))
        return found

    def _prologue_rate(self, operator: ROperator) -> float:
        """Return the device's rate for the maps before the contraction; maps that follow do not affect it."""
        if not operator.prologue:
            return 1.0
        key = "\n".join(
            map(self.binding.key, prologue_variants(operator))
        )  # without the maps, their results are read from memory
        if key not in self.shares:
            self.shares[key] = self.asked.prologue_rate(operator)
        return self.shares[key]

    def _rated_device(self, operator: ROperator) -> VDevice:
        """Return the device with its peak scaled by the kernels' rate, which differs most for rows of contractions."""
        return replace(self.device, flops=self.device.flops * self.asked.rate(operator))


def _has_epilogue_reduction(operator: ROperator) -> bool:
    """Return True if a reduction follows a contraction. If on-chip memory is a cache, the fusion gains little, and it prevents
    fast kernels that only multiply."""
    kinds = [c.kind for c in operator.computes]
    return "contraction" in kinds and "reduction" in kinds[kinds.index("contraction") :]


def _remaining_operators(narrow: ROperator, wide: ROperator) -> list[ROperator]:
    """Return the Computes of ``wide`` outside ``narrow`` as operators, one each. If ``wide`` holds an operand on chip, row-wise
    Computes up to the next product form one operator."""
    inside = {c.name for c in narrow.computes}
    runs = list[list[Compute]]()
    for c in wide.computes:
        if c.name not in inside:
            if wide.holds_operand and runs and "contraction" not in (c.kind, runs[-1][-1].kind):
                runs[-1].append(c)
            else:
                runs.append([c])
    return [_make_operator(tuple(run), _inner_connections(run, wide)) for run in runs]


def _inner_connections(run: list[Compute], operator: ROperator) -> tuple[Connection, ...]:
    names = {c.name for c in run}
    return tuple(e for e in operator.connections if {e.producer, e.consumer} <= names)


def is_elementwise(c: Compute, group: list[Compute]) -> bool:
    """Return True if ``c`` is a map that reads the group element by element."""
    inside = {g.name for g in group}
    return c.combiner is None and all(identity_load(ld, c) for ld in c.loads if ld.tensor in inside)


def _last_product(group: list[Compute]) -> int:
    """Return the position of the last contraction, or -1."""
    return max((i for i, c in enumerate(group) if c.kind == "contraction"), default=-1)


def _chain_length(group: list[Compute]) -> int:
    """Return the number of Computes from the last contraction on in a chain of layers, or of all Computes."""
    if not _is_layer_chain(group):
        return len(group)
    return len(group) - _last_product(group)


def _is_layer_chain(group: list[Compute]) -> bool:
    """Return True if the group begins with a contraction and has no windows."""
    return group[0].kind == "contraction" and all(c.kind != "window" for c in group)


def _can_be_prologue(group: list[Compute], c: Compute) -> bool:
    """Return True if the group consists of maps that the contraction ``c`` can compute in place for one operand. Each element of
    their results must depend on the same element of their operands."""
    names = {g.name for g in group}
    operands = contraction_operands(c)
    if operands is None or sum(ld.tensor in names for ld in operands) != 1 or any(g.combiner is not None for g in group):
        return False
    return all(_in_place(g) for g in group)


def _in_place(c: Compute) -> bool:
    """Return True if a map reads at least one tensor of its rank, and each of them element by element."""
    whole = [identity_load(ld, c) for ld in c.loads if len(ex.axes_of(ld)) == len(c.axes)]
    return bool(whole) and all(whole) and all(ld.fill is None for ld in c.loads)


def _name_of(compute: Compute) -> str:
    return compute.name


def _make_operator(computes: tuple[Compute, ...], connections: tuple[Connection, ...]) -> ROperator:
    return ROperator(computes[-1].name, computes, connections, (computes[-1].name,))
