"""Growth of compilation: the cost per node is the same for large and small models. Function calls are counted, which load does
not change. ``python -m rammer_testing.growth`` measures more shapes, sizes and devices, by seconds of CPU."""

from __future__ import annotations

import math
import time

import pytest

from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.frontend.read.reader import read_model
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.growth.measure import exponent, growth
from rammer_testing.growth.shapes import SHAPES

#: 2 is linear, somewhat more if operators are grouped by dozens; 4 is pairwise.
MOST = 2.5
CHECKED = (
    *("mixed", "transposes", "splits", "regrouped", "hosted", "scaled", "accumulated", "twice", "kept"),
    *("fan_out", "many_inputs"),
)
#: Nodes of the smallest of three models. Its parts are one region for stitching, which retains more plans of small regions (fewer
#: than ``rammer.fusion.stitch.WIDE`` operators).
LEAST = {"regrouped": 100, "accumulated": 80}


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
    """Check by the least CPU time of a few reads, since copies of sets make no calls. Growth was quadratic when every attribute
    copied its names."""
    sizes = (1500, 6000)
    models = [SHAPES["pool"](n).SerializeToString() for n in sizes]
    assert exponent(sizes, [min(map(reading, [data] * 2)) for data in models]) < 1.5


def reading(data: bytes) -> float:
    """Return the seconds of this thread's CPU spent on reading."""
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
