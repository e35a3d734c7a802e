"""Gathering the column operand of a contraction into a panel ``[K][columns]`` in scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rammer.codegen.operations import literal
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.expr import Expr, Interval, Load

from rammer_rocm.kernels.contraction import QUOTIENT, Access, Product, access
from rammer_rocm.kernels.generic import CPU_DIALECT
from rammer_rocm.kernels.task import Unsuited
from rammer_rocm.kernels.vector import Vector, inline, vector_type


@dataclass
class Gather:
    """Writes the statements; ``pointer`` names a tensor's parameter, ``origin`` an axis' first value in the task.

    A run is the columns along the innermost column axis. Vectors may write past the end of a run: what
    they spoil is written later, and ``stride`` leaves room behind the last run.
    """

    p: Product
    binding: Binding
    lanes: int
    stride: int
    flat: Mapping[str, int]
    pointer: Callable[[str], str]
    origin: Callable[[str], str]

    def __post_init__(self) -> None:
        self.inner = self.p.columns[-1]
        self.outer = self.p.columns[:-1]

    def lines(self) -> Iterator[str]:
        """All statements."""
        loops = [(f"k_{r.name}", str(r.extent)) for r in self.p.main.reduce if r.extent > 1]
        ones = [r.name for r in self.p.main.reduce if r.extent == 1]
        yield from (f"const int k_{name} = 0;" for name in ones)
        for name, count in [*loops, *((f"i_{c}", f"e_{c}") for c in self.outer)]:
            yield f"for (int {name} = 0; {name} < {count}; ++{name}) {{"
        row = " + ".join(f"k_{r} * {s * self.stride}" for r, s in self.flat.items())
        column = "0"
        for c in self.outer:
            column = f"({column}) * e_{c} + i_{c}"
        yield f"__global float *d = panel + {row} + ({column}) * e_{self.inner};"
        yield from self._run()
        yield from ["}"] * (len(loops) + len(self.outer))

    def _run(self) -> Iterator[str]:
        """One run: fill to the left of the valid columns, values, fill to the right."""
        count = f"e_{self.inner}"
        load = self.p.b
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
        for axis in ex.axes_of(self.p.b):
            name, _, divisor = axis.partition(QUOTIENT)
            if divisor:
                ranges[axis] = (0, (self.p.extent[name] - 1) // int(divisor))
        return ranges

    def address(self, steps: Access) -> str:
        """Address (or index) at the first column of the run."""
        parts = [str(steps.constant)] if steps.constant else []
        for axis, step in steps.steps.items():
            if axis in self.flat:
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

        load = self.p.b
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
