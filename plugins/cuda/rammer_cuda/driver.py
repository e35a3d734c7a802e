"""Calls into the CUDA driver and NVRTC through cuda.bindings, with errors as exceptions."""

from __future__ import annotations

from typing import Any

from rammer.errors import DeviceFailure, MissingDependency

HINT = "pip install -e 'plugins/cuda[cu13]' (or [cu12]) from the checkout"


def import_driver() -> Any:
    """Import the module ``cuda.bindings.driver``. Raises MissingDependency without it."""
    try:
        from cuda.bindings import driver as module
    except ImportError as problem:
        raise MissingDependency("cuda-bindings", HINT) from problem
    return module


def import_nvrtc() -> Any:
    """Import the module ``cuda.bindings.nvrtc``. Raises MissingDependency without it or its library."""
    try:
        from cuda.bindings import nvrtc as module

        module.nvrtcVersion()
    except ImportError as problem:
        raise MissingDependency("cuda-bindings", HINT) from problem
    except Exception as problem:  # the loader raises private exception types without libnvrtc
        raise MissingDependency("nvidia-cuda-nvrtc", HINT) from problem
    return module


def check_result(result: tuple[Any, ...], what: str) -> Any:
    """Return the value of a driver call. Raises DeviceFailure with the call's purpose and the error."""
    status, values = result[0], result[1:]
    if int(status) != 0:
        raise DeviceFailure(f"{what} failed: {getattr(status, 'name', status)}")
    return values[0] if len(values) == 1 else values
