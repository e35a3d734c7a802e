"""Faults outside rammer (a missing package, a driver, the system): one clear error with the right exit code."""

from __future__ import annotations

import errno
import importlib
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import LITTLE, arrays, model, saved
from command import Done, typed

import rammer
from rammer.cache import Cache
from rammer.device.loader import Registry
from rammer.errors import DeviceFailure, DeviceUnavailable
from rammer.runtime.host_bound import HostBound
from rammer.tuning import measure_process
from rammer_testing.nonempty import some

import rammer_toy

Typed = Callable[..., Done]


class DriverError(Exception):
    """An exception class that neither Python nor rammer defines."""


@pytest.fixture
def rammers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    return lambda *words: typed(monkeypatch, capsys, *words)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return saved(tmp_path / "m.onnx", model(LITTLE.replace("N", "3")))


def told(done: Done, code: int, *parts: str) -> None:
    """Check for a clear error without other output."""
    assert (done.code, "Traceback" in done.err, "internal error" in done.err) == (code, False, False), done.err
    assert done.err.startswith("rammer: error: ")
    for part in some(parts):
        assert part in done.err, done.err


# --- missing packages ----------------------------------------------------------------------------------


def no_nvrtc_library(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")

    def lost() -> Any:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", lost)


def no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("gone, package", [(no_nvrtc_library, "nvidia-cuda-nvrtc"), (no_bindings, "cuda-bindings")])
def test_compiling_for_cuda_without_its_compiler(
    gone: Callable[[pytest.MonkeyPatch], None], package: str, path: Path, monkeypatch: pytest.MonkeyPatch, rammers: Typed
) -> None:
    gone(monkeypatch)
    for tune in ("off", "quick"):
        done = rammers("compile", path, "--device", "cuda", "--target", "sm_90a", "--tune", tune)
        told(done, 3, f"device cuda needs {package}\n", "hint: pip install -e 'plugins/cuda[cu13]'")


@pytest.mark.parametrize("gpus, reason", [(1, "needs cupy: pip install -e 'plugins/cuda[cu13]'"), (0, "no unit was found")])
def test_a_gpu_without_cupy_and_no_driver(
    gpus: int, reason: str, path: Path, monkeypatch: pytest.MonkeyPatch, rammers: Typed
) -> None:
    monkeypatch.setattr("rammer_cuda.hardware.gpu_count", lambda: gpus)
    monkeypatch.setitem(sys.modules, "cupy", None)
    told(rammers("run", path, "--device", "cuda"), 3, "device cuda is not available", reason)


def test_no_nvidia_driver(path: Path, monkeypatch: pytest.MonkeyPatch, rammers: Typed) -> None:
    def lost(flags: int) -> Any:
        raise RuntimeError("Failure finding libcuda.so.1")

    monkeypatch.setattr(pytest.importorskip("cuda.bindings.driver"), "cuInit", lost)
    words = "missing-dependency", "needs libcuda.so.1, which was not found: install the NVIDIA driver"
    told(rammers("run", path, "--device", "cuda"), 3, *words)
    listed = rammers("devices", "--no-test")
    assert listed.code == 0
    assert all(word in listed.out for word in words)


def test_no_pyopencl(path: Path, monkeypatch: pytest.MonkeyPatch, rammers: Typed) -> None:
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    told(rammers("run", path, "--device", "rocm"), 3, "missing-dependency", "needs pyopencl: pip install pyopencl")


@pytest.mark.parametrize("none", ["an error", "no platform", "no device"])
def test_no_opencl_runtime(none: str, path: Path, monkeypatch: pytest.MonkeyPatch, rammers: Typed) -> None:
    def platforms() -> list[Any]:
        if none == "an error":
            raise DriverError("clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR")
        return [SimpleNamespace(get_devices=list)] if none == "no device" else []

    fake = SimpleNamespace(Error=DriverError, get_platforms=platforms)
    monkeypatch.setattr("rammer_rocm.opencl_runtime.import_opencl", lambda: fake)
    done = rammers("run", path, "--device", "rocm")
    told(done, 3, "missing-dependency", "needs an OpenCL runtime that has a unit: pip install intel-opencl-rt")


@pytest.mark.parametrize(
    "words", [("compare", "--device", "toy", "--against", "onnxruntime"), ("bench", "--device", "toy", "--peer", "onnxruntime")]
)
def test_no_onnxruntime(words: tuple[str, ...], path: Path, monkeypatch: pytest.MonkeyPatch, rammers: Typed) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    told(rammers(words[0], path, *words[1:]), 3, "onnxruntime is not installed", "pip install onnxruntime")


# --- failures ------------------------------------------------------------------------------------------

OUTSIDE = [
    DriverError("CL_OUT_OF_RESOURCES"),
    sqlite3.OperationalError("disk I/O error"),
    OSError(errno.ENODEV, "No such device"),
    subprocess.TimeoutExpired("clang", 9),
]
PLACES = [
    (rammer_toy.ToyBackend, "candidates"),
    (rammer_toy.ToyBackend, "kernel"),
    (rammer_toy.ToyBackend, "load"),
    (rammer_toy.ToyBackend, "fingerprint"),
    (rammer_toy.ToyProgram, "run"),
    (rammer_toy.ToyBackend, "profiler"),
    (rammer_toy.ToyProfiler, "task_time"),
    (rammer_toy.ToyProfiler, "resources"),
]


def failing(monkeypatch: pytest.MonkeyPatch, where: tuple[type, str], problem: Exception) -> None:
    def fails(self: Any, *args: Any, **named: Any) -> Any:
        raise problem

    plain = vars(where[0]).get(where[1])
    monkeypatch.setattr(where[0], where[1], fails if callable(plain) else property(fails, lambda *_: None), raising=False)


@pytest.mark.parametrize("where", PLACES, ids=lambda where: f"{where[0].__name__}.{where[1]}")
def test_a_driver_that_fails_anywhere(
    where: tuple[type, str], path: Path, monkeypatch: pytest.MonkeyPatch, rammers: Typed
) -> None:
    for problem in OUTSIDE:
        with monkeypatch.context() as patch:
            patch.setattr(measure_process, "opening_of", lambda backend: None)  # the failure is in this process
            failing(patch, where, problem)
            done = rammers("run", path, "--device", "toy", "--tune", "quick")
        told(done, 4, f"device toy failed: {problem}")


@pytest.mark.parametrize("where", PLACES[:5], ids=lambda where: f"{where[0].__name__}.{where[1]}")
def test_what_is_our_own_fault_keeps_its_traceback(
    where: tuple[type, str], path: Path, monkeypatch: pytest.MonkeyPatch, rammers: Typed
) -> None:
    failing(monkeypatch, where, KeyError("h0"))
    done = rammers("run", path, "--device", "toy", "--tune", "quick")
    assert done.code == 4 and "Traceback" in done.err and "rammer: internal error: 'h0'" in done.err


def test_a_package_that_is_missed_only_when_it_is_used(
    path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    exe = rammer.compile(path, device="toy")
    failing(monkeypatch, (rammer_toy.ToyProgram, "run"), ModuleNotFoundError("No module named 'fast'", name="fast.arrays"))
    with pytest.raises(DeviceUnavailable, match="device toy needs the package fast"):
        exe.run(arrays(rng))
    failing(monkeypatch, (rammer_toy.ToyProgram, "run"), ImportError("circular", name="rammer.codegen"))
    with pytest.raises(ImportError, match="circular"):
        exe.run(arrays(rng))


def test_a_driver_that_fails_in_bound_calls(path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    exe, given = rammer.compile(path, device="toy"), arrays(rng)
    bound = exe.bind(given)
    calls: dict[str, Callable[[], object]] = {
        "launch": bound.run,
        "measure": bound.seconds,
        "fetch": bound.to_host,
        "store": lambda: bound.write(given),
        "wait": bound.synchronize,
        "release": bound.close,
    }
    for name, call in calls.items():
        with monkeypatch.context() as patch:
            failing(patch, (HostBound, name), DriverError("lost"))
            with pytest.raises(DeviceFailure, match="device toy failed: lost"):
                call()


def test_an_amd_target_without_its_compiler(path: Path, monkeypatch: pytest.MonkeyPatch, rammers: Typed) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    told(rammers("compile", path, "--device", "rocm", "--target", "gfx90a"), 3, "apt install clang-19")


def test_opencl_errors(path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    cl = pytest.importorskip("pyopencl")
    registry = Registry()
    if registry.status("rocm").state != "ok":
        pytest.skip("no OpenCL here")
    exe = rammer.compile(path, device="rocm")
    exe.run(arrays(rng))

    def fails(*args: object, **named: object) -> Any:
        raise cl.MemoryError("clEnqueueNDRangeKernel failed: MEM_OBJECT_ALLOCATION_FAILURE")

    with monkeypatch.context() as patch:
        patch.setattr(cl, "enqueue_nd_range_kernel", fails)
        with pytest.raises(DeviceFailure, match=r"failed.*: .*MEM_OBJECT_ALLOCATION_FAILURE"):
            exe.run(arrays(rng))
    from rammer_rocm.build import build_program

    with pytest.raises(DeviceFailure, match="an OpenCL kernel does not compile"):
        build_program(exe.backend.context, "kernel void f() { this is no C; }")  # type: ignore[attr-defined]
    given = arrays(rng)
    np.testing.assert_allclose(exe.run(given)["y"], np.maximum(given["x"] @ given["w"], 0), rtol=1e-4, atol=1e-5)


def test_home_that_nobody_can_write(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rammers: Typed) -> None:
    """Check that everything works without a cache: OpenCL caches its binaries in a folder of the user."""
    blocked = saved(tmp_path / "file", b"")
    monkeypatch.delenv("RAMMER_CACHE")
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(blocked / "home"))
    monkeypatch.delenv("PYOPENCL_CACHE_FAILURE_FATAL", raising=False)
    monkeypatch.setattr("rammer_rocm.opencl_runtime._READY", [])  # as in a new process
    if Registry().status("rocm").state != "ok":
        pytest.skip("no OpenCL here")
    for words in (f"run {path} --device rocm", f"compile {path} --device toy", "cache info", "cache clear"):
        done = rammers(*words.split())
        assert (done.code, "Traceback" in done.err) == (0, False), done.err


def test_a_cache_whose_disk_fails_while_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check one warning for all entries that cannot be written, and one for an entry that cannot be read."""
    cache, key = Cache("tuned", root=tmp_path), "a" * 64
    cache.put(key, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda self, target: fail(OSError(errno.ENOSPC, "No space left on device")))
        for _ in range(2):
            cache.put(key, b"new")
        assert capsys.readouterr().err.count(f"cannot write to the cache {tmp_path}: No space left on device") == 1
    assert cache.get(key, bytes) == b"old" and not list(tmp_path.rglob("*.partial"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda self: fail(OSError(errno.EIO, "Input/output error")))
        assert cache.get(key, bytes) is None
    assert "is not used: Input/output error" in capsys.readouterr().err


def fail(problem: Exception) -> Any:
    raise problem


@pytest.mark.parametrize(
    "problem",
    [
        OSError(errno.ENOSPC, "No space left on device", "/there"),
        sqlite3.DatabaseError("database disk image is malformed"),
        ModuleNotFoundError("No module named 'fast'", name="fast"),
    ],
)
def test_the_system_fails_where_nobody_foresaw_it(
    problem: Exception, path: Path, monkeypatch: pytest.MonkeyPatch, rammers: Typed
) -> None:
    def fails(*args: object, **named: object) -> Any:
        raise problem

    monkeypatch.setattr("rammer.device.loader.Registry.open", fails)
    said = "rammer needs the package fast" if isinstance(problem, ImportError) else f"rammer failed: {problem}"
    told(rammers("run", path, "--device", "toy"), 3 if isinstance(problem, ImportError) else 4, said)


# --- another library of the same name ------------------------------------------------------------------

PROBE = """import ctypes, sys
ctypes.CDLL(sys.argv[1])
from rammer_rocm.plugin import probe
print(len(probe()))
"""


def test_opencl_beside_another_copy_of_its_threading_library(tmp_path: Path) -> None:
    """Check with an empty library in place of the older copy that OpenVINO brings."""
    from rammer_rocm.icd import installed_file

    if not shutil.which("cc") or installed_file("tbb", "libtbb.so.12") is None:
        pytest.skip("needs a C compiler and Intel's OpenCL runtime")
    other = tmp_path / "libtbb.so.12"
    subprocess.run(["cc", "-shared", "-Wl,-soname,libtbb.so.12", "-xc", "/dev/null", "-o", str(other)], check=True)
    done = subprocess.run([sys.executable, "-c", PROBE, str(other)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and int(done.stdout) >= 1, done.stderr
