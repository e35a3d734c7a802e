"""The dialects of the devices under their native compilers, where those are installed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rammer.codegen.c_target import CFunction, CTarget
from rammer.codegen.dialects import one_thread
from rammer.codegen.emit import emit_operator
from rammer.errors import DeviceFailure
from rammer.ir.extent import AffineExtent, ReduceBound, SkipTasks
from rammer.ir.program import Storage
from rammer_testing.host_c import Array, HostCase, case, close, reference

from rammer_cuda.dialect import CUDA
from rammer_ipu_sim.codelet import IPU
from rammer_rocm.dialect import GPU_DIALECT, OPENCL
from rammer_rocm.generic.kernel import write_generic_task
from rammer_rocm.kernels.task_guards import ended


def cases(rng: np.random.Generator) -> dict[str, HostCase]:
    """Return one operator for each kind of code that the emitter writes."""

    def rand(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    softmax = [
        "m: f32[i:9] = max[j:70] x[i, j]",
        "e: f32[i:9, j:70] = exp(x[i, j] - m[i])",
        "s: f32[i:9] = sum[j:70] e[i, j]",
        "y: f32[i:9, j:70] = e[i, j] / s[i]",
    ]
    window = "pad(x[n, q, h + r - 1, w + s - 1], 0.0)"
    conv = [
        f"c: f32[n:1, m:8, h:9, w:21] = sum[q:4, r:3, s:3] {window} * k[m, q, r, s]",
        "y: f32[n:1, m:8, h:9, w:21] = max(c[n, m, h, w] + b[m], 0.0)",
    ]
    pool = "y: f32[n:1, c:3, h:5, w:20] = max[r:3, s:3] pad(x[n, c, h * 2 + r - 1, w * 2 + s - 1], -inf)"
    mean = ["s: f32[n:2, c:5] = sum[h:7, w:7] x[n, c, h, w]", "y: f32[n:2, c:5] = s[n, c] / 49.0"]
    wild = "y: f32[i:40] = where(isnan(tanh(x[i])), erf(x[i]), pow(abs(x[i]), 1.5)) + round(x[i]) % 3.0"
    ints = "y: i64[i:40] = max(div(a[i], 3), a[i] % 5) + cast(int64, x[i]) // 2"
    near = "x[table(int64, [3, 1, 2, 0], i % 4)]"
    table = f"y: f32[i:40] = {near} * table(float32, [0.5, 2.0], i // 20) + cast(float32, i)"
    flipped = "as_float32(xor(as_uint32(x[i]), const(uint32, 2147483648)))"
    next_one = "cast(float32, as_float64(as_uint64(w[i]) + const(uint64, 4503599627370496)))"
    bits = f"y: f32[i:40] = {flipped} + {next_one}"
    integers = rng.integers(-99, 99, 40)
    return {
        "softmax": case(softmax, {"x": rand(9, 70)}, (4, 70), "veu"),
        "softmax in place": case(softmax, {"x": rand(9, 70)}, (2, 70), "thread"),
        "conv": case(conv, {"x": rand(1, 4, 9, 21), "k": rand(8, 4, 3, 3), "b": rand(8)}, (1, 4, 4, 21)),
        "conv staged": case(conv, {"x": rand(1, 4, 9, 21), "k": rand(8, 4, 3, 3), "b": rand(8)}, (1, 8, 4, 21), "veu"),
        "product": case(
            ["y: f32[i:32, j:32] = sum[k:50] a[i, k] * b[j, k]"],
            {"a": rand(32, 50), "b": rand(32, 50)},
            (16, 32),
        ),
        "pool": case([pool], {"x": rand(1, 3, 10, 40)}, (1, 2, 2, 20)),
        "mean": case(mean, {"x": rand(2, 5, 7, 7)}, (1, 3)),
        "functions": case([wild], {"x": rand(40)}, (17,)),
        "integers": case([ints], {"a": integers, "x": rand(40)}, (17,)),
        "tables": case([table], {"x": rand(40)}, (17,)),
        "bits": case([bits], {"x": rand(40), "w": rand(40).astype(np.float64)}, (17,)),
        "half": case(["y: f16[i:40] = x[i] * x[i]"], {"x": rand(40).astype(np.float16)}, (17,)),
    }


def kernel(target: CTarget, function: CFunction, item: HostCase, head: str, group: str) -> str:
    """Return a kernel that runs every task, one after another, on one group."""
    types = item.binding.types
    pointers = ", ".join(f"{target.global_} {target.types[types[n].dtype]} *p{k}" for k, (n, _) in enumerate(function.arguments))
    passed = "".join(f"p{k}, " for k in range(len(function.arguments)))
    loop = f"for (int k = 0; k < {item.operator.task_count}; ++k) {function.name}({passed}scratch, k);"
    return f"{function.text}\n{head} k_{function.name}({pointers}) {{ {group} {loop} }}\n"


@pytest.fixture(scope="module")
def device() -> Any:
    icd = pytest.importorskip("rammer_rocm.icd")
    icd.prepare_icd()
    cl = pytest.importorskip("pyopencl")
    try:
        devices = [d for p in cl.get_platforms() for d in p.get_devices()]
    except cl.Error:
        devices = []
    if not devices:
        pytest.skip("no OpenCL device")
    context = cl.Context([devices[0]])
    return context, cl.CommandQueue(context)


@pytest.mark.parametrize("threads", [1, 8])
def test_opencl_computes_the_reference(device: Any, threads: int, rng: np.random.Generator) -> None:
    import pyopencl as cl

    context, queue = device
    target = one_thread(OPENCL) if threads == 1 else GPU_DIALECT
    items = cases(rng)
    functions = {n: emit_operator(i.operator, i.binding, target) for n, i in items.items()}
    text = ""
    for n, f in functions.items():
        room = f"__local float16 room[{f.scratch // 64 + 1}]; __local char *scratch = (__local char *)room;"
        text += kernel(target, f, items[n], "__kernel void", room)
    program = cl.Program(context, target.preamble + text).build()
    for name, function in functions.items():
        item = items[name]
        types = item.binding.types
        host = {
            n: np.array(item.values[n]) if n in item.values else np.zeros(types[n].shape, types[n].dtype)
            for n, _ in function.arguments
        }
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        buffers = {n: cl.Buffer(context, flags, hostbuf=np.ascontiguousarray(v)) for n, v in host.items()}
        entry = cl.Kernel(program, f"k_{function.name}")
        entry(queue, (threads,), (threads,), *buffers.values())
        for output, expected in reference(item).items():
            cl.enqueue_copy(queue, host[output], buffers[output])
            queue.finish()
            close(
                host[output],
                expected,
                1e-3 if types[output].dtype == "float16" else 1e-5,
                f"{name}\n{function.text}",
            )


@pytest.mark.parametrize("length", [1, 37, 70])
def test_tiles_on_a_gpu_end_at_the_length(device: Any, length: int, rng: np.random.Generator) -> None:
    """Check that work-items skip elements past the length, where operands are NaN, and store the fill value there. The length may
    be inside a task."""
    import pyopencl as cl

    context, queue = device
    extent = AffineExtent((("n", 1),), 0)
    x = rng.standard_normal((70, 70)).astype(np.float32)
    x[length:], x[:, length:] = np.nan, np.nan
    texts = ["t: f32[i:70] = sum[j:70] x[i, j]", "y: f32[i:70] = t[i] * 2.0"]
    item = case(texts, {"x": x, "n": np.array(length)}, (16,), "thread")
    operator = replace(item.operator, skips=(SkipTasks("i", extent, (7.0,)),), reduce_bounds=(ReduceBound("t", "j", extent),))
    binding = replace(item.binding, storages={**item.binding.storages, "n": Storage("n", "b_n", 0, (), ())})
    made = ended(operator, write_generic_task(operator, binding, GPU_DIALECT), binding, GPU_DIALECT)
    assert made.inner is not None and made.inner.stops
    function = CFunction(
        made.entry, made.inner.text + made.text, tuple((a.tensor, a.written) for a in made.arguments), made.scratch
    )
    room = f"__local float16 room[{made.scratch // 64 + 1}]; __local char *scratch = (__local char *)room;"
    text = kernel(GPU_DIALECT, function, item, "__kernel void", room)
    program = cl.Program(context, GPU_DIALECT.preamble + text).build()
    y, flags = np.zeros(70, np.float32), cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    known = {"x": x, "n": np.array([length]), "y": y}
    buffers = {n: cl.Buffer(context, flags, hostbuf=v) for n, v in known.items()}
    cl.Kernel(program, f"k_{function.name}")(queue, (8,), (8,), *(buffers[n] for n, _ in function.arguments))
    cl.enqueue_copy(queue, y, buffers["y"])
    queue.finish()
    wanted = np.where(np.arange(70) < length, 2 * np.nan_to_num(x).astype(np.float64).sum(1), 7.0)
    np.testing.assert_allclose(y, wanted, 1e-4, 1e-4)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nvrtc_compiles_the_cuda_dialect(arch: str, rng: np.random.Generator) -> None:
    core = pytest.importorskip("cuda.core")
    items = cases(rng)
    functions = {n: emit_operator(i.operator, i.binding, CUDA) for n, i in items.items()}
    text = "".join(
        kernel(CUDA, f, items[n], 'extern "C" __global__ void', "extern __shared__ char scratch[];") for n, f in functions.items()
    )
    try:
        code = core.Program(CUDA.preamble + text, "c++", core.ProgramOptions(arch=arch)).compile("cubin")
    except (ImportError, OSError, RuntimeError) as problem:
        if "NVRTC" in str(problem) or "nvrtc" in str(problem):
            raise
        pytest.skip(f"NVRTC does not load: {problem}")
    assert len(code.code) > 1000


def test_the_codelet_dialect_compiles_as_cpp(tmp_path: Any, rng: np.random.Generator) -> None:
    import shutil
    import subprocess

    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    items = cases(rng)
    source = tmp_path / "codelets.cpp"
    half = "struct half { half() = default; explicit half(float); operator float() const; };\n"  # Poplar's half type
    source.write_text(half + IPU.preamble + "".join(emit_operator(i.operator, i.binding, IPU).text for i in items.values()))
    done = subprocess.run([compiler, "-std=c++17", "-fsyntax-only", str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_dialect_without_an_element_type_declines(rng: np.random.Generator) -> None:
    item = cases(rng)["half"]
    with pytest.raises(DeviceFailure, match="float16"):
        emit_operator(item.operator, item.binding, replace(IPU, types={k: v for k, v in IPU.types.items() if k != "float16"}))
