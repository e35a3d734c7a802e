"""Graph connecting: which Computes become one ROperator, and at which layer their edges meet.

First connect, then schedule (Welder, section 4.1): starting from every edge at the device layer, groups
grow forwards from a seed. A contraction or window takes element-wise consumers at thread level
(epilogue fusion); a reduction or map also takes row-wise consumers at vEU level, which is what makes
softmax and layer normalisation one operator (FusionStitching's block composition). A contraction takes
another one that reads its tile at vEU level: layers in a row whose interior stays on chip. A group is kept
where the predicted time of its best tile beats the parts' on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rammer.ir import expr as ex
from rammer.ir.compute import Compute, ComputeGraph, identity_load
from rammer.ir.device import Scope, VDevice
from rammer.ir.expr import Ref
from rammer.ir.operator import Connection, ROperator
from rammer.tile.graph import Decision, TileGraph, device_edges
from rammer.tile.search import ranked_tiles
from rammer.tile.signature import signature

#: Longest chain of Computes that meet at thread level: beyond it kernels only grow in registers and compile time.
LONGEST_CHAIN = 24
#: Longest chain of contractions that meet at vEU level.
MOST_CONTRACTIONS = 16

#: The share of a vEU's peak that a device's kernels reach on an operator that keeps a contraction's operand on chip.
Rate: TypeAlias = Callable[[ROperator], float]


def peak(operator: ROperator) -> float:
    """The Rate of a device whose kernels are equally good at all operators."""
    return 1.0


def connect(graph: ComputeGraph, device: VDevice, aliases: Mapping[str, tuple[str, ...]] | None = None,
            rate: Rate = peak) -> TileGraph:  # fmt: skip
    """Group the Computes of ``graph`` into operators for ``device``.

    ``aliases`` maps a tensor that no Compute writes to the tensors whose memory it shares (views and
    concatenations, from the storage pass): its readers depend on their producers, and they must be written to memory.
    """
    state = _Connector(graph, device, dict(aliases or {}), rate)
    operators = tuple(state.grow(c) for c in graph.computes if c.name not in state.owner)
    ordered = _topological(operators, state)
    edges = tuple(e for o in ordered for e in o.connections) + device_edges(graph, state.owner)
    return TileGraph(graph, ordered, tuple(state.decisions), edges)


@dataclass
class _Connector:
    graph: ComputeGraph
    device: VDevice
    aliases: dict[str, tuple[str, ...]]
    rate: Rate
    owner: dict[str, str] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    prices: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.consumers = self.graph.consumers()
        self.producers = self.graph.producers
        self.position = {c.name: i for i, c in enumerate(self.graph.computes)}
        self.escaping = set(self.graph.outputs) | {t for sources in self.aliases.values() for t in sources}
        self.ancestors = self._ancestors()

    def roots(self, tensor: str) -> tuple[str, ...]:
        """The tensors whose memory ``tensor`` reads: itself unless it is a view."""
        return self.aliases.get(tensor, (tensor,))

    def _ancestors(self) -> dict[str, int]:
        """Compute name -> bitset of the Computes it depends on, itself included."""
        result: dict[str, int] = {}
        for i, c in enumerate(self.graph.computes):
            bits = 1 << i
            for root in (r for name in c.reads for r in self.roots(name)):
                bits |= result.get(root, 0)
            result[c.name] = bits
        return result

    def grow(self, seed: Compute) -> ROperator:
        """The operator that starts at ``seed``: the longest legal group that pays."""
        best = _operator((seed,), ())
        group, connections = [seed], list[Connection]()
        while _run(group) < LONGEST_CHAIN:
            readers = self._open(group)
            if not readers:
                break
            c = self.producers[min(readers, key=self.position.__getitem__)]
            layer = self._layer(group, c)
            if layer is None or self._depends_around(group, c):
                break
            inside = {g.name for g in group}
            connections += [Connection(p, c.name, layer) for p in c.reads if p in inside]
            group.append(c)
            if self._closed(group):
                wider = _operator(tuple(group), tuple(connections))
                if not self._pays(best, wider, layer):
                    break
                best = wider
        for c in best.computes:
            self.owner[c.name] = best.name
        return best

    def _open(self, group: list[Compute]) -> set[str]:
        """Names of Computes outside the group that read something inside."""
        inside = {c.name for c in group}
        readers = (r.name for c in group for r in self.consumers[c.name])
        return {r for r in readers if r not in inside}

    def _closed(self, group: list[Compute]) -> bool:
        """Whether only the last Compute's value is used outside the group."""
        inside = {c.name for c in group}
        return all(
            c.name not in self.escaping and all(r.name in inside for r in self.consumers[c.name])
            for c in group[:-1]
        )

    def _depends_around(self, group: list[Compute], c: Compute) -> bool:
        """Whether ``c`` reads an outside value that itself depends on the group (not convex)."""
        inside = {g.name for g in group}
        mask = 0
        for g in group:
            mask |= 1 << self.position[g.name]
        outside = [r for n in c.reads if n not in inside for r in self.roots(n)]
        unplaced = any(n in self.position and n not in self.owner for n in outside)
        return unplaced or any(self.ancestors.get(n, 0) & mask for n in outside)

    def _layer(self, group: list[Compute], c: Compute) -> Scope | None:
        """The highest layer at which ``c`` can meet the group, or None."""
        produced = {g.name: g for g in group}
        inner = [ld for ld in c.loads if ld.tensor in produced]
        if c.combiner is None and all(identity_load(ld, c) for ld in inner):
            return "thread"
        aligned = all(ld.fill is None and all(isinstance(i, Ref | ex.Const) for i in ld.indices) for ld in inner)
        if not aligned or not inner:
            return None
        kinds = {g.kind for g in group}
        if c.kind == "contraction" and "contraction" in kinds and kinds <= {"contraction", "map"}:
            return "veu" if sum(g.kind == "contraction" for g in group) < MOST_CONTRACTIONS else None
        return None if {c.kind, *kinds} & {"contraction", "window"} else "veu"

    def _pays(self, narrow: ROperator, wide: ROperator, layer: Scope) -> bool:
        """Predict both sides with their best tiles and log the decision."""
        inside = {c.name for c in narrow.computes}
        rest = [c for c in wide.computes if c.name not in inside]
        together = self._price(wide)
        apart = self._price(narrow) + sum(self._price(_operator((c,), ())) for c in rest)
        kept = together <= apart
        why = "fewer bytes and launches" if kept else "recomputation or memory costs more"
        subject = " + ".join(c.name for c in wide.computes)
        self.decisions.append(Decision(subject, layer, apart, together, kept, why))
        return kept

    def _price(self, operator: ROperator) -> float:
        """Predicted seconds with the best tile that fits; infinite when none does."""
        key = signature(operator, self.graph.types)
        if key not in self.prices:
            ranked = ranked_tiles(operator, self.graph.types, self._achieved(operator))
            self.prices[key] = ranked[0][0] if ranked else float("inf")
        return self.prices[key]

    def _achieved(self, operator: ROperator) -> VDevice:
        """The device at the rate of its kernels: chains of contractions are where they differ most."""
        contractions = {c.name for c in operator.computes if c.kind == "contraction"}
        if not any(e.layer == "veu" and e.consumer in contractions for e in operator.connections):
            return self.device
        return replace(self.device, flops=self.device.flops * self.rate(operator))


def _run(group: list[Compute]) -> int:
    """Computes from the last contraction on."""
    starts = [i for i, c in enumerate(group) if c.kind == "contraction"]
    return len(group) - (starts[-1] if starts else 0)


def _operator(computes: tuple[Compute, ...], connections: tuple[Connection, ...]) -> ROperator:
    return ROperator(computes[-1].name, computes, connections, (computes[-1].name,))


def _topological(operators: tuple[ROperator, ...], state: _Connector) -> tuple[ROperator, ...]:
    """Order by the position of the last Compute: every input of a group is placed before its anchor."""
    return tuple(sorted(operators, key=lambda o: state.position[o.anchor.name]))
