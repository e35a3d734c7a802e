"""Opening a model on a device: the one place that joins source, registry and executable."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rammer.device.loader import Registry
from rammer.errors import BadInput, DeviceUnavailable
from rammer.profile.store import KernelStore, cache_folder
from rammer.profile.tune import MEASURED
from rammer.runtime.executable import Executable
from rammer.runtime.options import CompileOptions, Progress, quiet
from rammer.runtime.source import open_source

if TYPE_CHECKING:
    import onnx


def open_executable(model: str | Path | bytes | onnx.ModelProto, device: str, *, policy: str = "wavefront",
                    tune: str = "off", require: str = "", target: str = "", options: dict[str, str] | None = None,
                    registry: Registry | None = None, progress: Progress = quiet,
                    store: KernelStore | None = None) -> Executable:  # fmt: skip
    """See ``rammer.compile``. The model is read before the device is opened: bad input costs no driver."""
    if tune not in MEASURED:
        raise BadInput(f"unknown tuning level {tune!r}", hint=f"one of: {', '.join(MEASURED)}")
    source = open_source(model)
    source.head  # noqa: B018 - reads and checks the model before any driver is touched
    registry = registry or Registry()
    spec = device or first_measured(registry)
    backend = registry.open(spec, require, target, options)
    chosen = CompileOptions(policy, tune, target)
    name = spec if ":" in spec else f"{spec}:0"
    return Executable(source, backend, name, chosen, registry, progress, store, cache_folder() / "programs")


def first_measured(registry: Registry) -> str:
    """The first working device that has a clock. DeviceUnavailable lists the reasons otherwise."""
    reasons = []
    for status in registry.statuses():
        if status.state == "ok" and status.device is not None and not status.device.simulated:
            return status.name
        reasons.append(f"{status.name}: {status.state}{f' ({status.reason})' if status.reason else ''}")
    raise DeviceUnavailable(
        "no device with a clock works here", where="; ".join(reasons) or "no plugin is installed",
        hint="pip install -e plugins/rocm from the checkout, or name a simulated device with --device",
    )  # fmt: skip
