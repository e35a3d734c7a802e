"""ONNX Runtime's attention: the same kernel as for an attention that an exporter writes operator by operator."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import OpenOptions
from rammer.frontend.read.reader import read_model

pytest.importorskip("cuda.bindings")

from rammer_cuda.backend import open_backend

BATCH, LENGTH, HEADS, WIDTH = 1, 64, 2, 64


def written_out() -> list[onnx.NodeProto]:
    """Return attention as reshapes, transpositions, products and a softmax."""
    nodes = [helper.make_node("Constant", [], ["s"], value_ints=[BATCH, LENGTH, HEADS, WIDTH])]
    nodes.append(helper.make_node("Constant", [], ["t"], value_ints=[BATCH, LENGTH, HEADS * WIDTH]))
    nodes.append(helper.make_node("Constant", [], ["c"], value_float=0.125))
    for n, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes.append(helper.make_node("Reshape", [n, "s"], [f"{n}_heads"]))
        nodes.append(helper.make_node("Transpose", [f"{n}_heads"], [f"{n}_first"], perm=perm))
    nodes.append(helper.make_node("MatMul", ["q_first", "k_first"], ["a"]))
    nodes.append(helper.make_node("Mul", ["a", "c"], ["b"]))
    nodes.append(helper.make_node("Softmax", ["b"], ["p"]))
    nodes.append(helper.make_node("MatMul", ["p", "v_first"], ["o"]))
    nodes.append(helper.make_node("Transpose", ["o"], ["o_last"], perm=[0, 2, 1, 3]))
    return [*nodes, helper.make_node("Reshape", ["o_last", "t"], ["y"])]


def families(nodes: list[onnx.NodeProto], path: Path) -> list[str]:
    """Return the kernel families of the compiled program, for an H100 that need not be present."""
    shape = [BATCH, LENGTH, HEADS * WIDTH]
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in "qkv"]
    graph = helper.make_graph(nodes, "g", ports, [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    model = read_model(path)
    compiled = Compiler(open_backend(OpenOptions(target="sm_90a"))).compile_model(model, {})
    return [o.family for s in compiled.segments if isinstance(s, ProgramSegment) for o in s.program.operators]


def test_the_same_attention_kernel(tmp_path: Path) -> None:
    one = [helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["y"], domain="com.microsoft", num_heads=HEADS)]
    found = families(one, tmp_path / "one.onnx")
    assert found == families(written_out(), tmp_path / "many.onnx")
    assert "attention" in found
