"""Products of a whole sequence, computed for all time steps at once or step by step.

A recurrent layer multiplies all its inputs by one matrix. One product is the least work. However, it waits for the last step of
the previous layer, so stacked layers run one after another. With one product per step, a step needs only one step of the previous
layer. The layers then overlap as a wavefront of cells (Rammer, OSDI'20, section 4.2; Appleyard et al., arXiv 1604.01946, section
3.4). The faster form depends on the number of vEUs, so both are predicted for the device from work and span.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from rammer.device.manifest import Binding
from rammer.fusion.tile_search import ranked_tiles
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, ComputeGraph, identity_load
from rammer.ir.device import VDevice
from rammer.ir.expr import Const, Expr, Load, Op, Ref, integer
from rammer.ir.names import Names, make_identifier
from rammer.ir.operator import ROperator
from rammer.ir.piecewise import piecewise_regions

#: Maximum predicted time of the first layers' product as a whole, relative to its time in steps. Prices do not model weights that
#: stay in registers from step to step. For LSTM-TC they predict 0.987, and uniform layers are fastest (measured on an H200).
CLEARLY: Final = 0.95


def slice_steps(graph: ComputeGraph, device: VDevice) -> ComputeGraph:
    """Return ``graph`` with one product per step where layers then overlap and are predicted faster on ``device``.

    Otherwise return ``graph`` itself. The first layers, whose input is complete at the start, may keep one product: if it is
    wide, reading its weights in every step costs more than the wave of one product."""
    chains = _find_chains(graph)
    if not chains:
        return graph
    prices: dict[str, float] = {}
    waves, seconds = _price_waves(graph, device, prices)
    chosen = graph
    for some in (chains, _behind_others(graph, chains)):
        if some and (some is chains or len(some) < len(chains)):
            sliced = _Slicer(graph, some).graph_of_slices()
            fewer, less = _price_waves(sliced, device, prices)
            if fewer < waves and less < seconds:
                chosen, seconds = sliced, less * CLEARLY
    return chosen


def every_step(graph: ComputeGraph) -> ComputeGraph:
    """Return ``graph`` with one product per step wherever layers then overlap, regardless of cost."""
    chains = _find_chains(graph)
    return _Slicer(graph, chains).graph_of_slices() if chains else graph


@dataclass(frozen=True, slots=True)
class _Chain:
    """A product with the maps that follow it, whose consumers read only the positions ``used`` of axis ``dim``."""

    members: tuple[Compute, ...]
    dim: int
    used: tuple[int, ...]


def _find_chains(graph: ComputeGraph) -> list[_Chain]:
    slices, found = _Slices(graph), list[_Chain]()
    for c in graph.computes:
        if c.kind == "contraction":
            options = (_match_chain(graph, c, d, slices) for d, a in enumerate(c.axes) if a.extent > 1)
            found += [chain for chain in options if chain is not None][:1]
    return found


def _behind_others(graph: ComputeGraph, chains: list[_Chain]) -> list[_Chain]:
    """Return the chains that depend, directly or indirectly, on another chain."""
    members, downstream = {m.name for chain in chains for m in chain.members}, set[str]()
    for c in graph.computes:
        if any(r in members or r in downstream for r in c.reads):
            downstream.add(c.name)
    return [chain for chain in chains if chain.members[0].name in downstream]


def _match_chain(graph: ComputeGraph, product: Compute, dim: int, slices: _Slices) -> _Chain | None:
    """Return the chain from ``product`` whose consumers read slices along ``dim``, or None if a consumer reads more."""
    if not _steps_of_data(graph, product, product.axes[dim].name):
        return None
    used = slices.read(product.name, dim)
    return _Chain(slices.members(product), dim, tuple(sorted(used))) if used and len(used) > 1 else None


class _Slices:
    """Cache of the positions along an axis that consumers read of a Compute and of the maps after it. Products that are summed
    one after another share most of the maps after them."""

    def __init__(self, graph: ComputeGraph) -> None:
        self.consumers, self.outputs = graph.consumers(), set(graph.outputs)
        self.producers = graph.producers
        self.found: dict[tuple[str, int], frozenset[int] | None] = {}

    def read(self, name: str, dim: int) -> frozenset[int] | None:
        """Return the positions, or None if the value is a graph output or a consumer reads more than single positions."""
        waiting = [name]
        while waiting:  # iterative, because chains of maps may be long
            at = waiting[-1]
            readers = [] if at in self.outputs else [r.name for r in self._map_readers(at)]
            missing = [b for b in readers if (b, dim) not in self.found] if (at, dim) not in self.found else []
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if (at, dim) not in self.found:
                self.found[at, dim] = self._join_positions(at, dim, readers)
        return self.found[name, dim]

    def _join_positions(self, name: str, dim: int, readers: list[str]) -> frozenset[int] | None:
        own = self._own(name, dim)
        parts = [own, *(self.found[b, dim] for b in readers)]
        return None if None in parts else frozenset[int]().union(*(p for p in parts if p is not None))

    def _own(self, name: str, dim: int) -> frozenset[int] | None:
        """Return the positions that are read by consumers other than element-wise maps."""
        if name in self.outputs:
            return None
        maps = {r.name for r in self._map_readers(name)}
        loads = [ld for r in self.consumers[name] if r.name not in maps for ld in r.loads if ld.tensor == name]
        places = [ld.indices[dim] for ld in loads]
        if not all(isinstance(p, Const) for p in places) or any(ld.fill is not None for ld in loads):
            return None
        return frozenset(int(p.value) for p in places if isinstance(p, Const))

    def _map_readers(self, name: str) -> list[Compute]:
        """Return the consumers that read every element at the same index."""
        shape = self.producers[name].shape
        return [
            r
            for r in self.consumers[name]
            if not r.reduce and r.shape == shape and all(identity_load(ld, r) for ld in r.loads if ld.tensor == name)
        ]

    def members(self, product: Compute) -> tuple[Compute, ...]:
        """Return the product and all maps after it, without duplicates."""
        members = {product.name: product}
        waiting = [product]
        for member in waiting:
            new = [r for r in self._map_readers(member.name) if r.name not in members]
            members |= {r.name: r for r in new}
            waiting += new
        return tuple(members.values())


def _steps_of_data(graph: ComputeGraph, product: Compute, axis: str) -> bool:
    """Return True if ``axis`` indexes only data, so that all its positions share the same weights."""
    weights = {axis in ex.axes_of(ld) for ld in product.loads if ld.tensor in graph.constants}
    return weights == {False} and any(Ref(axis) in ld.indices for ld in product.loads)


class _Slicer:
    """Rewrite of every chain of a graph into one copy per step."""

    def __init__(self, graph: ComputeGraph, chains: list[_Chain]) -> None:
        self.graph, self.producers, self.outputs = graph, graph.producers, set(graph.outputs)
        self.chain_of = {m.name: chain for chain in chains for m in chain.members}
        self.made: dict[str, Compute] = {}
        self.copies: dict[str, str] = {}
        self.taken, self.named = Names(graph.types), dict[tuple[object, ...], str]()

    def graph_of_slices(self) -> ComputeGraph:
        """Return the rewritten graph, with each slice directly before its first consumer."""
        for c in self.graph.computes:
            if c.name not in self.chain_of:
                self._add_compute(replace(c, body=ex.rename_tensors(ex.transform(c.body, self._slice_load), self.copies)))
        used = {*self.graph.outputs}
        kept = list[Compute]()
        for c in reversed(self.made.values()):  # sequences that only chains read are removed
            if c.name in used:
                kept.append(c)
                used |= set(c.reads)
        types = {n: t for n, t in self.graph.types.items() if n not in self.producers} | {c.name: c.type for c in kept}
        return replace(self.graph, computes=tuple(reversed(kept)), types=types)

    def _add_compute(self, c: Compute) -> None:
        copy = isinstance(c.body, Load) and identity_load(c.body, c) and c.body.tensor in self.made
        if isinstance(c.body, Load) and copy and c.name not in self.outputs:
            self.copies[c.name] = c.body.tensor
        else:
            self.made[c.name] = c

    def _slice_load(self, e: Expr) -> Load | None:
        """Replace a read of one position of a chain by a read of that step's copy."""
        if not isinstance(e, Load) or e.tensor not in self.chain_of:
            return None
        dim = self.chain_of[e.tensor].dim
        at = e.indices[dim]
        assert isinstance(at, Const)
        return Load(self._step(e.tensor, int(at.value)), (*e.indices[:dim], *e.indices[dim + 1 :]))

    def _step(self, name: str, step: int) -> str:
        """Return the copy of chain member ``name`` for ``step``."""
        own = self._name(f"{name}_{step}", name, step)
        if own not in self.made:
            c, chain = self.producers[name], self.chain_of[name]
            axis = c.axes[chain.dim].name
            self.made[own] = replace(
                c,
                name=own,
                axes=(*c.axes[: chain.dim], *c.axes[chain.dim + 1 :]),
                reduce=c.reduce,
                body=ex.transform(c.body, lambda e: self._at(e, axis, step)),
            )
            self.made[own] = self.made.pop(own)  # after the slices that its body created
        return own

    def _name(self, title: str, *what: object) -> str:
        """Return the identifier of a slice: its title, or a unique variant if the name is taken."""
        if what not in self.named:
            self.named[what] = make_identifier(title, self.taken)
        return self.named[what]

    def _at(self, e: Expr, axis: str, step: int) -> Expr | None:
        """Return ``e`` at position ``step`` of ``axis``, with copies of chain members and slices of other tensors."""
        if isinstance(e, Ref):
            return integer(step) if e.axis == axis else None
        if not isinstance(e, Load):
            return None
        at = Load(e.tensor, tuple(ex.substitute(i, {axis: integer(step)}) for i in e.indices), e.fill)
        if e.tensor in self.chain_of:
            return self._slice_load(at)
        if Ref(axis) not in e.indices or e.fill is not None or e.tensor in self.graph.constants:
            return at
        source = self._resolve_source(at)
        return self._load_step_slice(self._slice_load(source) or source)

    def _resolve_source(self, load: Load) -> Load:
        """Return the source of ``load``, resolved through copies and concatenations."""
        producer = self.producers.get(load.tensor)
        while producer is not None and producer.combiner is None and load.tensor not in self.chain_of:
            body = ex.substitute(producer.body, dict(zip((a.name for a in producer.axes), load.indices, strict=True)))
            body = _fold_where(body)
            if not isinstance(body, Load) or body.fill is not None:
                break
            load, producer = body, self.producers.get(body.tensor)
        return load

    def _load_step_slice(self, load: Load) -> Load:
        """Return a read of a slice of a tensor with all steps. The form does not depend on the step, so that equal steps read
        alike."""
        literal = [d for d, i in enumerate(load.indices) if isinstance(i, Const)]
        # The tensor may itself be a slice of another chain that was just created.
        kind = self.made[load.tensor].type if load.tensor in self.made else self.graph.types[load.tensor]
        shape = kind.shape
        if all(shape[d] == 1 for d in literal):
            return load
        own = self._name(
            f"{load.tensor}_at{'_'.join(str(load.indices[d]) for d in literal)}",
            load.tensor,
            *((d, load.indices[d]) for d in literal),
        )
        rest = [d for d in range(len(shape)) if d not in literal]
        if own not in self.made:
            axes = tuple(Axis(f"s{d}", shape[d]) for d in rest)
            names = iter(axes)
            indices = tuple(i if d in literal else Ref(next(names).name) for d, i in enumerate(load.indices))
            origin = self.producers[load.tensor].origin if load.tensor in self.producers else ""
            self.made[own] = Compute(own, kind.dtype, axes, Load(load.tensor, indices), origin=origin)
        return Load(own, tuple(load.indices[d] for d in rest))


def _fold_where(body: Expr) -> Expr:
    """Fold ``where(lt(3, 5), a, b)`` to ``a``: a piecewise body at a constant index."""
    while isinstance(body, Op) and body.fn == "where":
        test = body.args[0]
        if not (isinstance(test, Op) and test.fn == "lt" and all(isinstance(a, Const) for a in test.args)):
            break
        low, high = (a.value for a in test.args if isinstance(a, Const))
        body = body.args[1] if low < high else body.args[2]
    return body


def _price_waves(graph: ComputeGraph, device: VDevice, prices: dict[str, float]) -> tuple[int, float]:
    """Return the number of waves and their predicted seconds. A wave costs a launch plus the maximum of its slowest Compute and
    its work over all vEUs."""
    depth: dict[str, int] = {}
    span: dict[int, float] = {}
    work: dict[int, float] = {}
    for c in graph.computes:
        before = max((depth.get(r, 0) for r in c.reads), default=0)
        free = c.combiner is None and (isinstance(c.body, Load) or piecewise_regions(c) is not None)  # usually compiled as a view
        depth[c.name] = before if free else before + 1
        if not free:
            alone, busy = _price_compute(c, graph, device, prices)
            span[before] = max(span.get(before, 0.0), alone)
            work[before] = work.get(before, 0.0) + busy
    return len(span), sum(device.launch + max(span[d], work[d] / device.veus) for d in span)


def _price_compute(c: Compute, graph: ComputeGraph, device: VDevice, prices: dict[str, float]) -> tuple[float, float]:
    """Return the seconds of one Compute on an idle device, and its vEU-seconds."""
    operator = ROperator(c.name, (c,), (), (c.name,))
    key = Binding(graph.types, {}).key(operator)
    if key not in prices:
        ranked = ranked_tiles(operator, graph.types, device)
        prices[key] = ranked[0][0] - device.launch if ranked else math.inf
        tasks = replace(operator, tile=ranked[0][1]).task_count if ranked else 1
        prices[f"work {key}"] = tasks * ranked[0][2].alone if ranked else math.inf
    return prices[key], prices[f"work {key}"]
