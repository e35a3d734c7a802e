"""Bound calls on host arrays, on every device: supported arrays, access in place, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from bound_calls import TWICE, Foreign, executable, normal

from rammer.device.arrays import check_distinct, dtype_of, shape_of
from rammer.errors import BadInput
from rammer.runtime.executable import Executable


@pytest.fixture(params=["toy", "rocm", "ipu_sim"])
def twice(request: pytest.FixtureRequest) -> Iterator[Executable]:
    exe = executable(request.param, TWICE)
    yield exe
    exe.close()


def test_runs_read_and_write_the_callers_arrays(twice: Executable, rng: np.random.Generator) -> None:
    x, y = normal(rng, 3, 4), np.zeros((3, 4), np.float32)
    bound = twice.bind({"x": x}, {"y": y})
    assert bound.outputs["y"] is y and bound.inputs["x"] is x
    for _ in range(3):
        x[...] = normal(rng, 3, 4)
        bound.run()
        bound.synchronize()
        assert np.array_equal(y, x + x) and np.array_equal(bound.outputs["t"], (x + x).T)


def test_strided_arrays(twice: Executable, rng: np.random.Generator) -> None:
    x, whole = normal(rng, 3, 8)[:, ::2], np.zeros((4, 6), np.float32)
    bound = twice.bind({"x": x}, {"t": whole[:, ::2]})
    bound.run()
    bound.synchronize()
    assert np.array_equal(whole[:, ::2], (x + x).T)
    assert not whole[:, 1::2].any()


def test_arrays_of_other_libraries(twice: Executable, rng: np.random.Generator) -> None:
    x = normal(rng, 3, 4)
    assert (dtype_of(Foreign(x)), shape_of(Foreign(x))) == ("float32", (3, 4))
    bound = twice.bind({"x": Foreign(x)})
    for _ in range(2):
        bound.run()
        assert np.array_equal(bound.to_host("y")["y"], x + x)
        x[...] = normal(rng, 3, 4)
    with pytest.raises(BadInput, match=r"input 'x' is .*another device"):
        twice.bind({"x": Foreign(x, device=2)})
    with pytest.raises(BadInput, match=r"output 'y' is .*another device"):
        twice.bind({"x": x}, {"y": Foreign(x, device=2)})
    with pytest.raises(BadInput, match=r"input 'x' is .*another device"):
        bound.write({"x": Foreign(x, device=2)})


def test_memory_that_cannot_be_written_or_is_bound_twice(twice: Executable, rng: np.random.Generator) -> None:
    x, fixed = normal(rng, 3, 4), np.zeros((3, 4), np.float32)
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


@pytest.mark.parametrize("strides", [(0, 4), (4, 4), (16, 0), (8, 4), (-4, 4)])
def test_an_output_whose_elements_share_memory_is_refused(twice: Executable, strides: tuple[int, int]) -> None:
    y = np.lib.stride_tricks.as_strided(np.zeros(40, np.float32)[16:], (3, 4), strides)
    with pytest.raises(BadInput, match="elements of output 'y' share memory with each other"):
        twice.bind({"x": np.zeros((3, 4), np.float32)}, {"y": y})
    with pytest.raises(BadInput, match="elements of output 'y' share memory with each other"):
        twice.bind({"x": np.zeros((3, 4), np.float32)}, {"y": Foreign(y)})


def test_values_are_not_written_into_an_input_whose_elements_share_memory(twice: Executable, rng: np.random.Generator) -> None:
    x = np.lib.stride_tricks.as_strided(normal(rng, 4), (3, 4), (0, 4))
    bound = twice.bind({"x": x})
    bound.run()
    assert np.array_equal(bound.to_host("y")["y"], x + x)
    if bound.inputs["x"] is x:
        with pytest.raises(BadInput, match="elements of input 'x' share memory with each other"):
            bound.write({"x": normal(rng, 3, 4)})


def test_overlaps_are_found_exactly(rng: np.random.Generator) -> None:
    """Check random strides by enumerating an array's offsets. Other libraries give strides in elements, or in
    ``__cuda_array_interface__``."""
    found = [0, 0]
    for _ in range(2000):
        shape = tuple(int(n) for n in rng.integers(0, 5, rng.integers(0, 4)))
        strides = tuple(int(s) * int(rng.choice([1, 2, 4])) for s in rng.integers(-9, 10, len(shape)))
        places = sorted(int(np.dot(at, strides)) for at in np.ndindex(shape))
        shared = any(b - a < 2 for a, b in pairwise(places))
        dense = np.zeros(1, np.float16)
        array = np.lib.stride_tricks.as_strided(dense, shape, strides)
        elements = SimpleNamespace(dtype="float16", shape=shape, stride=lambda s=strides: s)
        interface = SimpleNamespace(dtype="float16", shape=shape, __cuda_array_interface__={"strides": strides})
        for one in (array, interface):
            found[shared] += 1
            with pytest.raises(BadInput) if shared else nullcontext():
                check_distinct("it", one)
        apart = any(b - a < 1 for a, b in pairwise(places))
        with pytest.raises(BadInput) if apart else nullcontext():
            check_distinct("it", elements)
    assert min(found) > 100
