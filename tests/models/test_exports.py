"""Models from torch's exporters (``export_torch.py``): correctness on every device at every allowed size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.frontend.read.reader import read_model
from rammer.jit.onnx_source import open_source
from rammer.reference.outputs import expected_outputs
from rammer.runtime.executable import Executable
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.accuracy import TOLERANCE
from rammer_testing.nonempty import some

FILES = sorted((Path(__file__).parent / "exports").glob("*.onnx"))
#: Sizes of dynamic axes, one column after the other.
SIZES = {
    "batch": (3, 1),
    "steps": (3, 6),
    "tokens": (7, 5),
    "samples": (1000, 2117),
    "frames": (40, 71),
    "height": (64, 96),
    "width": (96, 70),
}


def shapes_of(proto: onnx.ModelProto, column: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs, with dynamic axes at the sizes of ``column``."""
    return {
        i.name: tuple(SIZES[d.dim_param][column] if d.dim_param else d.dim_value for d in i.type.tensor_type.shape.dim)
        for i in proto.graph.input
    }


def random_inputs(rng: np.random.Generator, proto: onnx.ModelProto, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return floats from N(0, 1), token identifiers, and masks that keep the first token."""
    found = {}
    for i in proto.graph.input:
        dtype, shape = helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type), shapes[i.name]
        if dtype.kind == "f":
            found[i.name] = rng.standard_normal(shape).astype(dtype)
        elif "mask" in i.name:
            found[i.name] = np.maximum(rng.integers(0, 2, shape), np.arange(shape[-1]) == 0).astype(dtype)
        else:
            found[i.name] = rng.integers(0, 100, shape).astype(dtype)
    return found


def test_the_exports_are_here() -> None:
    assert len({p.stem.rpartition("_")[0] for p in FILES}) >= 20 and len(FILES) >= 40


def marked(path: Path) -> list[pytest.MarkDecorator]:
    """Return the mark ``large`` for older exporter files that a newer exporter's file covers."""
    by_both = path.stem.endswith("_script") and path.stem not in ("bert_script", "lstm10_script", "gru_script", "gpt2_script")
    return [pytest.mark.large] if by_both or path.stem == "convnext_permuted_dynamo" else []


@pytest.mark.slow
@pytest.mark.sampled(2, of="device")
@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem, marks=marked(p)) for p in FILES])
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_an_export_agrees_with_onnxruntime(path: Path, device: str, rng: np.random.Generator) -> None:
    registry = Registry()
    if registry.status(device).state != "ok":
        pytest.skip(f"{device} does not work here")
    proto = onnx.load(path)
    options = {"tiles": "64"} if device == "ipu_sim" else {}
    exe = Executable(
        open_source(path), registry.open(device, options=options), device, CompileOptions(), registry, store=KernelStore(None)
    )
    shapes = [shapes_of(proto, column) for column in (0, 1)]
    for chosen in some(shapes[: 1 if shapes[0] == shapes[1] else 2]):
        inputs = random_inputs(rng, proto, chosen)
        want, have = expected_outputs(read_model(proto), "onnxruntime", inputs), exe.run(inputs)
        for name, value in want.items():
            assert have[name].shape == value.shape and np.isfinite(value).all()
            error = np.linalg.norm(have[name].astype(np.float64) - value) / np.linalg.norm(value)
            assert error <= TOLERANCE, f"{name} at {chosen}: relative L2 error {error:.1e}"
    exe.close()


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem) for p in FILES if "dynamo" in p.name])
def test_an_export_compiles_for_a_gpu(path: Path) -> None:
    """Check that every program is verified when compiled and no operator is left to the host."""
    pytest.importorskip("cuda.bindings")
    backend = Registry().open("cuda", target="sm_90a")
    compiler, shapes = Compiler(backend, CompileOptions(), KernelStore(None)), shapes_of(onnx.load(path), 0)
    compiled = compiler.compile_model(read_model(path), shapes)
    assert all(isinstance(s, ProgramSegment) for s in some(compiled.segments))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attentions", "most"), [("bert_script", 2, 24), ("gpt2_dynamo", 2, 20), ("vit_dynamo", 2, 24)])
def test_transformers_are_as_few_kernels_as_models_made_by_hand(name: str, attentions: int, most: int) -> None:
    """Check that each attention is one kernel and that biases, activations and residuals are fused into
    the preceding products."""
    pytest.importorskip("cuda.bindings")
    (path,) = (p for p in FILES if p.stem == name)
    compiler = Compiler(Registry().open("cuda", target="sm_90a"), CompileOptions(), KernelStore(None))
    compiled = compiler.compile_model(read_model(path), shapes_of(onnx.load(path), 0))
    operators = [o for s in compiled.segments if isinstance(s, ProgramSegment) for o in s.program.operators]
    assert sum(o.family == "attention" for o in operators) == attentions and len(operators) <= most
