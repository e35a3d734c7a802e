"""The garbage collector passes by what lives for a whole run of tests: a pytest plugin (``-p rammer_testing.heap``).

Collecting makes thousands of tests and loads every module: about a million objects, none of which goes before the run ends.
Looking through them again and again took a quarter of the time of the tests' own processes.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

#: Objects made, less those that are gone, from one search among young ones to the next: CPython's own 700 suits small programs.
YOUNG = 10_000


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No search for garbage while tests are collected; what is there then is never searched again (``gc.freeze``)."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
        gc.enable()
