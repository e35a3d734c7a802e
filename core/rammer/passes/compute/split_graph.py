"""A graph whose products are being split: Computes by name, their consumers, and their original Computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rammer.fusion.topological_order import by_rank
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, ComputeGraph
from rammer.ir.expr import Load, Ref
from rammer.ir.names import Names, make_identifier
from rammer.ir.types import TensorType


@dataclass(frozen=True)
class CutGraph:
    """A graph with split products. For each new Compute, ``sources`` names the model's Compute that it is part of. ``cuts`` lists
    the cuts that created it, each named after the model's Compute at which the cut ends."""

    graph: ComputeGraph
    sources: Mapping[str, str]
    cuts: Mapping[str, frozenset[str]]


class CutState:
    """The graph under construction. A cut is named after the model's Compute at which it ends. Cuts in
    ``without`` are skipped."""

    def __init__(self, graph: ComputeGraph, without: Collection[str]) -> None:
        self.graph, self.without = graph, without
        self.computes = graph.producers
        self.places = {c.name: i for i, c in enumerate(graph.computes)}
        self.readers: dict[str, dict[str, None]] = {n: {r.name: None for r in rs} for n, rs in graph.consumers().items()}
        self.types, self.constants = dict(graph.types), dict(graph.constants)
        self.taken = Names(graph.types)
        self.named: dict[tuple[str, int, int, int], str] = {}
        self.sources: dict[str, str] = {}
        self.cuts: dict[str, frozenset[str]] = {}
        self.begins: dict[str, int] = {}  # first index of a block in the model's Compute
        self.outputs = frozenset(graph.outputs)

    def along(self, load: Load, axis: Axis) -> int | None:
        """Return the dimension that ``axis`` indexes completely and alone, or None if it does not exist."""
        at = [d for d, i in enumerate(load.indices) if axis.name in ex.axes_of(i)]
        shape = self.types[load.tensor].shape
        plain = load.fill is None and len(at) == 1 and load.indices[at[0]] == Ref(axis.name) and shape[at[0]] == axis.extent
        return at[0] if plain else None

    def piece(self, tensor: str, at: int, first: int, length: int) -> str:
        """Return the name of a constant's part along dimension ``at``, or ``tensor`` if the part is all of it."""
        key = tensor, at, first, length
        if length == self.types[tensor].shape[at]:
            return tensor
        if key not in self.named:
            value = self.constants[tensor]
            part = value[(slice(None),) * at + (slice(first, first + length),)]
            part.flags.writeable = False
            name = self.named[key] = make_identifier(f"{tensor}_from{first}", self.taken)
            self.constants[name], self.types[name] = part, TensorType(self.types[tensor].dtype, part.shape)
        return self.named[key]

    def replace_with(self, c: Compute) -> None:
        if c.name in self.computes:
            self.drop(c.name)
        self.computes[c.name], self.types[c.name] = c, c.type
        self.readers.setdefault(c.name, {})
        for name in c.reads:
            self.readers.setdefault(name, {})[c.name] = None

    def drop(self, name: str) -> None:
        for read in self.computes.pop(name).reads:
            self.readers[read].pop(name, None)

    def add(self, c: Compute, of: Sequence[Compute], label: str) -> None:
        """Add a Compute that a cut creates from the Computes ``of``; the last of these is its main source."""
        self.replace_with(c)
        known = [self.cuts.get(m.name, frozenset[str]()) for m in of]
        self.sources[c.name] = self.sources.get(of[-1].name, of[-1].name)
        self.cuts[c.name] = frozenset({label}).union(*known)

    def result(self) -> CutGraph:
        """Return the rewritten graph in topological order."""
        if not self.cuts:
            return CutGraph(self.graph, {}, {})
        computes = self._in_order()
        used = {n for c in computes for n in c.reads} | self.outputs
        constants = {n: v for n, v in self.constants.items() if n in used}
        made = {c.name for c in computes} & self.cuts.keys()
        graph = replace(self.graph, computes=computes, types=self.types, constants=constants)
        return CutGraph(graph, {n: self.sources[n] for n in made}, {n: self.cuts[n] for n in made})

    def _in_order(self) -> tuple[Compute, ...]:
        """Return the live Computes in topological order, ties broken by the model's order."""
        live, waiting = set[str](), [n for n in self.outputs if n in self.computes]
        while waiting:
            if (name := waiting.pop()) not in live:
                live.add(name)
                waiting += [r for r in self.computes[name].reads if r in self.computes]
        missing = {n: sum(r in live for r in self.computes[n].reads) for n in live}
        rank = {n: (self.places[self.sources.get(n, n)], self.begins.get(n, 0), i) for i, n in enumerate(self.computes)}
        return tuple(self.computes[name] for name in by_rank(missing, self.readers, rank))
