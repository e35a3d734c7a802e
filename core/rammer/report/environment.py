"""The environment of a measurement, for result files."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Final

from rammer.device.loader import GROUP

#: The core's relevant packages, and the other runtimes that it is compared with.
PACKAGES: Final = ("rammer-core", "rammer-runtime", "numpy", "onnx", "onnxruntime", "torch", "jax")


def describe_environment() -> dict[str, str]:
    """Return processor, cores, operating system, Python and package versions of the core, the plugins and their requirements."""
    found = {
        "cpu": _cpu_name(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for package in dict.fromkeys((*PACKAGES, *_plugin_distributions())):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _plugin_distributions() -> list[str]:
    """Return the distributions of the installed plugins and their requirements, with extras but without tests."""
    names = list[str]()
    for plugin in sorted({e.dist for e in entry_points(group=GROUP) if e.dist is not None}, key=lambda d: d.name):
        needed = [r for r in plugin.requires or () if not re.search(r"extra\s*==\s*['\"]test", r)]
        names += [plugin.name, *(m[0] for r in needed if (m := re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", r)))]
    return names


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
