"""Errors with the names of ONNX Runtime's. Each is also an error of ``rammer.errors``, with a location and a hint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rammer.errors import BadInput, DeviceFailure, RammerError


class InvalidArgument(BadInput):
    """Error for a feed of the wrong type or shape, and for an unknown input or output name."""


class InvalidProtobuf(BadInput):
    """Error for a file that is not an ONNX model."""


class NoSuchFile(BadInput):
    """Error for a path without a file."""


class Fail(DeviceFailure):
    """Error for a run that was terminated or failed on the device."""


@contextmanager
def as_errors_of_run() -> Iterator[None]:
    """Raise errors of a run as the classes that ONNX Runtime raises."""
    try:
        yield
    except BadInput as problem:
        raise InvalidArgument(problem.what, problem.where, problem.hint) from problem
    except RammerError as problem:
        raise Fail(problem.what, problem.where, problem.hint) from problem


@contextmanager
def as_runtime_error() -> Iterator[None]:
    """Raise errors of a bound run as RuntimeError, like ONNX Runtime."""
    try:
        yield
    except RammerError as problem:
        raise RuntimeError(f"Error in execution: {problem}") from problem
