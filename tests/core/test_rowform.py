"""Reads of rows, in operators whose producers are read twice each."""

from __future__ import annotations

from itertools import pairwise

from rammer.codegen.rowform import RowForm, collect_accesses, row_form
from rammer.ir.compute import Compute
from rammer.ir.expr import Load
from rammer.ir.operator import Connection, ROperator

#: Producers in a chain. Written out as one expression they are 2^60 loads.
DEPTH = 60


def chain(dtype: str, step: str) -> RowForm:
    """Return sums of rows of a chain of producers, each of which applies ``step`` to the previous one."""
    lines = [f"p{n}: {dtype}[i:4, j:8] = " + step.replace("@", f"p{n - 1}" if n else "x") for n in range(DEPTH)]
    computes = [Compute.parse(line) for line in (*lines, f"y: {dtype}[i:4] = sum[j:8] p{DEPTH - 1}[i, j]")]
    links = tuple(Connection(a.name, b.name, "thread") for a, b in pairwise(computes))
    form = row_form(ROperator("y", tuple(computes), links, ("y",)))
    assert form is not None
    return form


def test_a_chain_of_values_that_are_read_twice_is_seen_once() -> None:
    found = collect_accesses(chain("f32", "@[i, j] * @[i, j]"))
    (row,), (element,) = found.rows, found.elements
    assert found.loads == (Load("x", (row, element)), Load("y", (row,)))
    assert not found.outside


def test_a_chain_of_places_that_are_read_twice_is_seen_once() -> None:
    found = collect_accesses(chain("i64", "t[@[i, j]] + u[@[i, j]] + j"))
    assert [load.tensor for load in found.loads] == ["t", "u", "y"]
    assert found.outside == {found.elements[0].axis}
