"""Small If branches in one program: results equal ONNX Runtime's for the taken branch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import BOOL, FLOAT, INT64, model, tensor
from test_later import agree

import rammer
from rammer.compiled.segments import Compiled
from rammer.frontend.bind import if_conversion
from rammer.runtime.executable import Executable
from rammer_testing.nonempty import some

node = helper.make_node
CONSTANTS = {
    "zero": np.array(0),
    "ten": np.array([10]),
    "table": np.arange(3, dtype=np.float32),
    "w": np.eye(4, dtype=np.float32),
}


def branches(one: list[onnx.NodeProto], other: list[onnx.NodeProto], dtype: int = FLOAT, **ports: Any) -> onnx.ModelProto:
    """Return ``y = one if c else other``, with the last results of these operators."""
    graphs = [
        helper.make_graph(nodes, n, [], [tensor(nodes[-1].output[0], None, dtype)]) for n, nodes in (("t", one), ("e", other))
    ]
    ports = ports or {"x": ([4], FLOAT)}
    inputs = [tensor("c", [], BOOL), *(tensor(n, shape, kind) for n, (shape, kind) in ports.items())]
    return model([node("If", ["c"], ["y"], then_branch=graphs[0], else_branch=graphs[1])], inputs, ["y"], constants=CONSTANTS)


def stays(exe: Executable) -> bool:
    """Return True if the If is still an operator, or waits for its condition."""
    compiled: Compiled = exe.compile_only({})
    return compiled.rest is not None or any(h.node.node.op == "If" for h in compiled.host_nodes)


def test_small_branches_are_part_of_the_program() -> None:
    """Check that infinities and NaN of the branch that is not taken do not reach the result."""
    proto = branches([node("Log", ["x"], ["a"])], [node("Neg", ["x"], ["b0"]), node("Exp", ["b0"], ["b"])])
    exe = rammer.compile(proto, "toy")
    assert not stays(exe)
    for x in some(([1, 2, 3, 4], [-1, 0, -np.inf, np.nan], [-1e9, 1e9, 0, -0.0])):
        for c in (True, False):
            agree(proto, exe, {"c": np.array(c), "x": np.array(x, np.float32)})
    exe.close()


REFUSED = {
    "division": (
        branches([node("Div", ["x", "k"], ["a"])], [node("Identity", ["x"], ["b"])], INT64, x=([4], INT64), k=([], INT64)),
        {"x": np.arange(4), "k": np.array(0)},
    ),
    "index": (
        branches([node("Gather", ["table", "k"], ["a"])], [node("Identity", ["x"], ["b"])], x=([], FLOAT), k=([], INT64)),
        {"x": np.array(1, np.float32), "k": np.array(77)},
    ),
    "shapes": (
        branches([node("Concat", ["x", "x"], ["a"], axis=0)], [node("Neg", ["x"], ["b"])]),
        {"x": np.ones(4, np.float32)},
    ),
    "random": (
        branches([node("RandomNormalLike", ["x"], ["a"])], [node("Neg", ["x"], ["b"])]),
        {"x": np.ones(4, np.float32)},
    ),
    "work": (
        branches([node("Tanh", ["x"], ["a"])], [node("Neg", ["x"], ["b"])], x=([1 << 16], FLOAT)),
        {"x": np.ones(1 << 16, np.float32)},
    ),
    "product": (
        branches([node("MatMul", ["x", "x"], ["a"])], [node("Neg", ["x"], ["b"])], x=([100, 100], FLOAT)),
        {"x": np.ones((100, 100), np.float32)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", list(REFUSED))
def test_others_stay_branches(why: str) -> None:
    """Check branches that may fail, change the shape or cost much: they run only if taken."""
    proto, feeds = REFUSED[why]
    exe = rammer.compile(proto, "toy")
    assert stays(exe)
    agree(proto, exe, {"c": np.array(False), **feeds})
    exe.close()


def test_many_operators_stay_branches() -> None:
    one = [node("Tanh", [f"a{i}" if i else "x"], [f"a{i + 1}"]) for i in range(if_conversion.MOST_OPERATORS)]
    for count, wanted in ((if_conversion.MOST_OPERATORS, True), (3, False)):
        exe = rammer.compile(branches(one[:count], [node("Neg", ["x"], ["b"])]), "toy")
        assert stays(exe) is wanted
        exe.close()


def test_conditions_of_one_element_keep_the_shape() -> None:
    """Check that a condition [1, 1] that selects between scalars gives a scalar."""
    then = helper.make_graph([node("Neg", ["x"], ["a"])], "t", [], [tensor("a", [], FLOAT)])
    other = helper.make_graph([node("Abs", ["x"], ["b"])], "e", [], [tensor("b", [], FLOAT)])
    proto = model(
        [node("If", ["c"], ["y"], then_branch=then, else_branch=other)],
        [tensor("c", [1, 1], BOOL), tensor("x", [], FLOAT)],
        ["y"],
    )
    exe = rammer.compile(proto, "toy")
    for c, want in ((True, 2.0), (False, 2.0)):
        found = exe.run({"c": np.array([[c]]), "x": np.array(-2, np.float32)})["y"]
        assert found.shape == () and found == want
    exe.close()
