"""ONNX's tests of single operators without the slow part of their import.

Four fifths of the import time compute results of a few poolings, window by window in Python. These are deferred until a test's
data is first accessed, which most processes that list the tests never do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from inspect import signature
from typing import Any, overload
from unittest.mock import patch

import numpy as np
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.reference.ops import op_pool_common

__all__ = ["node_tests"]

_Set = tuple[Sequence[Any], Sequence[Any]]


@cache
def node_tests() -> tuple[TestCase, ...]:
    """Return the tests, created once per process."""
    later = _Later()
    # Reading the tests' sources (for documentation) takes a fifth of the time.
    with (
        warnings.catch_warnings(),
        patch("onnx.backend.test.case.base.process_snippet", return_value=("", "")),
        patch.object(op_pool_common, "pool", later),
    ):
        warnings.simplefilter("ignore")  # onnx creates infinities and similar values on purpose
        tests = tuple(load_model_tests(kind="node"))
    for test in tests:
        waiting = [work for _, outputs in test.data_sets or () for o in outputs for a, work in later.arrays if o is a]
        if waiting:
            test.data_sets = _Sets(test.data_sets or (), waiting)
    return tests


class _Later:
    """A substitute for onnx's ``pool`` that defers large results. They are NaN, which matches no value, until computed."""

    #: Elements of the largest result that is computed immediately.
    LARGEST = 1000

    def __init__(self) -> None:
        self.arrays = list[tuple[np.ndarray[Any, Any], Callable[[], None]]]()

    def __call__(self, *given: Any, **named: Any) -> Any:
        made = partial(_REAL, *given, **named)
        told = signature(_REAL).bind(*given, **named).arguments
        shape = (*told["x_shape"][:2], *told["out_shape"])
        if np.prod(shape) <= self.LARGEST:
            return made()
        result = np.full(shape, np.nan, told["padded"].dtype)
        self.arrays.append((result, lambda: np.copyto(result, made())))
        return result


_REAL = op_pool_common.pool


class _Sets(Sequence[_Set]):
    """A test's data sets; deferred results are computed on first access."""

    def __init__(self, sets: Sequence[_Set], missing: list[Callable[[], None]]) -> None:
        self._sets, self._missing = sets, missing

    def __len__(self) -> int:
        return len(self._sets)

    @overload
    def __getitem__(self, index: int) -> _Set: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[_Set]: ...

    def __getitem__(self, index: int | slice) -> _Set | Sequence[_Set]:
        while self._missing:
            self._missing.pop()()
        return self._sets[index]
