"""Unfolded constants: random graphs with constants for inputs give equal results with folding and with folding limits of zero."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import rammer
from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind
from rammer.frontend.read import limits
from rammer.frontend.read.reader import read_model
from rammer.passes.graph.fold_constants import FoldConstants
from rammer.passes.pass_pipeline import default_passes
from rammer_testing.graphs.case import GraphCase
from rammer_testing.graphs.generate import graph
from rammer_testing.graphs.judge import Judge, Setting
from rammer_testing.judge import relative_error


def lowered(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Set the folding limits to ``limit`` bytes."""
    monkeypatch.setattr(limits, "MAX_FOLDED_BYTES", limit)
    monkeypatch.setattr(limits, "WIDENED", 0)
    few = tuple(FoldConstants(limit, 0) if isinstance(p, FoldConstants) else p for p in default_passes())
    monkeypatch.setattr("rammer.compiler.compiler.default_passes", lambda extra: few)


def known(case: GraphCase, share: float, rng: np.random.Generator) -> GraphCase:
    """Return ``case`` with a fraction of its inputs as constants."""
    fixed = {n: a for n, a in case.inputs.items() if rng.random() < share}
    others = {n: a for n, a in case.inputs.items() if n not in fixed}
    return replace(case, inputs=others, constants={**case.constants, **fixed})


@pytest.mark.slow
@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.large)])
def test_graphs_of_constants_give_the_same_unfolded(
    count: int, seed: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, compared, setting = Judge(voices=False), 0, Setting("toy")
    for index in range(count):
        case = graph(seed, index)
        if case is None:
            continue
        case = known(case, float(rng.choice([0.3, 0.6, 1.0])), rng)
        try:
            with monkeypatch.context() as patch:
                lowered(patch, int(rng.choice([0, 8, 64])))
                found = judge.run(case.model(), case.inputs, setting)
        except BadInput as problem:
            assert judge(case, setting).kind == "refused", f"{problem}\n{case}"
            continue
        verdict = judge.compared(case, found, setting)
        assert verdict.good, f"{verdict.kind} {verdict.detail}\n{case}"
        compared += 1
    assert compared > count // 2


def tied(weights: np.ndarray, *nodes: tuple[str, list[str], list[str], dict[str, object]]) -> ModelProto:
    """Return a table lookup whose result is multiplied with ``t``. ``nodes`` compute ``w`` and ``t`` from the table."""
    made = [helper.make_node(op, i, o, **a) for op, i, o, a in nodes]
    made += [helper.make_node("Gather", ["w", "ids"], ["x"]), helper.make_node("MatMul", ["x", "t"], ["z"])]
    ports = [helper.make_tensor_value_info("ids", TensorProto.INT64, [3])]
    result = [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)]
    words = numpy_helper.from_array(np.arange(0, len(weights), 2), "some")
    table = numpy_helper.from_array(weights, "w0")
    made_of = helper.make_graph(made, "tied", ports, result, [table, words])
    return helper.make_model(made_of, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


SAME = ("Identity", ["w0"], ["w"], {})
FORMS = {
    "transposed": (np.float32, [SAME, ("Transpose", ["w"], ["t"], {"perm": [1, 0]})]),
    "cast": (np.float16, [("Cast", ["w0"], ["w"], {"to": 1}), ("Transpose", ["w"], ["t"], {"perm": [1, 0]})]),
    "gathered": (
        np.float32,
        [SAME, ("Gather", ["w", "some"], ["s"], {}), ("Transpose", ["s"], ["t"], {"perm": [1, 0]})],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_table_that_is_read_in_two_ways_compiles_unfolded(
    form: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, nodes = FORMS[form]
    table = rng.standard_normal((40, 16)).astype(kind)
    ids = rng.integers(0, 40, 3)
    lowered(monkeypatch, 8)
    exe = rammer.compile(tied(table, *nodes), "toy")
    found = exe.run({"ids": ids})
    exact = table.astype(np.float64)
    want = exact[ids] @ (exact[::2] if form == "gathered" else exact).T
    assert relative_error(found["z"], want) < 1e-5


def test_what_is_made_of_large_constants_is_folded(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_FOLDED_BYTES", 64)
    for _, (kind, nodes) in FORMS.items():
        bound = bind(read_model(tied(rng.standard_normal((40, 16)).astype(kind), *nodes)), {})
        assert [n.op for n in bound.nodes] == ["Gather", "MatMul"]


def test_what_a_few_bytes_describe_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_FOLDED_BYTES", 64)
    twice = [helper.make_node("Concat", [f"w{i}"] * 2, [f"w{i + 1}"], axis=0) for i in range(12)]
    made = helper.make_graph(
        [*twice, helper.make_node("Add", ["x", "w12"], ["y"])],
        "doubled",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ones(16, np.float32), "w0")],
    )
    bound = bind(read_model(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)), {})
    assert [n.op for n in bound.nodes].count("Concat") > 5
