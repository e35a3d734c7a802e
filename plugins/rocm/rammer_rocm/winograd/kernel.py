"""The task function of the family ``winograd``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from rammer.codegen import Packing, Unsuited, block_sizes, format_sum, in_tiles, make_packing, write_in_blocks
from rammer.device.manifest import Array
from rammer.ir.compute import Axis

from rammer_rocm.dialect import CPU_DIALECT
from rammer_rocm.kernels.task import TaskFunction, extent_text
from rammer_rocm.kernels.vector import read_element, read_vector, vector_type
from rammer_rocm.kernels.window_text import WindowText
from rammer_rocm.winograd.recognise import PLACES, SIDE, TAPS, UNDER, WinogradForm

#: Sums of three weights along a side.
WEIGHTS: Final = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
#: Sums of four inputs (``{0}`` to ``{3}``) along a side, and of four products.
INPUTS: Final = ("{0} - {2}", "{1} + {2}", "{2} - {1}", "{1} - {3}")
PRODUCTS: Final = ("{0} + {1} + {2}", "{1} - {2} - {3}")
#: Recovers a weight from the sums at ``u``, with ``step`` elements between positions.
HELPERS: Final = """
inline static float rm_winograd_side(__global const float *u, int step, int tap) {
  return tap == 0 ? u[0] : tap == 1 ? u[step] - u[2 * step] : u[3 * step];
}
inline static float rm_winograd_weight(__global const float *u, int step, int high, int wide) {
  if (high == 1) return rm_winograd_side(u + 4 * step, step, wide) - rm_winograd_side(u + 8 * step, step, wide);
  return rm_winograd_side(u + 6 * high * step, step, wide);
}
"""


def winograd_function(form: WinogradForm, lanes: int) -> TaskFunction:
    """Return the task function of a tiled operator. Raises Unsuited if it cannot be written."""
    if form.nv * form.mr > 64:
        raise Unsuited("a register tile that no core holds")
    return _Winograd(form, lanes).function()


def pack_weights(form: WinogradForm) -> Packing:
    """Return the sums of weights as ``[tiles, blocks, places, channels, mr]``, padded with zeros."""
    axes = {a.name: a for a in (*form.main.axes, *form.main.reduce)}
    rows, channels, mr, tile = axes[form.row].extent, form.channels, form.mr, form.tile[form.row]
    tiles, blocks = -(-rows // tile), -(-tile // mr)

    def arrange(full: Array) -> Array:
        # One matrix product: einsum over both sides needed half of a warm start.
        squares = full.reshape(rows * channels, TAPS * TAPS).astype(np.float64)
        summed = (squares @ np.kron(WEIGHTS, WEIGHTS).T).reshape(1, rows, channels, PLACES)
        cut = in_tiles(np.swapaxes(summed, 2, 3), tile, mr).reshape(tiles, blocks, mr, PLACES, channels)
        return np.moveaxis(cut, 2, -1)

    order: list[Axis] = [axes[n] for n in (form.row, form.channel, form.high.tap, form.wide.tap)]
    size = tiles * blocks * mr * PLACES * channels
    # Tiles of whole blocks are stored like their blocks: other tiles of these blocks share the same arrangement.
    lie = (mr, tiles * blocks) if tile == mr * blocks or tiles == 1 else (tile, mr)
    return make_packing(form.kernel, order, size, arrange, "winograd", *lie)


class _Winograd(WindowText):
    """A writer of one task function of the ``winograd`` family."""

    def __init__(self, form: WinogradForm, lanes: int) -> None:
        super().__init__(form, lanes, form.wide.axis)
        self.form, self.pitch, self.row = form, form.pitch(lanes), form.line(lanes)
        self.at = {a: f"o_{a} + i_{a}" for a in form.outer}
        self.at |= {form.row: f"o_{form.row} + r + i", form.high.axis: f"o_{form.high.axis} + y", form.wide.axis: "v"}
        self.room = f"{form.wide.outputs - 1} - v"

    def function(self) -> TaskFunction:
        """Return the finished task function."""
        form, text, lanes = self.form, self.text, self.lanes
        self.origins()
        for axis, end in form.ends.items():
            left = f"(int)max({extent_text(end, self.pointer)} - o_{axis}, 0l)"
            text.line(f"const int images_{axis} = min(e_{axis}, {left});")
        text.line(f"const int down = (e_{form.high.axis} + 1) / {SIDE};")
        text.line(f"const int squares = {' * '.join([*map(self._image_count, form.outer), 'down'])} * {form.across};")
        text.line("__global float *image = (__global float *)scratch;")
        text.line(f"__global float *panels = image + {form.image(lanes)};")
        text.line(f"__global float *products = panels + {PLACES * form.panel(lanes)};")
        text.line(f"__global float *outputs = products + {PLACES * form.mr * self.row};")
        fill = f"vstore{lanes}({self.spread(self.fill)}, 0, image + n)"
        text.line(f"for (int n = 0; n < {form.image(lanes)}; n += {lanes}) {fill};")
        with text.block(f"for (int k = 0; k < {form.channels}; ++k)"):
            text.line(f"__global float *panel = panels + k * {self.row};")
            with text.block(self._each_image()):
                self._copy()
                self._transform_inputs()
            # A register tile must not read uninitialised memory past the last square.
            for place in range(PLACES):
                text.line(f"vstore{lanes}({self.spread('0')}, 0, panel + {place * form.panel(lanes)} + squares);")
        packed = pack_weights(form)
        blocks = -(-form.tile[form.row] // form.mr) * PLACES * form.channels * form.mr
        tile = f"(size_t)(o_{form.row} / {form.tile[form.row]}) * {blocks}"
        text.line(f"__global const float *weights = {self.pointer(form.kernel.tensor, packed=packed)} + {tile};")
        with text.block(f"for (int r = 0; r < e_{form.row}; r += {form.mr})"):
            self._multiply_features()
            with text.block(f"for (int i = 0; i < min({form.mr}, e_{form.row} - r); ++i)"), text.block(self._each_image()):
                self._transform_outputs()
        return self.finished("winograd", form.scratch(lanes), HELPERS, stops=bool(form.ends))

    def _image_count(self, axis: str) -> str:
        """Return the number of images along an axis."""
        return f"{'images' if axis in self.form.ends else 'e'}_{axis}"

    def _each_image(self) -> str:
        """Return the loop over images: ``number`` counts them, and ``i_`` are their indices along the axes."""
        parts, below = list[str](), "1"
        for axis in reversed(self.form.outer):
            parts.append(f"const int i_{axis} = number / ({below}) % {self._image_count(axis)};")
            below += f" * {self._image_count(axis)}"
        self._places = parts
        return f"for (int number = 0; number < {below}; ++number)"

    # --- the inputs -----------------------------------------------------------------------------

    def _copy(self) -> None:
        """Write the copy of the rows inside the image; the rest of the copy keeps the initial padding."""
        form, text, lanes = self.form, self.text, self.lanes
        high, wide = form.high, form.wide
        kind = self._write_source()
        low = max(0, -wide.first)
        end = min(wide.outputs + TAPS - 1, wide.extent - wide.first)
        whole = low + max(0, end - low) // lanes * lanes
        text.line(f"const int first = o_{high.axis} + {high.first};")
        with text.block(f"for (int q = max(0, -first); q < min(e_{high.axis} + {TAPS - 1}, {high.extent} - first); ++q)"):
            text.line(f"__global const {CPU_DIALECT.types[kind]} *line = x + q * {high.stride};")
            text.line(f"__global float *to = image + q * {self.pitch};")
            if whole > low:
                copied = f"vstore{lanes}({read_vector(kind, lanes, 'line + n')}, 0, to + n)"
                text.line(f"for (int n = {low}; n < {whole}; n += {lanes}) {copied};")
            if whole < end:
                mask = ", ".join("-1" if whole + n < end else "0" for n in range(lanes))
                value = f"select({self.spread(self.fill)}, {read_vector(kind, lanes, f'line + {whole}')}, "
                text.line(f"vstore{lanes}({value}({vector_type(lanes, 'int')})({mask})), 0, to + {whole});")

    def _write_source(self) -> str:
        """Write the pointer ``x`` to channel ``k`` of an image, at the start of the task's padding; return its element type."""
        form, kind = self.form, self.stored(self.form.x.tensor)
        self.text.all(self._places)
        steps, constant = self.steps(form.x)
        terms = [(f"({self.at[a]})", steps[a]) for a in form.outer if a in steps]
        terms += [(f"o_{form.high.axis}", form.high.stride), ("k", steps.get(form.channel, 0))]
        place = f"{self.pointer(form.x.tensor)} + {format_sum(terms, constant)}"
        self.text.line(f"__global const {CPU_DIALECT.types[kind]} *x = {place};")
        return kind

    def _transform_inputs(self) -> None:
        """Write the sums of each square's inputs, for a vector of squares of a row at a time. Vectors may write past the row's
        end; later writes overwrite the excess."""
        form, text, lanes = self.form, self.text, self.lanes
        with text.block("for (int t = 0; t < down; ++t)"), text.block(f"for (int v = 0; v < {form.across}; v += {lanes})"):
            text.line(f"__global const float *from = image + {SIDE} * (t * {self.pitch} + v);")
            for a in range(UNDER):
                for b in (0, SIDE):
                    first, second = (f"vload{lanes}({n}, from + {a * self.pitch + b})" for n in (0, 1))
                    text.line(f"const {self.kind} l{a}{b} = {first}, m{a}{b} = {second};")
                    text.line(f"const {self.kind} d{a}{b} = ({self.kind})(l{a}{b}.even, m{a}{b}.even);")
                    text.line(f"const {self.kind} d{a}{b + 1} = ({self.kind})(l{a}{b}.odd, m{a}{b}.odd);")
            text.all(self._sum_side("d", "t", INPUTS, UNDER))
            text.line(f"__global float *to = panel + (number * down + t) * {form.across} + v;")
            for a in range(UNDER):
                for b, what in enumerate(INPUTS):
                    value = what.format(*(f"t{a}{n}" for n in range(UNDER)))
                    text.line(f"vstore{lanes}({value}, 0, to + {(a * UNDER + b) * form.panel(lanes)});")

    def _sum_side(self, given: str, made: str, sums: tuple[str, ...], columns: int) -> Iterator[str]:
        """Yield sums along the first side: variables ``given`` are the operands, ``made`` the results."""
        for b in range(columns):
            for a, what in enumerate(sums):
                yield f"const {self.kind} {made}{a}{b} = {what.format(*(f'{given}{n}{b}' for n in range(UNDER)))};"

    # --- the products ---------------------------------------------------------------------------

    def _multiply_features(self) -> None:
        """Write the products of the sums at each position, for ``mr`` features."""
        form, text, full = self.form, self.text, self.form.nv * self.lanes
        with text.block(f"for (int p = 0; p < {PLACES}; ++p)"):
            text.line(f"__global const float *a = weights + ((size_t)r * {PLACES} + p * {form.mr}) * {form.channels};")
            with text.block(f"for (int c = 0, nv = 1; c < squares; c += nv * {self.lanes})"):
                text.line(f"nv = squares - c > {full - self.lanes} ? {form.nv} : 1;")
                text.line(f"__global const float *b = panels + p * {form.panel(self.lanes)} + c;")
                text.line(f"__global float *to = products + p * {form.mr * self.row} + c;")
                for nv in sorted({form.nv, 1}, reverse=True):
                    with text.block(f"if (nv >= {nv})" if nv == form.nv else "else"):
                        self._register_tile(nv)

    def _register_tile(self, nv: int) -> None:
        text, lanes, mr = self.text, self.lanes, self.form.mr
        for i in range(mr):
            text.line(f"{self.kind} {', '.join(f's{i}_{j} = 0' for j in range(nv))};")

        def walk(first: str, end: str) -> None:
            with text.block(f"for (int k = {first}; k < {end}; ++k)"):
                for j in range(nv):
                    text.line(f"const {self.kind} b{j} = vload{lanes}({j}, b + k * {self.row});")
                for i in range(mr):
                    each = " ".join(f"s{i}_{j} = fma(w, b{j}, s{i}_{j});" for j in range(nv))
                    text.line(f"{{ const {self.kind} w = a[k * {mr} + {i}]; {each} }}")

        channels, sums = self.form.channels, [f"s{i}_{j}" for i in range(mr) for j in range(nv)]
        write_in_blocks(text, sums, self.kind, block_sizes(channels), ("0", str(channels)), walk)
        for i in range(mr):
            text.line(" ".join(f"vstore{lanes}(s{i}_{j}, {j}, to + {i * self.row});" for j in range(nv)))

    # --- the outputs ----------------------------------------------------------------------------

    def _transform_outputs(self) -> None:
        """Write the sums of a feature's products, two rows of outputs at a time, with epilogue maps and stores."""
        form, text, lanes = self.form, self.text, self.lanes
        text.all(self._places)
        with text.block("for (int t = 0; t < down; ++t)"):
            with text.block(f"for (int v = 0; v < {form.across}; v += {lanes})"):
                text.line(f"__global const float *from = products + i * {self.row} + (number * down + t) * {form.across} + v;")
                for p in range(PLACES):
                    place = p * form.mr * self.row
                    text.line(f"const {self.kind} d{p // UNDER}{p % UNDER} = vload{lanes}(0, from + {place});")
                text.all(self._sum_side("d", "t", PRODUCTS, UNDER))
                for a in range(SIDE):
                    for b, what in enumerate(PRODUCTS):
                        text.line(f"const {self.kind} y{a}{b} = {what.format(*(f't{a}{n}' for n in range(UNDER)))};")
                    for n, half in enumerate(("lo", "hi")):
                        text.line(f"{self.kind} z{a}{n}; z{a}{n}.even = y{a}0.{half}; z{a}{n}.odd = y{a}1.{half};")
                        text.line(f"vstore{lanes}(z{a}{n}, {n}, outputs + {a * self.pitch} + {SIDE} * v);")
            rows = f"for (int y = {SIDE} * t; y < min({SIDE} * t + {SIDE}, e_{form.high.axis}); ++y)"
            with text.block(rows), text.block(f"for (int v = 0; v < {form.wide.outputs}; v += {lanes})"):
                text.line(f"{self.kind} total = vload{lanes}(0, outputs + y % {SIDE} * {self.pitch} + v);")
                with text.block("if (!all(isfinite(total)))"):
                    self._again()
                self.maps("total")

    def _again(self) -> None:
        """Write the recomputation of non-finite outputs from their nine taps. An infinity or a NaN under a square belongs to only
        some of its outputs."""
        wide, text, lanes = self.form.wide, self.text, self.lanes
        text.line(f"float lane[{lanes}]; vstore{lanes}(total, 0, lane);")
        with text.block(f"for (int l = 0; l < min({lanes}, {wide.outputs} - v); ++l)"):
            text.line("if (isfinite(lane[l])) continue;")
            text.line("lane[l] = 0;")
            self._taps_again()
        text.line(f"total = vload{lanes}(0, lane);")

    def _taps_again(self) -> None:
        """Write the sum of an output's taps over all channels, to ``lane[l]``."""
        form, text = self.form, self.text
        high, wide = form.high, form.wide

        def walk(first: str, end: str) -> None:
            with text.block(f"for (int k = {first}; k < {end}; ++k)"):
                kind = self._write_source()
                text.line(f"__global const float *u = weights + (size_t)r * {PLACES * form.channels} + k * {form.mr} + i;")
                with text.block(f"for (int tap = 0; tap < {TAPS * TAPS}; ++tap)"):
                    text.line(f"const int q = y + tap / {TAPS}, n = v + l + tap % {TAPS};")
                    down, across = f"o_{high.axis} + q + {high.first}", f"n + {wide.first}"
                    text.line(f"if ((uint)({down}) >= {high.extent}u || (uint)({across}) >= {wide.extent}u) continue;")
                    weight = f"rm_winograd_weight(u, {form.channels * form.mr}, tap / {TAPS}, tap % {TAPS})"
                    text.line(f"lane[l] = fma({read_element(kind, 'x', f'q * {high.stride} + n')}, {weight}, lane[l]);")

        sizes = block_sizes(form.channels, TAPS * TAPS)
        write_in_blocks(text, ["lane[l]"], "float", sizes, ("0", str(form.channels)), walk)

    def left(self, steps: Mapping[str, int]) -> str:
        """Return the elements from the vector's start that this task writes now or later in this channel. A vector may overwrite
        these elements."""
        high, wide = self.form.high.axis, self.form.wide.outputs
        return f"(e_{high} - y) * {wide} - v" if steps.get(high, 0) == wide else f"{wide} - v"
