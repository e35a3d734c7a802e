"""Opening of a model or a compiled file, for ``rammer.compile`` and for sessions. The compiler is imported only for a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rammer.compile_options import Progress, Request, ignore_progress
from rammer.compiled.artifact import is_artifact
from rammer.device.loader import Registry
from rammer.errors import require_compiler
from rammer.ir.collector import collector_paused
from rammer.runtime.compiled_file import open_artifact

if TYPE_CHECKING:
    from rammer.runtime.executable import Executable
    from rammer.runtime.specialiser import CompileSite, Specialiser


def open_model(parameters: Mapping[str, Any]) -> Executable:
    """Return the executable for the parameters of ``rammer.compile``."""
    options = dict(parameters)
    model, device = options.pop("model"), options.pop("device")
    return open_as_requested(model, device, Request.from_parameters(options))


def open_as_requested(model: Any, device: str, request: Request, progress: Progress = ignore_progress) -> Executable:
    """Return the executable for a parsed request. ``progress`` is called for each step of compiling a model."""
    with collector_paused():  # most of the time is imports of the device's plugin
        if isinstance(model, str | Path) and is_artifact(Path(model)):
            return open_artifact(Path(model), device, request, Registry(), _specialise)
        require_compiler("rammer.compile of a model")
        from rammer.jit.session import open_executable

        return open_executable(model, device, request, progress=progress)


def _specialise(site: CompileSite) -> Specialiser:
    """Return the compiler of the programs that a compiled file does not have: of control flow, or for other arrays."""
    require_compiler("a program that is not in the file")
    from rammer.jit.model_specialiser import ModelSpecialiser

    return ModelSpecialiser(site)
