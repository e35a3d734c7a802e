"""Attention from torch's exporters as one operator."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, helper
from onnx_models import model, tensor
from pass_graphs import normal

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.device.manifest import Binding
from rammer.frontend.read.reader import read_model
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.single import UntiledOperator, trial_of

from .cuda_on_host import planted, problem_of
from .emulator.launch import COMPILER
from rammer_cuda.source import task_kernel

GUARD = [helper.make_node("IsNaN", ["p"], ["n"]), helper.make_node("Where", ["n", "zero", "p"], ["g"])]
ZERO = {"zero": np.zeros((), np.float32)}


def attention(rng: np.random.Generator, masked: bool) -> ModelProto:
    """Return attention with separately scaled queries and keys, a mask computed between the products, and a guard after the
    softmax."""
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
    return model(nodes, inputs, ["y"], constants=constants)


def compiled(given: ModelProto, batching: str) -> ProgramSegment:
    """Return the only segment of ``given`` for sm_90a."""
    pytest.importorskip("cuda.bindings")
    compiler = Compiler(Registry().open("cuda", target="sm_90a"), CompileOptions(batching=batching), KernelStore(None))
    (segment,) = compiler.compile_model(read_model(given), {}).segments
    assert isinstance(segment, ProgramSegment)
    return segment


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_attention_as_torch_exports_it_is_one_kernel(masked: bool, rng: np.random.Generator) -> None:
    """Check one kernel, also if a single product computes queries, keys and values. Reading slices of that product's rows pays
    off."""
    given = attention(rng, masked)
    programs = {batching: compiled(given, batching).program for batching in ("off", "auto")}
    found = {
        b: sorted(o.family.partition("_")[0] for o in p.operators if o.main.kind == "contraction") for b, p in programs.items()
    }
    assert found == {"off": ["attention", "gemm", "gemm", "gemm"], "auto": ["attention", "gemm"]}
    assert len(programs["auto"].operators) == 2
    assert programs["auto"].predicted < programs["off"].predicted


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.skipif(COMPILER is None, reason="kernels run on the host through g++")
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_slices_agrees_with_float64(masked: bool, rng: np.random.Generator) -> None:
    """Check the kernel on the host that reads queries, keys and values of one product."""
    segment = compiled(attention(rng, masked), "auto")
    binding = Binding.of(segment.program, segment.constants)
    (operator,) = (o for o in segment.program.operators if o.family == "attention")
    slices = [binding.storages[n] for n in ("q3", "k3", "v3")]
    assert [p.offset for p in slices] == [0, 128, 256] and len({p.buffer for p in slices}) == 1
    trial = trial_of(UntiledOperator(operator, binding, segment.constants), int(rng.integers(2**31)))
    kernel = task_kernel(operator, binding)
    assert problem_of(kernel, operator, trial) == ""
    assert problem_of(planted(kernel, lambda text: text.replace("384", "380")), operator, trial)
