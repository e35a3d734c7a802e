"""Bound calls on a GPU: arrays of torch, CuPy and JAX, in place and on their streams. `pytest -m cuda`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rammer.compile_options import CompileOptions
from rammer.errors import BadInput, DeviceFailure
from rammer.jit.onnx_source import open_source
from rammer.runtime.executable import Executable
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.conformance import Subject
from rammer_testing.nonempty import some
from rammer_testing.small_models import SmallModel

pytestmark = pytest.mark.cuda

SIZE = 256
MODEL = SmallModel(
    "net",
    f"""(float[{SIZE},{SIZE}] x, float[{SIZE},{SIZE}] w) => (float[{SIZE},{SIZE}] y, float[{SIZE}] s) {{
    m = MatMul(x, w)
    y = Relu(m)
    axis = Constant<value = int64[1] {{1}}>()
    s = ReduceSum<keepdims=0>(y, axis)
}}""",
)


@pytest.fixture
def exe() -> Iterator[Executable]:
    subject = Subject("cuda")
    source = open_source(MODEL.build(subject.rng))
    made = Executable(source, subject.backend, "cuda", CompileOptions(), subject.registry, store=KernelStore(None))
    yield made
    made.close()


def library(name: str) -> Any:
    return importlib.import_module(name)


def normal(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((SIZE, SIZE)).astype(np.float32)


def close(have: Any, x: Any, w: Any) -> bool:
    x, w = (np.asarray(a, np.float64) for a in (x, w))
    want = np.maximum(x @ w, 0)
    return bool(np.linalg.norm(np.asarray(have, np.float64) - want) <= 1e-5 * np.linalg.norm(want))


def test_torch_tensors_on_a_torch_stream(exe: Executable, rng: np.random.Generator) -> None:
    torch = library("torch")
    x, w, y = (torch.from_numpy(normal(rng)).cuda() for _ in range(3))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    bound = exe.bind({"x": x, "w": w}, {"y": y}, stream=stream)
    assert bound.outputs["y"].data.ptr == y.data_ptr() and bound.inputs["x"].data.ptr == x.data_ptr()
    assert bound.stream.ptr == stream.cuda_stream and bound.notes == ()
    with torch.cuda.stream(stream):
        for _ in range(50):  # only the stream orders the work
            x.normal_()
            bound.run()
            want = torch.relu(x.double() @ w.double())
            assert torch.linalg.norm(y.double() - want) <= 1e-5 * torch.linalg.norm(want)
    sums = torch.from_dlpack(bound.outputs["s"])
    bound.synchronize()
    assert sums.is_cuda and torch.allclose(sums, y.sum(1), rtol=1e-4)


def test_cupy_arrays_and_two_calls_on_two_streams(exe: Executable, rng: np.random.Generator) -> None:
    cp = library("cupy")
    calls = []
    for _ in range(2):
        stream = cp.cuda.Stream(non_blocking=True)
        x, w = cp.asarray(normal(rng)), cp.asarray(normal(rng))
        cp.cuda.Device().synchronize()
        calls.append((exe.bind({"x": x, "w": w}, stream=stream), x, w))
    for _ in range(200):  # both use the program's arena: a missing order between the streams gives wrong values
        for bound, _, _ in calls:
            bound.run()
    for bound, x, w in some(calls):
        bound.synchronize()
        assert isinstance(bound.outputs["y"], cp.ndarray)
        assert close(bound.outputs["y"].get(), x.get(), w.get())
        assert close(bound.to_host("y")["y"], x.get(), w.get())


def test_jax_arrays_by_dlpack(exe: Executable, rng: np.random.Generator) -> None:
    jax = library("jax")
    x, w = jax.numpy.asarray(normal(rng)), jax.numpy.asarray(normal(rng))
    bound = exe.bind({"x": jax.block_until_ready(x), "w": jax.block_until_ready(w)})
    bound.run()
    assert close(bound.to_host("y")["y"], np.asarray(x), np.asarray(w))


def test_what_is_not_dense_or_aligned_is_copied_and_told(exe: Executable, rng: np.random.Generator) -> None:
    cp = library("cupy")
    wide = cp.asarray(rng.standard_normal((SIZE, 2 * SIZE)).astype(np.float32))
    moved = cp.zeros(SIZE * SIZE + 1, cp.float32)[1:].reshape(SIZE, SIZE)
    w = cp.asarray(normal(rng))
    cp.cuda.Device().synchronize()
    bound = exe.bind({"x": wide[:, ::2], "w": w}, {"y": moved})
    assert any("input 'x' is not dense" in n for n in bound.notes), bound.notes
    assert any("output 'y' is not aligned" in n for n in bound.notes), bound.notes
    bound.run()
    bound.synchronize()
    assert close(moved.get(), wide[:, ::2].get(), w.get())


@pytest.mark.alone
def test_host_arrays_are_copied_once(exe: Executable, rng: np.random.Generator) -> None:
    x, w = normal(rng), normal(rng)
    bound = exe.bind({"x": x, "w": w})
    assert any("input 'x' was copied from the host" in n for n in bound.notes)
    first = x.copy()
    x[...] = 0
    bound.run()
    assert close(bound.to_host("y")["y"], first, w)
    bound.write({"x": first * 2})
    assert 0 < bound.seconds() < 1e-2
    assert close(bound.to_host("y")["y"], first * 2, w)
    with pytest.raises(BadInput, match="output 'y' is in host memory"):
        exe.bind({"x": x, "w": w}, {"y": np.zeros((SIZE, SIZE), np.float32)})


def test_misuse_is_named(exe: Executable, rng: np.random.Generator) -> None:
    cp, torch = library("cupy"), library("torch")
    x, w = cp.asarray(normal(rng)), cp.asarray(normal(rng))
    with pytest.raises(BadInput, match="input 'x' is float16"):
        exe.bind({"x": x.astype(cp.float16), "w": w})
    with pytest.raises(BadInput, match="input 'w' cannot be read"):
        exe.bind({"x": x, "w": torch.zeros((SIZE, SIZE), device="cuda", requires_grad=True)})
    with pytest.raises(BadInput, match="output 'y' shares memory with input 'x'"):
        exe.bind({"x": x, "w": w}, {"y": x})
    with pytest.raises(BadInput, match="str is not a CUDA stream"):
        exe.bind({"x": x, "w": w}, stream="0")
    bound = exe.bind({"x": x, "w": w})
    exe.close()
    with pytest.raises(DeviceFailure, match="closed"):
        bound.run()


def test_runs_between_bound_runs(exe: Executable, rng: np.random.Generator) -> None:
    """Check that ``run`` and bound calls share memory on the device, but not values."""
    feeds = [{"x": normal(rng), "w": normal(rng)} for _ in range(2)]
    bound = exe.bind(feeds[0])
    for _ in range(100):
        bound.run()
        assert close(exe.run(feeds[1])["y"], feeds[1]["x"], feeds[1]["w"])
    assert close(bound.to_host("y")["y"], feeds[0]["x"], feeds[0]["w"])
