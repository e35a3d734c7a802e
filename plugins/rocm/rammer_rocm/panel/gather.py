"""Gather of a contraction's column operand into a panel ``[K][columns]`` in scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from rammer.codegen import QUOTIENT, Unsuited, combine_digits, inline_producers, spell_literal
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.expr import Expr, Interval, Load

from rammer_rocm.dialect import CPU_DIALECT
from rammer_rocm.kernels.vector import Vector, integer_text, read_vector, vector_type
from rammer_rocm.panel.recognise import Access, PanelProduct, dense_axes, load_access
from rammer_rocm.panel.reduction_loops import AxisWalk


@dataclass(frozen=True)
class Region:
    """The region that a task gathers: ``load`` over reduction axes (name, extent, step in the panel) and column axes.

    Column axes are (name, C text of the count, largest count). ``pitch`` is the number of elements between the starts of
    consecutive runs ("" = contiguous). ``walks`` are the reduction axes that are gathered in part."""

    load: Load
    reduce: tuple[tuple[str, int, int], ...]
    columns: tuple[tuple[str, str, int], ...]
    pitch: str = ""
    walks: Mapping[str, AxisWalk] = field(default_factory=dict)


def columns_region(p: PanelProduct, stride: int, walks: Mapping[str, AxisWalk]) -> Region:
    """Return the region of all column operand values of a task, once for each position in K."""
    flat = dense_axes(p.main.reduce)
    reduce = tuple((r.name, r.extent, flat[r.name] * stride) for r in p.main.reduce)
    return Region(p.b, reduce, tuple((c, f"e_{c}", p.tile[c]) for c in p.columns), walks=walks)


@dataclass
class Gather:
    """A writer of gather statements; ``pointer`` maps a tensor to its parameter, ``origin`` an axis to its first value in a task.

    A run is the columns along the innermost column axis. Vectors may write past the end of a run; later writes overwrite the
    excess. A vector of zeros follows the last run of a panel row. Register tiles therefore never multiply uninitialised memory
    (denormal numbers are slow).
    """

    p: PanelProduct
    binding: Binding
    lanes: int
    region: Region
    pointer: Callable[[str], str]
    origin: Callable[[str], str]
    #: The C type of panel elements, and the zero literal.
    element: ClassVar[str] = "float"
    zero: ClassVar[str] = "0.0f"

    def __post_init__(self) -> None:
        self.inner, self.count, _ = self.region.columns[-1]
        self.outer = {name for name, _, _ in self.region.columns[:-1]}
        self.reduced = {name for name, _, _ in self.region.reduce}

    def lines(self) -> Iterator[str]:
        """Yield all statements of the gather."""
        yield from (f"const int k_{name} = 0;" for name, extent, _ in self.region.reduce if extent == 1)
        guards = list(self._write_guards(self.region.load)) if self.region.load.fill is not None else []
        value = self.expression()
        steps = {self.access(load).step(self.inner) for load in ex.loads(value)}
        yield from self._by_columns(value) if not guards and not steps <= {0, 1, 2} else self._by_rows(value, guards)

    def _by_rows(self, value: Expr, guards: list[str]) -> Iterator[str]:
        """Yield run after run along the columns, for sources with nearby columns."""
        region = self.region
        yield from self._k_loops()
        yield f"__global {self.element} *line = panel + {self._row_offset()};"
        yield from self._outer_loops()
        yield f"__global {self.element} *d = line + ({self._run_number()}) * {region.pitch or self.count};"
        yield from self._run(value, guards)
        yield from ["}"] * len(self.outer)
        yield f"vstore{self.lanes}(({vector_type(self.lanes, self.element)})({self.zero}), 0, line + {self._end()});"
        yield from self._k_ends()

    def _by_columns(self, value: Expr) -> Iterator[str]:
        """Yield blocks of columns, each through all of K: a transposition, for sources that are contiguous along K."""
        lanes = self.lanes
        yield from self._outer_loops()
        yield f"for (int n = 0; n < {self.count}; n += {lanes}) {{"
        yield from self._k_loops()
        pitch = self.region.pitch or self.count
        yield f"__global {self.element} *d = panel + {self._row_offset()} + ({self._run_number()}) * {pitch};"
        yield f"if (n + {lanes} <= {self.count}) {{"
        yield "const int i = n;"
        yield from self.assign(value, lanes)
        yield f"}} else for (int i = n; i < {self.count}; ++i) {{"
        yield from self.assign(value, 1)
        yield "}"
        yield from self._k_ends()
        yield from ["}"] * (len(self.outer) + 1)
        yield from self._k_loops()
        zeros = f"({vector_type(lanes, self.element)})({self.zero})"
        yield f"vstore{lanes}({zeros}, 0, panel + {self._row_offset()} + {self._end()});"
        yield from self._k_ends()

    def _k_loops(self) -> Iterator[str]:
        for name, extent, _ in self.region.reduce:
            if extent > 1:
                first, end = self.region.walks[name].ends if name in self.region.walks else ("0", str(extent))
                yield f"for (int k_{name} = {first}; k_{name} < {end}; ++k_{name}) {{"

    def _k_ends(self) -> Iterator[str]:
        yield from ("}" for _, extent, _ in self.region.reduce if extent > 1)

    def _outer_loops(self) -> Iterator[str]:
        for name, count, _ in self.region.columns[:-1]:
            yield f"for (int i_{name} = 0; i_{name} < {count}; ++i_{name}) {{"

    def _row_offset(self) -> str:
        """Return the offset of the panel row for the current position in K."""
        return " + ".join(f"{self._step(name)} * {step}" for name, _, step in self.region.reduce) or "0"

    def _step(self, name: str) -> str:
        """Return the position along a reduction axis, relative to the panel's first row."""
        walk = self.region.walks.get(name)
        return f"(k_{name} - {walk.first})" if walk is not None and walk.chunk else f"k_{name}"

    def _run_number(self) -> str:
        """Return the number of the current run within a panel row."""
        return combine_digits((f"i_{name}", count) for name, count, _ in self.region.columns[:-1])

    def _end(self) -> str:
        """Return the number of used elements of a panel row."""
        return " * ".join([*(count for _, count, _ in self.region.columns[:-1]), self.region.pitch or self.count])

    def _run(self, value: Expr, guards: list[str]) -> Iterator[str]:
        """Yield one run: fill to the left of the valid columns, values, fill to the right."""
        if not guards:
            yield from self._write_values(value, "0", self.count)
            return
        yield f"int lo = 0, hi = {self.count};"
        yield from guards
        yield "lo = min(lo, hi);"
        fill = self.fill()
        yield f"for (int i = 0; i < lo; ++i) d[i] = {fill};"
        yield from self._write_values(value, "lo", "hi")
        blank = f"vstore{self.lanes}(({vector_type(self.lanes, self.element)})({fill}), 0, d + i)"
        yield f"for (int i = hi; i < {self.count}; i += {self.lanes}) {blank};"

    def fill(self) -> str:
        """Return the value outside the tensor."""
        return spell_literal(CPU_DIALECT, float(self.region.load.fill or 0.0), "float32")

    def _write_guards(self, load: Load) -> Iterator[str]:
        ranges = self._axis_ranges()
        shape = self.binding.types[load.tensor].shape
        for index, extent in zip(load.indices, shape, strict=True):
            span = ex.interval(index, ranges)
            form = ex.affine_form(index)
            if form is None or span is None:
                raise Unsuited(f"{load} is not affine")
            if span[0] >= 0 and span[1] < extent:
                continue
            step = form[0].get(self.inner, 0)
            first = self.address(Access("", form[0], form[1]))
            if step == 0:
                yield f"if ((uint)({first}) >= {extent}u) hi = 0;"
            elif step > 0:
                yield "{"
                yield f"const int first = {first};"
                yield f"if (first < 0) lo = max(lo, ({step - 1} - first) / {step});"
                yield f"hi = first < {extent} ? min(hi, ({extent - 1} - first) / {step} + 1) : 0;"
                yield "}"
            else:
                raise Unsuited("padded columns in reverse")

    def _axis_ranges(self) -> dict[str, Interval]:
        ranges: dict[str, Interval] = {name: (0, n - 1) for name, n in self.p.extent.items()}
        for name, _, most in self.region.columns:
            ranges[name] = (0, self.p.extent[name] - self.p.tile[name] + most - 1)
        for axis in ex.axes_of(self.region.load):
            name, _, divisor = axis.partition(QUOTIENT)
            if divisor:
                ranges[axis] = (0, (self.p.extent[name] - 1) // int(divisor))
        return ranges

    def address(self, steps: Access) -> str:
        """Return the address (or index) at the first column of the run."""
        parts = [str(steps.constant)] if steps.constant else []
        for axis, step in steps.steps.items():
            if axis in self.reduced:
                place = f"k_{axis}"
            else:
                place = self.origin(axis)
                if axis in self.outer:
                    place = f"({place} + i_{axis})"
            parts.append(place if step == 1 else f"{place} * {step}")
        return " + ".join(parts) or "0"

    def expression(self) -> Expr:
        """Return the value of a column: the load, or the inlined prologue maps."""
        load = self.region.load
        return inline_producers(Load(load.tensor, load.indices), self.p.before)

    def _write_values(self, value: Expr, low: str, high: str) -> Iterator[str]:
        """Yield ``d[i]`` for columns ``low <= i < high``; whole vectors if reading past the end is safe."""
        steps = {self.access(load).step(self.inner) for load in ex.loads(value)}
        width = self.lanes if steps <= {0, 1, 2} else 1
        yield f"for (int i = {low}; i < {high}; i += {width}) {{"
        yield from self.assign(value, width)
        yield "}"

    def assign(self, value: Expr, width: int) -> Iterator[str]:
        """Yield the assignment of columns ``i .. i + width - 1``."""
        vector = Vector(width, lambda load: self._load_text(self.access(load), width), before=partial(self._before, width))
        result = vector.value(value)
        yield from vector.lines
        yield f"vstore{width}({result}, 0, d + i);" if width > 1 else f"d[i] = {result};"

    def _before(self, width: int, index: Expr, end: Expr) -> str:
        """Return a mask of the columns from ``i`` at which ``index`` is less than ``end``, also if it is negative."""
        form = ex.affine_form(index)
        assert form is not None  # as ``Vector.mask`` found
        limit = integer_text(end, lambda load: f"{self.pointer(load.tensor)}[0]")
        step = form[0].get(self.inner, 0)
        first = f"{self.address(Access('', *form))} + i * {step}"
        if width == 1:
            return f"({first} < {limit} ? -1 : 0)"
        return f"rm_within{width}((uint)({first}) + (1u << 31), {step}, (uint)({limit}) + (1u << 31))"

    def access(self, load: Load) -> Access:
        """Return the address of a load without padding. Raises Unsuited unless it is affine."""
        if load.fill is not None:
            raise Unsuited("padding inside a computed operand")
        return load_access(load, self.binding)

    def _load_text(self, steps: Access, width: int) -> str:
        step, kind = steps.step(self.inner), self.binding.types[steps.tensor].dtype
        source = f"{self.pointer(steps.tensor)} + ({self.address(steps)})"
        if step == 0:
            return f"({vector_type(width)})({read_vector(kind, 1, source)})"
        if width == 1:
            return read_vector(kind, 1, f"{source} + i * {step}")
        if step == 1:
            return read_vector(kind, width, f"{source} + i")
        if step != 2:
            each = (read_vector(kind, 1, f"{source} + (i + {n}) * {step}") for n in range(width))
            return f"({vector_type(width)})({', '.join(each)})"
        halves = (read_vector(kind, width, f"{source} + i * 2", n) + ".even" for n in (0, 1))
        return f"({vector_type(width)})({', '.join(halves)})"
