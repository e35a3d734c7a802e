"""Parsing of scalar expressions: the inverse of ``str``, by Python's parser.

Most expressions of a program differ only in their tensors; an unrolled LSTM repeats them thousands of times. A text is therefore
parsed once with numbered tensors and copied for each set of names."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from rammer.ir import expr as ex
from rammer.ir.expr import Cast, Const, Expr, Load, Op, Ref, Table
from rammer.ir.names import SHOWN
from rammer.ir.types import SHORT

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
}


#: The name of a loaded tensor: it precedes a bracket in the text of an expression.
TENSOR = re.compile(r"([^\W\d]\w*)(?=\s*\[)", re.ASCII)
#: Tokens that begin with a digit outside a name, and numbers as ``str`` prints them. The sign of an exponent ends a token.
_DIGITS, _NUMBER = re.compile(r"(?<![\w.])\d[\w.]*", re.ASCII), re.compile(r"\d+(\.\d+)?(e\d*)?", re.ASCII)
#: One more than the largest integer of any element type.
LARGEST = 1 << 64
#: Maximum number of cached expressions.
REMEMBERED = 4096


#: An expression's text without tensor names, and the numbers of its tensors.
Form: TypeAlias = "tuple[tuple[str, ...], tuple[int, ...]]"


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed expression: distinct tensors in order of first use, axes, and True if ``str`` prints exactly its text."""

    expr: Expr
    tensors: tuple[str, ...]
    axes: frozenset[str]
    canonical: bool
    form: Form


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """The common part of texts of one form: ``copy`` builds the expression over a list of tensors."""

    copy: Callable[[Sequence[str]], Expr]
    axes: frozenset[str]
    canonical: bool
    form: Form


def parse(text: str) -> Parsed:
    """Parse an expression from the text of ``str``. Raises ValueError for text that ``str`` does not print."""
    pattern, tensors = pattern_of(text)
    return Parsed(pattern.copy(tensors), tensors, pattern.axes, pattern.canonical, pattern.form)


def pattern_of(text: str) -> tuple[Pattern, tuple[str, ...]]:
    """Return the pattern of an expression's text, and its tensors. The pattern is cached and shared by all texts of one form.
    Raises ValueError for text that ``str`` does not print."""
    if not text.isascii():
        raise ValueError(f"not a scalar expression: {text[:SHOWN]!r}")
    form, tensors = form_of(text)
    try:
        return _make_pattern(form), tensors
    except (RecursionError, MemoryError):  # Python's parser and ours recurse as deep as the expression
        raise ValueError(f"an expression is nested too deeply: {text[:SHOWN]}") from None
    except (SyntaxError, KeyError, IndexError, TypeError, OverflowError) as problem:
        raise ValueError(f"not a scalar expression: {text[:SHOWN]}") from problem


def form_of(text: str) -> tuple[Form, tuple[str, ...]]:
    """Return the form of an expression's text, and its tensors in order of first use. Expressions that differ only in tensor
    names have equal forms."""
    parts = TENSOR.split(text)
    number: dict[str, int] = {}
    order = tuple([number.setdefault(t, len(number)) for t in parts[1::2]])
    return (tuple(parts[::2]), order), tuple(number)


@lru_cache(REMEMBERED)
def _make_pattern(form: Form) -> Pattern:
    """Parse the pattern of a form, with numbered tensors between its texts."""
    between, order = form
    text = "".join(f"{before}t{i}" for before, i in zip(between, order, strict=False)) + between[-1]
    if not all(map(_NUMBER.fullmatch, _DIGITS.findall(text))):
        raise ValueError("not a number as expressions print it")  # Python reads more forms of numbers, some with a warning
    expr = _read_node(ast.parse(text.strip(), mode="eval").body)
    return Pattern(_make_copier(expr), frozenset(ex.axes_of(expr)), str(expr) == text, form)


def _make_copier(e: Expr) -> Callable[[Sequence[str]], Expr]:
    """Return a function that copies ``e`` with other tensors and shares all parts without loads."""
    if not ex.loads(e):
        return lambda tensors: e
    if isinstance(e, Load):
        at, fill, indices = int(e.tensor[1:]), e.fill, e.indices
        if not any(map(ex.loads, indices)):
            return lambda tensors: Load(tensors[at], indices, fill)
        inner = [_make_copier(i) for i in indices]
        return lambda tensors: Load(tensors[at], tuple([i(tensors) for i in inner]), fill)
    if isinstance(e, Op):
        fn, parts = e.fn, [_make_copier(a) for a in e.args]
        return lambda tensors: Op(fn, tuple([p(tensors) for p in parts]))
    part = _make_copier(*ex.children(e))
    return lambda tensors: ex.rebuild_expr(e, (part(tensors),))


def _read_node(node: ast.expr) -> Expr:
    if isinstance(node, ast.Constant):
        return _read_literal(node.value)
    if isinstance(node, ast.Name):
        return Const(math.inf if node.id == "inf" else math.nan) if node.id in ("inf", "nan") else Ref(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _read_node(node.operand)
        if isinstance(inner, Const):
            return replace(inner, value=-inner.value)
    if isinstance(node, ast.BinOp):
        return Op(_BINARY[type(node.op)], (_read_node(node.left), _read_node(node.right)))
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return Load(node.value.id, tuple(_read_node(i) for i in items))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _read_call(node.func.id, node.args)
    raise ValueError(f"not a scalar expression: {ast.unparse(node)[:SHOWN]}")


def _read_literal(value: object) -> Const:
    if isinstance(value, bool):
        return Const(value, "bool")
    if isinstance(value, int) and value < LARGEST:
        return Const(value, "int64")
    if isinstance(value, float):
        return Const(value, "float32")
    raise ValueError("not a literal of any element type")


def _read_call(name: str, args: list[ast.expr]) -> Expr:
    if name == "pad":
        inner, fill = _read_node(args[0]), _read_node(args[1])
        if isinstance(inner, Load) and isinstance(fill, Const):
            return replace(inner, fill=fill.value)
    if name == "const":
        literal = _read_node(args[1])
        if isinstance(literal, Const):
            return Const(literal.value, _read_dtype(args[0]))
    if name == "cast":
        return Cast(_read_dtype(args[0]), _read_node(args[1]))
    if name == "table" and isinstance(args[1], ast.List):
        values = [_read_node(v) for v in args[1].elts]
        return Table(tuple(v.value for v in values if isinstance(v, Const)), _read_node(args[2]), _read_dtype(args[0]))
    return Op(name, tuple(_read_node(a) for a in args))


def _read_dtype(node: ast.expr) -> str:
    if isinstance(node, ast.Name) and node.id in SHORT:
        return node.id
    raise ValueError(f"not an element type: {ast.unparse(node)[:SHOWN]}")
