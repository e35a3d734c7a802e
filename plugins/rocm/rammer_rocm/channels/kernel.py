"""Windows over images with channels last (the family ``channels``): a vector holds channels of one output.

Neighbouring channels are adjacent in memory, so data is not copied. Each tap is a vector in place. Each weight is a vector too,
after the weights are packed tap by tap. Several columns of outputs are computed together, to load each weight once for all of
them. Columns that overlap padding are computed one at a time, with the taps inside the image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rammer.codegen import Forms, Unsuited, format_sum, make_packing, pad_axis
from rammer.device.manifest import Array, Binding
from rammer.ir import expr as ex
from rammer.ir.device import VDevice
from rammer.ir.expr import Load
from rammer.ir.operator import ROperator
from rammer.ir.types import row_major

from rammer_rocm.dialect import CPU_DIALECT
from rammer_rocm.image.cost import MAXIMUM, OUTPUT, SUM, operations
from rammer_rocm.kernels.task import Family, TaskFunction
from rammer_rocm.kernels.vector import read_vector
from rammer_rocm.kernels.window_form import Slide, WindowForm, window_form
from rammer_rocm.kernels.window_text import WindowText

#: Vectors of channels and columns of outputs that are computed together; the accumulators and a weight fit the registers.
VECTORS, COLUMNS, ACCUMULATORS = (1, 2, 4), (1, 2, 4, 6, 8), 16
#: Numbers of tasks per vEU that are tried.
ROUNDS = (1, 2, 4, 8, 16)
#: Cycles of one core (fitted on a Zen 4): to load a weight, to start an output's sums, to store a vector of outputs element by
#: element.
WEIGHT, BEGIN, SCATTER = 1.0, 12.0, 24.0

CONFIGS = {"nv": range(1, max(VECTORS) + 1), "columns": range(1, max(COLUMNS) + 1)}


@dataclass(frozen=True)
class ChannelsForm(WindowForm):
    """A window operator whose vectors run along the channel axis ``lane``. Windows slide along ``high`` and ``wide``."""

    high: Slide
    wide: Slide
    lane: str

    @property
    def tile(self) -> dict[str, int]:
        """Tile size by axis name."""
        return {a.name: t for a, t in zip(self.main.axes, self.operator.tile, strict=True)}

    @property
    def extent(self) -> dict[str, int]:
        """Axis extent by axis name."""
        return {a.name: a.extent for a in self.main.axes}

    @property
    def config(self) -> tuple[int, int]:
        """Vectors of channels and columns that are computed together."""
        config = dict(self.operator.config)
        return config.get("nv", 1), config.get("columns", 1)

    @property
    def outer(self) -> list[str]:
        """Axes along which no window slides."""
        return [a.name for a in self.main.axes if a.name not in (self.high.axis, self.wide.axis, self.lane)]

    def tiled(self, tile: Mapping[str, int], nv: int, columns: int) -> ChannelsForm:
        """Return this form with another tile, ``nv`` vectors and ``columns`` columns."""
        sizes = tuple(tile[a.name] for a in self.main.axes)
        config = (("columns", columns), ("nv", nv))
        return replace(self, operator=replace(self.operator, tile=sizes, family="channels", config=config))


def channels_form(operator: ROperator, binding: Binding) -> ChannelsForm:
    """Return the form of a tiled or untiled operator. Raises Unsuited."""
    window = window_form(operator, binding)
    lanes = [s for s in window.slides if s.axis and s.stride == 1 and s.outputs > 1 and not s.tap and s.step == 1]
    sliding = sorted((s for s in window.slides if s.tap), key=lambda s: -s.stride)
    if len(lanes) != 1 or not 1 <= len(sliding) <= 2 or lanes[0].first or lanes[0].staged != lanes[0].extent:
        raise Unsuited("the image is not stored channels last")
    neutral = -math.inf if window.main.combiner == "max" else 0.0
    if window.x.fill not in (None, neutral):
        raise Unsuited("padding that counts")
    along = {s.axis for s in sliding}
    if window.weights is not None and ex.axes_of(window.weights) - {r.name for r in window.main.reduce} != {lanes[0].axis}:
        raise Unsuited("weights that differ along the image")
    high = sliding[0] if len(sliding) == 2 else Slide()
    assert len(along) == len(sliding)
    return ChannelsForm(**vars(window), high=high, wide=sliding[-1], lane=lanes[0].axis)


def _enumerate_tilings(form: ChannelsForm, device: VDevice) -> Iterator[ChannelsForm]:
    """Yield tilings that split rows first, then channels: a row's channels are adjacent."""
    channels, lanes = form.extent[form.lane], device.vector
    for nv in VECTORS:
        if nv > 1 and nv * lanes >= 2 * channels:
            continue
        block = nv * lanes
        columns = [c for c in COLUMNS if c * nv <= ACCUMULATORS and c <= form.wide.outputs]
        for rounds in ROUNDS:
            tile, want = dict(form.extent), device.veus * rounds
            for axis in (*form.outer, form.high.axis, form.lane):
                if axis:
                    size = -(-tile[axis] // min(want, tile[axis]))
                    tile[axis] = min(tile[axis], -(-size // block) * block) if axis == form.lane else size
                    want = -(-want // -(-form.extent[axis] // tile[axis]))
            yield min((form.tiled(tile, nv, c) for c in columns), key=lambda f: _task_cycles(f, lanes))


def _task_cycles(form: ChannelsForm, lanes: int) -> float:
    """Return the cycles of one core for a full task."""
    nv, columns = form.config
    high, wide, tile = form.high, form.wide, form.tile
    each = SUM if form.main.combiner == "sum" else MAXIMUM
    inner = sum(_is_inside(wide, w, columns) for w in range(0, wide.outputs, columns)) * columns / wide.outputs
    together = nv * columns * each + (WEIGHT * nv if form.weights is not None else 0.0)
    separate = nv * (each + (WEIGHT if form.weights is not None else 0.0)) + 2.0
    taps = high.taps * wide.taps
    step = form.binding.storages[form.operator.outputs[-1]].strides[[a.name for a in form.main.axes].index(form.lane)]
    epilogue = nv * (OUTPUT + (SCATTER if step != 1 else 0.0) + sum(operations(c.body) for c in form.after)) + BEGIN
    output = taps * (inner * together / columns + (1 - inner) * separate) + epilogue
    blocks = -(-tile[form.lane] // (lanes * nv))
    return math.prod(t for a, t in tile.items() if a != form.lane) * blocks * output


def _is_inside(slide: Slide, first: int, count: int) -> bool:
    low = slide.first + slide.step * first
    return low >= 0 and low + (count - 1) * slide.step + (slide.taps - 1) * slide.reach < slide.extent


def _predict_seconds(form: ChannelsForm, binding: Binding, device: VDevice) -> float:
    """Return the predicted seconds of all tasks, without the launch."""
    task = _task_cycles(form, device.vector) / (device.flops / (2 * device.vector)) + device.dispatch
    return -(-form.operator.task_count // device.veus) * task


def make_channels_family(device: VDevice) -> Family:
    """Return the ``channels`` family for a device."""
    forms = Forms(
        channels_form, _enumerate_tilings, _predict_seconds, lambda form, binding: _Channels(form, device.vector).function()
    )
    return replace(
        forms.family("channels", CONFIGS),
        supported_by=lambda unit: unit.threads == 1 and unit.vector in (4, 8, 16),
        max_candidates=4,
    )


class _Channels(WindowText):
    """A writer of one task function of the ``channels`` family."""

    def __init__(self, form: ChannelsForm, lanes: int) -> None:
        super().__init__(form, lanes, form.lane)
        self.form = form
        self.nv, self.columns = form.config
        self.block = self.nv * lanes
        if form.tile[form.lane] % self.block and form.tile[form.lane] != form.extent[form.lane]:
            raise Unsuited("channels in parts of vectors")
        self.at = {a: f"o_{a} + i_{a}" for a in (*form.outer, form.high.axis, form.wide.axis) if a}

    def function(self) -> TaskFunction:
        """Return the finished task function."""
        form, text = self.form, self.text
        self.origins()
        with self._output_loops():
            self._write_image_row()
            wide = form.wide
            first = f"({self.at[wide.axis]}) * {wide.step} + {wide.first}"
            text.line(f"for (int i_{wide.axis} = 0; i_{wide.axis} < e_{wide.axis};) {{")
            text.line(f"const int left = {first};")
            last = (self.columns - 1) * wide.step + (wide.taps - 1) * wide.reach
            inside = f"left >= 0 && left + {last} < {wide.extent} && i_{wide.axis} + {self.columns} <= e_{wide.axis}"
            text.line(f"const int many = {inside};")
            text.line(f"{self.kind} tile[{self.columns * self.nv}];")
            text.line("if (many) {")
            self._write_sums(self.columns, "0", str(wide.taps))
            text.line("} else {")
            low, high = _tap_range(wide, "left")
            self._write_sums(1, low, high)
            text.line("}")
            self._write_epilogue()
            text.line("}")
        return self.finished("channels", 0)

    @contextmanager
    def _output_loops(self) -> Iterator[None]:
        form, text = self.form, self.text
        axes = [*form.outer, *([form.high.axis] if form.high.axis else [])]
        for axis in axes:
            text.line(f"for (int i_{axis} = 0; i_{axis} < e_{axis}; ++i_{axis}) {{")
        text.line(f"for (int c = 0; c < e_{form.lane}; c += {self.block}) {{")
        yield
        text.all(["}"] * (len(axes) + 1))

    def _write_image_row(self) -> None:
        """Write the image row of the outputs' first tap, its weights, and the range of tap rows inside the image."""
        form, text = self.form, self.text
        steps, constant = self.steps(form.x)
        sliding = (form.high.axis, form.wide.axis)
        terms = [(f"({self.at[a]})", steps[a]) for a in (*form.outer, form.high.axis) if a in steps]
        kind, source = CPU_DIALECT.types[self.stored(form.x.tensor)], self.pointer(form.x.tensor)
        terms += [(f"(o_{form.lane} + c)", 1)]
        text.line(f"__global const {kind} *x = {source} + {format_sum(terms, constant)};")
        assert all(a in self.at for a in sliding if a)
        if form.high.tap:
            text.line(f"const int top = ({self.at[form.high.axis]}) * {form.high.step} + {form.high.first};")
            low, high = _tap_range(form.high, "top")
            text.line(f"const int low = {low}, high = {high};")
        if form.weights is not None:
            self._weights(form.weights)

    def _weights(self, weights: Load) -> None:
        form, block = self.form, self.block
        lane, taps = next(a for a in form.main.axes if a.name == form.lane), math.prod(r.extent for r in form.main.reduce)
        blocks = -(-lane.extent // block)

        def arrange(full: Array) -> Array:
            lines = pad_axis(full.reshape(lane.extent, taps), 0, blocks * block)
            return lines.reshape(blocks, block, taps).swapaxes(1, 2)

        packed = make_packing(weights, (lane, *form.main.reduce), blocks * block * taps, arrange, "channels", block)
        source = self.pointer(weights.tensor, packed=packed)
        self.text.line(f"__global const float *w = {source} + (size_t)(o_{form.lane} + c) * {taps};")

    def _write_sums(self, columns: int, low: str, high: str) -> None:
        """Write the sums of some columns, for the taps from ``low`` (inclusive) to ``high`` (exclusive) along the row."""
        form, text, lanes = self.form, self.text, self.lanes
        reduce = form.main.reduce
        steps = dict(zip((r.name for r in reduce), row_major(tuple(r.extent for r in reduce)), strict=True))
        places = [(j, v) for j in range(columns) for v in range(self.nv)]
        text.line(f"{self.kind} {', '.join(f's{j}_{v} = {self.start}' for j, v in places)};")
        text.line("for (int k = low; k < high; ++k) {" if form.high.tap else "{ const int k = 0;")
        text.line(f"for (int t = {low}; t < {high}; ++t) {{")
        along = form.wide.stride
        place = [("k", form.high.reach * form.high.stride), ("t", form.wide.reach * along)]
        column = f"({self.at[form.wide.axis]})"
        text.line(f"__global const {CPU_DIALECT.types[self.stored(form.x.tensor)]} *at = x + "
                  f"{format_sum([*place, (column, form.wide.step * along)])};")  # fmt: skip
        tap = format_sum([("k", steps.get(form.high.tap, 0)), ("t", steps.get(form.wide.tap, 0))])
        for v in range(self.nv):
            if form.weights is not None:
                text.line(f"const {self.kind} u{v} = vload{lanes}({v}, w + ({tap}) * {self.block});")
        for j, v in places:
            offset = j * form.wide.step * along + v * lanes
            value = read_vector(self.stored(form.x.tensor), lanes, f"at + {offset}")
            text.line(f"s{j}_{v} = {self.combined(f's{j}_{v}', value, f'u{v}' if form.weights is not None else '')};")
        text.all(["}", "}"])
        text.line(" ".join(f"tile[{j * self.nv + v}] = s{j}_{v};" for j, v in places))

    def _write_epilogue(self) -> None:
        """Write the epilogue maps of every vector of sums, and the step to the next columns."""
        form, text = self.form, self.text
        text.line(f"for (int n = 0; n < (many ? {self.columns * self.nv} : {self.nv}); ++n) {{")
        text.line(f"const int v = c + n % {self.nv} * {self.lanes};")
        text.line(f"if (v >= e_{form.lane}) continue;")
        wide = form.wide.axis
        before = self.at[wide]
        self.at |= {wide: f"o_{wide} + i_{wide} + n / {self.nv}", form.lane: f"o_{form.lane} + v"}
        self.room = f"(e_{form.lane} - 1 - v)"
        text.line(f"const {self.kind} total = tile[n];")
        self.maps("total")
        self.at[wide] = before
        text.line("}")
        text.line(f"i_{wide} += many ? {self.columns} : 1;")


def _tap_range(slide: Slide, first: str) -> tuple[str, str]:
    """Return the range of taps inside the image if the first tap is at ``first``."""
    if slide.first >= 0 and slide.first + slide.staged <= slide.extent:
        return "0", str(slide.taps)
    low = f"max(0, ({slide.reach - 1} - {first}) / {slide.reach})"
    high = f"({first} < {slide.extent} ? min({slide.taps}, ({slide.extent - 1} - {first}) / {slide.reach} + 1) : 0)"
    return low, high
