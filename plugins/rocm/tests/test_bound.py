"""Bound calls on OpenCL arrays."""

from __future__ import annotations

import numpy as np
import pytest
from bound_calls import TWICE, executable, normal

from rammer.errors import BadInput


def test_opencl_arrays_are_copied_on_the_device(rng: np.random.Generator) -> None:
    arrays = pytest.importorskip("pyopencl.array")
    exe = executable("rocm", TWICE)
    x = normal(rng, 3, 4)
    queue = exe.bind({"x": x}).stream
    on_device, result = arrays.to_device(queue, x), arrays.zeros(queue, (3, 4), np.float32)
    bound = exe.bind({"x": on_device}, {"y": result}, stream=queue)
    assert bound.inputs["x"] is on_device and bound.outputs["y"] is result
    assert any("copied" in note for note in bound.notes)
    for _ in range(2):
        bound.run()
        bound.synchronize()
        assert np.array_equal(result.get(), x + x) and np.array_equal(bound.to_host("y")["y"], x + x)
        x = normal(rng, 3, 4)
        bound.write({"x": x})
    with pytest.raises(BadInput, match="output 'y' shares memory with input 'x'"):
        exe.bind({"x": on_device}, {"y": on_device})
    with pytest.raises(BadInput, match="programs run on the queue that their device was opened with"):
        exe.bind({"x": x}, stream=object())
    exe.close()
