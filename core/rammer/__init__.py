"""A compiler from ONNX models to static tables of small tasks, which any device with a plugin runs.

``rammer.compile(model, device="rocm")`` returns an ``Executable``; ``exe.run({name: array})`` runs it; ``rammer.devices()`` lists
the devices with their state. Heavy modules load on first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rammer.version import __version__

if TYPE_CHECKING:
    import onnx

    from rammer.device.loader import DeviceStatus
    from rammer.ir.extent import GivenLength
    from rammer.runtime.executable import Executable

__all__ = ["__version__", "compile", "devices"]


def compile(
    model: str | Path | bytes | onnx.ModelProto,
    device: str = "",
    *,
    policy: str = "wavefront",
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
    keep_float32: Sequence[str] = (),
) -> Executable:
    """Prepare ``model`` (a path, bytes or ModelProto) for ``device`` (``NAME[:INDEX]``).

    The default device is the first working one with a clock. Input shapes are not needed: each new set of shapes is specialised
    at its first run. At most ``resident`` sets stay on the device. The least recently used set is evicted for a new one, unless
    it is running or bound. Any thread may call the result; its runs are serialised.

    The keyword parameters are the options of the command line; ``rammer compile --help`` describes them. ``layout``,
    ``batching``, ``fusion`` and ``keep_float32`` are fixed in a compiled file. A precision that the device lacks, or that differs
    from that of a compiled file, is bad input.

    ``shapes`` are ranges of open dimensions, for example ``{"seq": (1, 512)}``. One program serves all lengths of a part of the
    range, so a new length needs no compilation. ``{"width": (32, 960, 32)}`` has a step, which makes programs faster.
    ``{"past": (0, 63), "total": "past + 1"}`` derives one dimension from another.

    Raises ``rammer.errors.BadInput``, ``DeviceUnavailable`` or ``DeviceFailure``.
    """
    parameters = dict(locals())  # first, so that it has the parameters only
    from rammer.compile_options import Request
    from rammer.runtime.session import open_executable

    return open_executable(parameters.pop("model"), parameters.pop("device"), Request.from_parameters(parameters))


def devices() -> list[DeviceStatus]:
    """Return every installed device with its state. A broken device raises nothing."""
    from rammer.device.loader import Registry

    return list(Registry().statuses())


def __dir__() -> list[str]:
    return sorted([*__all__, "errors", "torch"])


def __getattr__(name: str) -> Any:
    if name in ("errors", "torch"):
        import importlib

        return importlib.import_module(f"rammer.{name}")
    raise AttributeError(f"module 'rammer' has no attribute {name!r}")
