"""Compiling takes as many operations for a node of a large model as of a small one. ``python -m rammer_testing.growth`` looks at
more shapes, sizes and devices, by seconds of CPU; here calls of functions are counted, which no load of the machine changes."""

from __future__ import annotations

import math
import time

import pytest

from rammer.compiler.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.frontend.read.reader import read_model
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.growth.measure import exponent, growth
from rammer_testing.growth.shapes import SHAPES

#: Linear is 2, and somewhat more where operators are grouped by dozens; pairs are 4.
MOST = 2.5
CHECKED = (
    *("mixed", "transposes", "splits", "regrouped", "hosted", "scaled", "accumulated", "twice", "kept"),
    *("fan_out", "many_inputs"),
)
#: Nodes of the smallest of three models. Its parts are one region for the stitching, which keeps more plans of small ones (fewer
#: than ``rammer.fusion.stitch.WIDE`` operators).
LEAST = {"regrouped": 100}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", CHECKED)
def test_operations_grow_with_the_model(registry: Registry, shape: str) -> None:
    backend = registry.open("toy")

    def compile_of(size: int) -> None:
        compiler = Compiler(backend, CompileOptions(), KernelStore(None), device="toy")
        compiler.compile_model(read_model(SHAPES[shape](size).SerializeToString()), {})

    assert growth(compile_of, LEAST.get(shape, 40)) <= MOST


@pytest.mark.slow
def test_reading_copies_no_names_for_each_node() -> None:
    """Sets are copied without a call: the least CPU of a few reads tells. It was a power of 2 where every attribute copied."""
    sizes = (1500, 6000)
    models = [SHAPES["pool"](n).SerializeToString() for n in sizes]
    assert exponent(sizes, [min(map(reading, [data] * 2)) for data in models]) < 1.5


def reading(data: bytes) -> float:
    """Seconds of this thread's CPU that reading takes."""
    start = time.thread_time()
    read_model(data)
    return time.thread_time() - start


def test_growth_tells_pairs_from_nodes() -> None:
    def pairs(n: int) -> None:
        for i in range(n):
            [math.sqrt(k) for k in range(i)]

    def nodes(n: int) -> None:
        [math.sqrt(k) for k in range(50 * n + 1000)]

    assert growth(nodes, 20) == pytest.approx(2, abs=0.01)
    assert growth(pairs, 20) > 3.5
