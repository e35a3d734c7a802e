"""Generator of the graph fuzzer: every lowered operator is described, drawn cases are valid and survive serialisation."""

from __future__ import annotations

import numpy as np
import pytest

import rammer.frontend.lower.operators  # noqa: F401  (importing it fills the registry)
from rammer.frontend.lower.lowering_registry import REGISTRY
from rammer_testing.graphs.case import Call, GraphCase
from rammer_testing.graphs.generate import OPSETS, graph, merged, tidied
from rammer_testing.operators import DESCRIBED, LEFT_OUT
from rammer_testing.operators.draw import Draw, Reject, schema_of

#: The operators that graphs draw.
IN_GRAPHS = sorted(op for op, entry in DESCRIBED.items() if entry.weight)


def test_every_lowered_operator_is_described_or_left_out_with_a_reason() -> None:
    lowered = {op for domain, op in REGISTRY if not domain}
    assert lowered - set(IN_GRAPHS) == set(LEFT_OUT)
    assert all(len(why) > 10 for why in LEFT_OUT.values())


@pytest.mark.parametrize("op", IN_GRAPHS)
def test_what_is_described_can_be_drawn_and_is_valid(op: str) -> None:
    opsets = [o for o in OPSETS if schema_of(op, o) is not None]
    drawn = valid = 0
    for seed in range(40):
        d = Draw(np.random.default_rng([7, seed]), opsets[seed % len(opsets)])
        d.pick(("float32",), (1, 4))
        try:
            DESCRIBED[op].draw(d, op)
        except Reject:
            continue
        drawn += 1
        try:
            made = [o for o in d.nodes[-1].outputs if o]
            assert any(c.op == op for c in tidied(d.case(made, "one")).nodes)
            tidied(d.case(made, "one")).typed()
            valid += 1
        except AssertionError:
            raise
        except Exception:  # the checker's exceptions have no common base
            continue
        if valid >= 2:
            return
    # Only its body types GroupNormalization, and the checker's inference does not know that body.
    assert drawn and (valid or op == "GroupNormalization"), f"{op}: {drawn} drawn, {valid} valid"


def test_a_case_survives_its_text_and_its_batch() -> None:
    cases = [c for i in range(12) if (c := graph(3, i, opset=17)) is not None]
    assert len(cases) > 6
    for case in cases:
        again, extra = GraphCase.parse(case.text(signature="s"))
        assert str(again) == str(case) and extra == {"signature": "s"}
        for name, array in {**case.inputs, **case.constants}.items():
            kept = {**again.inputs, **again.constants}[name]
            assert kept.dtype == array.dtype and np.array_equal(kept, array, equal_nan=array.dtype.kind == "f")
    assert len(merged(cases).nodes) == sum(len(c.nodes) for c in cases)
    merged(cases).typed()


def test_what_nothing_computes_is_refused_before_onnx_looks() -> None:
    """Check the early refusal: ONNX's inference of EyeLike ends the process for an operand without a type."""
    case = GraphCase(20, {}, {}, (Call("EyeLike", ("nowhere",), ("y",), {"dtype": 1}),), ("y",))
    with pytest.raises(ValueError, match="nothing computes nowhere"):
        case.typed()


def test_the_same_seed_draws_the_same_graph() -> None:
    first, again = graph(11, 4), graph(11, 4)
    assert first is not None and again is not None and first.text() == again.text()
