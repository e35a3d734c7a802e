"""Rows that a product of few vectors computes for itself: a normalisation, softmax or map before it, in every task.

A launch costs more than a few rows. The rows are an operator of their own (``rows_before``), whose result, the vectors, is a tile
in shared memory. Every block of the product computes the vectors that its task needs, with the kernel of the ``rowwise`` family.
The rows may be results of a product themselves, the ``scores`` of an attention. A block then computes all scores of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from rammer.codegen import Unsuited
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Compute, contraction_operands
from rammer.ir.expr import Const, Interval, Ref
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import Storage
from rammer.ir.types import itemsize, row_major

from rammer_cuda.dialect import CUDA
from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.frame import VECTOR, Frame
from rammer_cuda.kernels.task import place_of
from rammer_cuda.rows.cost import CHAIN, join_cycles
from rammer_cuda.rows.rowshape import LANES, MOST_ELEMENTS, PlacedRows, rows_of, shape_of
from rammer_cuda.rows.rowwise import RowwiseKernel

#: The vectors and the scores in shared memory, their most bytes, and the first number of the arrays that reductions share there.
VECTORS, SCORES, MOST_BYTES, SHARE = "vec", "scores", 24 << 10, 8
#: Cycles from the wait to the rows' arithmetic, beyond those of vectors that are read from memory, and of the barrier after them.
MEET: Final = 100.0


@dataclass(frozen=True)
class LeadingRows:
    """The rows before a product. ``origins`` has, for each axis of the vectors, the axis of the product of which a task has one
    element, or None if it has all elements. ``storages`` are those of the vectors and of the scores in shared memory. ``scores``
    is the product whose results the rows read, if any, with the tile of a task."""

    placed: PlacedRows
    origins: tuple[int | None, ...]
    storages: tuple[Storage, ...]
    scores: ROperator | None = None

    @property
    def tensor(self) -> str:
        """The vectors."""
        return self.storages[0].tensor

    @property
    def nbytes(self) -> int:
        """The bytes in shared memory."""
        return sum(map(self._nbytes, self.storages))

    def _nbytes(self, storage: Storage) -> int:
        low, high = storage.span()
        return (high - low) * itemsize(self.placed.binding.types[storage.tensor].dtype)

    def laid_out(self, threads: int) -> PlacedRows:
        """Return the rows as ``threads`` threads compute them. Raises Unsuited if a thread would have too many elements."""
        form, operator = self.placed.form, self.placed.operator
        rows = math.prod(operator.tile[d] for d, r in enumerate(form.row_of) if r is not None)
        vector = VECTOR if form.length % VECTOR == 0 else 1
        lanes = max((n for n in LANES if n * rows <= threads and n * vector < 2 * form.length), default=0)
        if not lanes or -(-form.length // (lanes * vector)) * vector > MOST_ELEMENTS:
            raise Unsuited(f"{rows} rows of {form.length} before a product, by {threads} threads")
        return self.placed.tiled(replace(operator, family="rowwise", config=(("lanes", lanes), ("vector", vector))))

    def cycles(self, threads: int, tasks: int, gpu: Gpu) -> float:
        """Return the cycles by which the rows delay ``tasks`` blocks of ``threads``: of one block, or of the lanes of an SM if
        its blocks need longer."""
        placed = self.laid_out(threads)
        s, work = shape_of(placed.form), sum(ex.count_flops(c.body) + 1 for c in placed.operator.computes)
        alone = CHAIN * s.chunks * s.vector * work + len(placed.form.reductions) * join_cycles(s)
        return MEET + max(alone, s.rows * placed.form.length * work * -(-tasks // gpu.sms) / gpu.lanes)

    def write(self, frame: Frame, waits: bool, multiply: Callable[[Frame], None]) -> None:
        """Write the rows to the product's kernel, in a scope of their own, up to the barrier after them. ``multiply`` writes the
        scores."""
        bound = self.bound(self.placed.binding)
        for storage in self.storages:
            dtype = self.placed.binding.types[storage.tensor].dtype
            frame.shared += self._nbytes(storage)
            frame.places[storage.tensor] = place_of(storage.tensor, storage.buffer, bound)
            count = self._nbytes(storage) // itemsize(dtype)
            frame.line(f"__shared__ __align__(16) {CUDA.types[dtype]} {storage.buffer}[{count}];")
        frame.block.lines += [f"const int begin{d} = o{k};" for d, k in enumerate(self.origins) if k is not None]
        if self.scores is not None:
            with self._task_scope(frame):
                multiply(frame)
            for c in self.scores.computes:
                frame.inlined.pop(c.name, None)
        with self._task_scope(frame):
            RowwiseKernel(self.laid_out(frame.threads), frame, SHARE).write(waits)

    @contextmanager
    def _task_scope(self, frame: Frame) -> Iterator[None]:
        """Enclose statements in a scope whose tile begins where the task's vectors begin, with a barrier after it."""
        outer, ranges = frame.block, dict[str, Interval](frame.unit.ranges)
        with outer.nest("") as frame.block:
            for d, k in enumerate(self.origins):
                frame.line(f"const int o{d} = {'0' if k is None else f'begin{d}'};")
                frame.unit.ranges[f"o{d}"] = (0, 0) if k is None else ranges[f"o{k}"]
            yield
        frame.block = outer
        frame.unit.ranges.update(ranges)
        frame.line("__syncthreads();")

    def bound(self, binding: Binding) -> Binding:
        """Return ``binding`` with the storages in shared memory."""
        return replace(binding, storages={**binding.storages, **{s.tensor: s for s in self.storages}})


def rows_before(operator: ROperator, binding: Binding) -> tuple[ROperator, LeadingRows | None]:
    """Return an operator without the rows before its product, which it then reads as a tensor, and these rows. Raises Unsuited if
    its Computes have another form."""
    products = [i for i, c in enumerate(operator.computes) if c.kind == "contraction"]
    if products in ([], [0]):
        return operator, None
    before, rest = operator.computes[: products[-1]], operator.computes[products[-1] :]
    names, vectors = {c.name for c in before}, before[-1]
    others = {*operator.outputs, *(t for c in rest[1:] for t in c.reads)}
    if names & others or names & {*rest[0].reads} != {vectors.name} or operator.skips or operator.reduce_bounds:
        raise Unsuited("values before a product that others read, or of a range")
    tail = replace(operator, computes=rest, connections=_links(operator, rest))
    origins = _origins(vectors, rest[0])
    tile = tuple(1 if k is not None else a.extent for k, a in zip(origins, vectors.axes, strict=True))
    strides = tuple(s if k is None else 0 for s, k in zip(row_major(tile), origins, strict=True))
    scores, rows = _split_scores(operator, before) if len(products) > 1 else (None, before)
    storages: tuple[Storage, ...] = (Storage(vectors.name, VECTORS, 0, vectors.shape, strides),)
    if scores is not None:
        if products[1:] != products[-1:] or scores.anchor.shape != vectors.shape:
            raise Unsuited("rows of a product with another shape")
        scores = replace(scores, tile=tile)
        storages += (Storage(scores.name, SCORES, 0, vectors.shape, strides),)
    head = ROperator(vectors.name, rows, _links(operator, rows), (vectors.name,))
    placed = rows_of(head, replace(binding, storages={**binding.storages, **{s.tensor: s for s in storages}}))
    whole = all(k is None for k, e in zip(origins, placed.form.element_of, strict=True) if e is not None)
    found = LeadingRows(placed.tiled(replace(head, tile=tile)), origins, storages, scores)
    if not whole or not placed.joined or found.nbytes > MOST_BYTES:
        raise Unsuited("rows before a product of which a task has a part")
    return tail, found


def _split_scores(operator: ROperator, before: tuple[Compute, ...]) -> tuple[ROperator, tuple[Compute, ...]]:
    """Return the product at the start of ``before`` with the maps after it, and the rows that read its results."""
    end = next((i for i, c in enumerate(before) if i and (c.reduce or c.shape != before[0].shape)), len(before))
    product, rows = before[:end], before[end:]
    hidden = {c.name for c in product[:-1]}
    if before[0].kind != "contraction" or not rows or any(hidden & {*c.reads} for c in rows):
        raise Unsuited("rows that read a product and its maps")
    return ROperator(product[-1].name, product, _links(operator, product), (product[-1].name,)), rows


def _links(operator: ROperator, computes: tuple[Compute, ...]) -> tuple[Connection, ...]:
    names = {c.name for c in computes}
    return tuple(e for e in operator.connections if {e.producer, e.consumer} <= names)


def _origins(vectors: Compute, main: Compute) -> tuple[int | None, ...]:
    """Return ``LeadingRows.origins``: axes of the product that both operands have."""
    operands = contraction_operands(main) or ()
    loads = [ld for ld in operands if ld.tensor == vectors.name]
    if len(loads) != 1 or len(operands) != 2 or loads[0].fill is not None:
        raise Unsuited("rows that are not one operand of the product")
    other = ex.axes_of(next(ld for ld in operands if ld is not loads[0]))
    axes, result = [a.name for a in main.axes], list[int | None]()
    for index, axis in zip(loads[0].indices, vectors.axes, strict=True):
        if not isinstance(index, Ref | Const) or (isinstance(index, Const) and axis.extent > 1):
            raise Unsuited("a product that reads moved rows")
        both = isinstance(index, Ref) and axis.extent > 1 and index.axis in other and index.axis in axes
        result.append(axes.index(index.axis) if both and isinstance(index, Ref) else None)
    return tuple(result)
