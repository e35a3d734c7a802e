"""Float32 quotients by IEEE 754: codes at rounding ties depend on them, and OpenCL permits 2.5 units in the last place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyopencl")
from rammer_rocm.build import ROUNDED, build_options, build_program
from rammer_rocm.dialect import CPU_DIALECT, GPU_DIALECT, OPENCL
from rammer_rocm.opencl_runtime import import_opencl, kind_of, units
from rammer_rocm.plugin import DEVICE

if not DEVICE.probe():
    pytest.skip("no OpenCL unit", allow_module_level=True)

_TEXT = """
__kernel void mend(__global const float *a, __global const float *b, __global const float *q, __global float *c, int n) {
  for (int i = 0; i < n; ++i) c[i] = rm_rounded(a[i], b[i], q[i]);
}
__kernel void lone(__global const float *a, __global const float *b, __global const float *q, __global float *c, int n) {
  for (int i = 0; i < n; ++i) c[i] = QUOTIENT(a[i], b[i]);
}
__kernel void wide(__global const float *a, __global const float *b, __global const float *q, __global float *c, int n) {
  for (int i = 0; i < n; i += 8) vstore8(vload8(0, a + i) / vload8(0, b + i), 0, c + i);
}
"""
COUNT = 1 << 16


@pytest.fixture
def pairs(rng: np.random.Generator) -> tuple[Any, Any]:
    """Return numbers of many magnitudes, and numbers whose quotients are within a last place of a code's tie."""
    scale = np.exp(rng.uniform(-30, 30, COUNT)).astype(np.float32)
    codes = rng.integers(-300, 300, COUNT).astype(np.float32)
    near = ((codes + np.float32(0.5)) * scale * (1 + rng.integers(-1, 2, COUNT) * np.float32(2.0**-24))).astype(np.float32)
    any_size = (np.exp(rng.uniform(-15, 15, COUNT)) * rng.choice([-1, 1], COUNT)).astype(np.float32)
    return np.where(rng.random(COUNT) < 0.5, near, any_size), scale


def run(kernel: str, text: str, options: tuple[str, ...], *arrays: Any) -> Any:
    """Return the output of a kernel on the first unit."""
    cl, device = import_opencl(), units()[0]
    context = cl.Context([device])
    queue, flags = cl.CommandQueue(context), cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR
    program = build_program(context, text + _TEXT, build_options(device) + options)
    found = np.empty_like(arrays[0])
    into = cl.Buffer(context, cl.mem_flags.WRITE_ONLY, found.nbytes)
    buffers = [cl.Buffer(context, flags, hostbuf=np.ascontiguousarray(a)) for a in arrays]
    cl.Kernel(program, kernel)(queue, (1,), (1,), *buffers, into, np.int32(len(found)))
    cl.enqueue_copy(queue, found, into)
    return found


@pytest.mark.parametrize("units_off", [-2, -1, 0, 1, 2])
def test_a_quotient_a_few_units_off_is_mended(pairs: tuple[Any, Any], units_off: int) -> None:
    a, b = pairs
    given = (a / b).view(np.int32) + np.int32(units_off)
    found = run("mend", GPU_DIALECT.preamble, ("-DQUOTIENT=rm_quotient",), a, b, given.view(np.float32))
    assert np.array_equal(found, a / b)


def test_what_no_residual_can_mend_stays() -> None:
    a = np.array([np.inf, np.nan, 0.0, 1.0, 3e38, 1e-30, -0.0, 5e-39], np.float32)
    b = np.array([2.0, 2.0, 3.0, 0.0, 0.5, 1e30, 7.0, 0.25], np.float32)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        want = a / b
    found = run("mend", GPU_DIALECT.preamble, ("-DQUOTIENT=rm_quotient",), a, b, want)
    assert np.array_equal(found.view(np.int32)[~np.isnan(want)], want.view(np.int32)[~np.isnan(want)])


@pytest.mark.parametrize("kernel", ["lone", "wide"])
def test_the_unit_here_divides_right(pairs: tuple[Any, Any], kernel: str) -> None:
    """Check CPUs by their instruction, scalar and in vectors, and GPUs by the dialect's spelling."""
    gpu = kind_of(units()[0]) == "gpu"
    if gpu and kernel == "wide":
        pytest.skip("tasks of GPUs have no vectors")
    spelled = "-DQUOTIENT=rm_quotient" if gpu else "-DQUOTIENT(a,b)=((a)/(b))"
    a, b = pairs
    assert np.array_equal(run(kernel, GPU_DIALECT.preamble, (spelled,), a, b, a), a / b)


def test_a_unit_that_can_is_told_to() -> None:
    flags = import_opencl().device_fp_config
    for config, asked in ((flags.CORRECTLY_ROUNDED_DIVIDE_SQRT | flags.FMA, True), (flags.FMA, False)):
        unit = SimpleNamespace(extensions="", opencl_c_version="OpenCL C 1.2", version="OpenCL 3.0", single_fp_config=config)
        assert (ROUNDED[0] in build_options(unit), ROUNDED[1] in build_options(unit)) == (asked, asked)


def test_texts_for_gpus_ask_for_it_and_texts_for_cpus_do_not() -> None:
    assert GPU_DIALECT.functions["div"] == "rm_quotient" and "div" not in CPU_DIALECT.functions
    assert "div" not in OPENCL.functions and "rm_quotient" not in CPU_DIALECT.preamble
