"""Gathering the column operand of a contraction into a panel ``[K][columns]`` in scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rammer.codegen.operations import literal
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.expr import Expr, Interval, Load

from rammer_rocm.kernels.contraction import QUOTIENT, Access, Product, access, dense_axes
from rammer_rocm.kernels.generic import CPU_DIALECT
from rammer_rocm.kernels.task import Unsuited
from rammer_rocm.kernels.vector import Vector, inline, vector_type


@dataclass(frozen=True)
class Region:
    """What is gathered: ``load`` over reduction axes (name, extent, step in the panel) and column axes (name, C
    text of the count, largest count). Consecutive runs start ``pitch`` elements apart ("" = back to back)."""

    load: Load
    reduce: tuple[tuple[str, int, int], ...]
    columns: tuple[tuple[str, str, int], ...]
    pitch: str = ""


def columns_region(p: Product, stride: int) -> Region:
    """Every value of the column operand, once for each position in K."""
    flat = dense_axes(p.main.reduce)
    reduce = tuple((r.name, r.extent, flat[r.name] * stride) for r in p.main.reduce)
    return Region(p.b, reduce, tuple((c, f"e_{c}", p.tile[c]) for c in p.columns))


@dataclass
class Gather:
    """Writes the statements; ``pointer`` names a tensor's parameter, ``origin`` an axis' first value in a task.

    A run is the columns along the innermost column axis. Vectors may write past the end of a run: what
    they spoil is written later. Behind the last run of a panel row one vector of zeros is written, so that no
    register tile ever multiplies what happened to be in memory (denormal numbers are slow).
    """

    p: Product
    binding: Binding
    lanes: int
    region: Region
    pointer: Callable[[str], str]
    origin: Callable[[str], str]

    def __post_init__(self) -> None:
        self.inner, self.count, _ = self.region.columns[-1]
        self.outer = [name for name, _, _ in self.region.columns[:-1]]
        self.reduced = {name for name, _, _ in self.region.reduce}

    def lines(self) -> Iterator[str]:
        """All statements."""
        region, counts = self.region, {name: count for name, count, _ in self.region.columns}
        yield from (f"const int k_{name} = 0;" for name, extent, _ in region.reduce if extent == 1)
        loops = [(f"k_{name}", str(extent)) for name, extent, _ in region.reduce if extent > 1]
        for name, count in loops:
            yield f"for (int {name} = 0; {name} < {count}; ++{name}) {{"
        row = " + ".join(f"k_{name} * {step}" for name, _, step in region.reduce) or "0"
        yield f"__global float *line = panel + {row};"
        for name in self.outer:
            yield f"for (int i_{name} = 0; i_{name} < {counts[name]}; ++i_{name}) {{"
        column = "0"
        for name in self.outer:
            column = f"({column}) * {counts[name]} + i_{name}"
        yield f"__global float *d = line + ({column}) * {region.pitch or self.count};"
        yield from self._run()
        yield from ["}"] * len(self.outer)
        before = " * ".join([*(counts[name] for name in self.outer), region.pitch or self.count])
        yield f"vstore{self.lanes}(({vector_type(self.lanes)})(0.0f), 0, line + {before});"
        yield from ["}"] * len(loops)

    def _run(self) -> Iterator[str]:
        """One run: fill to the left of the valid columns, values, fill to the right."""
        count, load = self.count, self.region.load
        guarded = list(self._guards(load)) if load.fill is not None else []
        value = self._expression()
        if not guarded:
            yield from self._values(value, "0", count)
            return
        yield f"int lo = 0, hi = {count};"
        yield from guarded
        yield "lo = min(lo, hi);"
        fill = literal(CPU_DIALECT, float(load.fill or 0.0), "float32")
        yield f"for (int i = 0; i < lo; ++i) d[i] = {fill};"
        yield from self._values(value, "lo", "hi")
        blank = f"vstore{self.lanes}(({vector_type(self.lanes)})({fill}), 0, d + i)"
        yield f"for (int i = hi; i < {count}; i += {self.lanes}) {blank};"

    def _guards(self, load: Load) -> Iterator[str]:
        ranges = self._ranges()
        shape = self.binding.types[load.tensor].shape
        for index, extent in zip(load.indices, shape, strict=True):
            span = ex.interval(index, ranges)
            form = ex.affine(index)
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

    def _ranges(self) -> dict[str, Interval]:
        ranges: dict[str, Interval] = {name: (0, n - 1) for name, n in self.p.extent.items()}
        for name, _, most in self.region.columns:
            ranges[name] = (0, self.p.extent[name] - self.p.tile[name] + most - 1)
        for axis in ex.axes_of(self.region.load):
            name, _, divisor = axis.partition(QUOTIENT)
            if divisor:
                ranges[axis] = (0, (self.p.extent[name] - 1) // int(divisor))
        return ranges

    def address(self, steps: Access) -> str:
        """Address (or index) at the first column of the run."""
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

    def _expression(self) -> Expr:
        """What a column holds: the load, or the inlined maps before the contraction."""

        def expand(e: Expr) -> Expr | None:
            if isinstance(e, Load) and e.tensor in self.p.before:
                if e.fill is not None:
                    raise Unsuited("padding inside a computed operand")
                producer = self.p.before[e.tensor]
                return ex.transform(inline(e, producer.body, tuple(a.name for a in producer.axes)), expand)
            return None

        load = self.region.load
        bare = Load(load.tensor, load.indices)
        return ex.transform(bare, expand)

    def _values(self, value: Expr, low: str, high: str) -> Iterator[str]:
        """``d[i]`` for columns ``low <= i < high``."""
        accesses = {ld: self._access(ld) for ld in ex.loads(value)}
        steps = {a.step(self.inner) for a in accesses.values()}
        width = self.lanes if steps <= {0, 1, 2} else 1
        yield f"for (int i = {low}; i < {high}; i += {width}) {{"
        vector = Vector(width, lambda ld: self._loaded(accesses[ld], width))
        result = vector.value(value)
        yield from vector.lines
        yield f"vstore{width}({result}, 0, d + i);" if width > 1 else f"d[i] = {result};"
        yield "}"

    def _access(self, load: Load) -> Access:
        if load.fill is not None:
            raise Unsuited("padding inside a computed operand")
        return access(load, self.binding)

    def _loaded(self, steps: Access, width: int) -> str:
        step = steps.step(self.inner)
        source = f"{self.pointer(steps.tensor)} + ({self.address(steps)})"
        if step == 0:
            return f"({vector_type(width)})(*({source}))"
        if width == 1:
            return f"*({source} + i * {step})"
        if step == 1:
            return f"vload{width}(0, {source} + i)"
        halves = (f"vload{width}({n}, {source} + i * 2).even" for n in (0, 1))
        return f"({vector_type(width)})({', '.join(halves)})"
