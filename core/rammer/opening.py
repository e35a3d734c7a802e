"""Opening of a model or a compiled file, for ``rammer.compile`` and for sessions. The compiler is imported only for a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rammer.compile_options import Request
from rammer.compiled.artifact import is_artifact
from rammer.device.loader import Registry
from rammer.errors import require_compiler
from rammer.runtime.compiled_file import open_artifact

if TYPE_CHECKING:
    from rammer.runtime.executable import Executable
    from rammer.runtime.specialiser import CompileSite, Specialiser


def open_model(parameters: Mapping[str, Any]) -> Executable:
    """Return the executable for the parameters of ``rammer.compile``."""
    options = dict(parameters)
    model, device = options.pop("model"), options.pop("device")
    request = Request.from_parameters(options)
    if isinstance(model, str | Path) and is_artifact(Path(model)):
        return open_artifact(Path(model), device, request, Registry(), _specialise)
    require_compiler("rammer.compile of a model")
    from rammer.jit.session import open_executable

    return open_executable(model, device, request)


def _specialise(site: CompileSite) -> Specialiser:
    """Return the compiler of the programs that a compiled file does not have: of control flow, or for other arrays."""
    require_compiler("a program that is not in the file")
    from rammer.jit.model_specialiser import ModelSpecialiser

    return ModelSpecialiser(site)
