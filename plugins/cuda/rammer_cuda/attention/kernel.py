"""The ``attention`` family: two products with row-wise Computes between them (``attention.recognise``), entirely on chip.

A block has one head and 16 rows for each of ``groups`` rows of warps; ``warps`` warps share the keys of 16 rows. Keys and values
pass through a ring of shared-memory buffers, each with ``chunk`` columns of all of them. Every warp keeps the scores of its keys
in registers from the first product to the second.

Reductions along rows combine a thread's scores, then 4 threads by a butterfly, then the warps in order through shared memory. The
warps' partial results are also added there in order, so results are bitwise reproducible. The core's emitter writes all
expressions, including scale and mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rammer.codegen import Block, Operand, Unsuited, Val, convert_value, format_sum, initial_value, weighted_terms
from rammer.codegen.products import WARP, ceiling_quotient
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Expr, Load, Ref

from rammer_cuda.attention.recognise import Attention, live_axes
from rammer_cuda.device import device_source
from rammer_cuda.dialect import CUDA, ROUNDED
from rammer_cuda.kernels.epilogue import write_epilogue
from rammer_cuda.kernels.frame import Frame
from rammer_cuda.kernels.task import TaskKernel

#: Rows of a warp; most fragments of 8 keys a warp, whose scores need 4 registers each; most warps of a block.
ROWS, MOST_FRAGMENTS, MOST_WARPS = 16, 8, 16
#: Threads of a block above which a thread has fewer than the maximum number of registers.
MANY_THREADS = 256
#: Columns of keys and values in one buffer: multiples of an instruction's depth, 8 of float32 and 16 of float16.
CHUNKS = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Block16:
    """The block of a task: ``groups`` x ``warps`` warps, ``chunk`` columns a buffer, ``stages`` buffers."""

    groups: int
    warps: int
    chunk: int
    stages: int
    fragments: int
    first: int
    second: int
    half: bool

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return self.groups * self.warps * WARP

    @property
    def unroll(self) -> int:
        """The unroll factor of a thread's copies and stores. Their addresses need registers, which are few in large blocks."""
        return 4 if self.threads <= MANY_THREADS else 1

    @property
    def keys(self) -> int:
        """The keys of a block, padding included."""
        return self.warps * self.fragments * 8

    @property
    def pad(self) -> int:
        """The padding elements between rows in shared memory: 16 bytes, so that neighbouring rows use different banks."""
        return 8 if self.half else 4

    @property
    def pitches(self) -> tuple[int, int, int]:
        """The elements from row to row of queries, of a buffer, and of partial results."""
        return self.first * self.chunk + self.pad, self.chunk + self.pad, self.chunk + 8

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The elements of the queries, of a buffer, and of the partial results."""
        q, k, o = self.pitches
        rows = self.groups * ROWS
        return rows * q, self.keys * k, self.warps * rows * o

    def shared(self, reductions: int) -> int:
        """Return the bytes of shared memory."""
        queries, buffer, parts = self.sizes
        size = 2 if self.half else 4
        return (queries + self.stages * buffer) * size + 4 * (parts + reductions * self.warps * self.groups * ROWS)


def block_of(attention: Attention, config: Mapping[str, int]) -> Block16:
    """Return the block of a config. Raise Unsuited if it is impossible."""
    groups, warps, chunk = config.get("groups", 1), config.get("warps", 4), config.get("chunk", 16)
    first, second = (-(-n // chunk) for n in (attention.depth.extent, attention.width))
    fragments = -(-attention.keys // (8 * warps))
    fragments += fragments % 2 if attention.half else 0
    if not 1 <= groups * warps <= MOST_WARPS or fragments > MOST_FRAGMENTS or chunk not in CHUNKS[attention.half :]:
        raise Unsuited(f"{groups} x {warps} warps of {fragments} fragments, {chunk} columns at a time")
    stages = min(config.get("stages", 2), first + second)
    return Block16(groups, warps, chunk, stages, fragments, first, second, attention.half)


def attention_kernel(found: Attention, binding: Binding) -> TaskKernel:
    """Return the kernel of a tiled attention. Raise Unsuited if its block is impossible."""
    operator, block = found.operator, block_of(found, dict(found.operator.config))
    if operator.tile[found.row] > block.groups * ROWS or len(operator.tile) != len(found.scores.axes):
        raise Unsuited(f"tile {operator.tile} for {block.groups} groups of {ROWS} rows")
    try:
        return _Attention(found, block, binding).kernel()
    except KeyError as problem:
        raise Unsuited(f"{problem} is read at a position other than its row") from problem


def copied_together(o: Operand, column: Axis, wide: int) -> int:
    """Return the elements of an operand that are copied at a time along ``column``: ``wide`` or one."""
    others = [s for n, s in o.steps.items() if n != column.name]
    whole = o.steps.get(column.name, 0) == 1 and o.aligned and o.constant % wide == 0 and all(s % wide == 0 for s in others)
    return wide if whole and column.extent % wide == 0 else 1


def ends_of(found: Attention) -> bool:
    """Return True if all reductions, including the sum over keys, stop at one length of the run."""
    stops = {(s.compute, s.axis): s.extent for s in found.operator.reduce_bounds}
    extents = {stops.get((c.name, r.name)) for c in (*found.reductions, found.context) for r in live_axes(c.reduce)}
    return len(extents) == 1 and None not in extents


class _Attention:
    def __init__(self, found: Attention, block: Block16, binding: Binding) -> None:
        self.a, self.b, self.binding = found, block, binding
        maps = {c.name: c for c in (*found.between, *found.after) if not c.reduce}
        shared = block.shared(len(found.reductions))
        device = device_source("copies", "mma", "attention_f16" if block.half else "attention_tf32x3")
        # Shared memory leaves room for few blocks, so saving registers, or even spilling, does not increase their number.
        self.ends = ends_of(found)
        device += device_source("attention_ended_f16" if block.half else "attention_ended_tf32x3") if self.ends else ""
        self.frame = Frame(found.operator, binding, maps, block.threads, shared=shared, dynamic=shared, device=device, resident=1)
        self.type = "unsigned short" if block.half else "float"
        if block.half:
            self.frame.unit.target = ROUNDED
        self.pointer = {a.tensor: f"p{k}" for k, a in enumerate(self.frame.arguments)}
        self.own = found.scores.name
        self.known: dict[Load, str] = {}

    def kernel(self) -> TaskKernel:
        """Return the finished kernel."""
        self._places()
        self._write_fetches()
        self._write_scores()
        for number, c in enumerate(self.a.reductions):
            self._hold_before(c)
            self._write_reduction(number, c)
        self._hold_before(None)
        self._write_context()
        return self.frame.kernel("t_")

    # --- places and copies ----------------------------------------------------------------------

    def _places(self) -> None:
        b, line, (queries, buffer, parts) = self.b, self.frame.line, self.b.sizes
        pq, pk, _ = b.pitches
        line("extern __shared__ __align__(16) char memory[];")
        line(f"{self.type} *const qs = ({self.type} *)memory, *const ring = qs + {queries};")
        line(f"float *const parts = (float *)(ring + {b.stages * buffer}), *const joins = parts + {parts};")
        line(f"const int group = tid / {WARP * b.warps}, own = tid / {WARP} % {b.warps};")
        line("const int lg = tid % 32 / 4, lt = tid % 4;")
        self.limit = self.frame.stop(self.a.context, self.a.context.reduce) if self.ends else str(self.a.keys)
        if self.ends:  # the keys of the run are distributed over all warps
            each = f"({ceiling_quotient(self.limit, 16 * b.warps)}) * 2" if b.half else ceiling_quotient(self.limit, 8 * b.warps)
            line(f"const int count = {each}, key0 = own * count * 8;")
        else:
            line(f"const int key0 = own * {b.fragments * 8};")
        if b.half:
            # Blocks of ldmatrix: the layout of the operands determines the row of each lane.
            line("const int l8 = tid % 8, lb = tid / 8 % 2 * 8, lc = tid / 16 % 2 * 8;")
            line(f"const int qat = (group * {ROWS} + l8 + lb) * {pq} + lc, kat = (key0 + l8 + lc) * {pk} + lb;")
            line(f"const int vat = (key0 + l8 + lb) * {pk} + lc;")
        else:
            line(f"const int qat = (group * {ROWS} + lg) * {pq} + lt, kat = (key0 + lg) * {pk} + lt;")
            line(f"const int vat = (key0 + lt * 2) * {pk} + lg;")
        last = self.a.rows - 1
        for h in (0, 1):
            line(f"const int row{h} = min(o{self.a.row} + group * {ROWS} + lg + {8 * h}, {last});")

    def _write_fetches(self) -> None:
        """Write the copies of the queries and the first buffers. ``fetch`` copies chunk ``c`` of keys, then of values, into the
        next buffer."""
        a, b, line, (pq, pk, _) = self.a, self.b, self.frame.line, self.b.pitches
        row, key = a.scores.axes[a.row].name, a.scores.axes[a.column].name
        left = f"{a.rows} - o{a.row}" if a.rows % a.operator.tile[a.row] else str(a.operator.tile[a.row])
        line("// Copies of a chunk of keys or values.")
        with self.frame.scope("const auto fetch = [&](int c)", end="};"):
            line(f"{self.type} *const to = ring + c % {b.stages} * {b.sizes[1]};")
            with self.frame.scope(f"if (c < {b.first})"):
                self._copy("to", a.k, a.scores, (key, b.keys, self.limit), (a.depth, b.chunk, f"c * {b.chunk}"), pk)
            keys = next(r.name for r in a.context.reduce if r.extent > 1)
            place = f"(c - {b.first}) * {b.chunk}" if b.first else f"c * {b.chunk}"
            with self.frame.scope(f"else if (c < {b.first + b.second})"):
                self._copy("to", a.v, a.context, (keys, b.keys, self.limit), (a.context.axes[a.column], b.chunk, place), pk)
            line("rm_commit();")
        line("// Queries, and the first chunks.")
        line("rm_after();")
        rows = b.groups * ROWS
        self._copy("qs", a.q, a.scores, (row, rows, f"min({left}, {rows})"), (a.depth, b.first * b.chunk, "0"), pq)
        self.frame.block.lines += [f"fetch({c});" for c in range(b.stages)]

    def _copy(
        self, to: str, o: Operand, product: Compute, across: tuple[str, int, str], along: tuple[Axis, int, str], pitch: int
    ) -> None:
        """Write copies of ``across`` (axis, rows, valid rows) by ``along`` (axis, columns, first column), zero outside."""
        (axis, rows, limit), (column, columns, start), line = across, along, self.frame.line
        step, across_step = o.steps.get(column.name, 0), o.steps.get(axis, 0)
        wide = 16 // (2 if self.b.half else 4)
        vector = copied_together(o, column, wide)
        names = {x.name: f"o{d}" for d, x in enumerate(product.axes) if d != self.a.column and x.extent > 1}
        base = format_sum(weighted_terms(o.steps, names), o.constant)
        words, copy = columns // vector, {wide: "rm_copy16", 1: "rm_copy2" if self.b.half else "rm_copy4"}[vector]
        turned = step != 1 and across_step == 1
        places = f"i % {rows}, w = i / {rows} * {vector}" if turned else f"i / {words}, w = i % {words} * {vector}"
        copied = f"count * {8 * self.b.warps * words}" if self.ends and to == "to" and not turned else rows * words
        head = f"for (int i = tid; i < {copied}; i += {self.b.threads})"
        with self.frame.scope(head, f"#pragma unroll {self.b.unroll}"):
            line(f"const int r = {places}, x = {start} + w;")
            line(f"const bool there = r < {limit} && x < {column.extent};")
            place = f"{base} + r * {across_step} + x * {step}"
            line(f"{copy}({to} + r * {pitch} + w, {self.pointer[o.tensor]} + (there ? {place} : 0), there);")

    # --- products -------------------------------------------------------------------------------

    def _write_refill(self) -> None:
        """Write a wait until all warps have left the buffer of chunk ``c``, and the copy of its next chunk."""
        if self.b.first + self.b.second > self.b.stages:
            self.frame.block.lines += ["__syncthreads();", f"fetch(c + {self.b.stages});"]

    def _wait_lines(self) -> list[str]:
        """Return the wait for the copies of chunk ``c``. Every chunk is one group of copies. If buffers are refilled, ``stages``
        groups are always in flight."""
        chunks, stages = self.b.first + self.b.second, self.b.stages
        if chunks > stages:
            return [f"rm_arrived<{stages - 1}>();", "__syncthreads();"]
        return [f"if (c < {self.b.first}) rm_arrived<{self.b.second}>(); else rm_arrived<0>();", "__syncthreads();"]

    def _write_scores(self) -> None:
        b, (pq, pk, _), lines = self.b, self.b.pitches, self.frame.block.lines
        lines += ["// The first product: scores of this warp's keys.", f"float s[{b.fragments}][4] = {{}};"]
        with self.frame.scope(f"for (int c = 0; c < {b.first}; ++c)", "#pragma unroll 1"):
            lines += self._wait_lines()
            places = f"qs + qat + c * {b.chunk}, ring + c % {b.stages} * {b.sizes[1]} + kat"
            lines.append(f"rm_scores<{b.fragments}, {b.chunk}, {pq}, {pk}>({places}, s{self._count_argument});")
            self._write_refill()

    def _write_context(self) -> None:
        b, (_, pk, po), lines, rows = self.b, self.b.pitches, self.frame.block.lines, self.b.groups * ROWS
        lines.append("// The second product: this warp's part of the result.")
        places = f"s, ring + c % {b.stages} * {b.sizes[1]} + vat"
        with self.frame.scope(f"for (int c = {b.first}; c < {b.first + b.second}; ++c)", "#pragma unroll 1"):
            lines += self._wait_lines()
            lines += [
                f"float o[{b.chunk // 8}][4] = {{}};",
                f"rm_context<{b.fragments}, {b.chunk // 8}, {pk}>({places}, o{self._count_argument});",
                f"float *const mine = parts + (own * {rows} + group * {ROWS} + lg) * {po} + lt * 2;",
            ]
            with self.frame.scope(f"for (int j = 0; j < {b.chunk // 8}; ++j)", "#pragma unroll"):
                lines.append("*(float2 *)(mine + j * 8) = make_float2(o[j][0], o[j][1]);")
                lines.append(f"*(float2 *)(mine + {8 * po} + j * 8) = make_float2(o[j][2], o[j][3]);")
            self._write_refill()
            if b.first + b.second <= b.stages:
                lines.append("__syncthreads();")
            self._write_store()

    def _write_store(self) -> None:
        a, b, (_, _, po), rows = self.a, self.b, self.b.pitches, self.b.groups * ROWS
        tile = a.operator.tile[a.row]
        self.frame.line("// The parts of all warps, maps and stores.")
        self.frame.line(f"#pragma unroll {b.unroll}")
        with self.frame.block.nest(f"for (int i = tid; i < {rows * b.chunk}; i += {b.threads})") as scope:
            scope.line(f"const int local = i / {b.chunk}, row = o{a.row} + local;")
            scope.line(f"const int column = (c - {b.first}) * {b.chunk} + i % {b.chunk};")
            tests = [f"local < {tile}"] if tile < rows else []
            tests += [f"row < {a.rows}"] if a.rows % tile else []
            tests += [f"column < {a.width}"] if a.width % b.chunk else []
            if tests:
                scope.line(f"if (!({' && '.join(tests)})) continue;")
            scope.line(f"float sum = parts[local * {po} + i % {b.chunk}];")
            scope.lines += [
                "#pragma unroll 4",
                f"for (int w = 1; w < {b.warps}; ++w) sum += parts[(w * {rows} + local) * {po} + i % {b.chunk}];",
            ]
            self.frame.unit.ranges |= {"row": (0, a.rows - 1), "column": (0, a.width - 1)}
            point = a.point(Ref("row"), Ref("column"))
            write_epilogue(scope, self.frame.places, Load(a.context.name, point), "sum", a.context.dtype, a.operator.outputs)

    # --- rows -----------------------------------------------------------------------------------

    def _define_element(self, scope: Block) -> tuple[Expr, ...]:
        """Define score ``i`` of this thread and its known values; return its point."""
        a, last = self.a, self.a.keys - 1
        if self.ends:
            scope.line("if (i / 4 >= count) continue;")
        scope.line("const int row = i % 4 / 2 ? row1 : row0, place = key0 + i / 4 * 8 + lt * 2 + i % 2;")
        scope.line(f"const int key = {f'min(place, {self._last})' if self._is_ragged else 'place'};")
        self.frame.unit.ranges |= {"row": (0, a.rows - 1), "key": (0, last)}
        point = a.point(Ref("row"), Ref("key"))
        scope.memo[Load(self.own, point)] = Val(
            "s[i / 4][i % 4]", self.binding.types[self.own].dtype, atom=True, half=self.own != a.scores.name
        )
        for load, text in self.known.items():
            scope.memo[load] = Val(text, self.binding.types[load.tensor].dtype, atom=True)
        return point

    @property
    def _is_ragged(self) -> bool:
        return self.ends or self.b.keys != self.a.keys

    @property
    def _last(self) -> str:
        return f"{self.limit} - 1" if self.ends else str(self.a.keys - 1)

    @property
    def _count_argument(self) -> str:
        return ", count" if self.ends else ""

    def _each(self) -> str:
        self.frame.line("#pragma unroll")
        return f"for (int i = 0; i < {self.b.fragments * 4}; ++i)"

    def _hold_before(self, end: Compute | None) -> None:
        """Write the matrices in ``held``, in program order up to ``end``; each overwrites the previous one."""
        for c in self.a.between:
            if c is end:
                return
            if c.name not in self.a.held or c.name not in self.frame.unit.inlined:
                continue
            with self.frame.block.nest(self._each()) as scope:
                point = self._define_element(scope)
                value = convert_value(CUDA, scope.load(Load(c.name, point)), "float32").text
                # Padded keys add zero to sums.
                scope.line(f"s[i / 4][i % 4] = {f'place < {self.limit} ? {value} : 0.0f' if self._is_ragged else value};")
            self.own = c.name
            del self.frame.unit.inlined[c.name]

    def _write_reduction(self, number: int, c: Compute) -> None:
        """Write reduction ``c`` of the thread's two rows, with the result in every thread of these rows."""
        b, block, rows, t = self.b, self.frame.block, self.b.groups * ROWS, f"t{number}"
        begin = initial_value(CUDA, c)
        block.line(f"// Reduction {number} along rows.")
        block.line(f"float {t}[2] = {{{begin}, {begin}}};")
        with block.nest(self._each()) as scope:
            self._define_element(scope)
            values = self.a.along(c, Ref("row"), Ref("key"))
            statement = scope.combine(c, f"{t}[i % 4 / 2]", scope.value(ex.substitute(c.body, values)))
            scope.line(f"if (place < {self.limit}) {{ {statement} }}" if self._is_ragged else statement)
        other = Val("other", c.dtype, atom=True)
        with self.frame.scope("for (int i = 0; i < 4; ++i)", "#pragma unroll"):
            block.line(f"const float other = __shfl_xor_sync(0xffffffffu, {t}[i % 2], 1 + i / 2);")
            block.line(block.combine(c, f"{t}[i % 2]", other))
        if b.warps > 1:
            share = f"j{number}"
            block.line(f"float *const {share} = joins + {number * b.warps * rows} + group * {ROWS} + lg;")
            block.line(f"if (lt == 0) {{ {share}[own * {rows}] = {t}[0]; {share}[own * {rows} + 8] = {t}[1]; }}")
            block.line("__syncthreads();")
            with self.frame.scope("for (int h = 0; h < 2; ++h)", "#pragma unroll"):
                block.line(f"{t}[h] = {share}[8 * h];")
                with self.frame.scope(f"for (int w = 1; w < {b.warps}; ++w)", "#pragma unroll 4"):
                    block.line(f"const float other = {share}[w * {rows} + 8 * h];")
                    block.line(block.combine(c, f"{t}[h]", other))
        values = self.a.along(c, Ref("row"), Ref("key"))
        self.known[Load(c.name, tuple(values[x.name] for x in c.axes))] = f"{t}[i % 4 / 2]"
