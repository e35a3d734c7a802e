"""Skipping of unchanged tasks: if one test selects all results of an operator and fails, only old values are copied.

A recurrence whose sequences have ended retains its states, ``where(on[b], new, old)``. Once all sequences of a task have ended, a
function around the kernel makes the task copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rammer.codegen.c_text import Text, format_sum, split_digits
from rammer.device.manifest import Binding
from rammer.ir.compute import Compute
from rammer.ir.expr import Const, Expr, Load, Op, Ref, axes_of, loads
from rammer.ir.operator import ROperator

#: Comparisons that a test may be, besides the load of a truth value.
COMPARED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@dataclass(frozen=True)
class RestTest:
    """The ``test`` that selects the results of an operator, along its anchor's axes; ``kept`` writes them if it fails."""

    test: Expr
    kept: ROperator

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors that the test reads."""
        return tuple(dict.fromkeys(load.tensor for load in loads(self.test)))

    def lines(self, operator: ROperator, binding: Binding, pointers: Mapping[str, str]) -> list[str]:
        """Return statements that set ``on`` if the test holds anywhere in task ``task``; ``pointers``
        are those of ``tensors``."""
        text, open_loops = Text(), 0
        text.line("int on = 0;")
        places = split_digits("task", operator.grid)
        for axis, place, tile, count in zip(operator.anchor.axes, places, operator.tile, operator.grid, strict=True):
            if axis.name in axes_of(self.test):
                low = f"{place} * {tile}" if count > 1 else "0"
                name, high = f"e_{axis.name}", f"min({low} + {tile}, {axis.extent})"
                text.line(f"for (int {name} = {low}; {name} < {high}; ++{name}) {{")
                open_loops += 1
        text.line(f"on |= {_test_text(self.test, binding, pointers)};")
        text.all(["}"] * open_loops)
        return text.lines


def rest_of(operator: ROperator) -> RestTest | None:
    """Return the test that decides if an operator with a reduction computes, or None if it always does."""
    made = {c.name: c for c in operator.computes}
    written = [made[o] for o in operator.outputs]
    if operator.skips or all(c.combiner is None for c in operator.computes) or not all(map(_is_select, written)):
        return None
    tests = {_select_condition(c) for c in written}
    axes = {tuple((a.name, a.extent) for a in c.axes) for c in written}
    test = _select_condition(written[0])
    if len(tests) != 1 or len(axes) != 1 or not _is_simple_test(test, made):
        return None
    others = {c.name: replace(c, body=_else_value(c), used=None) for c in written}
    if any(r in made for c in others.values() for r in c.reads):
        return None
    computes = tuple(others[c.name] for c in operator.computes if c.name in others)
    return RestTest(test, replace(operator, computes=computes, connections=(), family="", config=(), reduce_bounds=()))


def _is_select(c: Compute) -> bool:
    return c.combiner is None and isinstance(c.body, Op) and c.body.fn == "where"


def _select_condition(c: Compute) -> Expr:
    assert isinstance(c.body, Op)
    return c.body.args[0]


def _else_value(c: Compute) -> Expr:
    assert isinstance(c.body, Op)
    return c.body.args[2]


def _is_simple_test(test: Expr, inside: Mapping[str, Compute]) -> bool:
    """Return True if a test is an outside truth value, or compares outside numbers."""
    parts: Sequence[Expr] = test.args if isinstance(test, Op) and test.fn in COMPARED else (test,)
    read = [p for p in parts if isinstance(p, Load)]
    if not read or any(not isinstance(p, Load | Const) or (isinstance(p, Const) and p.dtype[:3] != "int") for p in parts):
        return False
    return all(p.fill is None and p.tensor not in inside and all(isinstance(i, Ref | Const) for i in p.indices) for p in read)


def _test_text(e: Expr, binding: Binding, pointers: Mapping[str, str]) -> str:
    if isinstance(e, Op):
        left, right = (_test_text(a, binding, pointers) for a in e.args)
        return f"({left} {COMPARED[e.fn]} {right})"
    if isinstance(e, Const):
        return str(e.value)
    assert isinstance(e, Load)
    steps = binding.storages[e.tensor].strides
    places = zip(e.indices, steps, strict=True)
    terms = [(f"e_{i.axis}" if isinstance(i, Ref) else str(i.value) if isinstance(i, Const) else "", s) for i, s in places]
    return f"{pointers[e.tensor]}[{format_sum(terms)}]"
