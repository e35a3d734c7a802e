"""ONNX's tests of single operators, which its package makes when it is imported, without the slow part of that.

Four fifths of the time go into results of a few poolings, which the package computes window by window in Python. They are
computed when a test's data is first looked at: most processes that list the tests never do.
"""

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
    """The tests, once in a process."""
    later = _Later()
    # The sources of the tests, which documentation is made of, take a fifth of the time to read.
    with (
        warnings.catch_warnings(),
        patch("onnx.backend.test.case.base.process_snippet", return_value=("", "")),
        patch.object(op_pool_common, "pool", later),
    ):
        warnings.simplefilter("ignore")  # onnx makes infinities and the like on purpose
        tests = tuple(load_model_tests(kind="node"))
    for test in tests:
        waiting = [work for _, outputs in test.data_sets or () for o in outputs for a, work in later.arrays if o is a]
        if waiting:
            test.data_sets = _Sets(test.data_sets or (), waiting)
    return tests


class _Later:
    """Stands for onnx's ``pool``: large results are NaN, which agrees with nothing, until they are computed."""

    #: Elements of the largest result that is computed at once.
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
    """A test's data; what is missing is computed when it is first looked at."""

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
