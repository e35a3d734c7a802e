"""Deep nesting and deep expressions: compiled or refused with a message, without a recursion error."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.errors import BadInput
from rammer.frontend.read.limits import MAX_CALLS, MAX_NESTING
from rammer.frontend.read.reader import read_model
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.growth.bodies import calls
from rammer_testing.growth.sketch import Sketch


def compiled(model: onnx.ModelProto) -> Compiler:
    compiler = Compiler(Registry().open("toy"), store=KernelStore(None))
    compiler.compile_model(read_model(model), {})
    return compiler


def nested(depth: int) -> onnx.ModelProto:
    """Make nested Ifs in place: protobuf cannot copy a message of this depth."""
    model = onnx.ModelProto(ir_version=10)
    model.opset_import.add().version = 21
    graph, result = model.graph, "y"
    graph.name = "nested"
    graph.input.extend([helper.make_tensor_value_info("c", TensorProto.BOOL, ()), helper.make_tensor_value_info("x", 1, (4,))])
    graph.output.append(helper.make_tensor_value_info("y", 1, (4,)))
    for i in range(depth):
        node = graph.node.add(op_type="If", input=["c"], output=[result])
        for branch in ("else_branch", "then_branch"):
            attribute = node.attribute.add(name=branch, type=onnx.AttributeProto.GRAPH)
            graph, result = attribute.g, f"{branch}{i}"
            graph.name = result
            graph.output.append(helper.make_tensor_value_info(result, 1, (4,)))
            if branch == "else_branch" or i == depth - 1:
                graph.node.add(op_type="Abs", input=["x"], output=[result])
    return model


def test_bodies_nest_as_deep_as_the_limit_and_no_deeper() -> None:
    compiled(nested(MAX_NESTING))
    for depth in (MAX_NESTING + 1, 2000):
        with pytest.raises(BadInput, match=f"nested more than {MAX_NESTING} deep"):
            read_model(nested(depth))


def test_functions_call_as_deep_as_the_limit_and_no_deeper() -> None:
    compiled(calls(MAX_CALLS - 1))
    for depth in (MAX_CALLS + 1, 2000):
        with pytest.raises(BadInput, match=r"functions call functions more than|cannot be inlined"):
            read_model(calls(depth))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("tree", [False, True])
def test_conditions_on_conditions_become_no_deep_expression(tree: bool) -> None:
    s = Sketch()
    x, zero = s.input(4, 8), s.constant(np.zeros(8, np.float32))
    values = [s.node("Less", x, s.constant(np.full(8, i, np.float32))) for i in range(300)]
    while len(values) > 1:
        if tree:
            values = [s.node("And", a, b) for a, b in zip(values[::2], values[1::2], strict=False)] + values[len(values) & ~1 :]
        else:
            values = [s.node("Or", values[0], values[1]), *values[2:]]
    compiled(s.model(s.node("Where", values[0], x, zero)))


@pytest.mark.slow
def test_a_long_chain_of_rearrangements_compiles() -> None:
    s = Sketch()
    value = s.input(2, 3, 4)
    for _ in range(1500):
        value = s.node("Transpose", value, perm=[1, 2, 0])
    compiled(s.model(value))
