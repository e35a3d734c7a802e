"""Parsing of printed scalar expressions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import OPS, Cast, Const, Expr, Load, Op, Ref, Table
from rammer.ir.parse import parse

NAMES = ("a", "b", "t0", "t1", "t2", "_w", "x_1")
leaves: st.SearchStrategy[Expr] = st.one_of(
    st.builds(Ref, st.sampled_from(("i", "j", "k"))),
    st.builds(Const, st.integers(-9, 9), st.sampled_from(("int64", "int32"))),
    st.builds(Const, st.sampled_from((0.5, -2.0, float("inf"), 1e-30)), st.just("float32")),
    st.builds(Const, st.booleans(), st.just("bool")),
)


def _larger(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    def op(fn: str) -> st.SearchStrategy[Expr]:
        return st.builds(Op, st.just(fn), st.tuples(*[inner] * OPS[fn].arity))

    return st.one_of(
        st.sampled_from(sorted(OPS)).flatmap(op),
        st.builds(Load, st.sampled_from(NAMES), st.lists(inner, min_size=1, max_size=3).map(tuple), st.sampled_from((None, 0.0))),
        st.builds(Cast, st.just("int64"), inner),
        st.builds(Table, st.just((1, 2, 3)), inner),
    )


expressions = st.recursive(leaves, _larger, max_leaves=12)


@pytest.mark.slow
@given(expressions, st.permutations(NAMES))
@settings(max_examples=300)
def test_a_text_reads_back_whatever_its_tensors_are_called(e: Expr, names: list[str]) -> None:
    for one in (e, ex.rename_tensors(e, dict(zip(NAMES, names, strict=True)))):
        found = parse(str(one))
        assert found.expr == one and found.canonical
        assert found.tensors == tuple(dict.fromkeys(load.tensor for load in ex.loads(one)))
        assert found.axes == ex.axes_of(one)


def test_spaces_are_no_part_of_a_name() -> None:
    assert parse("t1 [0] + b[0]").expr == parse("t1[0] + b[0]").expr
    assert not parse("t1 [0] + b[0]").canonical
    assert str(Compute.parse("y: f32[i:2] = t1 [i]+b[i]")) == "y: f32[i:2] = t1[i] + b[i]"


def test_what_is_no_expression_is_refused() -> None:
    for text in ("a[i] if i else 0", "f(x)[0]", "'a'", "a[i:2]", "lambda: 0"):
        with pytest.raises(ValueError, match="not a "):
            parse(text)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("text", ["1and 2", "0x10", "1_000", "1j", "0b1", "1.", "1.5.2", "i + 1or", "1e", "07"])
def test_numbers_are_read_as_they_are_printed(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a (number|scalar)"):
        parse(text)
    for number in ("1", "1.5", "1e-07", "1e+20", "3.4028234663852886e+38"):
        assert parse(number).canonical


def test_computes_of_one_pattern_share_what_has_no_loads() -> None:
    one, other = (Compute.parse(f"y: f32[i:4] = exp(x{n}[i * 2 + 1])") for n in np.arange(2))
    assert one.reads == ("x0",) and other.reads == ("x1",)
    assert one.loads[0].indices is other.loads[0].indices
