"""The ``rowwise`` family: softmax, normalisations, pooling over whole images, reductions along contiguous rows, and maps.

``lanes`` neighbouring threads share one row and keep its elements in registers from the first load to the last store. A reduction
is a sum (or maximum ...) of a thread's elements in order, then a butterfly of warp shuffles. If a row needs several warps, their
results are combined in shared memory in warp order: results repeat bit for bit. Rows that are neighbours in memory with strided
elements may have interleaved threads as well. A row that is too long for a block uses a cluster of up to 8, combined in block
order. The core's emitter writes every expression, including maps before and after the reductions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rammer.codegen import (
    Forms,
    Unsuited,
    Val,
    canonicalise_sum,
    convert_value,
    format_store,
    preload_elements,
    spell_literal,
    spell_type,
    stored_loads,
)
from rammer.codegen.products import WARP
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Expr, Load, Ref, integer, make_add

from rammer_cuda.device import device_source
from rammer_cuda.dialect import CUDA
from rammer_cuda.family import size_keys
from rammer_cuda.kernels.frame import VECTOR, Frame, define_coordinates, is_quad_aligned, join_blocks, join_lanes
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.rows.cost import row_seconds
from rammer_cuda.rows.rowshape import LANES, MOST_ELEMENTS, MOST_THREADS, SIDES, PlacedRows, RowShape, rows_of, shape_of
from rammer_cuda.rows.rowtiles import CLUSTERS, enumerate_tilings


def join_sides(frame: Frame, c: Compute, total: Val, shape: RowShape, number: int = 0) -> None:
    """Combine ``total`` of all lanes of a row into every one of them.

    Lanes of a warp use shuffles and all get the same bits. Then the warps are combined in order through shared memory named by
    ``number``. Single lanes are combined instead if a warp has one of every row."""
    block, kind, side = frame.block, spell_type(CUDA, total.cdtype), shape.side
    other, share = Val("other", total.cdtype, atom=True), f"part{number}"
    if side < WARP:
        with frame.scope(f"for (int s = {WARP // 2}; s >= {side}; s >>= 1)", "#pragma unroll"):
            block.line(f"const {kind} other = __shfl_xor_sync(0xffffffffu, {total.text}, s);")
            block.line(block.combine(c, total.text, other))
    step = max(side, WARP)
    parts = shape.threads // step
    if parts == 1:
        return
    frame.shared += parts * side * 8
    block.line(f"__shared__ {kind} {share}[{parts}][{side}];")
    first = f"if (tid % {WARP} < {side}) " if side < WARP else ""
    block.line(f"{first}{share}[tid / {step}][local] = {total.text};")
    block.line("__syncthreads();")
    block.line(f"{total.text} = {share}[0][local];")
    with frame.scope(f"for (int w = 1; w < {parts}; ++w)", "#pragma unroll"):
        block.line(f"const {kind} other = {share}[w][local];")
        block.line(block.combine(c, total.text, other))


#: Registers for constants loaded before the wait.
AHEAD = 48


class RowwiseKernel:
    """A writer of one kernel on rows, or with ``frame`` of the rows that another kernel computes for itself. The names of its
    shared arrays are numbered from ``share``."""

    def __init__(self, placed: PlacedRows, frame: Frame | None = None, share: int = 0) -> None:
        self.form, self.binding, self.share = placed.form, placed.binding, share
        form, binding = placed.form, placed.binding
        self.s = shape = shape_of(form)
        operator = form.operator
        whole = all(
            t == a.extent for t, a, e in zip(operator.tile, operator.anchor.axes, form.element_of, strict=True) if e is not None
        )
        if not whole or shape.lanes not in LANES or shape.threads > MOST_THREADS:
            raise Unsuited(f"tile {operator.tile} of {shape.threads} threads")
        if shape.chunks * shape.vector > MOST_ELEMENTS or form.length % shape.vector or shape.lanes & (shape.lanes - 1):
            raise Unsuited(f"{shape.chunks} x {shape.vector} elements a thread for rows of {form.length}")
        if shape.blocks not in CLUSTERS or (shape.blocks > 1 and ((shape.rows > 1 and not shape.side) or not form.reductions)):
            raise Unsuited(f"{shape.blocks} blocks for {shape.rows} rows")
        if shape.side and (shape.side not in SIDES or shape.vector > 1 or not shape.sided):
            raise Unsuited(f"{shape.lanes} lanes for {shape.rows} of {shape.side} rows side by side")
        self.joined = placed.joined
        # Reductions are not inlined: if one is not yet known at a point, the emitter reports a missing tensor.
        maps = {c.name: c for c in operator.computes if not c.reduce}
        device = device_source("cluster_rows") if shape.blocks > 1 else ""
        resident = int(shape.blocks > 1)  # else ptxas leaves some clusters half of the registers
        self.frame = frame or Frame(operator, binding, maps, shape.threads, device=device, resident=resident, blocks=shape.blocks)
        self.block = self.frame.block

    def kernel(self) -> TaskKernel:
        """Return the finished kernel text."""
        self.write()
        return self.frame.kernel("r_")

    def write(self, waits: bool = True) -> None:
        """Write the rows to the frame. With ``waits``, that includes the wait for earlier kernels."""
        try:
            self._places()
            self._load_row(waits)
            for number, c in enumerate(self.form.reductions):
                self._reduce_row(self.share + number, c)
            self._store_outputs()
            if self.s.blocks > 1:  # a block's shared memory must outlive its readers
                self.frame.line("rm_cluster_meet();")
        except KeyError as problem:
            raise Unsuited(f"{problem} is read at a position other than its row") from problem

    # --- places ---------------------------------------------------------------------------------

    def _places(self) -> None:
        """Define this thread's row and elements; positions past the end are clamped and never stored."""
        f, s, operator = self.frame, self.s, self.form.operator
        f.line("// This thread's row and its elements.")
        rank = f" + rank * {s.lanes}" if s.blocks > 1 else ""
        self.deep = self._reduction_bound()
        if s.side:
            f.line(f"const int lane = tid / {s.side}{rank}, local = tid % {s.side};")
        else:
            f.line(f"const int lane = tid % {s.lanes}{rank}, local = tid / {s.lanes};")
        tiles = [operator.tile[self.form.row_of.index(k)] for k in range(len(self.form.rows))]
        tests = [f"local < {s.rows}"] if s.rows * s.lanes < self.frame.threads else []
        f.line(f"const int own = {f'min(local, {s.rows - 1})' if tests else 'local'};")
        self.rows: tuple[Expr, ...] = ()
        for k, digit in enumerate(define_coordinates(f, "l", "own", tiles)):
            d = self.form.row_of.index(k)
            extent, place = operator.anchor.axes[d].extent, f"o{d} + {digit}"
            if extent % tiles[k]:
                tests.append(f"{place} < {extent}")
                place = f"min({place}, {extent - 1})"
            self.rows += (f.variable(f"r{k}", place, extent),)
        self.inside = " && ".join(tests)
        self.starts = [self._chunk_start(j) for j in range(s.chunks)]
        self.elements = [[self._element_axes(q, v) for v in range(s.vector)] for q in self.starts]

    def _reduction_bound(self) -> str:
        """Define the end of a run's rows before the bound, if equal for all reductions; return its name or "". Stores of whole
        rows end there, too, with ``fills`` past it."""
        form, operator = self.form, self.form.operator
        ends = {(s.compute, s.axis): s.extent for s in operator.reduce_bounds}
        firsts = [(c, next((r.name for r in c.reduce if r.extent > 1), "")) for c in form.reductions]
        extents = {ends.get((c.name, first)) for c, first in firsts}
        if len(extents) != 1 or None in extents:
            return ""
        if form.whole(operator.anchor.name):
            axis = operator.anchor.axes[form.element_of.index(0)].name
            found = [e for e in operator.skips if e.axis == axis and e.extent in extents and not e.before]
            if not found:
                return ""
            self.fills = dict(zip(operator.outputs, found[0].fills, strict=True))
        return self.frame.stop(firsts[0][0], firsts[0][0].reduce)

    def _chunk_place(self, chunk: int) -> str:
        """Return the first element of this thread's chunk, not clamped."""
        s = self.s
        return f"(lane + {chunk * s.across}) * {s.vector}" if s.vector > 1 else f"lane + {chunk * s.across}"

    def _chunk_start(self, chunk: int) -> Ref:
        """Define the first element of this thread's chunk, and a test that the chunk exists (``m{chunk}``)."""
        s, n, place = self.s, self.form.length, self._chunk_place(chunk)
        if self._partial(chunk):
            self.frame.line(f"const bool m{chunk} = {place} < {self.deep or n};")
            last = str(n - s.vector) if not self.deep else f"({self.deep} - 1) / {s.vector} * {s.vector}"
            place = f"min({place}, {last})"
        ref = self.frame.variable(f"q{chunk}", place, n)
        self.frame.unit.ranges[ref.axis] = (0, n - s.vector)
        return ref

    def _partial(self, chunk: int) -> bool:
        return bool(self.deep) or (chunk + 1) * self.s.across * self.s.vector > self.form.length

    def _element_axes(self, start: Ref, v: int) -> tuple[Expr, ...]:
        """Return the element axes of element ``v`` of a chunk."""
        extents = [a.extent for a in self.form.elements]
        if self.joined:
            return (*(integer(0) for _ in extents[1:]), make_add(start, v))
        return tuple(define_coordinates(self.frame, f"{start.axis}_{v}_", f"({start} + {v})", extents))

    # --- loads ----------------------------------------------------------------------------------

    def _element_bodies(self, elements: tuple[Expr, ...]) -> list[Expr]:
        """Return all expressions evaluated at one element of this thread's row."""
        form = self.form
        bodies = [ex.substitute(c.body, form.reduced(c, self.rows, elements)) for c in form.reductions]
        return bodies + [Load(n, form.point(n, self.rows, elements)) for n in form.operator.outputs]

    def _load_row(self, waits: bool) -> None:
        """Write every load of the row: constants first, then, after the wait, the others, all before any arithmetic."""
        inlined = self.frame.inlined
        found = [[stored_loads(b, inlined) for b in self._element_bodies(e)] for chunk in self.elements for e in chunk]
        loads = list(dict.fromkeys(ld for lists in found for each in lists for ld in each))
        loads = [ld for ld in loads if ld.tensor in self.frame.places and ld.tensor not in self.form.operator.outputs]
        early = self.frame.constants(loads)
        self.frame.line("// All loads; constants before the wait for earlier kernels.")
        if len(early) <= AHEAD:
            self._write_loads(early)
        if waits:
            self.frame.line("rm_after();")
        self._write_loads(loads)

    def _write_loads(self, loads: Sequence[Load]) -> None:
        """Write all loads, four neighbours at once if they are aligned."""
        wanted = dict.fromkeys(loads)
        for load in loads:
            group = self._adjacent_loads(load)
            if group is None or any(g not in wanted for g in group) or self.block.known(load) is not None:
                continue
            name = self.frame.unit.fresh("f")
            place = self.frame.places[load.tensor]
            address, half = self.block.address(place, load.indices), place.dtype == "float16"
            kind, parts = ("uint2", ("x", "x >> 16", "y", "y >> 16")) if half else ("float4", tuple("xyzw"))
            self.block.line(f"const {kind} {name} = *(const {kind} *)({place.pointer} + {address});")
            values = [f"{name}.{part}" for part in parts]
            if half:
                self._use_halves()
                self.block.lines += [f"const float {name}_{k} = rm_half({value});" for k, value in enumerate(values)]
                values = [f"{name}_{k}" for k in range(VECTOR)]
            for member, value in zip(group, values, strict=True):
                self.block.memo[member] = Val(value, place.dtype, atom=True, half=half)
        preload_elements(self.block, loads)

    def _use_halves(self) -> None:
        """Add the device code of words of float16."""
        halves = device_source("halves")
        if halves not in self.frame.device:
            self.frame.device = halves + self.frame.device

    def _adjacent_loads(self, load: Load) -> list[Load] | None:
        """Return the loads of a chunk that starts with ``load``, if they are aligned neighbours, else None."""
        if self.s.vector != VECTOR or not self.joined or not self.aligned(load):
            return None
        start = next((q for q in self.starts if q.axis in ex.axes_of(load)), None)
        if start is None:
            return None
        shifted = [ex.substitute(load, {start.axis: make_add(start, v)}) for v in range(VECTOR)]
        return [Load(load.tensor, tuple(canonicalise_sum(i) for i in g.indices)) for g in shifted if isinstance(g, Load)]

    def aligned(self, load: Load) -> bool:
        """Return True if ``load`` is contiguous along the row, from multiples of the bytes of four elements."""
        return is_quad_aligned(load, self.binding, {q.axis for q in self.starts})

    # --- reductions -----------------------------------------------------------------------------

    def _reduce_row(self, number: int, c: Compute) -> None:
        """Write reduction ``c`` of this thread's row, whose result every thread of the row gets."""
        self.block.line(f"// Reduction {number} of the row.")
        total = self.block.accumulator(c, {})
        for chunk, elements in enumerate(self.elements):
            for element in elements:
                value = self.block.value(ex.substitute(c.body, self.form.reduced(c, self.rows, element)))
                statement = self.block.combine(c, total.text, value)
                self.block.line(f"if (m{chunk}) {statement}" if self._partial(chunk) else statement)
        if self.s.side:
            join_sides(self.frame, c, total, self.s, number)
        else:
            join_lanes(self.frame, c, [total], self.s.lanes, number)
        if self.s.blocks > 1:
            join_blocks(self.frame, c, total, number, self.s.side or 1)
        row = tuple(self.form.reduced(c, self.rows, self.elements[0][0])[a.name] for a in c.axes)
        self.block.memo[Load(c.name, row)] = total

    # --- results --------------------------------------------------------------------------------

    def _store_outputs(self) -> None:
        form = self.form
        self.block.line("// Maps and stores.")
        for name in form.operator.outputs:
            if not form.whole(name):
                point = form.point(name, self.rows, self.elements[0][0])
                value = self.block.unrounded(Load(name, point))
                inside = " && ".join(filter(None, ("lane == 0" if self.s.across > 1 else "", self.inside)))
                with self.block.nest(f"if ({inside or 'true'})") as scope:
                    scope.store(self.frame.places[name], point, value, ())
                continue
            for chunk, elements in enumerate(self.elements):
                tests = " && ".join(filter(None, (self.inside, f"m{chunk}" if self._partial(chunk) else "")))
                self._store_chunk(name, [form.point(name, self.rows, e) for e in elements], tests)
                if self.deep and (fill := self.fills[name]) is not None:
                    self._fill_chunk(name, chunk, fill)

    def _store_chunk(self, name: str, points: Sequence[tuple[Expr, ...]], tests: str) -> None:
        """Store one chunk's results, four at once if their addresses are aligned."""
        place = self.frame.places[name]
        values = [convert_value(CUDA, self.block.unrounded(Load(name, p)), place.dtype) for p in points]
        with self.block.nest(f"if ({tests or 'true'})") as scope:
            if self.s.vector == VECTOR and self.joined and self.aligned(Load(name, points[0])):
                kind, parts = "float4", [v.text for v in values]
                if place.dtype == "float16":
                    self._use_halves()
                    kind, parts = "uint2", [f"rm_two_halves({a}, {b})" for a, b in zip(parts[::2], parts[1::2], strict=True)]
                scope.line(f"*({kind} *)({place.pointer} + {scope.address(place, points[0])}) = make_{kind}({', '.join(parts)});")
                return
            for point, value in zip(points, values, strict=True):
                scope.store(place, point, value, ())

    def _fill_chunk(self, name: str, chunk: int, value: float) -> None:
        """Store the fill value to a chunk past the length of a run."""
        f, s, n, place = self.frame, self.s, self.form.length, self.frame.places[name]
        tests = [f"!m{chunk}", *filter(None, [self.inside])]
        tests += [f"{self._chunk_place(chunk)} < {n}"] if (chunk + 1) * s.across * s.vector > n else []
        with f.scope(f"if ({' && '.join(tests)})"):
            start = f.variable(f"beyond{chunk}", self._chunk_place(chunk), n)
            for v in range(s.vector):
                at = self.block.address(place, self.form.point(name, self.rows, self._element_axes(start, v)))
                self.block.line(format_store(CUDA, place.pointer, at, place.dtype, spell_literal(CUDA, value, place.dtype)))


_ROWS: Final = Forms(rows_of, enumerate_tilings, row_seconds, lambda placed, binding: RowwiseKernel(placed).kernel())
ROWWISE: Final = replace(
    _ROWS.family("rowwise", size_keys("lanes", "vector", "blocks", "side")),
    packable=True,
    spread=lambda o: dict(o.config).get("blocks", 1),
    fused_forms=frozenset({"trailing maps", "further sums"}),
)
