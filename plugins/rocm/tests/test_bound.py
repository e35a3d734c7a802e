"""Bound calls on OpenCL arrays."""

from __future__ import annotations

import numpy as np
import pytest
from bound_calls import TWICE, executable, normal

from rammer.errors import BadInput

LATE = """
kernel void late(global float *x, int count, int turns) {
  volatile int turn = 0;
  while (turn < turns) turn = turn + 1;
  for (int i = 0; i < count; i++) x[i] += 1.0f;
}
"""


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


def test_a_run_on_another_queue_is_in_its_order(rng: np.random.Generator) -> None:
    """Check that a run reads what the given queue writes before it, as a table does that runs after its length variant."""
    cl, arrays = pytest.importorskip("pyopencl"), pytest.importorskip("pyopencl.array")
    exe, x = executable("rocm", TWICE), normal(rng, 3, 4)
    context = exe.bind({"x": x}).stream.context
    queue = cl.CommandQueue(context)
    given = arrays.to_device(queue, x)
    bound = exe.bind({"x": given}, stream=queue)
    late = cl.Kernel(cl.Program(context, LATE).build(), "late")
    for _ in range(3):
        late(queue, (1,), (1,), given.base_data, np.int32(12), np.int32(10**8))
        x = x + np.float32(1)
        bound.run()
        assert np.array_equal(bound.to_host("y")["y"], x + x)
    foreign = cl.Context(context.devices)
    with pytest.raises(BadInput, match="programs run on the queue"):
        exe.bind({"x": x}, stream=cl.CommandQueue(foreign))
    exe.close()
