"""Scalar operations, literals and conversions as C text; element types follow NumPy's arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rammer.codegen.c_target import CTarget
from rammer.codegen.dialects import SUFFIX
from rammer.errors import DeviceFailure
from rammer.ir.compute import Compute
from rammer.ir.expr import Number
from rammer.ir.types import is_float

INFIX = {"add": "+", "sub": "-", "mul": "*", "and_": "&", "or_": "|", "xor": "^"}
_COMPARE = {"eq": "==", "lt": "<", "le": "<="}
_ROUNDING = frozenset(("floor", "ceil", "round"))
_RENAMED = {"round": "rint", "abs": "fabs"}
#: Bit casts, which a dialect spells by a template over the value ``v``.
_BITS = {"as_uint32": "float32", "as_float32": "uint32", "as_uint64": "float64", "as_float64": "uint64"}


@dataclass(frozen=True, slots=True)
class Val:
    """The C text of a value. ``small``: an int64 of the IR held in a 32-bit C int. ``atom``: a name or literal. ``lanes``:
    elements of a vector, 0 for a scalar (a vector of bool is a mask of 0 and -1). ``half``: float16 holds it."""

    text: str
    dtype: str
    small: bool = False
    atom: bool = False
    lanes: int = 0
    half: bool = False

    @property
    def cdtype(self) -> str:
        """The element type of the C expression."""
        return "int32" if self.small else compute_type(self.dtype)


def compute_type(dtype: str) -> str:
    """Return the type that values of ``dtype`` compute in: float16 is a storage format only."""
    return "float32" if dtype == "float16" else dtype


def spell_type(target: CTarget, dtype: str) -> str:
    """Return the spelling of an element type. Raises DeviceFailure if the dialect lacks it."""
    if dtype not in target.types:
        raise DeviceFailure(f"the {target.name} dialect has no element type {dtype}", hint="cast the tensor to float32")
    return target.types[dtype]


def spell_literal(target: CTarget, value: Number, dtype: str) -> str:
    """Return a literal of ``dtype``."""
    if is_float(dtype):
        return _float_literal(target, float(value), dtype)
    if dtype == "bool":
        return "1" if value else "0"
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a {dtype}")
    number = int(value)
    if number == -(2**63):
        return f"(-{2**63 - 1} - 1)"
    if number == -(2**31):
        return f"(-{2**31 - 1} - 1)"
    suffix = "u" if dtype.startswith("u") and number > 2**31 - 1 else ""
    return f"{number}{suffix}" if number >= 0 else f"({number})"


def _float_literal(target: CTarget, value: float, dtype: str) -> str:
    wide = dtype == "float64"
    prefix = f"({spell_type(target, 'float64')})" if wide else ""
    with np.errstate(over="ignore"):
        narrow = value if wide else float(np.float32(value))
    if math.isnan(narrow):
        return f"({prefix}RM_NAN)"
    if math.isinf(narrow):
        return f"({prefix}{'-' if narrow < 0 else ''}RM_INF)"
    text = repr(narrow) if wide else str(np.float32(value))
    if "e" not in text and "." not in text:
        text += ".0"
    text += "" if wide else "f"
    return f"({text})" if text.startswith("-") else text


def convert_value(target: CTarget, value: Val, dtype: str) -> Val:
    """Convert ``value`` to ``dtype`` as C does (towards zero from float to integer)."""
    if value.dtype == dtype and not value.small:
        return value
    kind = compute_type(dtype)
    if compute_type(value.cdtype) == kind:
        return Val(value.text, dtype, atom=value.atom, half=value.half)
    if dtype == "bool":
        return Val(f"({value.text} != 0)", dtype)
    narrow = dtype in ("int8", "uint8", "int16", "uint16", "uint32") and is_float(value.dtype)
    # Converting a negative float to an unsigned type is undefined; by way of int64 it wraps, as in NumPy.
    if dtype == "uint64" and is_float(value.dtype):
        wrapped, plain = f"({spell_type(target, kind)})({spell_type(target, 'int64')})", f"({spell_type(target, kind)})"
        return Val(f"(({value.text}) < 0 ? {wrapped}({value.text}) : {plain}({value.text}))", dtype)
    through = f"({spell_type(target, 'int64')})" if narrow else ""
    return Val(
        f"(({spell_type(target, kind)}){through}{value.text})"
        if value.atom or value.text.startswith("(")
        else f"(({spell_type(target, kind)}){through}({value.text}))",
        dtype,
    )


def is_half(value: Number) -> bool:
    """Return True if float16 holds ``value``."""
    with np.errstate(over="ignore"):
        return isinstance(value, bool) or bool(np.float64(np.float16(value)) == np.float64(value))


def round_to_half(target: CTarget, value: Val) -> Val:
    """Return ``value`` rounded to float16: to nearest, ties to even, and infinite beyond its range."""
    if value.half:
        return value
    text = f"rm_hround{value.lanes}({value.text})" if value.lanes else target.functions["round:float16"].format(v=value.text)
    return Val(text, value.dtype, lanes=value.lanes, half=True)


def keeps_half(fn: str, args: Sequence[Val]) -> bool:
    """Return True if an operation returns one of its operands or its negation, and float16 holds all operands."""
    return fn in ("max", "min", "neg", "abs") and all(a.half for a in args)


def spell_function(target: CTarget, fn: str, dtype: str) -> str:
    """Return the spelling of a mathematical function for a floating type."""
    if fn in target.functions:
        return target.functions[fn]
    name = _RENAMED.get(fn, fn)
    return name if dtype == "float64" else f"{name}f"


def apply_function(target: CTarget, fn: str, args: Sequence[Val]) -> Val:
    """Apply ``fn`` to arguments in their common type."""
    dtype, small = args[0].dtype, all(a.small for a in args)
    texts = [a.text for a in args]
    if fn in _COMPARE:
        return Val(f"({texts[0]} {_COMPARE[fn]} {texts[1]})", "bool")
    if fn == "not_":
        return Val(f"(!{texts[0]})", "bool")
    if fn in _BITS:
        template = target.functions.get(fn)
        if template is None:
            raise DeviceFailure(f"the {target.name} dialect cannot reinterpret the bits of a number ({fn})")
        text = template.format(v=convert_value(target, args[0], _BITS[fn]).text)
        return Val(text, fn.removeprefix("as_"))
    if small:
        texts = [convert_value(target, a, dtype).text for a in args]
    kind = compute_type(dtype)
    if is_float(kind):
        result = _apply_float(target, fn, kind, texts, args)
        return Val(result, "bool" if fn in ("isnan", "isinf") else dtype, half=keeps_half(fn, args))
    if fn in ("isnan", "isinf"):
        return Val("0", "bool", atom=True)
    return Val(_apply_integer(target, fn, kind, texts), dtype)


def _apply_float(target: CTarget, fn: str, kind: str, texts: list[str], args: Sequence[Val]) -> str:
    if args[0].dtype == "float16" and not args[0].lanes and (half := target.functions.get(f"{fn}:float16")):
        return f"{half}({', '.join(texts)})"
    if fn in INFIX:
        return f"({texts[0]} {INFIX[fn]} {texts[1]})"
    if fn == "div" and (kind != "float32" or fn not in target.functions):
        return f"({texts[0]} / {texts[1]})"
    if fn == "neg":
        return f"(-{texts[0]})"
    if fn == "isnan":
        return f"({texts[0]} != {texts[0]})"
    if fn == "isinf":
        return f"({spell_function(target, 'abs', kind)}({texts[0]}) == RM_INF)"
    if fn in ("max", "min", "sign", "mod", "floordiv"):
        return f"rm_{fn}_{SUFFIX[kind]}({', '.join(texts)})"
    return f"{spell_function(target, fn, kind)}({', '.join(texts)})"


def _apply_integer(target: CTarget, fn: str, kind: str, texts: list[str]) -> str:
    """Return integer arithmetic that wraps as in NumPy: by way of unsigned, as signed overflow is undefined."""
    spelling = spell_type(target, kind)
    wide = kind if kind in SUFFIX else "int32"
    if fn in _ROUNDING or (fn == "abs" and kind.startswith("u")):
        return texts[0]
    if fn in ("and_", "or_", "xor"):
        return f"({texts[0]} {INFIX[fn]} {texts[1]})"
    if fn in ("add", "sub", "mul", "neg"):
        unsigned = spell_type(target, wide if wide.startswith("u") else f"u{wide}")
        lifted = [f"({unsigned}){t}" for t in texts]
        body = f"0 - {lifted[0]}" if fn == "neg" else f" {INFIX[fn]} ".join(lifted)
        return f"(({spelling})({body}))"
    if fn == "abs":
        return f"(({spelling})({texts[0]} < 0 ? -{texts[0]} : {texts[0]}))"
    if fn == "sign":
        return f"(({spelling})(({texts[0]} > 0) - ({texts[0]} < 0)))"
    if fn in ("max", "min", "div", "mod", "fmod", "floordiv", "pow", "shl", "shr"):
        call = f"rm_{fn}_{SUFFIX[wide]}({', '.join(texts)})"
        return call if kind == wide else f"(({spelling}){call})"
    raise DeviceFailure(f"{fn} is not defined for {kind}", hint="cast the tensor to float32")


def format_load(target: CTarget, pointer: str, address: str, dtype: str) -> str:
    """Return the text that reads ``pointer[address]``."""
    template = target.functions.get(f"load:{dtype}")
    return template.format(p=pointer, i=address) if template else f"{pointer}[{address}]"


def format_store(target: CTarget, pointer: str, address: str, dtype: str, text: str) -> str:
    """Return the statement that writes ``pointer[address]``."""
    template = target.functions.get(f"store:{dtype}")
    return f"{template.format(p=pointer, i=address, v=text)};" if template else f"{pointer}[{address}] = {text};"


def initial_value(target: CTarget, c: Compute) -> str:
    """Return the literal that a reduction starts from."""
    if c.combiner in ("max", "min") and not is_float(c.dtype):
        if c.dtype == "bool":
            return "0" if c.combiner == "max" else "1"
        info = np.iinfo(c.dtype)
        return spell_literal(target, int(info.min if c.combiner == "max" else info.max), c.dtype)
    return spell_literal(target, {"sum": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}[c.combiner or "sum"], c.dtype)


def combine_value(target: CTarget, c: Compute, total: str, value: Val) -> str:
    """Return the statement that combines ``value`` into the accumulator ``total``."""
    text = convert_value(target, value, c.dtype).text
    if is_float(c.dtype) and c.combiner in ("sum", "prod"):
        return f"{total} {'+' if c.combiner == 'sum' else '*'}= {text};"
    fn = {"sum": "add", "prod": "mul"}.get(c.combiner or "sum", c.combiner or "sum")
    return f"{total} = {apply_function(target, fn, [Val(total, c.dtype, atom=True), Val(text, c.dtype)]).text};"
