"""Graphs of about ``n`` operators in bodies of If, Loop and Scan, and in functions."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from rammer_testing.growth.sketch import MAPS, Sketch


def hosted(n: int) -> onnx.ModelProto:
    """Return a chain of operators that alternate between host and device."""
    s = Sketch()
    value, condition = s.input(4), s.input(dtype=TensorProto.BOOL)
    for i in range(n // 4):
        value = s.node("Tanh", s.node("If", condition, **_branches(value, i)))
    return s.model(value)


def loop(n: int) -> onnx.ModelProto:
    """Return a Loop with all operators in its body, inside a branch, where results need no static shape."""
    s, body, branch, other = Sketch(), Sketch(prefix="b"), Sketch(prefix="t"), Sketch(prefix="e")
    value = "carried"
    for i in range(n):
        value = body.node(MAPS[i % len(MAPS)], value)
    going = body.node("Identity", "going")
    body.inputs = [
        helper.make_tensor_value_info("count", TensorProto.INT64, ()),
        helper.make_tensor_value_info("going", TensorProto.BOOL, ()),
        helper.make_tensor_value_info("carried", TensorProto.FLOAT, (4,)),
    ]
    start, condition = s.input(4), s.input(dtype=TensorProto.BOOL)
    trips, shape = s.constant(np.array(2, np.int64)), s.constant(np.array([4], np.int64))
    graph = _typed(body, (going, TensorProto.BOOL, ()), (value, 1, (4,)))
    result = branch.node("Reshape", branch.node("Loop", trips, "", start, body=graph), shape)
    then, otherwise = _typed(branch, (result, 1, (4,))), _typed(other, (other.node("Abs", start), 1, (4,)))
    return s.model(s.node("If", condition, then_branch=then, else_branch=otherwise))


def scan(n: int) -> onnx.ModelProto:
    """Return a Scan with all operators in its body."""
    s, body = Sketch(), Sketch(prefix="b")
    value = "state"
    for i in range(n):
        value = body.node(MAPS[i % len(MAPS)], value)
    each = body.node("Add", value, "item")
    body.inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (4,)) for name in ("state", "item")]
    graph = _typed(body, (value, 1, (4,)), (each, 1, (4,)))
    result = s.node("Scan", s.input(4), s.input(2, 4), outputs=2, body=graph, num_scan_inputs=1)
    return s.model(result, f"{result}_1")


def _typed(body: Sketch, *outputs: tuple[str, int, tuple[int, ...]]) -> onnx.GraphProto:
    graph = body.graph([])
    graph.output.extend(helper.make_tensor_value_info(*o) for o in outputs)
    return graph


def many_ifs(n: int) -> onnx.ModelProto:
    """Return a chain of If operators with run-time conditions."""
    s = Sketch()
    value, condition = s.input(4), s.input(dtype=TensorProto.BOOL)
    for i in range(n // 3):
        value = s.node("If", condition, **_branches(value, i))
    return s.model(value)


def _branches(value: str, i: int) -> dict[str, onnx.GraphProto]:
    result = {}
    for name, op in (("then_branch", "Neg"), ("else_branch", "Abs")):
        body = Sketch(prefix=f"{name[0]}{i}_")
        result[name] = _typed(body, (body.node(op, value), 1, (4,)))
    return result


def nested_ifs(n: int) -> onnx.ModelProto:
    """Return nested If operators of depth ``n``."""
    s = Sketch()
    value, condition = s.input(4), s.input(dtype=TensorProto.BOOL)
    inner = Sketch(prefix="leaf")
    graph = _typed(inner, (inner.node("Neg", value), 1, (4,)))
    for i in range(n):
        body, other = Sketch(prefix=f"t{i}_"), Sketch(prefix=f"e{i}_")
        otherwise = _typed(other, (other.node("Abs", value), 1, (4,)))
        if i == n - 1:
            return s.model(s.node("If", condition, then_branch=graph, else_branch=otherwise))
        graph = _typed(body, (body.node("If", condition, then_branch=graph, else_branch=otherwise), 1, (4,)))
    return s.model(s.node("If", condition, then_branch=graph, else_branch=graph))


def decided_ifs(n: int) -> onnx.ModelProto:
    """Return nested If operators with constant conditions; their branches are inlined."""
    model = nested_ifs(n)
    known = numpy_helper.from_array(np.array(True), model.graph.input[1].name)
    del model.graph.input[1]
    model.graph.initializer.append(known)
    return model


def calls(n: int) -> onnx.ModelProto:
    """Return functions that call functions, to depth ``n``."""
    s = Sketch()
    domain, imports = "growth", [helper.make_opsetid("", 21), helper.make_opsetid("growth", 1)]
    for i in range(n):
        inner = [helper.make_node("Relu", ["a"], ["b"])]
        inner.append(helper.make_node(f"f{i - 1}", ["b"], ["c"], domain=domain) if i else helper.make_node("Neg", ["b"], ["c"]))
        s.functions.append(helper.make_function(domain, f"f{i}", ["a"], ["c"], inner, imports))
    return s.model(s.node(f"f{n - 1}", s.input(4), domain=domain))


def many_calls(n: int) -> onnx.ModelProto:
    """Return many calls of one function."""
    s = Sketch()
    inner = [helper.make_node("Relu", ["a"], ["b"]), helper.make_node("Neg", ["b"], ["c"])]
    s.functions.append(helper.make_function("growth", "f", ["a"], ["c"], inner, [helper.make_opsetid("", 21)]))
    value = s.input(4)
    for _ in range(n // 2):
        value = s.node("f", value, domain="growth")
    return s.model(value)
