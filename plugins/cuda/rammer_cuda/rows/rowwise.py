"""The ``rowwise`` family: softmax, normalisations, pooling over whole images, reductions along contiguous rows, and maps.

``lanes`` neighbouring threads share one row and keep their elements of it in registers from the first load to the last
store; a reduction is a sum (or maximum ...) of a thread's own elements in order, then a butterfly of warp shuffles, and
where a row takes several warps their results meet in shared memory in the order of the warps: results repeat bit for bit.
A row that is too long for a block is a cluster's of up to 8, whose results meet in the order of the blocks.
Every expression, maps before and after the reductions included, is the core's emitter's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from rammer.codegen import operations as ops
from rammer.codegen.bounds import tidy
from rammer.codegen.family import Forms
from rammer.codegen.operations import Val
from rammer.codegen.preload import preload, stored_loads
from rammer.codegen.rowform import Accesses, RowForm, accesses, joinable, map_form, row_form, step
from rammer.codegen.task import Unsuited
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Expr, Load, Ref, add, integer
from rammer.ir.operator import ROperator

from rammer_cuda.device import source
from rammer_cuda.dialect import CUDA
from rammer_cuda.family import sizes
from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.frame import VECTOR, WARP, Frame, aligned, coordinates, join_blocks, join_lanes, moved_bytes
from rammer_cuda.kernels.task import TaskKernel

#: Threads that share a row, most elements a thread keeps, and threads of a block.
LANES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MOST_ELEMENTS, MOST_THREADS = 32, 1024
#: Most elements of a row of an operator without reductions, whose rows are as long as one likes.
MAP_ELEMENTS = 2048
#: Registers that constants loaded ahead may take.
AHEAD = 48
#: Blocks that may share a row (the largest cluster that every GPU with clusters can schedule), and from which length on.
CLUSTERS, LONG = (1, 2, 4, 8), 8192
#: Types that a reduction may have here: those that warp shuffles move.
SHUFFLED = frozenset(("float32", "float64", "int32", "int64", "uint32", "uint64"))


@dataclass(frozen=True, slots=True)
class RowShape:
    """``lanes`` threads a row and block, ``vector`` neighbouring elements a load, ``chunks`` loads a thread, ``rows`` a block;
    ``blocks`` share a row."""

    lanes: int
    vector: int
    chunks: int
    rows: int
    blocks: int = 1

    @property
    def across(self) -> int:
        """Threads that share a row, over all blocks."""
        return self.lanes * self.blocks

    @property
    def threads(self) -> int:
        """Threads of the block: whole warps."""
        return -(-self.rows * self.lanes // WARP) * WARP


def shape_of(form: RowForm) -> RowShape:
    """The block of a tiled operator under its config."""
    operator, config = form.operator, dict(form.operator.config)
    lanes, vector, blocks = config.get("lanes", WARP), config.get("vector", 1), config.get("blocks", 1)
    rows = math.prod(t for t, r in zip(operator.tile, form.row_of, strict=True) if r is not None)
    return RowShape(lanes, vector, -(-form.length // (lanes * blocks * vector)), rows, blocks)


def strides_of(operator: ROperator, binding: Binding) -> dict[str, tuple[int, ...]]:
    """Strides of the stored tensors."""
    return {n: binding.storages[n].strides for n in (*operator.inputs, *operator.outputs)}


def form_of(operator: ROperator, binding: Binding) -> RowForm:
    """The rows of an operator; Unsuited says why it has none."""
    form = row_form(operator) or map_form(operator, strides_of(operator, binding), MAP_ELEMENTS)
    if form is None:
        raise Unsuited("no operator on rows")
    if any(c.kind != "reduction" for c in form.reductions):
        raise Unsuited("sums of products and windows read their operands many times")
    if any(ops.compute_type(c.dtype) not in SHUFFLED for c in form.reductions):
        raise Unsuited("a reduction of a type that warps do not shuffle")
    return form


class _Rowwise:
    def __init__(self, form: RowForm, binding: Binding) -> None:
        self.form, self.binding = form, binding
        self.s = shape = shape_of(form)
        operator = form.operator
        whole = all(
            t == a.extent for t, a, e in zip(operator.tile, operator.anchor.axes, form.element_of, strict=True) if e is not None
        )
        if not whole or shape.lanes not in LANES or shape.threads > MOST_THREADS:
            raise Unsuited(f"tile {operator.tile} of {shape.threads} threads")
        if shape.chunks * shape.vector > MOST_ELEMENTS or form.length % shape.vector or shape.lanes & (shape.lanes - 1):
            raise Unsuited(f"{shape.chunks} x {shape.vector} elements a thread for rows of {form.length}")
        if shape.blocks not in CLUSTERS or (shape.blocks > 1 and (shape.rows > 1 or not form.reductions)):
            raise Unsuited(f"{shape.blocks} blocks for {shape.rows} rows")
        self.joined = joinable(form, strides_of(operator, binding))
        # Reductions are not computed in place: where one is not yet known at a point, the emitter finds no such tensor.
        maps = {c.name: c for c in operator.computes if not c.reduce}
        device = source("cluster_rows") if shape.blocks > 1 else ""
        resident = int(shape.blocks > 1)  # else ptxas leaves some clusters half of the registers
        self.frame = Frame(operator, binding, maps, shape.threads, device=device, resident=resident, blocks=shape.blocks)
        self.block = self.frame.block

    def kernel(self) -> TaskKernel:
        """The finished kernel."""
        try:
            self._places()
            self._loads()
            for number, c in enumerate(self.form.reductions):
                self._reduce(number, c)
            self._store()
            if self.s.blocks > 1:  # no block's shared memory ends while another may read it
                self.frame.line("rm_cluster_meet();")
        except KeyError as problem:
            raise Unsuited(f"{problem} is read at another place than its row") from problem
        return self.frame.kernel("r_")

    # --- places ---------------------------------------------------------------------------------

    def _places(self) -> None:
        """This thread's row and elements; places beyond the end are moved back inside and never stored."""
        f, s, operator = self.frame, self.s, self.form.operator
        f.line("// This thread's row and its elements.")
        rank = f" + rank * {s.lanes}" if s.blocks > 1 else ""
        self.deep = self._stop()
        f.line(f"const int lane = tid % {s.lanes}{rank}, local = tid / {s.lanes};")
        tiles = [operator.tile[self.form.row_of.index(k)] for k in range(len(self.form.rows))]
        tests = [f"local < {s.rows}"] if s.rows * s.lanes < s.threads else []
        f.line(f"const int own = {f'min(local, {s.rows - 1})' if tests else 'local'};")
        self.rows: tuple[Expr, ...] = ()
        for k, digit in enumerate(coordinates(f, "l", "own", tiles)):
            d = self.form.row_of.index(k)
            extent, place = operator.anchor.axes[d].extent, f"o{d} + {digit}"
            if extent % tiles[k]:
                tests.append(f"{place} < {extent}")
                place = f"min({place}, {extent - 1})"
            self.rows += (f.variable(f"r{k}", place, extent),)
        self.inside = " && ".join(tests)
        self.starts = [self._start(j) for j in range(s.chunks)]
        self.elements = [[self._element(q, v) for v in range(s.vector)] for q in self.starts]

    def _stop(self) -> str:
        """Where a run's rows end before the bound, of all reductions alike, and of what is stored of whole rows, too: ``fills``
        lie beyond."""
        form, operator = self.form, self.form.operator
        ends = {(s.compute, s.axis): s.extent for s in operator.stops}
        firsts = [(c, next((r.name for r in c.reduce if r.extent > 1), "")) for c in form.reductions]
        extents = {ends.get((c.name, first)) for c, first in firsts}
        if len(extents) != 1 or None in extents:
            return ""
        if form.whole:
            axis = operator.anchor.axes[form.element_of.index(0)].name
            found = [e for e in operator.endings if e.axis == axis and e.extent in extents and not e.below]
            if not found:
                return ""
            self.fills = dict(zip(operator.outputs, found[0].fills, strict=True))
        return self.frame.stop(firsts[0][0], firsts[0][0].reduce)

    def _place(self, chunk: int) -> str:
        """First element of this thread's chunk, wherever that is."""
        s = self.s
        return f"(lane + {chunk * s.across}) * {s.vector}" if s.vector > 1 else f"lane + {chunk * s.across}"

    def _start(self, chunk: int) -> Ref:
        """First element of this thread's chunk, and whether the chunk is there (``m{chunk}``)."""
        s, n, place = self.s, self.form.length, self._place(chunk)
        if self._partial(chunk):
            self.frame.line(f"const bool m{chunk} = {place} < {self.deep or n};")
            last = str(n - s.vector) if not self.deep else f"({self.deep} - 1) / {s.vector} * {s.vector}"
            place = f"min({place}, {last})"
        ref = self.frame.variable(f"q{chunk}", place, n)
        self.frame.unit.ranges[ref.axis] = (0, n - s.vector)
        return ref

    def _partial(self, chunk: int) -> bool:
        return bool(self.deep) or (chunk + 1) * self.s.across * self.s.vector > self.form.length

    def _element(self, start: Ref, v: int) -> tuple[Expr, ...]:
        """The element axes of element ``v`` of a chunk."""
        extents = [a.extent for a in self.form.elements]
        if self.joined:
            return (*(integer(0) for _ in extents[1:]), add(start, v))
        return tuple(coordinates(self.frame, f"{start.axis}_{v}_", f"({start} + {v})", extents))

    # --- loads ----------------------------------------------------------------------------------

    def _bodies(self, elements: tuple[Expr, ...]) -> list[Expr]:
        """Everything evaluated at one element of this thread's row."""
        form = self.form
        bodies = [ex.substitute(c.body, form.reduced(c, self.rows, elements)) for c in form.reductions]
        return bodies + [Load(n, form.point(self.rows, elements)) for n in form.operator.outputs]

    def _loads(self) -> None:
        """Every load of the row: constants first, then, once they may be read, the others, all before any arithmetic."""
        inlined = self.frame.inlined
        found = [[stored_loads(b, inlined) for b in self._bodies(e)] for chunk in self.elements for e in chunk]
        loads = list(dict.fromkeys(ld for lists in found for each in lists for ld in each))
        loads = [ld for ld in loads if ld.tensor in self.frame.places and ld.tensor not in self.form.operator.outputs]
        early = self.frame.constants(loads)
        self.frame.line("// All loads; constants before the wait for earlier kernels.")
        if len(early) <= AHEAD:
            self._fetch(early)
        self.frame.line("rm_after();")
        self._fetch(loads)

    def _fetch(self, loads: Sequence[Load]) -> None:
        """Load everything, four neighbours at once where they are 16 aligned bytes."""
        wanted = dict.fromkeys(loads)
        for load in loads:
            group = self._neighbours(load)
            if group is None or any(g not in wanted for g in group) or self.block.known(load) is not None:
                continue
            name = self.frame.unit.fresh("f")
            address = self.block.address(self.frame.places[load.tensor], load.indices)
            self.block.line(f"const float4 {name} = *(const float4 *)({self.frame.places[load.tensor].pointer} + {address});")
            for member, part in zip(group, "xyzw", strict=True):
                self.block.memo[member] = Val(f"{name}.{part}", "float32", atom=True)
        preload(self.block, loads)

    def _neighbours(self, load: Load) -> list[Load] | None:
        """The loads of a chunk whose first one is ``load``, if they are 16 aligned bytes; None otherwise."""
        if self.s.vector != VECTOR or not self.joined or not self.aligned(load):
            return None
        start = next((q for q in self.starts if q.axis in ex.axes_of(load)), None)
        if start is None:
            return None
        shifted = [ex.substitute(load, {start.axis: add(start, v)}) for v in range(VECTOR)]
        return [Load(load.tensor, tuple(tidy(i) for i in g.indices)) for g in shifted if isinstance(g, Load)]

    def aligned(self, load: Load) -> bool:
        """Whether ``load`` runs along the row element by element, from multiples of 16 bytes."""
        return aligned(load, self.binding, {q.axis for q in self.starts})

    # --- reductions -----------------------------------------------------------------------------

    def _reduce(self, number: int, c: Compute) -> None:
        """``c`` of this thread's row, known to every thread of it."""
        self.block.line(f"// Reduction {number} of the row.")
        total = self.block.accumulator(c, {})
        for chunk, elements in enumerate(self.elements):
            for element in elements:
                value = self.block.value(ex.substitute(c.body, self.form.reduced(c, self.rows, element)))
                statement = self.block.combine(c, total.text, value)
                self.block.line(f"if (m{chunk}) {statement}" if self._partial(chunk) else statement)
        join_lanes(self.frame, c, [total], self.s.lanes, number)
        if self.s.blocks > 1:
            join_blocks(self.frame, c, total, number)
        row = tuple(self.form.reduced(c, self.rows, self.elements[0][0])[a.name] for a in c.axes)
        self.block.memo[Load(c.name, row)] = total

    # --- results --------------------------------------------------------------------------------

    def _store(self) -> None:
        form = self.form
        self.block.line("// Maps and stores.")
        for name in form.operator.outputs:
            if not form.whole:
                point = form.point(self.rows, self.elements[0][0])
                value = self.block.load(Load(name, point))
                inside = " && ".join(filter(None, ("lane == 0" if self.s.across > 1 else "", self.inside)))
                with self.block.nest(f"if ({inside or 'true'})") as scope:
                    scope.store(self.frame.places[name], point, value, ())
                continue
            for chunk, elements in enumerate(self.elements):
                tests = " && ".join(filter(None, (self.inside, f"m{chunk}" if self._partial(chunk) else "")))
                self._store_chunk(name, [form.point(self.rows, e) for e in elements], tests)
                if self.deep and (fill := self.fills[name]) is not None:
                    self._fill(name, chunk, fill)

    def _store_chunk(self, name: str, points: Sequence[tuple[Expr, ...]], tests: str) -> None:
        """One chunk's results, by one 16-byte store where their places are 16 aligned bytes."""
        place = self.frame.places[name]
        values = [ops.convert(CUDA, self.block.load(Load(name, p)), place.dtype) for p in points]
        with self.block.nest(f"if ({tests or 'true'})") as scope:
            if self.s.vector == VECTOR and self.joined and self.aligned(Load(name, points[0])):
                parts = ", ".join(v.text for v in values)
                scope.line(f"*(float4 *)({place.pointer} + {scope.address(place, points[0])}) = make_float4({parts});")
                return
            for point, value in zip(points, values, strict=True):
                scope.store(place, point, value, ())

    def _fill(self, name: str, chunk: int, value: float) -> None:
        """What lies in a chunk beyond the length of a run."""
        f, s, n, place = self.frame, self.s, self.form.length, self.frame.places[name]
        tests = [f"!m{chunk}", *filter(None, [self.inside])]
        tests += [f"{self._place(chunk)} < {n}"] if (chunk + 1) * s.across * s.vector > n else []
        with f.scope(f"if ({' && '.join(tests)})"):
            start = f.variable(f"beyond{chunk}", self._place(chunk), n)
            for v in range(s.vector):
                at = self.block.address(place, self.form.point(self.rows, self._element(start, v)))
                self.block.line(ops.put(CUDA, place.pointer, at, place.dtype, ops.literal(CUDA, value, place.dtype)))


# --- choice -------------------------------------------------------------------------------------

#: Cycles from a launch to the last store of a row with nothing to do, of launching one more block, of one butterfly step, of
#: reading one warp's result in shared memory, of an operation of a thread, of each 128 bytes that a warp loads or stores on
#: its scheduler, and of working out an element's several coordinates. Fitted to 278 kernels of the zoo's models on an H200:
#: the measured time over the predicted has a standard deviation of 0.11.
START, BLOCK, BUTTERFLY, WARP_READ, CHAIN, LINE, PLACE = 612, 1.23, 20, 36, 6.7, 1.88, 7.3
#: Cycles of a cluster's barrier, and of reading one value of another block of it.
MEET, PEER = 600, 30
#: Bytes of a cache line.
LINE_BYTES = 128
#: Threads of a block that are aimed at.
BLOCKS = (64, 128, 256)


def _tilings(form: RowForm, gpu: Gpu) -> Iterator[RowForm]:
    """Lanes and vectors that leave every thread at most ``MOST_ELEMENTS`` and no lane without any, in all blocks."""
    long = gpu.clusters and form.reductions and form.length >= LONG
    for lanes, vector, blocks in product(LANES, (VECTOR, 1), CLUSTERS if long else (1,)):
        fits = form.length % vector == 0 and -(-form.length // (lanes * blocks * vector)) * vector <= MOST_ELEMENTS
        if fits and lanes * blocks * vector < 2 * max(form.length, 2) and (blocks == 1 or lanes >= BLOCKS[-1]):
            for tile in sorted({_tile(form, max(1, threads // lanes)) for threads in BLOCKS}):
                config = (("lanes", lanes), ("vector", vector), *([("blocks", blocks)] * (blocks > 1)))
                yield replace(form, operator=replace(form.operator, tile=tile, family="rowwise", config=config))


def _tile(form: RowForm, rows: int) -> tuple[int, ...]:
    """About ``rows`` neighbouring rows: inner row axes whole, one split evenly, the outer ones 1."""
    tile = [a.extent for a in form.operator.anchor.axes]
    for d in range(len(tile) - 1, -1, -1):
        if form.row_of[d] is None:
            continue
        part = max(1, min(rows, tile[d]))
        tile[d] = -(-tile[d] // -(-tile[d] // part))
        rows //= tile[d]
    return tuple(tile)


def _seconds(form: RowForm, binding: Binding, gpu: Gpu) -> float:
    """Predicted seconds of all tasks, without the launch."""
    operator, s, clock = form.operator, shape_of(form), gpu.model_clock
    each, narrow = s.chunks * s.vector, min(s.lanes, WARP)
    found, strides = accesses(form), strides_of(operator, binding)
    lines = sum(_lines(ld, strides.get(ld.tensor, ()), found, s) for ld in found.loads)
    join = BUTTERFLY * (narrow.bit_length() - 1) + (WARP_READ * s.lanes // WARP if s.lanes > WARP else 0)
    join += (MEET + PEER * s.blocks) if s.blocks > 1 else 0
    busy = s.threads / WARP * -(-operator.task_count * s.blocks // gpu.sms) / 4
    cycles = START + BLOCK * operator.task_count * s.blocks + len(form.reductions) * join
    cycles += CHAIN * each * sum(ex.flops(c.body) + 1 for c in operator.computes) + busy * LINE * s.chunks * lines
    if not joinable(form, strides):
        cycles += PLACE * each
    return max(cycles / clock, moved_bytes(operator, binding) / gpu.bandwidth)


def _lines(load: Load, strides: tuple[int, ...], found: Accesses, s: RowShape) -> int:
    """Lines of 128 bytes that one access of a warp touches, for each chunk of a thread."""
    lanes, rows = min(s.lanes, WARP), WARP // min(s.lanes, WARP)
    along = step(load, strides, found.elements[-1]) if found.elements else 0
    across = step(load, strides, found.rows[-1]) if found.rows else 0
    if along is None or across is None:
        return WARP * s.vector
    if along == 0:
        return 1 if across <= 1 else min(rows, rows * across * 4 // LINE_BYTES + 1)
    if abs(along) == 1:
        return rows * max(1, lanes * s.vector * 4 // LINE_BYTES)
    apart = lanes * s.vector * min(LINE_BYTES, abs(along) * 4) // LINE_BYTES
    return max(1, apart) * (1 if abs(across) == 1 else rows)


_ROWS: Final = Forms(form_of, _tilings, _seconds, lambda form, binding: _Rowwise(form, binding).kernel())
ROWWISE: Final = replace(
    _ROWS.family("rowwise", sizes("lanes", "vector", "blocks")), beside=True, spread=lambda o: dict(o.config).get("blocks", 1)
)
