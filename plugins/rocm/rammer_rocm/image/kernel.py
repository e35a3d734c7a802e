"""The task function of the family ``image``: copy an image, sum its windows, apply the epilogue maps row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from rammer.codegen import combine_digits, format_sum, make_packing
from rammer.ir import expr as ex
from rammer.ir.types import row_major

from rammer_rocm.dialect import CPU_DIALECT
from rammer_rocm.image.recognise import ImageForm
from rammer_rocm.kernels.task import TaskFunction
from rammer_rocm.kernels.vector import read_vector, vector_type
from rammer_rocm.kernels.window_text import WindowText


def image_function(form: ImageForm, lanes: int) -> TaskFunction:
    """Return the task function of a tiled operator. Raises Unsuited if it cannot be written."""
    return _Image(form, lanes).function()


class _Image(WindowText):
    """A writer of one task function of the ``image`` family."""

    def __init__(self, form: ImageForm, lanes: int) -> None:
        super().__init__(form, form.lanes(lanes), form.wide.axis)
        self.form, self.plane = form, form.plane(lanes)
        self.at = {a: f"o_{a} + i_{a}" for a in form.outer}
        self.at |= {form.high.axis: f"o_{form.high.axis} + y"} if form.high.axis else {}
        self.at[form.wide.axis] = "v"
        self.room = f"{form.wide.outputs - 1} - v"
        self.most = lanes

    def function(self) -> TaskFunction:
        """Return the finished task function."""
        form, text = self.form, self.text
        self.origins()
        size = form.planes * self.plane
        text.line("__global float *image = (__global float *)scratch;")
        text.line(f"__global float *sums = image + {size};")
        text.line(f"for (int n = 0; n < {size}; n += {self.lanes}) vstore{self.lanes}({self.spread(self.fill)}, 0, image + n);")
        for axis in form.outer:
            text.line(f"for (int i_{axis} = 0; i_{axis} < e_{axis}; ++i_{axis}) {{")
        self._copy()
        self._write_sums()
        self._rows()
        text.all(["}"] * len(form.outer))
        return self.finished("image", form.scratch(self.most))

    # --- the copy -------------------------------------------------------------------------------

    def _copy(self) -> None:
        """Write the copy of the rows inside the image into their planes; the rest of the planes keeps the initial padding.
        Vectors end with padding, so the excess that they write after a row is correct or overwritten later."""
        form, text = self.form, self.text
        high, wide = form.high, form.wide
        steps, constant = self.steps(form.x)
        terms = [(f"({self.at[a]})", steps[a]) for a in form.outer if a in steps]
        terms += [(f"o_{high.axis}", steps.get(high.axis, 0))] if high.axis else []
        kind = CPU_DIALECT.types[self.stored(form.x.tensor)]
        text.line(f"__global const {kind} *x = {self.pointer(form.x.tensor)} + {format_sum(terms, constant)};")
        low, end = max(0, -wide.first), min(wide.staged, wide.extent - wide.first)
        if high.axis:
            under = f"(e_{high.axis} - 1) * {high.step} + {(high.taps - 1) * high.reach + 1}"
            text.line(f"const int first = o_{high.axis} * {high.step} + {high.first};")
            text.line(f"for (int r = max(0, -first); r < min({under}, {high.extent} - first); ++r) {{")
        else:
            text.line("{ const int r = 0;")
        row = f"r % {high.step} * {wide.step * self.plane} + r / {high.step} * {form.pitch}"
        text.line(f"__global const {kind} *line = x + r * {high.stride};")
        text.line(f"__global float *to = image + {row if high.step > 1 else f'r * {form.pitch}'};")
        for place in range(low, end, self.lanes * wide.step):
            text.all(self._copy_vector(place, end))
        text.line("}")

    def _copy_vector(self, place: int, end: int) -> Iterator[str]:
        """Yield the copy of a row's elements from ``place``, one vector for each plane."""
        lanes, step, dtype = self.lanes, self.form.wide.step, self.stored(self.form.x.tensor)
        parts = [f"a{n}" for n in range(step)]
        yield "{"
        for n, name in enumerate(parts):
            # Vectors past the tensor's end are not read: they could start a full vector beyond it.
            begin = place + n * lanes
            value = read_vector(dtype, lanes, f"line + {begin}") if begin < end else self.spread("0")
            yield f"const {self.kind} {name} = {value};"
        for n in range(step):
            first = place + n
            count = min(lanes, -(-(end - first) // step))
            if count <= 0:
                continue
            half = ".even" if n == 0 else ".odd"
            value = parts[0] if step == 1 else f"({self.kind})({', '.join(p + half for p in parts)})"
            if count < lanes:
                mask = ", ".join("-1" if k < count else "0" for k in range(lanes))
                value = f"select({self.spread(self.fill)}, {value}, ({vector_type(lanes, 'int')})({mask}))"
            yield f"vstore{lanes}({value}, 0, to + {first % step * self.plane + first // step});"
        yield "}"

    # --- the windows ----------------------------------------------------------------------------

    def _write_sums(self) -> None:
        """Write the sums of all outputs of the image."""
        form, text, lanes = self.form, self.text, self.lanes
        self._weights()
        text.line(f"for (int y = 0; y < {form.high.tile}; y += {form.rows}) {{")
        text.line(f"for (int v = 0; v < {form.wide.tile}; v += {lanes}) {{")
        self._sum_rows()
        text.all(["}", "}"])

    def _sum_rows(self) -> None:
        """Write the unrolled sums of a vector in each of ``rows`` rows; each loaded vector serves every row with it as a tap."""
        form, text, lanes = self.form, self.text, self.lanes
        high, wide = form.high, form.wide
        text.line(f"{self.kind} {', '.join(f's{j} = {self.start}' for j in range(form.rows))};")
        text.line(f"__global const float *at = image + y * {form.pitch} + v;")
        for (phase, row), users in sorted(high.shared(form.rows).items()):
            for across in range(wide.taps):
                place = across * wide.reach
                offset = (phase * wide.step + place % wide.step) * self.plane + row * form.pitch + place // wide.step
                text.line(f"{{ const {self.kind} u = vload{lanes}(0, at + {offset});")
                for j, tap in users:
                    text.line(f"s{j} = {self.combined(f's{j}', 'u', self._tap_weight(tap, across))};")
                text.line("}")
        for j in range(form.rows):
            text.line(f"vstore{lanes}(s{j}, 0, sums + (y + {j}) * {form.sums_pitch(lanes)} + v);")

    def _tap_weight(self, high: int, wide: int) -> str:
        """Return the weight of a tap."""
        if self.form.weights is None:
            return ""
        reduce = self.form.main.reduce
        steps = dict(zip((r.name for r in reduce), row_major(tuple(r.extent for r in reduce)), strict=True))
        return self.spread(f"w[{high * steps.get(self.form.high.tap, 0) + wide * steps.get(self.form.wide.tap, 0)}]")

    def _weights(self) -> None:
        """Write the image's weights, tap after tap."""
        form = self.form
        if form.weights is None:
            return
        used = [a for a in form.main.axes if a.name in ex.axes_of(form.weights)]
        taps = math.prod(r.extent for r in form.main.reduce)
        axes = (*used, *form.main.reduce)
        packed = make_packing(form.weights, axes, math.prod(a.extent for a in axes), lambda full: full.reshape(-1), "taps")
        place = combine_digits((f"(o_{a.name} + {f'i_{a.name}' if a.name in form.outer else '0'})", a.extent) for a in used)
        pointer = self.pointer(form.weights.tensor, packed=packed)
        self.text.line(f"__global const float *w = {pointer} + ({place}) * {taps};")

    # --- the epilogue ---------------------------------------------------------------------------

    def _rows(self) -> None:
        """Write the epilogue maps and the store of each row of outputs."""
        form, text = self.form, self.text
        wide = form.wide.outputs
        high = f"e_{form.high.axis}" if form.high.axis else "1"
        text.line(f"for (int y = 0; y < {high}; ++y) for (int v = 0; v < {wide}; v += {self.lanes}) {{")
        text.line(f"const {self.kind} total = vload{self.lanes}(0, sums + y * {form.sums_pitch(self.lanes)} + v);")
        self.maps("total")
        text.line("}")

    def left(self, steps: Mapping[str, int]) -> str:
        """Return the elements from the vector's start that this task writes now or later.

        A vector may overwrite these elements."""
        form = self.form
        high, wide = form.high, form.wide.outputs
        if high.axis and steps.get(high.axis, 0) != wide:
            return f"{wide} - v"
        left = f"{f'(e_{high.axis} - y)' if high.axis else '1'} * {wide} - v"
        whole = high.outputs * wide
        live = [a for a in form.outer if form.tile[a] > 1]
        if live and steps.get(live[-1]) == whole and high.tile == high.outputs:
            left += f" + (e_{live[-1]} - 1 - i_{live[-1]}) * {whole}"
        return left
