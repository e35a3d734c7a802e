"""Scalar bodies as OpenCL vector expressions of several element types: the epilogue of a product of bytes. Arithmetic uses
float32 and int32; bytes, 16-bit integers and float16 are loaded, converted and stored. 32-bit sums wrap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rammer.codegen import Unsuited, spell_literal
from rammer.codegen.vector_text import STORED
from rammer.ir import expr as ex
from rammer.ir.expr import Cast, Const, Expr, Load, Op, Ref

from rammer_rocm.kernels.generic import CPU_DIALECT
from rammer_rocm.kernels.vector import Vector, round_vector, vector_type

#: Element types that vectors load, convert and store.
TYPES: Final = ("float32", "float16", "int32", "uint8", "int8", "int16", "uint16")
#: Element types of vector arithmetic.
_NUMBERS: Final = ("float32", "int32")
_WRAPPING: Final = {"add": "+", "sub": "-", "mul": "*"}
_COMPARE: Final = {"eq": "==", "lt": "<", "le": "<="}
_LOGIC: Final = {"and_": "&", "or_": "|"}


@dataclass
class TypedVector(Vector):
    """A vector writer with a type for every value; ``types`` are those of the loaded tensors."""

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
