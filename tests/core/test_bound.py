"""Bound calls on host arrays: what may be bound, that runs read and write it where it is, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rammer.compiled.options import CompileOptions
from rammer.device.arrays import dtype_of, host_view, on_host, shape_of
from rammer.errors import BadInput
from rammer.profile.store import KernelStore
from rammer.runtime.executable import Executable
from rammer.runtime.source import open_source
from rammer.testing.bound_checks import HOSTED
from rammer.testing.conformance import Subject
from rammer.testing.small_models import SmallModel

TWICE = SmallModel("twice", "(float[3,4] x) => (float[3,4] y, float[4,3] t) { y = Add(x, x)\n t = Transpose(y) }")
THROUGH = SmallModel(
    "through",
    """(float[3] x, float[2] w_c) => (float[3] y, float[3] x, float[2] w_c) {
    y = Neg(x)
}""",
)
rng = np.random.default_rng()


def executable(device: str, model: SmallModel) -> Executable:
    subject = Subject(device)
    source = open_source(model.build(subject.rng))
    return Executable(source, subject.backend, device, CompileOptions(), subject.registry, store=KernelStore(None))


@pytest.fixture(params=["toy", "rocm", "ipu_sim"])
def twice(request: pytest.FixtureRequest) -> Iterator[Executable]:
    exe = executable(request.param, TWICE)
    yield exe
    exe.close()


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def test_runs_read_and_write_the_callers_arrays(twice: Executable) -> None:
    x, y = normal(3, 4), np.zeros((3, 4), np.float32)
    bound = twice.bind({"x": x}, {"y": y})
    assert bound.outputs["y"] is y and bound.inputs["x"] is x
    for _ in range(3):
        x[...] = normal(3, 4)
        bound.run()
        bound.synchronize()
        assert np.array_equal(y, x + x) and np.array_equal(bound.outputs["t"], (x + x).T)


def test_strided_arrays(twice: Executable) -> None:
    x, whole = normal(3, 8)[:, ::2], np.zeros((4, 6), np.float32)
    bound = twice.bind({"x": x}, {"t": whole[:, ::2]})
    bound.run()
    bound.synchronize()
    assert np.array_equal(whole[:, ::2], (x + x).T)
    assert not whole[:, 1::2].any()


class Foreign:
    """An array that offers DLPack and nothing else."""

    def __init__(self, array: np.ndarray, device: int = 1) -> None:
        self.array, self.device, self.dtype, self.shape = array, device, f"library.{array.dtype}", array.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()


def test_arrays_of_other_libraries(twice: Executable) -> None:
    x = normal(3, 4)
    assert (dtype_of(Foreign(x)), shape_of(Foreign(x))) == ("float32", (3, 4))
    bound = twice.bind({"x": Foreign(x)})
    for _ in range(2):
        bound.run()
        assert np.array_equal(bound.to_host("y")["y"], x + x)
        x[...] = normal(3, 4)
    with pytest.raises(BadInput, match=r"input 'x' is .*another device"):
        twice.bind({"x": Foreign(x, device=2)})
    with pytest.raises(BadInput, match=r"output 'y' is .*another device"):
        twice.bind({"x": x}, {"y": Foreign(x, device=2)})
    with pytest.raises(BadInput, match=r"input 'x' is .*another device"):
        bound.write({"x": Foreign(x, device=2)})


def test_lists_are_taken_as_they_are_then() -> None:
    exe = executable("toy", SmallModel("one", "(double[2] x) => (double[2] y) { y = Neg(x) }"))
    values = [1.0, 2.0]
    bound = exe.bind({"x": values})
    values[0] = 5.0
    bound.run()
    assert bound.to_host()["y"].tolist() == [-1.0, -2.0]
    exe.close()


def test_memory_that_cannot_be_written_or_is_bound_twice(twice: Executable) -> None:
    x, fixed = normal(3, 4), np.zeros((3, 4), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(BadInput, match="output 'y' is an array that cannot be written"):
        twice.bind({"x": x}, {"y": fixed})
    bound = twice.bind({"x": fixed})
    with pytest.raises(BadInput, match="input 'x' was bound as an array that cannot be written"):
        bound.write({"x": x})
    flat = np.zeros(20, np.float32)
    with pytest.raises(BadInput, match="output 't' shares memory with output 'y'"):
        twice.bind({"x": x}, {"y": flat[:12].reshape(3, 4), "t": flat[8:].reshape(4, 3)})
    with pytest.raises(BadInput, match="output 'y' shares memory with input 'x'"):
        twice.bind({"x": x}, {"y": x})


def test_outputs_that_are_inputs_or_constants() -> None:
    exe = executable("toy", THROUGH)
    x = normal(3)
    bound = exe.bind({"x": x})
    bound.run()
    found = bound.to_host()
    assert np.array_equal(found["y"], -x) and np.array_equal(found["x"], x) and found["w_c"].shape == (2,)
    exe.close()


def test_operators_on_the_host_read_the_callers_arrays() -> None:
    exe = executable("toy", SmallModel("first", "(float[3,3] x) => (float y, float d) { d = Det(x)\n y = Neg(d) }"))
    x, d = normal(3, 3), np.zeros((), np.float32)
    bound = exe.bind({"x": x}, {"d": d})
    for _ in range(2):
        x[...] = normal(3, 3)
        bound.run()
        assert np.isclose(d, np.linalg.det(x), rtol=1e-4) and bound.to_host()["y"] == -d
    assert "host" in bound.clock and bound.seconds() > 0
    with pytest.raises(BadInput, match="input 'x' is on the device, but an operator on the host reads it"):
        exe.bind({"x": Foreign(x, device=2)})
    exe.close()


def test_hosted_values_are_fresh_in_every_run() -> None:
    exe = executable("toy", HOSTED)
    x, w = normal(4, 4), normal(4, 4)
    bound = exe.bind({"x": x, "w": w})
    for _ in range(3):
        x[...] = normal(4, 4)
        bound.run()
        want = exe.run({"x": x, "w": w})
        assert all(np.array_equal(bound.outputs[n], want[n]) for n in want)
    exe.close()


def test_what_lies_on_the_host() -> None:
    assert on_host(np.float32(1)) and on_host(Foreign(normal(1), 3)) and not on_host(Foreign(normal(1), 2))
    with pytest.raises(BadInput, match="it cannot be read: no gradient"):
        host_view("it", Gradient())


class Gradient:
    """A tensor that does not give its memory."""

    dtype, shape = "float32", (1,)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise RuntimeError("no gradient")


def test_opencl_arrays_are_copied_on_the_device() -> None:
    arrays = pytest.importorskip("pyopencl.array")
    exe = executable("rocm", TWICE)
    x = normal(3, 4)
    queue = exe.bind({"x": x}).stream
    on_device, result = arrays.to_device(queue, x), arrays.zeros(queue, (3, 4), np.float32)
    bound = exe.bind({"x": on_device}, {"y": result}, stream=queue)
    assert bound.inputs["x"] is on_device and bound.outputs["y"] is result
    assert any("copied" in note for note in bound.notes)
    for _ in range(2):
        bound.run()
        bound.synchronize()
        assert np.array_equal(result.get(), x + x) and np.array_equal(bound.to_host("y")["y"], x + x)
        x = normal(3, 4)
        bound.write({"x": x})
    with pytest.raises(BadInput, match="output 'y' shares memory with input 'x'"):
        exe.bind({"x": on_device}, {"y": on_device})
    with pytest.raises(BadInput, match="programs run on the queue that their device was opened with"):
        exe.bind({"x": x}, stream=object())
    exe.close()
