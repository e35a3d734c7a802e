"""The environment that a result was measured in, for result files."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("rammer-core", "rammer-cuda", "rammer-rocm", "rammer-ipu-sim", "numpy", "onnx", "onnxruntime", "pyopencl",
            "cuda-core", "cupy-cuda13x", "torch", "jax")  # fmt: skip


def environment() -> dict[str, str]:
    """Processor, cores, operating system, Python and package versions."""
    found = {
        "cpu": _cpu(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
