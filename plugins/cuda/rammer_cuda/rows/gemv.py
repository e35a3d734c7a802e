"""The ``gemv`` family: a matrix times one or a few vectors, bound by the bytes of the matrix.

``lanes`` neighbouring threads share ``columns`` neighbouring results for every vector. Each thread walks every ``lanes``-th group
of products, 16 bytes a load: four of float32, eight of float16, which are summed in float32. A butterfly of warp shuffles adds
their sums up, in a fixed order. A constant matrix is packed with its products contiguous. Its first loads are issued before the
kernel waits for its predecessors, and later ones while the previous are multiplied. A load of a computed matrix may have four
results' weights instead (``lies_across``). The core's emitter writes the following maps, one lane per result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from rammer.codegen import (
    Forms,
    Packing,
    Roles,
    Unsuited,
    Val,
    canonicalise_sum,
    make_packing,
    preload_elements,
    roles_of,
    stored_loads,
)
from rammer.codegen.products import WARP, Strips, ceiling_quotient
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Expr, Load, integer, make_add, make_mul
from rammer.ir.operator import ROperator

from rammer_cuda.device import device_source
from rammer_cuda.family import size_keys
from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.epilogue import write_epilogue
from rammer_cuda.kernels.frame import VECTOR, Frame, define_coordinates, join_lanes, steps_of
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.rows.leading_rows import LeadingRows, rows_before
from rammer_cuda.rows.tensor_gemv import STRIP, TensorSum, suits_tensor_cores

#: Maximum vectors, minimum products of a sum, and maximum sums of a thread.
MOST_VECTORS, LEAST_DEPTH, MOST_SUMS = 8, 32, 16
#: Threads that share results, results that they share along the matrix's rows, and threads of a block.
LANES = (8, 16, 32, 64, 128, 256)
COLUMNS = (1, 2, 4)
BLOCKS = (64, 128, 256)
#: Threads of a block that computes an attention's scores first, one or a few for each group of lanes.
SCORE_BLOCKS = (256, 512, 1024)
#: Registers for a thread's part of the matrix in flight.
AHEAD = 64


@dataclass(frozen=True)
class MatVec:
    """A contraction as ``y[.., i, j] = sum over k of matrix[.., i, k] * vectors[.., j, k]``. ``many`` are the axes i, ``few`` the
    axes j, as positions of the main Compute's axes; the others are in both operands."""

    operator: ROperator
    main: Compute
    matrix: Load
    vectors: Load
    many: tuple[int, ...]
    few: tuple[int, ...]
    across: bool = False  #: True if a load of the matrix has four results' weights (``lies_across``).
    half: bool = False  #: True if both operands are float16.
    rows: LeadingRows | None = None  #: The rows before the product that every task computes.
    after: tuple[Compute, ...] = ()

    @property
    def wide(self) -> int:
        """Products in 16 bytes."""
        return 2 * VECTOR if self.half else VECTOR

    @property
    def depth(self) -> int:
        """Products of a sum."""
        return math.prod(r.extent for r in self.main.reduce)


def matvec_of(operator: ROperator, binding: Binding) -> MatVec:
    """Return the matrix-vector form of an operator. Raises Unsuited with the reason if it does not apply."""
    tail, before = rows_before(operator, binding)
    binding = before.bound(binding) if before is not None else binding
    half = any(binding.types[n].dtype == "float16" for n in tail.computes[0].reads)
    roles = roles_of(tail, binding, "float16" if half else "float32")
    rows, columns = (math.prod(roles.main.axes[d].extent for d in axes) for axes in (roles.rows, roles.columns))
    if rows <= columns:
        result = MatVec(operator, roles.main, roles.b, roles.a, roles.columns, roles.rows)
    else:
        result = MatVec(operator, roles.main, roles.a, roles.b, roles.rows, roles.columns)
    if min(rows, columns) > MOST_VECTORS or not result.many or roles.groups:
        raise Unsuited("a product of two matrices")
    if result.depth < LEAST_DEPTH or _has_sliding_index(roles):
        raise Unsuited("no long sum")
    if steps_of(result.vectors, binding.storages[result.vectors.tensor].strides) is None:
        raise Unsuited("padded or non-affine vectors")
    if before is not None and result.vectors.tensor != before.tensor:
        raise Unsuited("rows that are the matrix")
    across = lies_across(result.matrix, result.main, result.many[-1], binding)
    return replace(result, half=half, across=across, rows=before, after=tail.computes[1:])


def _has_sliding_index(roles: Roles) -> bool:
    over = {r.name for r in roles.main.reduce if r.extent > 1}
    live = {a.name for a in roles.main.axes if a.extent > 1}
    return any(ex.axes_of(i) & over and ex.axes_of(i) & live for ld in (roles.a, roles.b) for i in ld.indices)


@dataclass(frozen=True, slots=True)
class SumWalk:
    """A thread's walk of the sum: ``vector`` products per load, ``chunks`` loads per iteration, ``turns`` iterations."""

    lanes: int
    vector: int
    chunks: int
    turns: int


def walk_of(m: MatVec, lanes: int, columns: int) -> SumWalk:
    """Return the walk with the fewest iterations that registers allow."""
    vector = m.wide if m.depth % m.wide == 0 and not m.across else 1
    groups = -(-m.depth // (lanes * vector))
    turns = -(-groups * vector * columns // (2 * AHEAD if m.half and vector > 1 else AHEAD))
    chunks = -(-groups // turns)
    return SumWalk(lanes, vector, chunks, -(-groups // chunks))


def strips_of(m: MatVec) -> Strips:
    """Return the results that ``lanes`` threads share: every vector, ``columns`` along the innermost axis of the matrix."""
    sizes = [m.main.axes[d].extent if d in m.few else 1 for d in range(len(m.main.axes))]
    sizes[m.many[-1]] = dict(m.operator.config).get("columns", 1)
    return Strips(m.operator, tuple(sizes))


def threads_of(m: MatVec) -> int:
    """Return the threads of a task's block: whole warps."""
    return -(-strips_of(m).count * dict(m.operator.config).get("lanes", WARP) // WARP) * WARP


class GemvKernel:
    """A writer of one gemv kernel."""

    def __init__(self, m: MatVec, binding: Binding, frame: Frame | None = None) -> None:
        self.m, self.binding, self.strips = m, m.rows.bound(binding) if m.rows is not None else binding, strips_of(m)
        self.lanes = dict(m.operator.config).get("lanes", WARP)
        s = self.strips
        threads = threads_of(m)
        columns = s.sizes[m.many[-1]]
        tensor = columns == STRIP and suits_tensor_cores(m, self.lanes, s.each // STRIP)
        if self.lanes not in LANES or not s.fits or threads > 1024 or (not tensor and s.each > min(MOST_SUMS, self.lanes)):
            raise Unsuited(f"{threads} threads for strips of {s.sizes}, {self.lanes} threads each")
        self.walk = walk_of(m, self.lanes, s.sizes[m.many[-1]])
        self.packing, self.matrix = self._matrix_operand()
        self.vectors = self.joined(m.vectors)
        if self.vectors is None:
            raise Unsuited("vectors that are not contiguous along the sum")
        packed = {m.matrix.tensor: self.packing} if self.packing else {}
        if m.half and self.walk.vector > 1 and not (self.vectors[2] == 1 and self.wide(m.vectors, self.vectors)):
            raise Unsuited("vectors of float16 that are not read 16 bytes at a time")
        self.tensor = TensorSum(self) if tensor else None
        device = device_source("mma") if tensor else device_source("halves") if m.half else ""
        maps = {c.name: c for c in m.operator.computes if not c.reduce}
        if frame is not None and packed:
            raise Unsuited("a packed matrix of a product before another one")
        self.frame = frame or Frame(m.operator, binding, maps, threads, packed, device=device)
        self.block = self.frame.block

    # --- operands -------------------------------------------------------------------------------

    def joined(self, load: Load) -> tuple[dict[str, int], int, int] | None:
        """Return ``(step by output axis, constant, step from one product to the next)``. Returns None if the products do not form
        one run."""
        found = steps_of(load, self.binding.storages[load.tensor].strides)
        if found is None:
            return None
        steps, constant = dict(found[0]), found[1]
        over = [steps.pop(r.name, 0) for r in self.m.main.reduce if r.extent > 1]
        extents = [r.extent for r in self.m.main.reduce if r.extent > 1]
        run = all(a == b * n for a, b, n in zip(over, over[1:], extents[1:], strict=False))
        return (steps, constant, over[-1]) if run else None

    def _matrix_operand(self) -> tuple[Packing | None, tuple[dict[str, int], int, int]]:
        """Return the matrix as stored, or a packed copy."""
        load, joined = self.m.matrix, self.joined(self.m.matrix)
        if self.m.across:
            if joined is None or self.strips.sizes[self.m.many[-1]] != VECTOR:
                raise Unsuited("products that are not contiguous, or loads of another number of results")
            return None, joined
        if joined is not None and joined[2] == 1 and (self.walk.vector == 1 or self.wide(load, joined)):
            return None, joined
        others = {t for c in self.m.operator.computes if c is not self.m.main for t in c.reads} | {self.m.vectors.tensor}
        if load.tensor not in self.binding.constants or load.tensor in others:
            raise Unsuited("a matrix whose products are not contiguous")
        axes = [a for a in self.m.main.axes if a.name in ex.axes_of(load)]
        steps, below = dict[str, int](), self.m.depth
        for a in reversed(axes):
            steps[a.name] = below
            below *= a.extent
        return _matrix_packing(load, axes, self.m.main.reduce, "float16" if self.m.half else "float32"), (steps, 0, 1)

    def wide(self, load: Load, joined: tuple[dict[str, int], int, int]) -> bool:
        """Return True if the products of a load are always 16 aligned bytes."""
        offset = self.binding.storages[load.tensor].offset
        return all(n % self.m.wide == 0 for n in (offset, joined[1], *joined[0].values()))

    # --- text -----------------------------------------------------------------------------------

    def kernel(self) -> TaskKernel:
        """Return the finished kernel text."""
        self.write()
        return self.frame.kernel("v_")

    def write(self, waits: bool = True) -> None:
        """Write the product to the frame. With ``waits``, that includes the wait for earlier kernels."""
        f, s, m = self.frame, self.strips, self.m
        self.deep = f.stop(m.main, m.main.reduce)
        number = f"tid / {self.lanes}"
        spare = s.count * self.lanes < f.threads
        f.line(f"const int lane = tid % {self.lanes}, group = {f'min({number}, {s.count - 1})' if spare else number};")
        base = s.base(f, "group")
        if self.tensor is not None:
            self.tensor.places(base)
        else:
            self.columns = self.distinct(s.points(base), self.matrix)
            self.rows = self.distinct(s.points(base), self.vectors)
            self.totals = [Val(f"sum{k}", "float32", atom=True) for k in range(s.each)]
        point = self.picked(base)
        tests = [f"lane < {s.each}", *s.own(f, point)] + ([f"{number} < {s.count}"] if spare else [])
        reads = list(dict.fromkeys(ld for n in m.operator.outputs for ld in stored_loads(Load(n, point), f.inlined)))
        reads = [ld for ld in reads if ld.tensor in f.places]
        early = m.matrix.tensor in self.binding.constants
        f.line("// This thread's part of the matrix, and what the maps read; constants before the wait for earlier kernels.")
        if early:
            self._load_matrix("")
        preload_elements(self.block, f.constants(reads))
        inside = m.rows is not None and m.rows.scores is None and early  # the rows wait
        if waits and not inside:
            f.line("rm_after();")
        if not early:
            self._load_matrix("")
        if m.rows is not None:
            m.rows.write(f, inside, lambda frame: GemvKernel(scores_of(m, f.threads), self.binding, frame).write(False))
        preload_elements(self.block, reads)
        if self.tensor is not None:
            self.store(point, tests, self.tensor.multiply())
            return
        self.sum()
        join_lanes(f, m.main, self.totals, self.lanes)
        self.finish(point, tests)

    def distinct(self, points: Sequence[tuple[Expr, ...]], where: tuple[dict[str, int], int, int] | None) -> dict[str, list[int]]:
        """Return address of the first product -> results that read from there."""
        assert where is not None
        result: dict[str, list[int]] = {}
        for k, point in enumerate(points):
            total: Expr = integer(where[1])
            for a, x in zip(self.m.main.axes, point, strict=True):
                total = make_add(total, make_mul(x, where[0].get(a.name, 0)))
            result.setdefault(self.frame.unit.index(canonicalise_sum(total)).text, []).append(k)
        return result

    def picked(self, base: list[Expr]) -> tuple[Expr, ...]:
        """Define the result that this lane finishes: lane p handles number p."""
        f, s = self.frame, self.strips
        f.line(f"const int pick = min(lane, {s.each - 1});")
        digits = define_coordinates(f, "k", "pick", s.sizes)
        return tuple(
            f.variable(f"y{d}", f"{f.unit.index(b).text} + {digit}", a.extent) if a.extent > 1 else integer(0)
            for d, (b, digit, a) in enumerate(zip(base, digits, self.m.main.axes, strict=True))
        )

    def _chunk_place(self, chunk: int, turn: str) -> tuple[str, str]:
        """Return (first product of this thread's chunk, test that it exists) in iteration ``turn`` ("" for the first)."""
        w = self.walk
        index = f"lane + {chunk * w.lanes}" + (f" + {turn} * {w.chunks * w.lanes}" if turn else "")
        place = f"({index}) * {w.vector}" if w.vector > 1 else index
        if self.deep:  # past the end, all threads load the last products
            last = f"({self.deep} - 1) / {w.vector} * {w.vector}" if w.vector > 1 else f"{self.deep} - 1"
            return f"min({place}, {last})", f"{place} < {self.deep}"
        whole = w.turns * w.chunks * w.lanes * w.vector == self.m.depth
        return (place, "") if whole else (f"min({place}, {self.m.depth - w.vector})", f"{place} < {self.m.depth}")

    @property
    def _load_type(self) -> str:
        return "float" if self.walk.vector == 1 else "uint4" if self.m.half else "float4"

    def _loaded(self, place: str) -> str:
        """Return a load of the products at the address ``place``."""
        if self.walk.vector > 1:
            return f"*(const {self._load_type} *)({place})"
        return f"rm_load_f16({place})" if self.m.half else f"*(const float *)({place})"

    def _parts(self, name: str, count: int) -> list[str]:
        """Return the ``count`` floats of a loaded vector."""
        if self.m.half:
            return [f"rm_half({name}.{'xyzw'[p // 2]}{' >> 16' if p % 2 else ''})" for p in range(count)]
        return [f"{name}.{p}" for p in "xyzw"]

    def _load_matrix(self, turn: str) -> None:
        """Load this thread's part of the matrix into ``w{column}_{chunk}``, declared in the first iteration (``turn`` = "")."""
        if self.tensor is not None:
            return self.tensor.load_matrix()
        if self.m.across:
            return self._fetch_across(turn)
        pointer, declare = self.frame.places[self.m.matrix.tensor].pointer, "" if turn else f"{self._load_type} "
        for column, address in enumerate(self.columns):
            for chunk in range(self.walk.chunks):
                place, _ = self._chunk_place(chunk, turn)
                text = self._loaded(f"{pointer} + (size_t)({address}) + {place}")
                self.block.line(f"{declare}w{column}_{chunk} = {text};")

    def _fetch_across(self, turn: str) -> None:
        """Load the matrix part with a product's weights for all columns at once."""
        pointer, first = self.frame.places[self.m.matrix.tensor].pointer, next(iter(self.columns))
        for chunk in range(self.walk.chunks):
            place, _ = self._chunk_place(chunk, turn)
            if not turn:
                self.block.line("float " + ", ".join(f"w{c}_{chunk}" for c in range(VECTOR)) + ";")
            with self.block.nest("") as scope:
                kind = "uint2" if self.m.half else "float4"
                scope.line(f"const {kind} all = *(const {kind} *)({pointer} + {first} + (size_t)({place}) * {self.matrix[2]});")
                scope.lines += [f"w{c}_{chunk} = {p};" for c, p in enumerate(self._parts("all", VECTOR))]

    def sum(self) -> None:
        """Write the iterations: load the vectors' part and the matrix's next part, multiply."""
        w = self.walk
        self.block.line("// Products and their sums.")
        self.block.lines += [f"float {t.text} = 0.0f;" for t in self.totals]
        if w.turns == 1:
            self._turn("")
            return
        outer = self.block
        outer.line("#pragma unroll 1")
        with outer.nest(f"for (int turn = 0; turn < {self._turns}; ++turn)") as self.block:
            self._turn("turn")
        self.block = outer

    @property
    def _turns(self) -> str:
        w = self.walk
        return ceiling_quotient(self.deep, w.chunks * w.lanes * w.vector) if self.deep else str(w.turns)

    def _turn(self, turn: str) -> None:
        w, chunks = self.walk, range(self.walk.chunks)
        for chunk in chunks:
            self._load_vectors(chunk, turn)
        if turn:
            names = [f"w{column}_{chunk}" for column in range(len(self.columns)) for chunk in chunks]
            self.block.lines += [f"const {self._load_type} h{n} = {n};" for n in names]
            outer = self.block
            with outer.nest(f"if (turn + 1 < {self._turns})") as self.block:
                self._load_matrix("(turn + 1)")
            self.block = outer
        held = "h" if turn else ""
        parts: Callable[[str], list[str]] = (lambda n: self._parts(n, w.vector)) if w.vector > 1 else (lambda n: [n])
        for chunk in chunks:
            _, test = self._chunk_place(chunk, turn)
            weights = [parts(f"{held}w{c}_{chunk}") for c in range(len(self.columns))]
            factors = [parts(f"v{r}_{chunk}") for r in range(len(self.rows))]
            products = [
                f"{self.totals[k].text} = fmaf({weights[c][p]}, {factors[r][p]}, {self.totals[k].text});"
                for p in range(w.vector)
                for c, ks in enumerate(self.columns.values())
                for r, js in enumerate(self.rows.values())
                for k in ks
                if k in js
            ]
            if test:
                with self.block.nest(f"if ({test})") as scope:
                    scope.lines += products
            else:
                self.block.lines += products

    def _load_vectors(self, chunk: int, turn: str) -> None:
        assert self.vectors is not None
        load, step = self.m.vectors, self.vectors[2]
        pointer, (place, _) = self.frame.places[load.tensor].pointer, self._chunk_place(chunk, turn)
        for row, address in enumerate(self.rows):
            name = f"v{row}_{chunk}"
            at = f"{address} + ({place}) * {step}"
            if self.walk.vector == 1:
                self.block.line(
                    f"const float {name} = {f'rm_load_f16({pointer} + {at})' if self.m.half else f'{pointer}[{at}]'};"
                )
            elif self.m.half:
                self.block.line(f"const uint4 {name} = *(const uint4 *)({pointer} + {address} + {place});")
            elif step == 1 and self.wide(load, self.vectors):
                self.block.line(f"const float4 {name} = *(const float4 *)({pointer} + {address} + {place});")
            else:
                each = ", ".join(f"{pointer}[{address} + ({place} + {i}) * {step}]" for i in range(VECTOR))
                self.block.line(f"const float4 {name} = make_float4({each});")

    def finish(self, point: tuple[Expr, ...], tests: list[str]) -> None:
        """Write the following maps and the stores, one lane per result."""
        self.block.line("// Maps and stores.")
        text = self.totals[-1].text
        for k in reversed(range(len(self.totals) - 1)):
            text = f"(pick == {k} ? {self.totals[k].text} : {text})"
        self.block.line(f"const float total = {text};")
        self.store(point, tests, Val("total", "float32", atom=True))

    def store(self, point: tuple[Expr, ...], tests: list[str], total: Val) -> None:
        """Write the maps of a result and its stores, if it is this lane's to finish."""
        with self.block.nest(f"if ({' && '.join(tests)})") as scope:
            write_epilogue(
                scope, self.frame.places, Load(self.m.main.name, point), total.text, self.m.main.dtype, self.m.operator.outputs
            )


def _matrix_packing(load: Load, axes: Sequence[Axis], reduce: tuple[Axis, ...], dtype: str) -> Packing:
    """Return the packing of the matrix as ``[axes..., products]``."""
    size = math.prod(a.extent for a in (*axes, *reduce))
    return make_packing(load, (*axes, *reduce), size, lambda values: values, "rows", dtype=dtype)


# --- choice -------------------------------------------------------------------------------------

#: Cycles from a launch to the last store of an empty block, of launching one more block, of a load of a thread, of adding up and
#: finishing one result, of a byte of the matrix that an SM reads, and of a product of a warp on its scheduler. Fitted to 88
#: kernels of the zoo's models on an H200: the measured time over the predicted has a standard deviation of 0.06.
START, BLOCK, LOAD, RESULT, BYTE, PRODUCT = 800, 0.74, 29.0, 100.0, 0.03, 1.23
#: Cycles between scores and the rows that read them, in blocks of up to 1,024 threads: a block of a decoder step at batch 8 takes
#: 5.0 us on an H200, 4.5 without them.
WAIT: Final = 1000.0
#: Cycles of a warp on its scheduler to convert an element of float16. With it, measured over predicted of 18 kernels of a decoder
#: on an H200 has a standard deviation of 0.12; the first choice is 3% slower than the best.
CONVERT = 1.5


def _enumerate_tilings(m: MatVec, gpu: Gpu) -> Iterator[MatVec]:
    """Yield all lanes and columns in blocks of about ``BLOCKS`` threads."""
    blocks = SCORE_BLOCKS if m.rows is not None and m.rows.scores is not None else BLOCKS
    few = math.prod(m.main.axes[d].extent for d in m.few)
    for lanes, columns in product(LANES, (VECTOR,) if m.across else (*COLUMNS, STRIP)):
        if columns == STRIP and not (gpu.copies and suits_tensor_cores(m, lanes, few)):
            continue
        config = (("lanes", lanes), ("columns", columns))
        for tile in dict.fromkeys(_tile_shape(m, columns, max(1, threads // lanes)) for threads in blocks):
            here = replace(m, operator=replace(m.operator, tile=tile, family="gemv", config=config))
            if strips_of(here).fits and _has_rows(here):
                yield here


def _has_rows(m: MatVec) -> bool:
    """Return True if the threads of a task can compute the rows before the product, if any."""
    try:
        if m.rows is not None:
            m.rows.laid_out(threads_of(m))
            if m.rows.scores is not None:
                scores_of(m, threads_of(m))
        return True
    except Unsuited:
        return False


def _tile_shape(m: MatVec, columns: int, groups: int) -> tuple[int, ...]:
    """Return the tile of every vector and ``groups`` strips of ``columns`` along the matrix's innermost axes."""
    tile = [a.extent if d in m.few else 1 for d, a in enumerate(m.main.axes)]
    wanted = groups * columns
    for d in reversed(m.many):
        tile[d] = min(m.main.axes[d].extent, wanted)
        wanted //= max(tile[d], 1)
        if tile[d] < m.main.axes[d].extent or wanted <= 1:
            break
    return tuple(tile)


def _predict_seconds(m: MatVec, binding: Binding, gpu: Gpu) -> float:
    operator, s, clock = m.operator, strips_of(m), gpu.model_clock
    config = dict(operator.config)
    lanes, columns = config["lanes"], config["columns"]
    w = walk_of(m, lanes, columns)
    threads = threads_of(m)
    busy = threads / WARP * -(-operator.task_count // gpu.sms) / 4
    loads = w.chunks * w.turns
    size = (2 if m.half else 4) * m.depth * math.prod(a.extent for d, a in enumerate(m.main.axes) if d not in m.few)
    # A warp reads 16 bytes of each 32-byte sector, or 8.
    size *= (4 if m.half else 2) if m.across and lanes > WARP // 2 else 1
    cycles = START + BLOCK * operator.task_count + BYTE * size / gpu.sms
    if columns == STRIP:
        cycles += 3 * LOAD * m.depth / lanes + 2 * RESULT
    else:
        cycles += LOAD * loads * (columns + s.each // columns) + RESULT * s.each + PRODUCT * busy * loads * w.vector * s.each
        cycles += CONVERT * busy * loads * w.vector * (columns + s.each // columns) if m.half else 0.0
    if m.rows is not None:
        cycles += m.rows.cycles(threads, operator.task_count, gpu)
        cycles += _score_cycles(scores_of(m, threads), operator.task_count, gpu) if m.rows.scores is not None else 0.0
    return max(cycles / clock, size / gpu.bandwidth)


def scores_of(m: MatVec, threads: int) -> MatVec:
    """Return the product before the rows of ``m``, whose results ``threads`` threads compute at once. Raises Unsuited if they
    cannot."""
    assert m.rows is not None and m.rows.scores is not None
    scores = matvec_of(m.rows.scores, m.rows.placed.binding)
    count = math.prod(scores.operator.tile[d] for d in scores.many)
    few = math.prod(scores.operator.tile[d] for d in scores.few)
    for lanes in (n for n in LANES if n <= WARP):
        columns = VECTOR if scores.across else -(-count // (threads // lanes))
        if columns * few <= min(MOST_SUMS, lanes) and columns * (threads // lanes) >= count:
            return replace(
                scores, operator=replace(scores.operator, family="gemv", config=(("lanes", lanes), ("columns", columns)))
            )
    raise Unsuited(f"{count} scores of {threads} threads")


def _score_cycles(scores: MatVec, tasks: int, gpu: Gpu) -> float:
    """Return the cycles of ``tasks`` blocks, each with all ``scores`` of its rows."""
    lanes, columns = dict(scores.operator.config)["lanes"], dict(scores.operator.config)["columns"]
    w, few = walk_of(scores, lanes, columns), strips_of(scores).each // columns
    loaded = (2 if scores.half else 4) * scores.depth * math.prod(scores.operator.tile[d] for d in scores.many)
    work = WAIT + LOAD * w.chunks * w.turns * (columns + few) + RESULT * columns * few
    return work + loaded * -(-tasks // gpu.sms) / gpu.delivered


_FORMS: Final = Forms(matvec_of, _enumerate_tilings, _predict_seconds, lambda m, binding: GemvKernel(m, binding).kernel())
GEMV: Final = replace(
    _FORMS.family("gemv", size_keys("lanes", "columns")),
    packable=True,
    keeps_operand_on_chip=True,
    fused_forms=frozenset({"trailing maps", "leading rows"}),
)


def lies_across(load: Load, main: Compute, innermost: int, binding: Binding) -> bool:
    """Return True if the non-constant matrix ``load`` has four results' weights in every 16 aligned bytes. The four are
    neighbours along axis ``innermost`` of the results, and products are not adjacent. Constants are packed instead."""
    storage, axis = binding.storages[load.tensor], main.axes[innermost]
    found = None if load.tensor in binding.constants else steps_of(load, storage.strides)
    if found is None or axis.extent % VECTOR or found[0].get(axis.name) != 1:
        return False
    over = [found[0].get(r.name, 0) for r in main.reduce if r.extent > 1]
    others = [step for name, step in found[0].items() if name != axis.name]
    return over[-1:] != [1] and all(n % VECTOR == 0 for n in (storage.offset, found[1], *others))
