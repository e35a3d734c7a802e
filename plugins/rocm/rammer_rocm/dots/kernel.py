"""The ``dots`` family: products of bytes summed in 32 bits, as panels whose elements are four bytes along the reduction.

One instruction multiplies four unsigned by four signed bytes and adds the products to a 32-bit sum (``RM_DOT``, see
``rammer_rocm.vnni``). If both operands have the same signedness, the sign bits of one non-constant operand are flipped, an offset
of 128. Accumulators start at 128 times the other operand's sums to compensate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from rammer.codegen import QUOTIENT, Unsuited, combine_digits, is_length
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.device import VDevice
from rammer.ir.expr import Expr, Load
from rammer.ir.operator import ROperator

from rammer_rocm.kernels.task import TaskFunction
from rammer_rocm.kernels.vector import TYPES, TypedVector, vector_type
from rammer_rocm.panel.gather import Gather, Region
from rammer_rocm.panel.kernel import Panel
from rammer_rocm.panel.packing import pack_quads
from rammer_rocm.panel.recognise import FourBytes, PanelOperand, PanelProduct, check_form, load_access, product_of
from rammer_rocm.vnni import LANES, dot_text

#: Element types of the operands.
BYTES = ("uint8", "int8")
#: 128 in each of four bytes, and 1 in each.
_FLIP, _ONES = "0x80808080", "0x01010101"


def check_bytes(operator: ROperator, binding: Binding) -> Compute:
    """Return the contraction of an operator that panels of bytes can compute. Raises Unsuited with the reason."""
    main = check_form(operator)
    if (
        main.operands is None
        or main.dtype != "int32"
        or any(binding.types[load.tensor].dtype not in BYTES for load in main.operands)
    ):
        raise Unsuited("no product of bytes")
    names = (*operator.inputs, *(c.name for c in operator.computes))
    if any(binding.types[n].dtype not in TYPES for n in names if not is_length(n, binding)):
        raise Unsuited("a type that vectors do not have")
    if operator.computes[0] is not main:
        raise Unsuited("maps before a product of bytes")
    for c in operator.computes[1:]:
        typed_vector(binding, 1, lambda load: load.tensor, "v").value(c.body)
    return main


def typed_vector(binding: Binding, lanes: int, load: Callable[[Load], str], prefix: str) -> TypedVector:
    """Return the vector writer for epilogue maps of a product of bytes."""
    return TypedVector(lanes, load, prefix, types={n: t.dtype for n, t in binding.types.items()})


def bytes_product(operator: ROperator, binding: Binding) -> PanelProduct:
    """Return a tiled operator as a product of four-byte groups, along the axis with the fewest groups. Raises Unsuited."""
    check_bytes(operator, binding)
    p = product_of(operator, binding)
    types = binding.types[p.a.tensor].dtype, binding.types[p.b.tensor].dtype
    fitting = [r for r in p.main.reduce if _is_unguarded(p, r, binding)]
    if not fitting:
        raise Unsuited("padding along every axis of the sum")
    best = min(reversed(fitting), key=lambda r: p.depth // r.extent * -(-r.extent // 4))
    fours = ex.make_mul(best.name, 4)
    a, b = (_substitute_axis(load, best.name, fours) for load in (p.a, p.b))
    reduce = tuple(Axis(r.name, -(-r.extent // 4)) if r == best else r for r in p.main.reduce)
    return replace(p, main=replace(p.main, reduce=reduce), a=a, b=b, quads=FourBytes(best.name, best.extent, p.a, p.b, types))


def _substitute_axis(load: Load, axis: str, place: Expr) -> Load:
    return Load(load.tensor, tuple(ex.substitute(i, {axis: place}) for i in load.indices), load.fill)


def _is_unguarded(p: PanelProduct, axis: Axis, binding: Binding) -> bool:
    """Return True if the column operand can be read in groups of four along ``axis``: affine, and inside its tensor."""
    ranges = {name: (0, n - 1) for name, n in p.extent.items()}
    for name in ex.axes_of(p.b):
        base, _, divisor = name.partition(QUOTIENT)
        if divisor:
            ranges[name] = (0, (p.extent[base] - 1) // int(divisor))
    for index, extent in zip(p.b.indices, binding.types[p.b.tensor].shape, strict=True):
        if axis.name not in ex.axes_of(index):
            continue
        span = ex.interval(index, ranges)
        if ex.affine_form(index) is None or span is None or span[0] < 0 or span[1] >= extent:
            return False
    return True


def write_dots_task(product: PanelProduct, binding: Binding, device: VDevice) -> TaskFunction:
    """Return the task function of a tiled product of bytes with a panel config. Raises Unsuited if it cannot be written."""
    lanes = device.vector
    if lanes not in LANES:
        raise Unsuited(f"vectors of {lanes}")
    made = Dots(product, binding, lanes).function()
    return replace(made, helpers=made.helpers + dot_text(lanes, device.dots > 0))


@dataclass(frozen=True)
class Signs:
    """Signedness of the operands in a product of bytes. ``unsigned`` is the operand that is multiplied as unsigned. The bytes of
    operand ``flipped`` are flipped ("" for none). ``factor`` times the sum of the other operand is added to the result."""

    unsigned: str
    flipped: str = ""
    factor: int = 0


def signs_of(types: tuple[str, str], constant: str) -> Signs:
    """Return the signedness for operands a and b of these types; the ``constant`` operand ("" for neither) is not flipped."""
    if types[0] != types[1]:
        return Signs("a" if types[0] == "uint8" else "b")
    flipped = "b" if constant == "a" else "a"
    if types[0] == "int8":
        return Signs(flipped, flipped, -128)
    return Signs("b" if flipped == "a" else "a", flipped, 128)


class Dots(Panel):
    """A writer of one task function over four-byte groups."""

    family, element, sum, floats = "dots", "int", "int", False

    @property
    def quads(self) -> FourBytes:
        """The four-byte groups of the product."""
        assert self.p.quads is not None
        return self.p.quads

    @property
    def constant(self) -> str:
        """The operand that is packed when the program is loaded."""
        if self.p.a.tensor in self.binding.constants:
            return "a"
        alone = self.p.b.tensor in self.binding.constants and len(self.p.columns) == 1 and not self.window
        return "b" if alone else ""

    @property
    def signs(self) -> Signs:
        """The signedness correction of the operands."""
        return signs_of(self.quads.types, self.constant)

    # --- operands -------------------------------------------------------------------------------

    def _packed_at(self, name: str, rows: bool, unit: int, extent: int) -> str:
        """Write a pointer ``name`` to this task's packed constants, whose blocks begin with their sums."""
        packing, coordinates = pack_quads(self.p, unit, rows, self.signs.factor)
        tensor = self.p.a.tensor if rows else self.p.b.tensor
        size = -(-extent // unit) * unit * self.depth
        place = f"(size_t)({combine_digits(coordinates)}) * {size}"
        self.text.line(f"__global const int *{name} = {self.pointer(tensor, packed=packing)} + {place};")
        return name

    @property
    def depth(self) -> int:
        """Number of elements of a line of packed constants."""
        return self.p.depth + bool(self.signs.factor)

    def rows_operand(self) -> PanelOperand:
        """Return the packed constants, or adjacent bytes in place."""
        p = self.p
        if self.constant == "a":
            name = self._packed_at("A", True, self.mr, p.rows)
            return PanelOperand(name, {r: s * self.mr for r, s in self.flat.items()}, packed=True)
        steps = load_access(p.a, self.binding)
        if load_access(self.quads.a, self.binding).step(self.quads.axis) != 1:
            raise Unsuited("the bytes of a row are not contiguous")
        self.text.line(f"__global const uchar *A = (__global const uchar *){self.pointer(p.a.tensor)} + ({self.address(steps)});")
        row = steps.step(p.row) if p.row else 0
        return PanelOperand("A", {r: steps.step(r) for r in self.flat}, row_step=row, dtype="uint8")

    def columns_operand(self) -> PanelOperand:
        """Return the packed constants, or four-byte groups gathered from bytes."""
        if self.window:
            self.scratch = (self.window.count * self.window.block(self.lanes) + self.lanes) * 4
            self.gather(self.window.region(self.lanes))
            return PanelOperand("panel", self.window.steps(self.lanes))
        if self.constant == "b":
            unit = self.nv * self.lanes
            name = self._packed_at("B", False, unit, self.p.width)
            return PanelOperand(name, {r: s * unit for r, s in self.flat.items()}, packed=True)
        return self.gathered()

    def gather_of(self, region: Region) -> Fours:
        """Return the writer that gathers the columns."""
        flipped = self.signs.flipped == "b"
        return Fours(self.p, self.binding, self.lanes, region, self.pointer, self.origin, self.quads, flipped)

    # --- the microkernel ------------------------------------------------------------------------

    def pointers(self, a: PanelOperand, b: PanelOperand) -> None:
        """Write the pointers as for float32, skipping the sums at the start of packed lines."""
        full = self.nv * self.lanes
        head = bool(self.signs.factor)
        place = f"c / {full} * {full * self.depth} + c % {full}" if b.packed else "c"
        skipped = f" + {full}" if b.packed and head else ""
        self.text.line(f"__global const int *b = {b.pointer} + {place}{skipped};")
        if a.packed:
            skipped = f" + {self.mr}" if head else ""
            self.text.line(f"__global const int *a = {a.pointer} + r * {self.depth}{skipped};")
            return
        for i in range(self.mr):
            self.text.line(f"__global const uchar *a{i} = A + min(r + {i}, rows - 1) * {a.row_step};")

    def multiply(self, a: PanelOperand, b: PanelOperand, nv: int) -> None:
        """Write the sums; the correction for flipped bytes is the initial value or is added after the loop."""
        kind, text, summed = vector_type(self.lanes, "int"), self.text, self._has_column_sums
        for i in range(self.mr):
            text.line(f"{kind} {', '.join(f's{i}_{j} = {self._initial_value(a, b, i, j)}' for j in range(nv))};")
        if summed:
            text.line(f"{kind} {', '.join(f'q{j} = 0' for j in range(nv))};")
        self.k_loops(a, b, ((), kind), lambda: self.multiply_add(a, b, nv))
        for i in range(self.mr):
            more = f" + {self.signs.factor} * q" if summed else ""
            text.line(" ".join(f"tile[{i * nv + j}] = s{i}_{j}{more and f'{more}{j}'};" for j in range(nv)))

    @property
    def _has_column_sums(self) -> bool:
        """True if the columns are also summed next to the products."""
        return bool(self.signs.factor) and not self.constant

    def _initial_value(self, a: PanelOperand, b: PanelOperand, i: int, j: int) -> str:
        """Return the initial value of an accumulator."""
        full = self.nv * self.lanes
        if not self.signs.factor or not (a.packed or b.packed):
            return "0"
        return f"a[{i - self.mr}]" if a.packed else f"vload{self.lanes}({j}, b - {full})"

    def multiply_add(self, a: PanelOperand, b: PanelOperand, nv: int) -> None:
        """Write one product of every accumulator, at ``ka`` and ``kb``."""
        lanes, text, signs = self.lanes, self.text, self.signs
        kind = vector_type(lanes, "int")
        for j in range(nv):
            text.line(f"const {kind} b{j} = vload{lanes}({j}, b + kb);")
        for i in range(self.mr):
            word = f"a[ka + {i}]" if a.packed else f"as_int(vload4(0, a{i} + ka))"
            word = f"(int)({word} ^ {_FLIP})" if signs.flipped == "a" else word
            each = " ".join(f"s{i}_{j} = {self._dot_call(f's{i}_{j}', 'w', f'b{j}')};" for j in range(nv))
            text.line(f"{{ const {kind} w = {word}; {each} }}")
        if self._has_column_sums:
            each = " ".join(f"q{j} = {self._dot_call(f'q{j}', 'ones', f'b{j}')};" for j in range(nv))
            text.line(f"{{ const {kind} ones = {_ONES}; {each} }}")

    def _dot_call(self, total: str, a: str, b: str) -> str:
        first, second = (a, b) if self.signs.unsigned == "a" else (b, a)
        return f"RM_DOT{self.lanes}({total}, {first}, {second})"

    # --- the epilogue ---------------------------------------------------------------------------

    def vector(self, load: Callable[[Load], str], prefix: str) -> TypedVector:
        """Return the writer of maps in vectors."""
        return typed_vector(self.binding, self.lanes, load, prefix)


@dataclass
class Fours(Gather):
    """A gather of four neighbouring bytes along the reduction into one ``int``, optionally ``flipped``. Bytes past the end of the
    sum are 0."""

    quads: FourBytes
    flipped: bool
    element: ClassVar[str] = "int"
    zero: ClassVar[str] = "0"

    def fill(self) -> str:
        """Return the four bytes of the padding value."""
        byte = int(self.region.load.fill or 0) & 255
        word = byte * 0x01010101 ^ (0x80808080 if self.flipped else 0)
        text, q = str(word - (1 << 32) if word >= 1 << 31 else word), self.quads
        if not word or q.extent % 4 == 0:
            return text
        # Bytes past the end of the sum must be 0, not padding: the other operand may hold arbitrary values there.
        live = f"({q.extent} - k_{q.axis} * 4)"
        return f"({text} & ({live} < 4 ? (1 << (8 * {live})) - 1 : -1))"

    def assign(self, value: Expr, width: int) -> Iterator[str]:
        """Yield the assignment of columns ``i .. i + width - 1``."""
        if not isinstance(value, Load):
            raise Unsuited("maps before a product of bytes")
        steps = self.access(value)
        stride = load_access(self.quads.b, self.binding).step(self.quads.axis)
        q = self.quads
        kind = vector_type(width, "uint")
        yield f"__global const uchar *q = (__global const uchar *){self.pointer(steps.tensor)} + ({self.address(steps)});"
        short = q.extent % 4
        if short:
            yield f"const int live = {q.extent} - k_{q.axis} * 4;"
        if stride == 1 and steps.step(self.inner) not in (0, 1, 2):
            step = steps.step(self.inner)
            each = ", ".join(f"as_uint(vload4(0, q + (i + {n}) * {step}))" for n in range(width))
            yield f"{kind} word = ({kind})({each});"
            if short:
                yield "if (live < 4) word &= (1u << (8 * live)) - 1u;"
        else:
            for r in range(4):
                read = self._load_bytes(f"q + {r * stride}", steps.step(self.inner), width)
                if short and r:
                    read = f"(live > {r} ? {read} : ({vector_type(width, 'uchar')})(0))"
                yield f"const {vector_type(width, 'uchar')} q{r} = {read};"
            shifted = (f"(convert_{kind}(q{r}) << {8 * r}u)" if r else f"convert_{kind}(q0)" for r in range(4))
            yield f"{kind} word = {' | '.join(shifted)};"
        if self.flipped:
            yield f"word ^= {_FLIP}u;"
        value_text = f"as_{vector_type(width, 'int')}(word)"
        yield f"vstore{width}({value_text}, 0, d + i);" if width > 1 else f"d[i] = {value_text};"

    def _load_bytes(self, source: str, step: int, width: int) -> str:
        if step == 0:
            return f"({vector_type(width, 'uchar')})(*({source}))"
        if width == 1:
            return f"*({source} + i * {step})"
        if step == 1:
            return f"vload{width}(0, {source} + i)"
        if step == 2:
            halves = ", ".join(f"vload{width}({n}, {source} + i * 2).even" for n in (0, 1))
            return f"({vector_type(width, 'uchar')})({halves})"
        each = ", ".join(f"*({source} + (i + {n}) * {step})" for n in range(width))
        return f"({vector_type(width, 'uchar')})({each})"
