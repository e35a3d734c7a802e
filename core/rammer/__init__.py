"""rammer: an ONNX model becomes a static table of small tasks, and any device with a plugin runs it.

``rammer.compile(model, device="rocm")`` gives an ``Executable``; ``exe.run({name: array})`` runs it;
``rammer.devices()`` lists what works here. Heavy modules load on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rammer.version import __version__

if TYPE_CHECKING:
    import onnx

    from rammer.device.loader import DeviceStatus
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
    require: str = "",
    target: str = "",
    options: Mapping[str, str] | None = None,
    resident: int = 8,
    shapes: Mapping[str, tuple[int, int] | str] | None = None,
    keep_float32: Sequence[str] = (),
) -> Executable:
    """Prepare ``model`` (a path, bytes or ModelProto) for ``device`` (``NAME[:INDEX]``).

    Without ``device``, the first working device with a clock. Input shapes are not needed: each new set of
    shapes is specialised at its first run, and ``resident`` sets at most stay on the device: for one more, the least
    recently used goes, unless it is running or bound. Any thread may call the result; its runs take turns. ``precision`` is
    ``float32`` (the default), ``tf32`` (matrix products and
    convolutions round their operands to 10 bits of mantissa) or ``float16`` (tensors are stored in 16 bits; inputs and
    outputs keep their types, sums are float32); a device without it is bad input, and so is another one than that of a
    file that was compiled before. ``layout`` is the order of images' axes inside the program: ``keep`` (the model's; of
    8-bit codes channels last where that is faster), ``nhwc`` (channels last) or ``auto`` (what the device's kernels are
    faster with, tensor by tensor); for a compiled file it is settled, as is ``batching``: whether independent
    products become one where that is predicted to be no slower (``auto``), never (``off``) or wherever nothing is copied for
    it (``all``), or as ``auto`` but also of windows that differ (``pad``). ``shapes`` are ranges of open dimensions,
    ``{"seq": (1, 512)}``: one program serves all lengths of a part of it, so that a new length needs no compiling;
    ``{"past": (0, 63), "total": "past + 1"}`` where one follows from another. ``keep_float32`` are patterns (``*/norm/*``) of the
    names or types of operators that ``float16`` leaves in float32. Raises ``rammer.errors.BadInput``,
    ``DeviceUnavailable`` or ``DeviceFailure``.
    """
    from rammer.compiler.compile_options import Request
    from rammer.runtime.session import open_executable

    spans = dict(shapes or {})
    given = dict(options or {})
    request = Request(policy, tune, target, precision, layout, batching, require, given, resident, spans, tuple(keep_float32))
    return open_executable(model, device, request)


def devices() -> list[DeviceStatus]:
    """Every installed device with its state; never raises because one of them is broken."""
    from rammer.device.loader import Registry

    return list(Registry().statuses())


def __dir__() -> list[str]:
    return sorted([*__all__, "errors"])


def __getattr__(name: str) -> Any:
    if name == "errors":
        import importlib

        return importlib.import_module("rammer.errors")
    raise AttributeError(f"module 'rammer' has no attribute {name!r}")
