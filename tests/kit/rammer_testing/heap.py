"""Exclusion of long-lived test objects from garbage collection: a pytest plugin (``-p rammer_testing.heap``).

Test collection creates thousands of tests and loads every module: about a million objects that live until the run ends. Scanning
them repeatedly cost a quarter of the time of the tests' own processes."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

#: Net allocations between collections of young objects; CPython's default of 700 suits small programs.
YOUNG = 10_000


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection during test collection, and exclude all existing objects from later scans (``gc.freeze``)."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
        gc.enable()
