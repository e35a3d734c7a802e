"""The attention of torch's exporters as one operator."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import NodeProto, helper
from onnx_models import model, tensor
from pass_graphs import normal

from rammer.compiled.options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler import Compiler
from rammer.device.loader import Registry
from rammer.frontend.reader import read_model
from rammer.profile.store import KernelStore

GUARD = [helper.make_node("IsNaN", ["p"], ["n"]), helper.make_node("Where", ["n", "zero", "p"], ["g"])]
ZERO = {"zero": np.zeros((), np.float32)}


@pytest.mark.parametrize("masked", [False, True])
def test_attention_as_torch_exports_it_is_one_kernel(masked: bool, rng: np.random.Generator) -> None:
    """Queries and keys scaled apart, a mask made between the products, and a guard behind the softmax."""
    pytest.importorskip("cuda.bindings")
    heads, nodes = np.array([1, 64, 4, 32]), list[NodeProto]()
    constants = {"heads": heads, "s": np.array(0.42, np.float32), "low": np.array(-3e38, np.float32), **ZERO}
    for name, perm in zip("qkv", ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True):
        constants |= {f"w{name}": normal(rng, 128, 128), f"b{name}": normal(rng, 128)}
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
