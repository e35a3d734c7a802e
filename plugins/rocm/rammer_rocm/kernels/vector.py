"""Scalar bodies as OpenCL vector expressions: in float32 with float16 in memory, or in several element types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from rammer.codegen import Unsuited, format_load, spell_literal
from rammer.codegen.vector_text import STORED
from rammer.ir import expr as ex
from rammer.ir.expr import TRANSCENDENTAL, Cast, Const, Expr, Load, Op, Ref
from rammer.ir.operator import ROperator

from rammer_rocm.dialect import CPU_DIALECT

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE = {"eq": "==", "lt": "<", "le": "<="}
_CALLS = {
    "abs": "fabs",
    "floor": "floor",
    "ceil": "ceil",
    "round": "rint",
    "sqrt": "sqrt",
    "pow": "pow",
    **{n: n for n in TRANSCENDENTAL},
}
#: Element types that typed vectors load, convert and store.
TYPES: Final = ("float32", "float16", "int32", "uint8", "int8", "int16", "uint16")
#: Element types of typed vector arithmetic.
_NUMBERS: Final = ("float32", "int32")
_WRAPPING: Final = {"add": "+", "sub": "-", "mul": "*"}


def vector_type(width: int, element: str = "float") -> str:
    """Return the name of an OpenCL vector type, such as ``float`` or ``float16``."""
    return element if width == 1 else f"{element}{width}"


def read_vector(dtype: str, width: int, address: str, number: int = 0) -> str:
    """Return the load of ``width`` elements of ``dtype`` as float32 from ``address``, or of the ``number``-th vector there."""
    if dtype == "float16":
        return f"vload_half{width if width > 1 else ''}({number}, {address})"
    return f"vload{width}({number}, {address})" if width > 1 else f"*({address})"


def write_vector(dtype: str, width: int, address: str, value: str) -> str:
    """Return the statement that stores float32 ``value`` at ``address`` as ``dtype``."""
    if dtype == "float16":
        return f"vstore_half{width if width > 1 else ''}({value}, 0, {address});"
    return f"vstore{width}({value}, 0, {address});" if width > 1 else f"*({address}) = {value};"


def round_vector(dtype: str, width: int, value: str) -> str:
    """Return float32 ``value`` rounded to ``dtype`` as in memory."""
    return f"rm_hround{width if width > 1 else ''}({value})" if dtype == "float16" else value


def read_element(dtype: str, pointer: str, place: str) -> str:
    """Return the load of one element as float32."""
    return format_load(CPU_DIALECT, pointer, place, dtype)


def _axis_before(index: Expr, end: Expr) -> str:
    """Return the test of a map's own axis, which a writer of kernels replaces."""
    if not isinstance(index, Ref):
        raise Unsuited(f"{index} in a vector expression")
    return f"{index} < {end}"


@dataclass
class Vector:
    """A writer of vector statements with ``width`` lanes into ``lines``; ``load`` returns the text of a load.

    Every operation is named, so that a repeated value is written once. ``before`` returns the text of a mask of the lanes at
    which an index is less than an integer."""

    width: int
    load: Callable[[Load], str]
    prefix: str = "v"
    lines: list[str] = field(default_factory=list)
    known: dict[Expr, str] = field(default_factory=dict)
    before: Callable[[Expr, Expr], str] = _axis_before

    def value(self, e: Expr) -> str:
        """Return the name of a floating-point value. Raises Unsuited for expressions that vectors cannot represent."""
        if e not in self.known:
            self.known[e] = self.named(self.text_of(e), vector_type(self.width))
        return self.known[e]

    def named(self, text: str, kind: str) -> str:
        """Define a variable that holds ``text``, and return its name."""
        name = f"{self.prefix}{len(self.lines)}"
        self.lines.append(f"const {kind} {name} = {text};")
        return name

    def text_of(self, e: Expr) -> str:
        """Return the text of one operation on named values."""
        if isinstance(e, Const):
            if isinstance(e.value, bool):
                raise Unsuited("a truth value as a number")
            return f"({vector_type(self.width)})({spell_literal(CPU_DIALECT, float(e.value), 'float32')})"
        if isinstance(e, Load):
            return self.load(e)
        if isinstance(e, Cast) and e.dtype in STORED:
            return round_vector(e.dtype, self.width, self.value(e.arg))
        if not isinstance(e, Op):
            raise Unsuited(f"{e} in a vector expression")
        if e.fn in ("max", "min"):
            return self._extremum_call(e)
        if e.fn == "where":
            return self.select(self.mask(e.args[0]), self.value(e.args[1]), self.value(e.args[2]))
        args = [self.value(a) for a in e.args]
        if e.fn in _INFIX:
            return f"{args[0]} {_INFIX[e.fn]} {args[1]}"
        if e.fn == "neg":
            return f"-{args[0]}"
        if e.fn in _CALLS:
            return f"{_CALLS[e.fn]}({', '.join(args)})"
        raise Unsuited(f"{e.fn} in a vector expression")

    def _extremum_call(self, e: Op) -> str:
        """Return NumPy's maximum or minimum, which propagates NaN. With a literal operand one comparison suffices."""
        sign = ">" if e.fn == "max" else "<"
        first, second = (self.value(a) for a in e.args)
        if isinstance(e.args[1], Const):
            return self.select(f"({second} {sign} {first})", second, first)
        test = f"({first} {sign} {second})"
        if not isinstance(e.args[0], Const):
            test = f"({test} | ({first} != {first}))"
        return self.select(test, first, second)

    def select(self, mask: str, yes: str, no: str) -> str:
        """Return the text of ``mask ? yes : no`` by lane."""
        return f"({mask} ? {yes} : {no})" if self.width == 1 else f"select({no}, {yes}, {mask})"

    def mask(self, e: Expr) -> str:
        """Return the text of a condition: an integer vector of -1 and 0."""
        if isinstance(e, Op) and e.fn == "lt" and ex.axes_of(e.args[0]) and ex.affine_form(e.args[0]) is not None:
            return self.before(e.args[0], e.args[1])
        if isinstance(e, Op) and e.fn in _COMPARE:
            return f"({self.value(e.args[0])} {_COMPARE[e.fn]} {self.value(e.args[1])})"
        if isinstance(e, Op) and e.fn in ("and_", "or_"):
            joined = " & " if e.fn == "and_" else " | "
            return f"({joined.join(self.mask(a) for a in e.args)})"
        if isinstance(e, Op) and e.fn == "not_":
            return f"(!{self.mask(e.args[0])})"
        if isinstance(e, Op) and e.fn == "isnan":
            return f"({self.value(e.args[0])} != {self.value(e.args[0])})"
        raise Unsuited(f"{e} as a condition")


@dataclass
class TypedVector(Vector):
    """A vector writer with a type for every value, for maps after a product of bytes; ``types`` are those of the loaded tensors.

    Arithmetic uses float32 and int32; bytes, 16-bit integers and float16 are loaded, converted and stored. 32-bit sums wrap."""

    types: Mapping[str, str] = field(default_factory=dict)

    def value(self, e: Expr) -> str:
        """Return the name of a number. Raises Unsuited for expressions that vectors cannot represent."""
        return self.typed(e, self._value_type(e))

    def typed(self, e: Expr, kind: str) -> str:
        """Return the name of a number; a literal has the type ``kind`` of its sibling operand."""
        key = Cast(kind, e) if isinstance(e, Const) else e
        if key not in self.known:
            if kind not in TYPES:
                raise Unsuited(f"{kind} in a vector expression")
            text = self._typed_literal(e, kind) if isinstance(e, Const) else self.text_of(e)
            self.known[key] = self.named(text, vector_type(self.width, CPU_DIALECT.types[kind]))
        return self.known[key]

    def _value_type(self, e: Expr) -> str:
        kind = ex.dtype_of(e, self.types)
        return "float32" if kind in STORED else kind

    def _typed_literal(self, e: Const, kind: str) -> str:
        if isinstance(e.value, bool):
            raise Unsuited("a truth value as a number")
        value = float(e.value) if kind == "float32" else int(e.value)
        return f"({vector_type(self.width, CPU_DIALECT.types[kind])})({spell_literal(CPU_DIALECT, value, kind)})"

    def text_of(self, e: Expr) -> str:
        """Return the text of one operation on named values."""
        if isinstance(e, Load):
            return self.load(e)
        if isinstance(e, Cast):
            return self._convert_value(e)
        if not isinstance(e, Op):
            raise Unsuited(f"{e} in a vector expression")
        kind = self._value_type(e)
        if kind not in _NUMBERS:
            raise Unsuited(f"{kind} is not computed with")
        if e.fn == "where":
            return self.select(self.mask(e.args[0]), *(self.typed(a, kind) for a in e.args[1:]))
        if kind == "int32":
            return self._integer_operation(e)
        if e.fn not in ("max", "min") and any(self._value_type(a) != "float32" for a in e.args if not isinstance(a, Const)):
            raise Unsuited(f"{e.fn} of mixed types")
        return super().text_of(Op(e.fn, tuple([Const(a.value, "float32") if isinstance(a, Const) else a for a in e.args])))

    def _integer_operation(self, e: Op) -> str:
        a = [self.typed(x, "int32") for x in e.args]
        if e.fn in _WRAPPING:
            kind = vector_type(self.width, "uint")
            return f"as_{vector_type(self.width, 'int')}(as_{kind}({a[0]}) {_WRAPPING[e.fn]} as_{kind}({a[1]}))"
        if e.fn in ("max", "min"):
            return f"{e.fn}({a[0]}, {a[1]})"
        raise Unsuited(f"{e.fn} of integers in a vector expression")

    def _convert_value(self, e: Cast) -> str:
        have = self._value_type(e.arg)
        if e.dtype in STORED and have == "float32":
            return round_vector(e.dtype, self.width, self.value(e.arg))
        if have not in TYPES or e.dtype not in TYPES or (have == "float32" and e.dtype not in _NUMBERS):
            raise Unsuited(f"{e} in a vector expression")
        return round_vector(
            e.dtype, self.width, f"convert_{vector_type(self.width, CPU_DIALECT.types[self._value_type(e)])}({self.value(e.arg)})"
        )

    def mask(self, e: Expr) -> str:
        """Return the text of a condition: an integer vector of -1 and 0."""
        if isinstance(e, Op) and e.fn in _COMPARE and not isinstance(e.args[0], Ref):
            kinds = {self._value_type(a) for a in e.args if not isinstance(a, Const)}
            if len(kinds) != 1 or not kinds <= {*_NUMBERS}:
                raise Unsuited(f"{e} as a condition")
            kind = next(iter(kinds))
            left, right = (self.typed(a, kind) for a in e.args)
            return f"({left} {_COMPARE[e.fn]} {right})"
        return super().mask(e)


def integer_text(e: Expr, load: Callable[[Load], str]) -> str:
    """Return an integer of type long that is equal in all lanes. Raises Unsuited unless it is a sum of lengths."""
    if isinstance(e, Const) and isinstance(e.value, int):
        return f"{e.value}l"
    if isinstance(e, Load) and not e.indices:
        return load(e)
    if isinstance(e, Op) and e.fn in ("add", "mul"):
        return f"({integer_text(e.args[0], load)} {_INFIX[e.fn]} {integer_text(e.args[1], load)})"
    raise Unsuited(f"{e} as an end")


def check_maps(operator: ROperator) -> None:
    """Raise Unsuited if vectors cannot represent the maps around the contraction."""
    for c in operator.computes:
        if not c.reduce:
            Vector(1, lambda load: load.tensor).value(c.body)
