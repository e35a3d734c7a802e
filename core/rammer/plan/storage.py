"""The storage pass, which assigns memory to tensors as buffers, views or slices of other tensors' memory.

A shape operator whose address is affine becomes a view of its source. Producers of a concatenation's pieces write directly into
its buffer. An output keeps a dense buffer; the producer before a reshape writes into it. A product that only a copy would read,
in an order without strides, is computed in that order: heads next to past ones. A tensor that needs two incompatible storages is
copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Box, Compute, ComputeGraph
from rammer.ir.expr import Expr, Load
from rammer.ir.names import Names, make_identifier
from rammer.ir.overlap import Shared, has_overlap
from rammer.ir.piecewise import piecewise_regions
from rammer.ir.program import Storage
from rammer.ir.reindex import collect_terms
from rammer.passes.compute.batch_candidates import is_rearrangement
from rammer.plan.load_addresses import dense_storage, invert_view, view_storage

Pieces = list[tuple[Box, Load]]
#: Empty map: no output aliases an input.
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True)
class StoragePlan:
    """The ``graph`` without Computes that storage made unnecessary, and the storage of every tensor.

    ``storages`` has an entry for every tensor, including eliminated ones; ``buffers`` maps a buffer to its element type and
    number of elements. ``graph.types`` keeps the types of all tensors."""

    graph: ComputeGraph
    storages: Mapping[str, Storage]
    buffers: Mapping[str, tuple[str, int]]

    @property
    def copies(self) -> list[Compute]:
        """The Computes that run and only rearrange."""
        return [c for c in self.graph.computes if is_rearrangement(c) or piecewise_regions(c) is not None]


def assign_storage(graph: ComputeGraph, kept: Mapping[str, str] = NOTHING, turn: bool = True) -> StoragePlan:
    """Return the storage of every tensor of ``graph`` (module docstring). Results are unchanged, bit for bit. Outputs in ``kept``
    alias their inputs. Without ``turn``, every product keeps its axes, by which a run's lengths may end its sums."""
    state = _Assigner(graph, kept)
    state.ports()
    for name in graph.outputs:
        state.write_behind(name)
    for compute, parts in state.concatenations():
        state.concatenate(compute, parts)
    for compute in graph.computes:
        state.write_ahead(compute)
    for compute in graph.computes:
        state.settle(compute)
    computes = tuple(state.remaining())
    turned = {c.name: p for c in computes if turn and (p := state.product_behind(c)) is not None}
    if turned:
        moved = {p.name for p in turned.values()}
        left = [c for c in graph.computes if c.name not in moved]
        computes = tuple(_in_order_of(c, turned[c.name]) if c.name in turned else c for c in left)
        types = {n: t for n, t in graph.types.items() if n not in moved}
        return assign_storage(replace(graph, computes=computes, types=types), kept)
    types = {**graph.types, **{c.name: c.type for c in computes}}
    return StoragePlan(replace(graph, computes=computes, types=types), state.storages, state.buffers)


@dataclass
class _Assigner:
    graph: ComputeGraph
    kept: Mapping[str, str]
    storages: dict[str, Storage] = field(default_factory=dict)
    buffers: dict[str, tuple[str, int]] = field(default_factory=dict)
    #: Computes that need not run, and the copies that replace a concatenation.
    eliminated: set[str] = field(default_factory=set)
    copies: dict[str, list[Compute]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.producers = self.graph.producers
        self.taken = Names(self.graph.types)
        self.readers = self.graph.consumers()
        self.alone: dict[str, bool] = {}
        self.expected: dict[str, Storage] = {}

    def own(self, name: str) -> None:
        """Assign a new dense buffer to ``name``."""
        kind = self.graph.types[name]
        self.storages[name] = dense_storage(name, name, kind.shape)
        self.buffers[name] = (kind.dtype, kind.size)

    def ports(self) -> None:
        """Assign separate buffers to inputs, constants and outputs."""
        for name in dict.fromkeys((*self.graph.inputs, *self.graph.constants, *self.graph.outputs)):
            self.own(name)
        for output, past in self.kept.items():
            del self.buffers[past]
            self.storages[past] = dense_storage(past, output, self.graph.types[past].shape)

    def free(self, name: str) -> bool:
        """Return True if ``name`` is computed here and does not have a storage yet."""
        return name in self.producers and name not in self.storages

    def view_load(self, compute: Compute) -> Load | None:
        """Return the load that ``compute`` only rearranges, or None."""
        body = compute.body
        if compute.combiner is not None or not isinstance(body, Load) or body.fill is not None:
            return None
        same = self.graph.types[body.tensor].dtype == compute.dtype
        return body if same and compute.points > 0 else None

    def place(self, name: str, storage: Storage) -> None:
        """Assign ``storage`` to ``name`` and, through rearrangements, to the free tensors before it."""
        self.storages[name] = storage
        self.write_behind(name)

    def write_behind(self, name: str) -> None:
        """Let the producers of free tensors that ``name`` only rearranges write into its storage, transitively."""
        while True:
            compute = self.producers.get(name)
            load = self.view_load(compute) if compute is not None else None
            if compute is None or load is None or not self.free(load.tensor):
                return
            shape = self.graph.types[load.tensor].shape
            storage = invert_view(load.tensor, shape, load, compute.axes, self.storages[name])
            if storage is None or _is_contiguous(storage) < _is_contiguous(self.storages[name]):
                return
            self.eliminated.add(name)
            self.storages[load.tensor] = storage
            name = load.tensor

    def write_ahead(self, compute: Compute) -> None:
        """Assign a buffer to a rearrangement that is not a view, and let its producer write there in that order. An example are
        joined attention heads. This applies only if the rearranged tensors have no other readers."""
        load = self.view_load(compute)
        if load is None or not self.free(compute.name) or not self._only_reader(compute):
            return
        if view_storage(compute.name, load, compute.axes, self._expected_storage(load.tensor)) is None:
            self.own(compute.name)
            self.write_behind(compute.name)

    def product_behind(self, copy: Compute) -> Compute | None:
        """Return the product that only ``copy`` reads, in runs along its last axis and each element once, or None."""
        load = self.view_load(copy)
        product = self.producers.get(load.tensor) if load is not None and copy.name in self.producers else None
        if load is None or product is None or product.kind != "contraction" or math.prod(product.shape) != math.prod(copy.shape):
            return None
        last = ex.affine_form(load.indices[-1]) if load.indices else None
        runs = last is not None and last[0].get(copy.axes[-1].name) == 1
        apart = {a.name for a in copy.axes}.isdisjoint(r.name for r in product.reduce)
        alone = product.name not in self.graph.outputs and self.readers[product.name] == [copy]
        return product if runs and apart and alone else None

    def _only_reader(self, compute: Compute) -> bool:
        """Return True if the free tensors that ``compute`` rearranges, directly or indirectly, have no other readers."""
        chain, alone = list[str](), True
        while alone and (load := self.view_load(compute)) is not None:
            chain.append(compute.name)
            alone = self.free(load.tensor) and len(self.readers[load.tensor]) == 1
            if not alone or load.tensor in self.alone:
                alone = alone and self.alone[load.tensor]
                break
            compute = self.producers[load.tensor]
        # A tensor with one reader gets its storage after that reader, so the answer for a free tensor is final.
        self.alone |= dict.fromkeys(chain, alone)
        return alone

    def _expected_storage(self, name: str) -> Storage:
        """Return the storage that ``settle`` would assign to ``name``, assuming that each rearranged tensor has one reader."""
        chain = list[tuple[Compute, Load]]()
        while name not in self.storages and name not in self.expected:
            compute = self.producers.get(name)
            load = self.view_load(compute) if compute is not None else None
            if compute is None or load is None:
                self.expected[name] = dense_storage(name, name, self.graph.types[name].shape)
                break
            chain.append((compute, load))
            name = load.tensor
        found = self.storages.get(name) or self.expected[name]
        for compute, load in reversed(chain):
            view = view_storage(compute.name, load, compute.axes, found)
            found = self.expected[compute.name] = view or dense_storage(compute.name, compute.name, compute.shape)
        return found

    def concatenations(self) -> Iterator[tuple[Compute, Pieces]]:
        """Yield piecewise Computes, largest first, so that smaller ones can be views of larger ones."""
        found = []
        for position, compute in enumerate(self.graph.computes):
            parts = piecewise_regions(compute)
            if parts and compute.points > 0 and all(self.graph.types[load.tensor].dtype == compute.dtype for _, load in parts):
                found.append((-compute.points, -position, compute, parts))
        for *_, compute, parts in sorted(found, key=lambda f: f[:2]):
            yield compute, parts

    def concatenate(self, compute: Compute, parts: Pieces) -> None:
        """Place the parts of a concatenation, or make it a view if they are already in position."""
        if self.free(compute.name):
            ready = self._concat_storage(compute, parts)
            if ready is not None:
                self.storages[compute.name] = ready
                self.eliminated.add(compute.name)
                return
            self.own(compute.name)
        parts = self._join_parts(compute, parts)
        placed = [self._place_part(compute, box, load) for box, load in parts]
        if not any(placed):
            return
        self.eliminated.add(compute.name)
        self.copies[compute.name] = [
            self._copy(compute, box, load) for (box, load), done in zip(parts, placed, strict=True) if not done
        ]

    def _join_parts(self, compute: Compute, parts: Pieces) -> Pieces:
        """Return the parts with adjacent slices that cover one free tensor merged into a read of that tensor."""
        groups: list[tuple[Box, Load, Pieces]] = []
        for box, load in parts:
            source = self._resolve_load(load)
            last = groups[-1] if groups else None
            union = _union_box(last[0], box) if last is not None and last[1] == source else None
            if last is not None and union is not None:
                groups[-1] = (union, source, [*last[2], (box, load)])
            else:
                groups.append((box, source, [(box, load)]))
        joined: Pieces = []
        for box, source, members in groups:
            whole = len(members) > 1 and self._slot_storage(compute, box, source) is not None
            joined += [(box, source)] if whole else members
        return joined

    def _resolve_load(self, load: Load) -> Load:
        """Return ``load`` of a free rearranging tensor as a load of that tensor's source."""
        compute = self.producers.get(load.tensor)
        inner = self.view_load(compute) if compute is not None and self.free(load.tensor) else None
        if compute is None or inner is None:
            return load
        axes = {a.name: i for a, i in zip(compute.axes, load.indices, strict=True)}
        return Load(inner.tensor, tuple(collect_terms(ex.substitute(i, axes)) for i in inner.indices), load.fill)

    def _concat_storage(self, compute: Compute, parts: Pieces) -> Storage | None:
        """Return the storage of a concatenation whose parts are already adjacent (a prefix of a larger one), or None."""
        origin = tuple(0 for _ in compute.axes)
        whole: Storage | None = None
        strides = [0] * len(compute.axes)
        views = [self._part_view(compute, box, load) for box, load in parts]
        if any(v is None for v in views):
            return None
        known = [v for v in views if v is not None]
        first = next((v for v, (box, _) in zip(known, parts, strict=True) if _box_start(box) == origin), None)
        if first is None or any(v.buffer != first.buffer for v in known):
            return None
        for d in range(len(strides)):
            strides[d] = _common_stride(d, known, parts, first)
        whole = Storage(compute.name, first.buffer, first.offset, compute.shape, tuple(strides))
        fits = (v == _slice_storage(whole, box, v.tensor) for v, (box, _) in zip(known, parts, strict=True))
        return whole if all(fits) else None

    def _part_view(self, compute: Compute, box: Box, load: Load) -> Storage | None:
        """Return the storage of the region ``box`` if its part has a storage; extent-1 axes get stride 0."""
        source, local = self.storages.get(load.tensor), self._localise_load(compute, box, load)
        if source is None or local.fill is not None:
            return None
        return view_storage(compute.name, local, _box_axes(compute, box), source)

    def _localise_load(self, compute: Compute, box: Box, load: Load) -> Load:
        """Return ``load`` in the axes of one region, without its guard if the region stays inside the tensor."""
        shifts: dict[str, Expr] = {a.name: ex.make_add(a.name, low) for a, (low, _) in zip(compute.axes, box, strict=True) if low}
        indices = tuple(collect_terms(ex.substitute(i, shifts)) for i in load.indices)
        bounds = {a.name: (0, a.extent - 1) for a in _box_axes(compute, box)}
        spans = [ex.interval(i, bounds) for i in indices]
        shape = self.graph.types[load.tensor].shape
        inside = all(s is not None and 0 <= s[0] <= s[1] < n for s, n in zip(spans, shape, strict=True))
        return Load(load.tensor, indices, None if inside else load.fill)

    def _place_part(self, compute: Compute, box: Box, load: Load) -> bool:
        """Let the part's producer write into its slice if possible. Return True on success."""
        storage = self._slot_storage(compute, box, load)
        if storage is not None:
            self.place(load.tensor, storage)
        return storage is not None

    def _slot_storage(self, compute: Compute, box: Box, load: Load) -> Storage | None:
        """Return the storage of a part inside its concatenation, or None if it is taken or rearranged beyond strides."""
        local = self._localise_load(compute, box, load)
        if not self.free(load.tensor) or local.fill is not None:
            return None
        target = _slice_storage(self.storages[compute.name], box, load.tensor)
        shape = self.graph.types[load.tensor].shape
        storage = invert_view(load.tensor, shape, local, _box_axes(compute, box), target)
        return None if storage is None or _is_contiguous(storage) < _is_contiguous(target) else storage

    def _copy(self, compute: Compute, box: Box, load: Load) -> Compute:
        """Return a Compute that copies one part into its slice."""
        name = make_identifier(f"{load.tensor}_copy", self.taken)
        self.storages[name] = _slice_storage(self.storages[compute.name], box, name)
        return Compute(
            name, compute.dtype, _box_axes(compute, box), self._localise_load(compute, box, load), origin=compute.origin
        )

    def settle(self, compute: Compute) -> None:
        """Assign an unconstrained tensor a view if possible, else a buffer."""
        if compute.name in self.storages:
            return
        load = self.view_load(compute)
        view = view_storage(compute.name, load, compute.axes, self.storages[load.tensor]) if load is not None else None
        if view is None:
            self.own(compute.name)
            return
        self.storages[compute.name] = view
        self.eliminated.add(compute.name)

    def remaining(self) -> Iterator[Compute]:
        """Yield the Computes that run, in topological order."""
        for compute in self.graph.computes:
            yield from self.copies.get(compute.name, ())
            if compute.name not in self.eliminated:
                yield compute


def _in_order_of(copy: Compute, product: Compute) -> Compute:
    """Return ``copy`` as a product of its own axes, instead of the elements of ``product`` that it reads."""
    assert isinstance(copy.body, Load)
    places = {a.name: i for a, i in zip(product.axes, copy.body.indices, strict=True)}
    return replace(product, name=copy.name, axes=copy.axes, body=ex.substitute(product.body, places))


def _is_contiguous(storage: Storage) -> bool:
    """Return True if neighbours along the last axis longer than 1 are adjacent in memory."""
    steps = [s for s, n in zip(storage.strides, storage.shape, strict=True) if n > 1]
    return not steps or steps[-1] == 1


def _union_box(a: Box, b: Box) -> Box | None:
    """Return the union of two boxes that differ along one axis and meet there, or None."""
    differing = [d for d, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if len(differing) != 1:
        return None
    d = differing[0]
    return (*a[:d], (a[d][0], b[d][1]), *a[d + 1 :]) if a[d][1] == b[d][0] else None


def _box_start(box: Box) -> tuple[int, ...]:
    return tuple(low for low, _ in box)


def _box_axes(compute: Compute, box: Box) -> tuple[Axis, ...]:
    """Return the axes of one region, counted from its start."""
    return tuple(Axis(a.name, high - low) for a, (low, high) in zip(compute.axes, box, strict=True))


def _slice_storage(storage: Storage, box: Box, tensor: str) -> Storage:
    """Return the storage of the region ``box`` of ``storage`` (axes of extent 1 get stride 0)."""
    offset = storage.offset + sum(low * s for (low, _), s in zip(box, storage.strides, strict=True))
    shape = tuple(high - low for low, high in box)
    strides = tuple(s if n > 1 else 0 for s, n in zip(storage.strides, shape, strict=True))
    return Storage(tensor, storage.buffer, offset, shape, strides)


def _common_stride(d: int, views: list[Storage], parts: Pieces, first: Storage) -> int:
    """Return the stride along axis ``d`` on which the parts' views agree, or that follows from the distance of two."""
    for view, (box, _) in zip(views, parts, strict=True):
        if view.shape[d] > 1:
            return view.strides[d]
        start = _box_start(box)
        if start[d] > 0 and not any(low for i, low in enumerate(start) if i != d):
            return (view.offset - first.offset) // start[d]
    return 0


def view_sources(graph: ComputeGraph, storages: Mapping[str, Storage]) -> dict[str, tuple[str, ...]]:
    """Return the computed tensors that share elements with each tensor that is not written, an input or a constant. A view has
    one source, a concatenation may have several."""
    written: dict[str, Shared] = {}
    for c in graph.computes:
        storage = storages[c.name]
        written.setdefault(storage.buffer, Shared()).add(c.name, storage)
    given = {*graph.inputs, *graph.constants, *(c.name for c in graph.computes)}
    used = dict.fromkeys([*(r for c in graph.computes for r in c.reads), *graph.outputs])
    result = {}
    for name in used:
        if name not in given:
            mine = storages[name]
            near = written[mine.buffer].near(mine) if mine.buffer in written else ()
            result[name] = tuple(tensor for tensor, s in near if has_overlap(mine, s))
    return result
