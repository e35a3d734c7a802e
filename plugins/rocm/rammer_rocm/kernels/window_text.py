"""Text common to window families: position of an output vector, epilogue maps, and stores."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from rammer.codegen import Unsuited, affine_address, format_store, format_sum, spell_literal, split_digits
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Load, Ref

from rammer_rocm.dialect import CPU_DIALECT
from rammer_rocm.kernels.task import TaskText
from rammer_rocm.kernels.vector import Vector, read_element, read_vector, round_vector, vector_type, write_vector
from rammer_rocm.kernels.window_form import WindowForm


class WindowText(TaskText):
    """A writer of one task function whose output vectors run along the axis ``lane``. ``at`` is the vector's start along every
    axis, ``room`` the number of elements after its first along ``lane`` (C texts)."""

    def __init__(self, form: WindowForm, lanes: int, lane: str) -> None:
        super().__init__(form.binding, lanes)
        self.window, self.lane = form, lane
        self.kind = vector_type(lanes)
        self.at: dict[str, str] = {}
        self.room = "0"

    def spread(self, scalar: str) -> str:
        """Return a vector with a scalar in every lane."""
        return f"({self.kind})({scalar})"

    @property
    def fill(self) -> str:
        """The value outside the image, as C text."""
        return spell_literal(CPU_DIALECT, float(self.window.x.fill or 0.0), "float32")

    @property
    def start(self) -> str:
        """The initial value of a sum, as C text."""
        return "-INFINITY" if self.window.main.combiner == "max" else "0"

    def combined(self, so_far: str, value: str, weight: str) -> str:
        """Return a sum extended by one element; ``weight`` is "" if the window has no weights."""
        if self.window.main.combiner == "max":
            return f"rm_vmax{self.lanes}({so_far}, {value})"
        return f"fma({value}, {weight}, {so_far})" if weight else f"{so_far} + {value}"

    def origins(self) -> None:
        """Write the origins ``o_`` and clipped extents ``e_`` of every axis."""
        operator = self.window.operator
        places = zip(self.window.main.axes, operator.tile, split_digits("task", operator.grid), strict=True)
        for axis, tile, place in places:
            self.text.line(f"const int o_{axis.name} = {f'{place} * {tile}' if tile < axis.extent else '0'};")
            size = str(tile) if axis.extent % tile == 0 else f"min({tile}, {axis.extent} - o_{axis.name})"
            self.text.line(f"const int e_{axis.name} = {size};")

    def steps(self, load: Load, axes: Mapping[str, str] | None = None) -> tuple[dict[str, int], int]:
        """Return the address of the image's load, or of an epilogue load whose axes ``axes`` renames."""
        renamed = ex.substitute(load, {old: Ref(new) for old, new in (axes or {}).items()})
        if not isinstance(renamed, Load) or (axes is not None and load.fill is not None):
            raise Unsuited(f"{load} after a window")
        return affine_address(renamed, self.binding.storages[load.tensor].strides)

    def place(self, steps: Mapping[str, int], constant: int) -> str:
        """Return the address of the vector's first element."""
        return format_sum([(f"({self.at[a]})", steps[a]) for a in self.at if a in steps], constant)

    def maps(self, value: str) -> None:
        """Write the epilogue maps for the vector ``value`` of sums, and the stores."""
        main = self.window.main
        names = {main.name: value}
        self._store_output(main, value)
        for number, c in enumerate(self.window.after):
            axes = dict(zip((a.name for a in c.axes), (a.name for a in main.axes), strict=True))
            vector = Vector(self.lanes, partial(self._load, names, axes), f"v{number}_")
            names[c.name] = vector.value(c.body)
            self.text.all(vector.lines)
            self._store_output(c, names[c.name])

    def _load(self, names: Mapping[str, str], axes: Mapping[str, str], load: Load) -> str:
        if load.tensor in names:
            return round_vector(self.stored(load.tensor), self.lanes, names[load.tensor])
        steps, constant = self.steps(load, axes)
        pointer, kind, step = self.pointer(load.tensor), self.stored(load.tensor), steps.get(self.lane, 0)
        place = self.place(steps, constant)
        if step == 0:
            return self.spread(read_element(kind, pointer, place))
        if step == 1:
            return read_vector(kind, self.lanes, f"{pointer} + ({place})")
        lanes = (read_element(kind, pointer, f"{place} + min({n}, {self.room}) * {step}") for n in range(self.lanes))
        return f"({self.kind})({', '.join(lanes)})"

    def _store_output(self, c: Compute, value: str) -> None:
        text, lanes = self.text, self.lanes
        if c.name not in self.window.operator.outputs:
            return
        axes = dict(zip((a.name for a in c.axes), (a.name for a in self.window.main.axes), strict=True))
        steps, constant = self.steps(Load(c.name, tuple(Ref(a.name) for a in c.axes)), axes)
        pointer, kind, step = self.pointer(c.name, written=True), self.stored(c.name), steps.get(self.lane, 0)
        place = self.place(steps, constant)
        if step == 1:
            whole = write_vector(kind, lanes, f"{pointer} + ({place})", value)
            text.line(f"if ({self.left(steps)} >= {lanes}) {whole}")
            text.line("else {")
        else:
            text.line("{")
        text.line(f"float lane[{lanes}]; vstore{lanes}({value}, 0, lane);")
        each = format_store(CPU_DIALECT, pointer, f"{place} + l * {step}", kind, "lane[l]")
        text.line(f"for (int l = 0; l < min({lanes}, {self.room} + 1); ++l) {each}")
        text.line("}")

    def left(self, steps: Mapping[str, int]) -> str:
        """Return the elements from the vector's first that may be stored whole."""
        return f"{self.room} + 1"
