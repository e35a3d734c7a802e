"""Products of few rows on a CPU, and of rows masked at a length."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import rammer
from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Array, Binding
from rammer.frontend.read.reader import read_model
from rammer.ir.device import MemoryLayer, VDevice
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some

from rammer_rocm.families import OpenClKernels
from rammer_rocm.panel.recognise import panel_product
from rammer_rocm.plugin import DEVICE

LAYERS = (
    MemoryLayer("dram", "device", 16 << 30, 47e9, 64),
    MemoryLayer("cache", "veu", 1 << 20, 768e9, 64),
    MemoryLayer("register", "thread", 2048, 1536e9, 64),
)
CORE = VDevice("opencl_cpu", "a core", 1, LAYERS, flops=96e9, launch=3e-6, vector=16, resident=1, spills=True)


class OneCore(OpenClKernels):
    """A backend that only compiles."""

    fingerprint, profiler = "one core", None


def model(nodes: list[onnx.NodeProto], depth: int, width: int, constants: Mapping[str, Array]) -> onnx.ModelProto:
    """Return a model from ``x`` of ``rows`` x ``depth`` to ``y`` of ``rows`` x ``width``."""
    ports = [helper.make_tensor_value_info(name, 1, ["rows", n]) for name, n in (("x", depth), ("y", width))]
    made = [numpy_helper.from_array(v, n) for n, v in constants.items()]
    graph = helper.make_graph(nodes, "rows", ports[:1], ports[1:], made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.slow
def test_rows_that_end_are_right_at_every_length(rng: np.random.Generator) -> None:
    """Check the last rows, for which every length uses a different number of lower register tiles."""
    pytest.importorskip("pyopencl")
    if not DEVICE.probe():
        pytest.skip("no OpenCL unit")
    depth, width = (int(rng.integers(24, 90)) for _ in range(2))
    w = rng.standard_normal((depth, width), np.float32)
    exe = rammer.compile(
        model([helper.make_node("MatMul", ["x", "w"], ["y"])], depth, width, {"w": w}), "rocm", shapes={"rows": (1, 40)}
    )
    for rows in some(range(1, 41)):
        x = rng.standard_normal((rows, depth), np.float32)
        wanted = x.astype(np.float64) @ w.astype(np.float64)
        assert np.abs(exe.run({"x": x})["y"] - wanted).max() < 1e-5 * depth, (rows, depth, width)
    exe.close()


def test_a_normalisation_behind_one_row_does_not_take_its_product_from_the_kernel_of_products(rng: np.random.Generator) -> None:
    n = 1024
    constants = {k: rng.standard_normal(s, np.float32) for k, s in (("w", (n, n)), ("scale", (n,)), ("bias", (n,)))}
    product = helper.make_node("MatMul", ["x", "w"], ["p"])
    normal = helper.make_node("LayerNormalization", ["p", "scale", "bias"], ["y"])
    compiler = Compiler(OneCore(CORE), CompileOptions("wavefront"), KernelStore(None))  # type: ignore[arg-type]
    compiled = compiler.compile_model(read_model(model([product, normal], n, n, constants)), {"x": (1, n)})
    programs = [s.program for s in compiled.segments if isinstance(s, ProgramSegment)]
    assert [o.family for p in programs for o in p.operators if o.main.kind == "contraction"] == ["panel"]


def test_rows_of_a_product_continue_over_the_outer_axes_of_an_image(rng: np.random.Generator) -> None:
    """Check that features, the columns, are stored as vectors, not the pixels lane by lane."""
    high, wide, depth, width = 12, 14, 24, 40
    w = rng.standard_normal((depth, width), np.float32)
    ports = [helper.make_tensor_value_info(name, 1, [1, high, wide, n]) for name, n in (("x", depth), ("y", width))]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    graph = helper.make_graph(nodes, "image", ports[:1], ports[1:], [numpy_helper.from_array(w, "w")])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    compiler = Compiler(OneCore(CORE), CompileOptions("wavefront"), KernelStore(None))  # type: ignore[arg-type]
    compiled = compiler.compile_model(read_model(made), {})
    (program,) = [s.program for s in compiled.segments if isinstance(s, ProgramSegment)]
    (operator,) = program.operators
    assert (operator.family, operator.tile) == ("panel", (1, high, wide, width))
    product = panel_product(operator, Binding.of(program, operator.inputs[1:]))
    assert (*product.row_axes, *product.columns) == tuple(a.name for a in operator.main.axes[1:])
    assert product.rows == high * wide
