"""A compiler from ONNX models to static tables of small tasks, which any device with a plugin runs.

``rammer.compile(model, device="rocm")`` returns an ``Executable``; ``exe.run({name: array})`` runs it; ``rammer.devices()`` lists
the devices with their state. Heavy modules load on first use.

This package belongs to the distribution rammer-runtime, which opens and runs compiled files. The compiler is rammer-core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rammer.version import __version__

if TYPE_CHECKING:
    import onnx

    from rammer.device.loader import DeviceStatus
    from rammer.ir.extent import GivenLength
    from rammer.onnxruntime_api import (
        ExecutionMode,
        GraphOptimizationLevel,
        InferenceSession,
        IOBinding,
        ModelMetadata,
        NodeArg,
        OrtDevice,
        OrtValue,
        RunOptions,
        SessionOptions,
        get_all_providers,
        get_available_providers,
        get_device,
        set_default_logger_severity,
        set_seed,
    )
    from rammer.runtime.executable import Executable

__all__ = [
    "ExecutionMode",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "ModelMetadata",
    "NodeArg",
    "OrtDevice",
    "OrtValue",
    "RunOptions",
    "SessionOptions",
    "__version__",
    "compile",
    "devices",
    "get_all_providers",
    "get_available_providers",
    "get_device",
    "set_default_logger_severity",
    "set_seed",
]

#: Names of ``rammer.onnxruntime_api``: with ``import rammer as ort``, code for ONNX Runtime runs unchanged.
_ONNX_RUNTIME = frozenset({*__all__} - {"__version__", "compile", "devices"})


def compile(
    model: str | Path | bytes | onnx.ModelProto,
    device: str = "",
    *,
    policy: str = "",
    tune: str = "off",
    precision: str | None = None,
    layout: str = "keep",
    batching: str = "auto",
    fusion: str = "full",
    require: str = "",
    target: str = "",
    options: Mapping[str, str] | None = None,
    resident: int = 8,
    shapes: Mapping[str, GivenLength] | None = None,
    trust: bool = False,
    trust_key: str | Path = "",
    keep_float32: Sequence[str] = (),
    exclude_family: Sequence[str] = (),
    cores: int = 0,
    memory: int = 0,
    copies: int = 1,
    progress: Callable[[str, str], None] | None = None,
) -> Executable:
    """Prepare ``model`` (a path, bytes or ModelProto) for ``device`` (``NAME[:INDEX]``).

    The default device is the first working one with a clock. Input shapes are not needed: each new set of shapes is specialised
    at its first run. At most ``resident`` sets stay on the device. The least recently used set is evicted for a new one, unless
    it is running or bound. Any thread may call the result. ``copies`` runs of one program may execute side by side.

    The keyword parameters are the options of the command line; ``rammer compile --help`` describes them. ``layout``,
    ``batching``, ``fusion``, ``keep_float32`` and ``exclude_family`` are fixed in a compiled file. A precision that the device
    lacks, or that differs from that of a compiled file, is bad input.

    ``shapes`` are ranges of open dimensions, for example ``{"seq": (1, 512)}``. One program serves all lengths of a part of the
    range, so a new length needs no compilation. ``{"width": (32, 960, 32)}`` has a step, which makes programs faster.
    ``{"past": (0, 63), "total": "past + 1"}`` derives one dimension from another.

    A compiled file may contain machine code, which is ignored unless the file is trusted: with ``trust``, or if the public key in
    the file ``trust_key`` signed it.

    Raises ``rammer.errors.BadInput``, ``DeviceUnavailable`` or ``DeviceFailure``.
    """
    parameters = dict(locals())  # first, so that it has the parameters only
    from rammer.ir.collector import collector_paused

    with collector_paused():  # which took a quarter of the time of the imports
        from rammer.opening import open_model
    return open_model(parameters)


def devices() -> list[DeviceStatus]:
    """Return every installed device with its state. A broken device raises nothing."""
    from rammer.device.loader import Registry

    return list(Registry().statuses())


def __dir__() -> list[str]:
    return sorted([*__all__, "errors", "onnxruntime_api", "torch"])


def __getattr__(name: str) -> Any:
    import importlib

    if name == "errors":
        return importlib.import_module("rammer.errors")
    if name == "torch":
        from rammer.errors import require_compiler

        require_compiler("rammer.torch")
    if name in ("onnxruntime_api", "torch"):
        return importlib.import_module(f"rammer.{name}")
    if name in _ONNX_RUNTIME:
        return getattr(importlib.import_module("rammer.onnxruntime_api"), name)
    raise AttributeError(f"module 'rammer' has no attribute {name!r}")
