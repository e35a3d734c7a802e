"""The ``panel`` family: contractions on CPU cores (Goto and van de Geijn, 2008; BLIS).

One work-item computes one task. The column operand is read in place if its columns are consecutive. Otherwise it is gathered once
into a panel ``[K][columns]`` in the core's scratch memory. Constant operands are packed when the program is loaded. A register
tile of ``mr`` rows by ``nv`` vectors sums over all of K with explicit fused multiply-adds. The epilogue maps are applied to it
before it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Final

from rammer.codegen import QUOTIENT, Unsuited, combine_digits, format_store, split_digits
from rammer.codegen.vector_text import STORED
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.expr import Expr, Load, Ref
from rammer.ir.types import itemsize

from rammer_rocm.dialect import CPU_DIALECT
from rammer_rocm.kernels.task import TaskFunction, TaskText, extent_text
from rammer_rocm.kernels.vector import Vector, integer_text, read_element, read_vector, round_vector, vector_type, write_vector
from rammer_rocm.panel.gather import Gather, Region, columns_region
from rammer_rocm.panel.last_columns import BLOCKS, HEIGHTS, columns_across, sum_across
from rammer_rocm.panel.packing import pack_columns, pack_rows
from rammer_rocm.panel.padding_taps import skips_of
from rammer_rocm.panel.recognise import (
    Access,
    PanelOperand,
    PanelProduct,
    dense_axes,
    ended_axes,
    epilogue_accesses,
    has_contiguous_columns,
    load_access,
)
from rammer_rocm.panel.reduction_loops import PanelDepth, join_loops, write_loops
from rammer_rocm.panel.window_copy import PanelWindow, window_of

#: ``rm_ahead_0`` prefetches bytes from ``p`` for reading, ``rm_ahead_1`` for writing. OpenCL C's ``prefetch`` does nothing on
#: Intel's runtime. If the compiler lacks the builtin or generic addresses, both do nothing.
HELPERS: Final = """
#ifndef RM_AHEAD
#define RM_AHEAD(p, write)
#if defined(__has_builtin) && (__OPENCL_C_VERSION__ == 200 || defined(__opencl_c_generic_address_space))
#if __has_builtin(__builtin_prefetch)
#undef RM_AHEAD
#define RM_AHEAD(p, write) __builtin_prefetch((const void *)(p), write, 3)
#endif
#endif
inline static void rm_ahead_0(__global const char *p, int count) { for (int n = 0; n < count; n += 64) RM_AHEAD(p + n, 0); }
inline static void rm_ahead_1(__global const char *p, int count) { for (int n = 0; n < count; n += 64) RM_AHEAD(p + n, 1); }
#endif
"""


def column_address(p: PanelProduct, steps: Access, column: str) -> str:
    """Return the address of ``column`` relative to column 0."""
    parts, below = [], ""
    for axis in reversed(p.columns):
        if steps.step(axis) and p.tile[axis] > 1:
            index = f"({column}) / ({below})" if below else f"({column})"
            wrapped = index if axis == p.columns[0] else f"({index} % e_{axis})"
            parts.append(f"{wrapped} * {steps.step(axis)}")
        below = f"{below} * e_{axis}" if below else f"e_{axis}"
    return " + ".join(parts) or "0"


def walk(p: PanelProduct, steps: Access) -> Iterator[str]:
    """Yield the start of a block that defines the address ``at`` of column ``col``, relative to column 0. The block also defines
    the column's run indices. This needs one division per vector instead of one per lane."""
    yield f"{{ int at = {column_address(p, steps, 'col')};"
    below = ""
    for axis in reversed(p.columns[1:]):
        index = f"col / ({below})" if below else "col"
        yield f"int i_{axis} = {index} % e_{axis};"
        below = f"{below} * e_{axis}" if below else f"e_{axis}"


def advance_column(p: PanelProduct, steps: Access) -> str:
    """Return the statement that advances ``at`` to the next column."""
    inner = [a for a in reversed(p.columns)]
    text = f"at += {steps.step(inner[0])};"
    for axis, outer in pairwise(inner):
        back = f"{steps.step(outer)} - e_{axis} * {steps.step(axis)}"
        text += f" if (++i_{axis} == e_{axis}) {{ i_{axis} = 0; at += {back};"
    return text + " }" * (len(inner) - 1)


def ends_of(p: PanelProduct, pointer: Callable[[str], str]) -> dict[str, str]:
    """Return the ends of rows and columns, by axis."""
    return {axis: extent_text(extent, pointer) for axis, extent in ended_axes(p.operator).items()}


def stops_of(p: PanelProduct, known: Collection[str], pointer: Callable[[str], str]) -> dict[str, str]:
    """Return the ends of the sum by axis, except for axes in ``known``. Products of bytes have no dynamic ends: they sum up to
    the bound."""
    stops = [s for s in p.operator.reduce_bounds if s.compute == p.main.name and p.quads is None and p.extent[s.axis] > 1]
    ends = {s.axis: extent_text(s.extent, pointer) for s in stops if s.axis not in known}
    return {axis: f"(int)min(max({text}, 0l), {p.extent[axis]}l)" for axis, text in ends.items()}


def lanes_before(p: PanelProduct, lanes: int, axis: str, limit: str, origin: Callable[[str], str]) -> str:
    """Return a mask of the lanes of a column vector at which ``axis`` is less than ``limit``. The vector starts at ``col`` in row
    ``row``. ``origin`` maps an axis to its first value in the task."""
    kind = vector_type(lanes, "int")
    if axis not in p.columns or p.tile[axis] == 1:
        return f"({kind})({origin(axis)}{' + row' if axis == p.row else ''} < {limit} ? -1 : 0)"
    if len(p.columns) > 1:
        raise Unsuited("an end among several axes of columns")
    if lanes == 1:
        return f"({origin(axis)} + col < {limit} ? -1 : 0)"
    return f"rm_within{lanes}({origin(axis)} + col, 1, max({limit}, 0l))"


def write_panel_task(product: PanelProduct, binding: Binding, lanes: int) -> TaskFunction:
    """Return the task function of a tiled product with config ``mr`` (rows), ``nv`` (vectors of ``lanes``) and ``window``. With
    ``window=1`` one padded copy serves all taps. Raises Unsuited if it cannot be written."""
    return Panel(product, binding, lanes).function()


class Panel(TaskText):
    """A writer of one task function; it multiplies float32 unless a subclass overrides the types."""

    #: The family name, and the C types of panel or packed elements and of sums.
    family, element, sum = "panel", "float", "float"
    #: True if the last columns may be summed across rows, and the last rows by a lower register tile.
    floats = True

    def __init__(self, product: PanelProduct, binding: Binding, lanes: int) -> None:
        config = dict(product.operator.config)
        super().__init__(binding, lanes)
        self.p = product
        self.mr, self.nv = config.get("mr", 8), config.get("nv", 2)
        self.high = self.mr
        self.window: PanelWindow | None = window_of(product) if config.get("window") else None
        self.walked = PanelDepth(product, skips_of(product, binding), config.get("chunk", 0))
        self.scratch = 0
        self.gaps = self.window is not None and len(product.columns) > 1
        self.flat = dense_axes(product.main.reduce)
        width = self.window.width if self.window else product.width
        few = self.floats and self.mr in HEIGHTS and not self.walked.steps
        self.rest = columns_across(product, binding, width, lanes) if few else 0

    # --- the function ---------------------------------------------------------------------------

    def function(self) -> TaskFunction:
        self._write_origins()
        self._write_bounds()
        self.text.all(self.walked.ends())
        a = self.rows_operand()
        self.text.all(self.walked.begin())
        b = self.columns_operand()
        self._reserve_sums()
        full, single = self.nv * self.lanes, self.lanes
        kind, text = vector_type(self.lanes, self.sum), self.text
        text.line("for (int c = 0; c < wide;) {")
        text.line(f"const int nv = wide - c > {full - single + self.rest} ? {self.nv} : 1;")
        text.line(f"const int high = {self._tile_height()};")
        text.line("for (int r = 0; r < rows; r += high) {")
        text.line(f"{kind} tile[{max(self.mr * self.nv, BLOCKS * self.mr * bool(self.rest)) + 1}];")
        if self.walked.steps:
            text.line(f"const int at = next; next += {self.mr} * nv;")
        self.pointers(a, b)
        self._ahead()
        if self.rest:
            with text.block(f"if (wide - c <= {self.rest})"):
                sum_across(text, self.p, b, (self.rest, self.mr, single), partial(self.k_loops, a, b))
            text.line("else")
        for least in sorted({self.nv, 1}, reverse=True):
            with text.block(f"if (nv >= {least})" if least == self.nv else "else"):
                self._write_heights(a, b, least)
        if self.walked.steps:
            wait = f"for (int v = 0; v < {self.mr} * nv; ++v) vstore{single}(tile[v], at + v, sums);"
            text.line(f"if (q_end < {self.p.extent[self.walked.outer]}) {{ {wait} continue; }}")
        self._write_epilogue()
        text.line("}")
        text.line(f"c += nv * {single};")
        text.line("}")
        text.all(["}"] * bool(self.walked.steps))
        return self.finished(self.family, self.scratch, HELPERS, self.stops)

    def _write_heights(self, a: PanelOperand, b: PanelOperand, nv: int) -> None:
        """Write the products of a register tile; with dynamic rows, a few last rows use lower register tiles."""
        ends = self.floats and self.p.row in ended_axes(self.p.operator) and not a.packed and not self.walked.steps
        for high in sorted({-(-self.mr // n) for n in ((4, 2) if ends else ())} - {self.mr}):
            self.high = high
            with self.text.block(f"if (rows - r <= {high})"):
                self.multiply(a, b, nv)
            self.text.line("else")
        self.high = self.mr
        with self.text.block("") if ends else nullcontext():
            self.multiply(a, b, nv)

    def _tile_height(self) -> str:
        """Return the number of rows of a register tile: several blocks if the last columns are summed across rows."""
        return f"wide - c > {self.rest} ? {self.mr} : {BLOCKS * self.mr}" if self.rest else str(self.mr)

    def _reserve_sums(self) -> None:
        """Reserve memory after the gathered panel for sums between chunks, one register tile after another."""
        if not self.walked.steps:
            return
        if not self.scratch:
            raise Unsuited("chunks of what is not gathered")
        place = -(-self.scratch // 64) * 64
        vectors = -(-(self.window.width if self.window else self.p.width) // self.lanes) + self.nv
        self.scratch = place + vectors * -(-self.p.rows // self.mr) * self.mr * self.lanes * 4
        self.text.line(f"__global float *sums = (__global float *)(scratch + {place});")

    def loaded(self, tensor: str) -> str:
        """Return the C type of a tensor's elements in registers."""
        kind = self.stored(tensor)
        return "float" if kind in STORED else CPU_DIALECT.types[kind]

    def _write_origins(self) -> None:
        """Write the tile coordinates ``t_``, origins ``o_`` and clipped extents ``e_`` of every axis."""
        operator = self.p.operator
        ends = self._axis_ends()
        places = zip(self.p.main.axes, operator.tile, operator.grid, split_digits("task", operator.grid), strict=True)
        for axis, tile, count, place in places:
            self.text.line(f"const int t_{axis.name} = {place if count > 1 else '0'};")
            self.text.line(f"const int o_{axis.name} = t_{axis.name} * {tile};")
            rest = f"{axis.extent} - o_{axis.name}"
            size = str(tile) if axis.extent % tile == 0 else f"min({tile}, {rest})"
            if axis.name in ends:
                size = f"min({size}, (int)max({ends[axis.name]} - o_{axis.name}, 0l))"
            self.text.line(f"const int e_{axis.name} = {size};")
        self.text.line(f"const int rows = {' * '.join(f'e_{r}' for r in self.p.row_axes) or '1'};")
        self.text.line(f"const int cols = {' * '.join(f'e_{c}' for c in self.p.columns)};")
        wide = "cols"
        if self.gaps and self.window:
            wide = f"(e_{self.p.columns[0]} - 1) * {self.window.pitch} + e_{self.p.columns[1]}"
        self.text.line(f"const int wide = {wide};")

    def _axis_ends(self) -> dict[str, str]:
        """Return the ends of rows and columns in a ranged program, by axis."""
        found = ends_of(self.p, self.pointer) if self.window is None else {}
        self.stops = bool(found)
        return found

    def _write_bounds(self) -> None:
        found = stops_of(self.p, self.walked.walks, self.pointer) if self.window is None else {}
        self.text.all(f"const int hi_{axis} = {end};" for axis, end in found.items())
        self.walked = replace(self.walked, stopped=tuple(found))

    def address(self, steps: Access, extra: Iterable[str] = ()) -> str:
        """Return the element address of the task's first point, plus ``extra`` terms."""
        parts = [str(steps.constant)] if steps.constant else []
        for axis, step in steps.steps.items():
            if axis not in self.flat:
                parts.append(f"{self.origin(axis)} * {step}")
        return " + ".join([*parts, *extra]) or "0"

    def origin(self, axis: str) -> str:
        """Return an axis's first value in the task."""
        name, _, divisor = axis.partition(QUOTIENT)
        return f"(o_{name} / {divisor})" if divisor else f"o_{name}"

    # --- operands -------------------------------------------------------------------------------

    def rows_operand(self) -> PanelOperand:
        """Return the access to rows, and write its setup."""
        p, a = self.p, self.p.a
        if a.tensor in self.binding.constants:
            packing, coordinates = pack_rows(p, self.mr)
            pointer = self.pointer(a.tensor, packed=packing)
            block = p.depth * self.mr
            blocks = -(-p.rows // self.mr)
            place = combine_digits(coordinates)
            self.text.line(f"__global const float *A = {pointer} + (size_t)({place}) * {blocks * block};")
            return PanelOperand("A", {r: s * self.mr for r, s in self.flat.items()}, packed=True)
        steps, dtype = load_access(a, self.binding), self.stored(a.tensor)
        pointer = self.pointer(a.tensor)
        self.text.line(f"__global const {CPU_DIALECT.types[dtype]} *A = {pointer} + ({self.address(steps)});")
        row = steps.step(p.row) if p.row else 0
        return PanelOperand("A", {r: steps.step(r) for r in self.flat}, row_step=row, dtype=dtype)

    def columns_operand(self) -> PanelOperand:
        """Return the access to columns, and write its setup."""
        p, b, dtype = self.p, self.p.b, self.stored(self.p.b.tensor)
        if self.window:
            if self.walked.steps and self.walked.outer not in self.window.channels:
                raise Unsuited("chunks of taps")
            count = self.window.count * self.walked.gathered // self.p.depth
            self.scratch = (count * self.window.block(self.lanes) + self.lanes) * 4
            self.gather(self.window.region(self.lanes, self.walked.walks))
            return PanelOperand("panel", self.window.steps(self.lanes))
        kind = CPU_DIALECT.types[dtype]
        if b.tensor in self.binding.constants and b.tensor not in p.before and len(p.columns) == 1:
            packing, coordinates = pack_columns(p, self.nv * self.lanes, dtype)
            pointer = self.pointer(b.tensor, packed=packing)
            size = -(-p.width // (self.nv * self.lanes)) * p.depth * self.nv * self.lanes
            self.text.line(f"__global const {kind} *B = {pointer} + (size_t)({combine_digits(coordinates)}) * {size};")
            return PanelOperand("B", {r: s * self.nv * self.lanes for r, s in self.flat.items()}, packed=True, dtype=dtype)
        if b.tensor not in p.before and b.fill is None:
            steps = load_access(b, self.binding)
            if has_contiguous_columns(steps, p):
                self.text.line(f"__global const {kind} *B = {self.pointer(b.tensor)} + ({self.address(steps)});")
                return PanelOperand("B", {r: steps.step(r) for r in self.flat}, dtype=dtype)
        return self.gathered()

    def gathered(self) -> PanelOperand:
        """Gather the panel ``[K][stride]`` in scratch memory; the stride avoids multiples of 4 KiB (cache sets)."""
        stride = -(-self.p.width // self.lanes) * self.lanes + self.lanes
        stride += self.lanes * (stride % 1024 == 0)
        self.scratch = (self.walked.gathered + 1) * stride * 4
        self.gather(columns_region(self.p, stride, self.walked.walks))
        return PanelOperand("panel", {r: s * stride for r, s in self.flat.items()})

    def gather(self, region: Region) -> None:
        """Write the statements that copy a region into the panel."""
        self.text.line(f"__global {self.element} *panel = (__global {self.element} *)scratch;")
        self.text.all(self.gather_of(region).lines())

    def gather_of(self, region: Region) -> Gather:
        """Return the writer that gathers the columns."""
        return Gather(self.p, self.binding, self.lanes, region, self.pointer, self.origin)

    # --- the microkernel ------------------------------------------------------------------------

    def pointers(self, a: PanelOperand, b: PanelOperand) -> None:
        """Write the pointer ``b`` to the first column, and ``a`` to the first row (or ``a0``, ``a1``, ... to every row)."""
        text, full = self.text, self.nv * self.lanes
        place = f"c / {full} * {full * self.p.depth} + c % {full}" if b.packed else "c"
        text.line(f"__global const {b.spelling} *b = {b.pointer} + {place};")
        if a.packed:
            text.line(f"__global const {a.spelling} *a = {a.pointer} + r * {self.p.depth};")
            return
        for i in range(self.mr):
            # Rows past the end repeat the last row; they are never stored.
            text.line(f"__global const {a.spelling} *a{i} = {a.pointer} + min(r + {i}, rows - 1) * {a.row_step};")

    def multiply(self, a: PanelOperand, b: PanelOperand, nv: int) -> None:
        """Write the sum over K in registers, and store it in ``tile`` row by row with ``nv`` vectors each."""
        kind = vector_type(self.lanes)
        for i in range(self.high):
            self.text.line(f"{kind} {', '.join(f's{i}_{j} = 0' for j in range(nv))};")
        if self.walked.steps:
            places = [(i, j) for i in range(self.high) for j in range(nv)]
            before = " ".join(f"s{i}_{j} = vload{self.lanes}(at + {i * nv + j}, sums);" for i, j in places)
            self.text.line(f"if (q) {{ {before} }}")
        sums = [f"s{i}_{j}" for i in range(self.high) for j in range(nv)]
        self.k_loops(a, b, (sums, kind), lambda: self.multiply_add(a, b, nv))
        for i in range(self.high):
            self.text.line(" ".join(f"tile[{i * nv + j}] = s{i}_{j};" for j in range(nv)))

    def k_loops(self, a: PanelOperand, b: PanelOperand, sums: tuple[Sequence[str], str], step: Callable[[], None]) -> None:
        """Write a loop over each group of reduction axes that both operands step through evenly. The loops are blocked by the
        accumulators ``sums`` and their type; ``step`` writes the body."""
        axes = [(r.name, r.extent, a.steps[r.name], b.steps[r.name]) for r in self.p.main.reduce]
        groups = join_loops(axes, self.walked.walks)
        share = self.walked.gathered, self.p.depth
        groups = [replace(g, most=g.extent * share[0] // share[1]) if g.walk.chunk else g for g in groups]
        a_off = " + ".join(f"k{n} * {g.a}" for n, g in enumerate(groups)) or "0"
        b_off = " + ".join(f"{g.within(f'k{n}')} * {g.b}" for n, g in enumerate(groups)) or "0"

        def body() -> None:
            self.text.line(f"const int ka = {a_off}, kb = {b_off};")
            step()

        write_loops(self.text, groups, sums, body)

    def multiply_add(self, a: PanelOperand, b: PanelOperand, nv: int) -> None:
        """Write one product of every accumulator, at ``ka`` and ``kb``."""
        vector, text = self.lanes, self.text
        for j in range(nv):
            text.line(f"const {vector_type(vector)} b{j} = {read_vector(b.dtype, vector, 'b + kb', j)};")
        for i in range(self.high):
            source = read_element(a.dtype, "a", f"ka + {i}") if a.packed else read_element(a.dtype, f"a{i}", "ka")
            fmas = " ".join(f"s{i}_{j} = fma(w, b{j}, s{i}_{j});" for j in range(nv))
            text.line(f"{{ const {vector_type(vector)} w = {source}; {fmas} }}")

    def vector(self, load: Callable[[Load], str], prefix: str) -> Vector:
        """Return the writer of maps in vectors."""
        return Vector(self.lanes, load, prefix)

    # --- the epilogue ---------------------------------------------------------------------------

    def _write_epilogue(self) -> None:
        """Apply the epilogue maps to each vector of the register tile, and store the operator's outputs. The loop is not
        unrolled: it runs once per K multiplications, and a small source builds in half the time."""
        p, text = self.p, self.text
        self._open_vector_loops()
        names = {p.main.name: "total"}
        self._store_output(p.main.name, names)
        for number, c in enumerate(p.after):
            axes = dict(zip((a.name for a in c.axes), (a.name for a in p.main.axes), strict=True))
            vector = self.vector(partial(self._load, names, axes), f"v{number}_")
            vector.before = partial(self._before, axes)
            names[c.name] = vector.value(c.body)
            text.all(vector.lines)
            self._store_output(c.name, names)
        text.all(["}"] * (3 if self.gaps else 1))

    def _open_vector_loops(self) -> None:
        """Write the loops over the vectors of the register tile: ``total``, ``row``, first ``col``, and valid lanes ``have``. If
        the columns have gaps, vectors restart at every row of the output."""
        text, lanes, kind = self.text, self.lanes, vector_type(self.lanes, self.sum)
        if not self.gaps or self.window is None:
            text.line("for (int v = 0; v < min(high, rows - r) * nv; ++v) {")
            text.line(f"const int row = r + v / nv, col = c + v % nv * {lanes}, have = min({lanes}, cols - col);")
            text.line(f"const {kind} total = tile[v];")
            return
        outer, inner = self.p.columns
        pitch = self.window.pitch
        text.line("for (int i = 0; i < min(high, rows - r); ++i) {")
        more = f"s < nv * {lanes} && y < e_{outer}; s += {pitch} - x, x = 0, ++y"
        text.line(f"for (int s = 0, y = c / {pitch}, x = c % {pitch}; {more}) {{")
        text.line(f"const int count = min(nv * {lanes} - s, e_{inner} - x), row = r + i;")
        text.line(f"for (int n0 = 0; n0 < count; n0 += {lanes}) {{")
        text.line(f"const int col = y * e_{inner} + x + n0, have = min({lanes}, count - n0);")
        text.line(f"const {kind} total = vload{lanes}(0, (const {self.sum} *)tile + i * nv * {lanes} + s + n0);")

    def _ahead(self) -> None:
        """Write prefetches of the epilogue's memory operands; with chunks, only in the last chunk.

        The distance between a tile's rows is a whole image. The tile accesses only a few lines of each row, which hardware
        prefetchers do not predict. Sums along 64 channels need 0.4 us, about the latency of memory."""
        last = f"if (q_end == {self.p.extent[self.walked.outer]}) " if self.walked.steps else ""
        for load, written in () if self.gaps else epilogue_accesses(self.p):
            steps, kind = load_access(load, self.binding), self.stored(load.tensor)
            if has_contiguous_columns(steps, self.p):
                line = f"{self.pointer(load.tensor, written)} + ({self._row_address(steps)} + c)"
                call = f"rm_ahead_{int(written)}((__global const char *)({line}), nv * {self.lanes * itemsize(kind)})"
                self.text.line(f"{last}for (int row = r; row < min(r + high, rows); ++row) {call};")

    def _steps(self, load: Load, axes: Mapping[str, str]) -> Access:
        renamed = ex.substitute(load, {old: ex.Ref(new) for old, new in axes.items()})
        if not isinstance(renamed, Load) or load.fill is not None:
            raise Unsuited(f"{load} in an epilogue")
        return load_access(renamed, self.binding)

    def _load(self, names: Mapping[str, str], axes: Mapping[str, str], load: Load) -> str:
        if load.tensor in names:
            return round_vector(self.stored(load.tensor), self.lanes, names[load.tensor])
        steps, p = self._steps(load, axes), self.p
        pointer, kind = self.pointer(load.tensor), self.stored(load.tensor)
        base = self._row_address(steps)
        if not any(steps.step(c) and p.tile[c] > 1 for c in p.columns):
            return f"({vector_type(self.lanes, self.loaded(load.tensor))})({read_element(kind, pointer, base)})"
        if has_contiguous_columns(steps, p):
            return read_vector(kind, self.lanes, f"{pointer} + ({base} + col)")
        columns = (f"min(col + {n}, cols - 1)" for n in range(self.lanes))
        lanes = (read_element(kind, pointer, f"{base} + {column_address(p, steps, column)}") for column in columns)
        return f"({vector_type(self.lanes, self.loaded(load.tensor))})({', '.join(lanes)})"

    def _before(self, axes: Mapping[str, str], axis: Expr, end: Expr) -> str:
        """Return a mask of the lanes at which ``axis`` is less than ``end``."""
        assert isinstance(axis, Ref)  # ``check_maps`` refuses other indices
        limit = integer_text(end, lambda load: f"{self.pointer(load.tensor)}[0]")
        return lanes_before(self.p, self.lanes, axes.get(axis.axis, axis.axis), limit, self.origin)

    def _row_address(self, steps: Access) -> str:
        """Return the address of column 0 in row ``row``."""
        row = [f"row * {steps.step(self.p.row)}"] if self.p.row and steps.step(self.p.row) else []
        return self.address(steps, extra=row)

    def _store_output(self, name: str, names: Mapping[str, str]) -> None:
        p = self.p
        if name not in p.operator.outputs:
            return
        compute = next(c for c in (p.main, *p.after) if c.name == name)
        axes = dict(zip((a.name for a in compute.axes), (a.name for a in p.main.axes), strict=True))
        steps = self._steps(Load(name, tuple(ex.Ref(a.name) for a in compute.axes)), axes)
        pointer, base, value, kind = self.pointer(name, written=True), self._row_address(steps), names[name], self.stored(name)
        # A vector with lanes in a gap may still be stored whole: later stores overwrite the excess.
        lane = "for (int n = 0; n < have; ++n)"
        if has_contiguous_columns(steps, p):
            whole = write_vector(kind, self.lanes, f"{pointer} + ({base} + col)", value)
            self.text.line(f"if (col + {self.lanes} <= cols) {whole}")
            self.text.line("else {")
            place = f"{base} + col + n"
        else:
            self.text.all(walk(p, steps))
            lane, place = f"{lane} {{", f"{base} + at"
        self.text.line(f"{self.loaded(name)} lane[{self.lanes}]; vstore{self.lanes}({value}, 0, lane);")
        self.text.line(f"{lane} {format_store(CPU_DIALECT, pointer, place, kind, 'lane[n]')}")
        if lane.endswith("{"):
            self.text.all([advance_column(p, steps)])
            self.text.line("}")
        self.text.line("}")
