"""Splitting of merged products: columns that are read in blocks, and sums over a concatenation.

A recurrent cell may have a product for each gate, or one product for all gates with a later split. It may also have one product
of its concatenated input and state. After splitting, all forms have the same products, and ``batching`` merges them as suits the
device:

1. a product that sums over the axis of a concatenation becomes the sum of a product for each piece;
2. if consumers read the columns of a product in blocks (a Split, slices, a reshape into heads), each block
   becomes a product, as do the column-wise maps in between.

Pieces of weights are views, without copies. Each sum equals that of the model except for the order of its terms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, ComputeGraph, contraction_operands
from rammer.ir.expr import Expr, Load, Op, Ref
from rammer.ir.names import make_identifier
from rammer.ir.piecewise import piecewise_regions
from rammer.passes.compute.batch_candidates import is_rearrangement, looked_through, normalise_index
from rammer.passes.compute.split_graph import CutGraph, CutState

#: Maximum number of blocks of a product, and minimum number of columns of a block.
MOST_BLOCKS: Final = 32
LEAST_COLUMNS: Final = 2
#: Types that store sums at the precision of accumulation. Other types would round between the parts of a sum.
EXACT: Final = ("float32", "float64", "int32", "int64")


def cut_products(graph: ComputeGraph, copied: Callable[[], Collection[str]], without: Collection[str] = ()) -> CutGraph:
    """Return ``graph`` with all products split that may gain by it, except for the cuts ``without``.

    Columns are split if maps read several blocks. Sums over concatenations are split if the weights serve several products or the
    concatenation is ``copied`` (called at most once). Returns the graph itself if no product is split."""
    state = Cutter(graph, without)
    state.concatenations(copied)
    state.blocks()
    return state.result()


@dataclass(frozen=True, slots=True)
class ColumnSpan:
    """A range of ``length`` columns that starts at ``first``."""

    first: int
    length: int

    def __contains__(self, column: int) -> bool:
        return self.first <= column < self.first + self.length


@dataclass(frozen=True, slots=True)
class BlockRead:
    """A load of columns ``first`` to ``last`` by a Compute: as written, and resolved to the split tensor."""

    reader: str
    load: Load
    root: Load
    first: int
    last: int


class Cutter(CutState):
    """A rewrite that splits sums over concatenations, then columns."""

    def concatenations(self, copied: Callable[[], Collection[str]]) -> None:
        """Split sums over concatenations into sums of sums."""
        found = [(c, over) for c in self.graph.computes if (over := self._over_concatenation(c)) is not None]
        uses: dict[str, int] = {}
        for c in self.graph.computes:
            for name in c.reads if c.kind == "contraction" else ():
                uses[name] = uses.get(name, 0) + 1
        alone = [c for c, (weights, *_) in found if uses[weights.tensor] == 1]
        known = copied() if alone else ()
        for c, (weights, root, parts) in found:
            if (uses[weights.tensor] > 1 or root in known) and c.name not in self.without:
                self._cut_sum(c, weights, parts)

    def _over_concatenation(self, c: Compute) -> tuple[Load, str, list[tuple[int, int, Load]]] | None:
        """Return the weights, the concatenation, and its pieces (begin, end and load along the summed axis)."""
        operands = contraction_operands(c)
        if operands is None or len(c.reduce) != 1 or c.dtype not in EXACT or c.name in self.without:
            return None
        summed = c.reduce[0]
        data = [ld for ld in operands if ld.tensor not in self.constants]
        weights = [ld for ld in operands if ld.tensor in self.constants]
        if len(data) != 1 or self.along(weights[0], summed) is None:
            return None
        root = looked_through(data[0], self.computes)
        at = self.along(root, summed)
        parts = piecewise_regions(self.computes[root.tensor]) if root.tensor in self.computes else None
        if at is None or parts is None or len(parts) < 2:
            return None
        view = self.computes[root.tensor]
        inner: dict[str, Expr] = {a.name: i for a, i in zip(view.axes, root.indices, strict=True)}
        made = list[tuple[int, int, Load]]()
        for box, load in parts:
            if any((low, high) != (0, n) for d, ((low, high), n) in enumerate(zip(box, view.shape, strict=True)) if d != at):
                return None
            low, high = box[at]
            indices = [
                normalise_index(ex.substitute(i, {**inner, view.axes[at].name: ex.make_add(summed.name, low)}))
                for i in load.indices
            ]
            made.append((low, high, Load(load.tensor, tuple(i for i in indices if i is not None))))
            if None in indices:
                return None
        return weights[0], view.name, sorted(made, key=lambda p: p[0])

    def _cut_sum(self, c: Compute, weights: Load, parts: Sequence[tuple[int, int, Load]]) -> None:
        summed = c.reduce[0]
        at = self.along(weights, summed)
        assert at is not None
        names = list[str]()
        for number, (low, high, data) in enumerate(parts):
            own = Load(self.piece(weights.tensor, at, low, high - low), weights.indices)

            def part(e: Expr, own: Load = own, data: Load = data) -> Expr | None:
                return None if not isinstance(e, Load) else own if e == weights else data

            name = make_identifier(f"{c.name}_part{number}", self.taken)
            body = ex.transform(c.body, part)
            self.add(replace(c, name=name, body=body, reduce=(Axis(summed.name, high - low),), used=None), (c,), c.name)
            names.append(name)
        whole: Expr = Load(names[0], c.place)
        for name in names[1:]:
            whole = Op("add", (whole, Load(name, c.place)))
        self.add(Compute(c.name, c.dtype, c.axes, whole, origin=c.origin), (c,), c.name)

    def blocks(self) -> None:
        """Split columns that are read in blocks into separate products, recursively for blocks of blocks."""
        waiting = deque(self.computes)
        while waiting:
            name = waiting.popleft()
            c = self.computes.get(name)
            if c is None or name in self.outputs or is_rearrangement(c) or self.sources.get(name, name) in self.without:
                continue
            for d in reversed(range(len(c.axes))):
                reads = self._block_reads(c, d) if c.shape[d] >= 2 * LEAST_COLUMNS else []
                found = _merge_blocks(reads) if reads and self._can_split_columns(c, d) and self._has_joint_maps(reads) else []
                region = self._grow_region(c, d) if found else {}
                if region:
                    waiting.extend(self._split_region(c, region, found, reads))
                    break

    def _block_reads(self, c: Compute, d: int) -> list[BlockRead]:
        """Return the partial loads of ``c`` along ``d``, through rearrangements of the whole; empty if a consumer reads all of
        it."""
        found, waiting = list[BlockRead](), [c.name]
        for name in waiting:  # grows while iterating
            for reader in self.readers[name]:
                r = self.computes[reader]
                bounds = {a.name: (0, a.extent - 1) for a in (*r.axes, *r.reduce)}
                for load in (ld for ld in r.loads if ld.tensor == name):
                    root = looked_through(load, self.computes)
                    if root.tensor != c.name or root.fill is not None or any(a.extent < 1 for a in (*r.axes, *r.reduce)):
                        return []
                    at = ex.interval(root.indices[d], bounds) if normalise_index(root.indices[d]) is not None else None
                    if at is None or (at == (0, c.shape[d] - 1) and (not is_rearrangement(r) or reader in self.outputs)):
                        return []
                    if at == (0, c.shape[d] - 1):
                        waiting.append(reader)
                    else:
                        found.append(BlockRead(reader, load, root, *at))
        return found

    def _has_joint_maps(self, reads: Sequence[BlockRead]) -> bool:
        """Return True if maps read several blocks, directly or rearranged, so that splitting lets them be fused."""
        return len({read.first for read in reads if self._has_map_reader(read.reader)}) > 1

    def _has_map_reader(self, name: str) -> bool:
        """Return True if ``name`` is a map or a map reads it through rearrangements."""
        waiting = [self.computes[name]]
        for c in waiting:  # grows while iterating
            if is_rearrangement(c):
                waiting += [self.computes[r] for r in self.readers[c.name]]
            elif c.combiner is None and piecewise_regions(c) is None:
                return True
        return False

    def _can_split_columns(self, m: Compute, d: int) -> bool:
        """Return True if ``m`` needs only one column per column along ``d``: a map, or a product whose weights have that axis."""
        axis = m.axes[d]
        having = [ld for ld in m.loads if axis.name in ex.axes_of(ld)]
        if any(self.along(ld, axis) is None for ld in having):
            return False
        if sum(e == Ref(axis.name) for e in ex.walk(m.body)) != len(having):
            return False
        if m.combiner is None:
            return True
        return contraction_operands(m) is not None and len(having) == 1 and having[0].tensor in self.constants

    def _grow_region(self, c: Compute, d: int) -> dict[str, int]:
        """Return the Computes from ``c`` up to products that share its columns along ``d``, with their dimensions. Returns {}
        without a product."""
        barred = set[str](self.outputs)
        while True:
            region, waiting = {c.name: d}, [c]
            for m in waiting:  # grows while iterating
                for load in m.loads:
                    at = self.along(load, m.axes[region[m.name]])
                    before = self.computes.get(load.tensor)
                    if at is None or before is None or before.name in barred or before.name in region:
                        continue
                    if self._can_split_columns(before, at):
                        region[before.name] = at
                        waiting.append(before)
            astray = {n for n, at in region.items() if n != c.name and not self._is_read_inside(n, at, region)}
            if not astray:
                return region if any(self.computes[n].combiner is not None for n in region) else {}
            barred |= astray

    def _is_read_inside(self, name: str, at: int, region: Mapping[str, int]) -> bool:
        """Return True if all consumers of a Compute are in the region and read it along its columns."""
        for reader in self.readers[name]:
            r = self.computes[reader]
            if reader not in region:
                return False
            axis = r.axes[region[reader]]
            if any(self.along(ld, axis) != at for ld in r.loads if ld.tensor == name):
                return False
        return True

    def _split_region(
        self, c: Compute, region: Mapping[str, int], blocks: Sequence[ColumnSpan], reads: Sequence[BlockRead]
    ) -> list[str]:
        """Split a region whose last Compute is ``c``. Return the names of Computes that can now be split further."""
        label, members, d = self.sources.get(c.name, c.name), [self.computes[n] for n in region], region[c.name]
        outside = [n for m in members for n in m.reads if n in self.computes and n not in region]
        names = [{n: make_identifier(f"{n}_from{b.first}", self.taken) for n in region} for b in blocks]
        last = [self._last(c, d, b, reads) or n[c.name] for b, n in zip(blocks, names, strict=True)]
        names = [{**n, c.name: own} for n, own in zip(names, last, strict=True)]
        shorter = [
            (self._shorten_compute(m, region, b, n), m, b.first) for b, n in zip(blocks, names, strict=True) for m in members
        ]
        for read in reads:
            if read.reader not in last:
                self._redirect_read(read, d, blocks, last)
        for n in (*region, *self._whole_views(c.name, last)):
            self.drop(n)
        for new, source, first in shorter:
            self.add(new, [*members, source], label)
            self.begins[new.name] = self.begins.get(source.name, 0) + first
        return [*last, *outside]

    def _whole_views(self, name: str, last: Collection[str]) -> list[str]:
        """Return the rearrangements of a whole Compute that are read only by the block reads ``last``."""
        found = [name]
        for n in found:  # grows while iterating
            found += [r for r in self.readers[n] if r not in last]
        return found[1:]

    def _last(self, c: Compute, d: int, block: ColumnSpan, reads: Sequence[BlockRead]) -> str | None:
        """Return the name of the slice that equals a block, which names the block, or None."""
        shape = (*c.shape[:d], block.length, *c.shape[d + 1 :])
        for read in reads:
            r = self.computes[read.reader]
            if (
                is_rearrangement(r)
                and r.shape == shape
                and read.first == block.first
                and shift_load(read.root, d, "", block.first).indices == r.place
            ):
                return r.name
        return None

    def _shorten_compute(self, m: Compute, region: Mapping[str, int], block: ColumnSpan, names: Mapping[str, str]) -> Compute:
        """Return one block of a Compute of the region."""
        first, length, d = block.first, block.length, region[m.name]
        axis = m.axes[d]

        def rule(e: Expr) -> Expr | None:
            at = self.along(e, axis) if isinstance(e, Load) else None
            if not isinstance(e, Load) or at is None:
                return None
            if e.tensor in names:
                return Load(names[e.tensor], e.indices)
            if e.tensor in self.constants:
                return Load(self.piece(e.tensor, at, first, length), e.indices)
            return Load(e.tensor, (*e.indices[:at], ex.make_add(axis.name, first), *e.indices[at + 1 :]))

        axes = (*m.axes[:d], Axis(axis.name, length), *m.axes[d + 1 :])
        return replace(m, name=names[m.name], axes=axes, body=ex.transform(m.body, rule), used=None)

    def _redirect_read(self, read: BlockRead, d: int, blocks: Sequence[ColumnSpan], names: Sequence[str]) -> None:
        """Redirect a read of a block to the new Compute of that block."""
        first, name = next((b.first, n) for b, n in zip(blocks, names, strict=True) if read.first in b)
        r, new = self.computes[read.reader], shift_load(read.root, d, name, first)
        self.replace_with(replace(r, body=ex.transform(r.body, lambda e: new if e == read.load else None), used=None))


def _merge_blocks(reads: Sequence[BlockRead]) -> list[ColumnSpan]:
    """Return the blocks that are read, with overlaps merged; empty for a single block, or for too many or too narrow blocks."""
    found = list[ColumnSpan]()
    for read in sorted(reads, key=lambda r: (r.first, r.last)):
        if found and read.first in found[-1]:
            found[-1] = ColumnSpan(found[-1].first, max(found[-1].length, read.last + 1 - found[-1].first))
        else:
            found.append(ColumnSpan(read.first, read.last + 1 - read.first))
    return found if 1 < len(found) <= MOST_BLOCKS and all(b.length >= LEAST_COLUMNS for b in found) else []


def shift_load(root: Load, d: int, name: str, first: int) -> Load:
    """Return a load of a tensor's block that begins at ``first`` along ``d``."""
    at = normalise_index(ex.make_add(root.indices[d], -first))
    assert at is not None  # affine by construction
    return Load(name, (*root.indices[:d], at, *root.indices[d + 1 :]))
