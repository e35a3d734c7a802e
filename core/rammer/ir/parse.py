"""Reading scalar expressions: the inverse of ``str``, through Python's own parser."""

from __future__ import annotations

import ast
import math
from dataclasses import replace

from rammer.ir.expr import Cast, Const, Expr, Load, Op, Ref, Table

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod",
}  # fmt: skip


def parse(text: str) -> Expr:
    """Inverse of ``str``. Raises ValueError on anything that ``str`` does not print."""
    return _read(ast.parse(text.strip(), mode="eval").body)


def _read(node: ast.expr) -> Expr:
    if isinstance(node, ast.Constant):
        return _literal(node.value)
    if isinstance(node, ast.Name):
        return Const(math.inf if node.id == "inf" else math.nan) if node.id in ("inf", "nan") else Ref(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _read(node.operand)
        if isinstance(inner, Const):
            return replace(inner, value=-inner.value)
    if isinstance(node, ast.BinOp):
        return Op(_BINARY[type(node.op)], (_read(node.left), _read(node.right)))
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return Load(node.value.id, tuple(_read(i) for i in items))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _call(node.func.id, node.args)
    raise ValueError(f"not a scalar expression: {ast.unparse(node)}")


def _literal(value: object) -> Const:
    if isinstance(value, bool):
        return Const(value, "bool")
    if isinstance(value, int):
        return Const(value, "int64")
    if isinstance(value, float):
        return Const(value, "float32")
    raise ValueError(f"not a literal: {value!r}")


def _call(name: str, args: list[ast.expr]) -> Expr:
    if name == "pad":
        inner, fill = _read(args[0]), _read(args[1])
        if isinstance(inner, Load) and isinstance(fill, Const):
            return replace(inner, fill=fill.value)
    if name == "const":
        literal = _read(args[1])
        if isinstance(literal, Const):
            return Const(literal.value, ast.unparse(args[0]))
    if name == "cast":
        return Cast(ast.unparse(args[0]), _read(args[1]))
    if name == "table" and isinstance(args[1], ast.List):
        values = [_read(v) for v in args[1].elts]
        return Table(tuple(v.value for v in values if isinstance(v, Const)), _read(args[2]), ast.unparse(args[0]))
    return Op(name, tuple(_read(a) for a in args))
