"""Conditions inside the maps that ask them, and the attention of torch's exporters as one operator."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import NodeProto, helper
from onnx_models import model, tensor
from pass_graphs import graph_of, normal

from rammer.compiled.options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler import Compiler
from rammer.device.loader import Registry
from rammer.frontend.lower import lower
from rammer.frontend.reader import read_model
from rammer.ir.compute import verify_compute_graph
from rammer.ir.evaluate import run_graph
from rammer.profile.store import KernelStore
from rammer.tile.conditions import inline_conditions

GUARD = [helper.make_node("IsNaN", ["p"], ["n"]), helper.make_node("Where", ["n", "zero", "p"], ["g"])]
ZERO = {"zero": np.zeros((), np.float32)}


def kinds(nodes: list[NodeProto], outputs: tuple[str, ...] = ("y",)) -> list[str]:
    """Element types of the Computes after conditions were inlined; values must stay, also where they are NaN."""
    before = lower(graph_of(nodes, (3, 5), ZERO, outputs))
    after = inline_conditions(before)
    verify_compute_graph(after)
    x = normal(3, 5)
    x[1] = -np.inf
    want, have = (run_graph(g, {g.inputs[0]: x}, precise=False) for g in (before, after))
    for name in before.outputs:
        np.testing.assert_array_equal(want[name], have[name])
    return [c.dtype for c in after.computes]


def test_the_guard_of_a_softmax_is_one_map() -> None:
    nodes = [helper.make_node("Softmax", ["x"], ["p"]), *GUARD, helper.make_node("Neg", ["g"], ["y"])]
    assert "bool" not in kinds(nodes)


def test_conditions_of_conditions() -> None:
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["a"]),
        helper.make_node("IsInf", ["x"], ["b"]),
        helper.make_node("Or", ["a", "b"], ["c"]),
        helper.make_node("Where", ["c", "zero", "x"], ["y"]),
    ]
    assert kinds(nodes) == ["float32"]


@pytest.mark.parametrize("outputs", [("y", "n"), ("y", "m")])
def test_a_condition_that_others_want_stays(outputs: tuple[str, ...]) -> None:
    nodes = [helper.make_node("Softmax", ["x"], ["p"]), *GUARD, helper.make_node("Neg", ["g"], ["y"])]
    nodes += [helper.make_node("Not", ["n"], ["m"])] if "m" in outputs else []
    assert "bool" in kinds(nodes, outputs)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_as_torch_exports_it_is_one_kernel(masked: bool) -> None:
    """Queries and keys scaled apart, a mask made between the products, and a guard behind the softmax."""
    pytest.importorskip("cuda.bindings")
    heads, nodes = np.array([1, 64, 4, 32]), list[NodeProto]()
    constants = {"heads": heads, "s": np.array(0.42, np.float32), "low": np.array(-3e38, np.float32), **ZERO}
    for name, perm in zip("qkv", ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True):
        constants |= {f"w{name}": normal(128, 128), f"b{name}": normal(128)}
        nodes += [
            helper.make_node("MatMul", ["x", f"w{name}"], [f"{name}0"]),
            helper.make_node("Add", [f"{name}0", f"b{name}"], [f"{name}1"]),
            helper.make_node("Reshape", [f"{name}1", "heads"], [f"{name}2"]),
            helper.make_node("Transpose", [f"{name}2"], [f"{name}3"], perm=perm),
        ]
    nodes += [
        helper.make_node("Mul", ["q3", "s"], ["q"]),
        helper.make_node("Mul", ["k3", "s"], ["k"]),
        helper.make_node("MatMul", ["q", "k"], ["r"]),
    ]
    if masked:
        nodes += [helper.make_node("Where", ["mask", "zero", "low"], ["m"]), helper.make_node("Add", ["r", "m"], ["t"])]
    nodes += [helper.make_node("Softmax", ["t" if masked else "r"], ["p"]), *GUARD]
    nodes.append(helper.make_node("MatMul", ["g", "v3"], ["y"]))
    inputs = [tensor("x", (1, 64, 128)), *([tensor("mask", (1, 1, 64, 64), 9)] if masked else [])]
    compiler = Compiler(Registry().open("cuda", target="sm_90a"), CompileOptions(), KernelStore(None))
    (segment,) = compiler.compile_model(read_model(model(nodes, inputs, ["y"], constants=constants)), {}).segments
    assert isinstance(segment, ProgramSegment)
    found = sorted(o.family for o in segment.program.operators if o.main.kind == "contraction")
    assert found.count("attention") == 1 and len(found) == 4
