"""Opening of a model on a device: the only module that joins source, registry and executable."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rammer.cache.cache_location import cache_folder
from rammer.compile_options import ANY, Progress, Request, check_choices, check_precision, ignore_progress
from rammer.compiled.artifact import is_artifact
from rammer.device.loader import PLUGINS, Registry
from rammer.errors import DeviceUnavailable
from rammer.jit.model_specialiser import ModelSpecialiser
from rammer.jit.onnx_source import check_kept, open_source
from rammer.runtime.auto_ranges import LengthHistory
from rammer.runtime.compiled_file import closed_where_refused, open_artifact
from rammer.runtime.executable import Executable
from rammer.runtime.model_source import ModelSource
from rammer.runtime.shape_buckets import Lengths

if TYPE_CHECKING:
    import onnx

    from rammer.tuning.kernel_store import KernelStore


def open_executable(
    model: str | Path | bytes | onnx.ModelProto | ModelSource,
    device: str,
    request: Request = ANY,
    *,
    registry: Registry | None = None,
    progress: Progress = ignore_progress,
    store: KernelStore | None = None,
) -> Executable:
    """Open a model on a device; see ``rammer.compile``.

    The model is read before the device is opened, so bad input does not load a driver.

    A file written by ``rammer compile -o`` opens on the device that it names. Its policy, tuning, layout, batching, fusion and
    precision are fixed. A request for a layout, batching, fusion or a different precision is refused.
    """
    registry = registry or Registry()
    if isinstance(model, str | Path) and is_artifact(Path(model)):
        return open_artifact(Path(model), device, request, registry, ModelSpecialiser)
    check_choices(request)
    source = model if isinstance(model, ModelSource) else open_source(model, registry.operators)
    source.head  # noqa: B018 - reads and checks the model before any driver is touched
    check_kept(request.chosen, source)
    spec = device or first_measured(registry)
    backend = registry.open(spec, request.require, request.target, request.device_options)
    chosen = request.chosen.with_policy(backend.default_policy)
    with closed_where_refused(backend):
        check_precision(chosen.precision, spec, backend.vdevice)
        backend.exclude_families(chosen.exclude_family)
        lengths = Lengths.of(source.head.inputs, request.lengths)
    name = spec if ":" in spec else f"{spec}:0"
    return Executable(
        source,
        backend,
        name,
        chosen,
        registry,
        request.progress or progress,
        store,
        cache_folder(),
        request.device_options,
        resident=request.resident,
        memory=request.memory,
        copies=request.copies,
        lengths=lengths,
        length_history=LengthHistory(on=True),
        owner=True,
    )


def first_measured(registry: Registry) -> str:
    """Return the first working device that has a clock. Raise DeviceUnavailable with the reasons if none works."""
    reasons = []
    for status in registry.statuses():
        if status.state == "ok" and status.device is not None and not status.device.simulated:
            return status.name
        reasons.append(f"{status.name}: {status.state}{f' ({status.reason})' if status.reason else ''}")
    raise DeviceUnavailable(
        "no device with a clock works here",
        where="; ".join(reasons) or "no plugin is installed",
        hint=f"{PLUGINS}; or name a simulated device with --device",
    )
