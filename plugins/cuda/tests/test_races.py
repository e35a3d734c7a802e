"""Kernels under ThreadSanitizer on host threads: a barrier must order all accesses of two threads of a block to one location.

ThreadSanitizer detects the races that NVIDIA's racecheck detects, without a GPU. It models the guarantees of barriers rather than
the timing of one run: mbarriers and named barriers order arrivals before waits, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from products import CASES as PRODUCTS
from products import PROLOGUES

from rammer.device.manifest import Binding
from rammer.errors import DeviceUnavailable
from rammer.ir.operator import ROperator
from rammer.ir.program import dense
from rammer.ir.types import TensorType

from .cuda_choices import WARPGROUPS, WARPS, choices, others
from .cuda_on_host import planted
from .emulator.launch import COMPILER, HostArgument, HostKernel, find_race
from .host_wgmma import race_of_warpgroups
from .test_attention import CASES as ATTENTIONS
from .test_attention import SMALL, blocks
from .test_families import CASES as FAMILIES
from .test_families import ROWS, VECTORS
from .test_prologue import backend_of, ffma_on_host
from .test_single import ALL, TF32, alone, backend, given, kinds
from .warps import race_of_warps
from rammer_cuda.attention.cost import ATTENTION
from rammer_cuda.rows.gemv import matvec_of, strips_of
from rammer_cuda.source import task_kernel

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(autouse=True, scope="module")
def sanitizer() -> None:
    """Skip the test if ThreadSanitizer is not installed or does not start (Linux kernels with too much address randomisation)."""
    text = 'extern "C" __global__ void one(float *y, const int *order, int first) { if (threadIdx.x == 0) *y = 1.0f; }'
    binding = Binding({"y": TensorType("float32", (1,))}, {"y": dense("y", "b", (1,))}, frozenset())
    try:
        find_race(HostKernel(text, "one", [HostArgument("y", True)], 1, 32, binding))
    except (DeviceUnavailable, AssertionError) as problem:
        pytest.skip(f"no ThreadSanitizer: {str(problem)[:200]}")


def wide(precision: str, case: str) -> tuple[list[ROperator], Binding]:
    """Return warpgroup kernels: one of every kind, not split over a cluster."""
    operator, binding = TF32[case] if precision == "float32" else ALL[precision, case]
    return kinds([alone(c) for c in choices(backend(), operator, binding, WARPGROUPS, 60)]), binding


# Late copies and late products alternate: `make test-all` also runs the opposite assignment.
@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("late_copies", [(False, True), pytest.param((True, False), marks=pytest.mark.large)])
@pytest.mark.parametrize(
    "precision, case",
    [
        ("float32", "halos"),
        ("float32", "strided"),
        ("float32", "padded"),
        ("tf32", "three by three"),
        ("tf32", "halos"),
        ("float16", "linear"),
    ],
)
def test_warpgroup_products(precision: str, case: str, late_copies: tuple[bool, bool], rng: np.random.Generator) -> None:
    found, binding = wide(precision, case)
    assert found
    for tiled, late in zip((found[0], found[:2][-1]), late_copies, strict=True):
        assert race_of_warpgroups(task_kernel(tiled, binding), binding, given(rng, tiled, binding), late) == "", tiled.head()


def without_last_barrier(text: str) -> str:
    """Return the text in which other threads read the sums immediately."""
    before, barrier, after = text.rpartition("__syncthreads();")
    assert barrier
    return before + after


def without_wait(name: str) -> Callable[[str], str]:
    """Return an edit that removes the waits for the mbarriers ``name``."""
    return lambda text: text.replace(f"rm_barrier_wait({name} +", f"if (0) rm_barrier_wait({name} +")


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "edit", [without_last_barrier, without_wait("full"), without_wait("empty")], ids=["sums", "full", "empty"]
)
def test_a_missing_barrier_is_found(edit: Callable[[str], str], rng: np.random.Generator) -> None:
    (tiled, *_), binding = wide("float32", "halos")
    kernel = task_kernel(tiled, binding)
    worse = planted(kernel, edit)
    assert "data race" in race_of_warpgroups(worse, binding, given(rng, tiled, binding), False)


def overlap(tiled: ROperator, binding: Binding) -> bool:
    """Return True if strips at a tile's end overlap their neighbours: two threads then write the same values."""
    return any(t % s for t, s in zip(tiled.tile, strips_of(matvec_of(tiled, binding)).sizes, strict=True))


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", sorted({**VECTORS, **ROWS}))
def test_families_that_reduce_across_threads(case: str, rng: np.random.Generator) -> None:
    """Check all families except windows and maps, and except choices of ``gemv`` with overlapping strips."""
    operator, binding = FAMILIES[case]
    found = [o for o in others(backend(), operator, binding, 200) if o.family != "gemv" or not overlap(o, binding)]
    found = [o for o in found if task_kernel(o, binding).blocks == 1]  # clusters need a GPU
    assert found
    tiled = found[int(rng.integers(len(found)))]
    kernel = task_kernel(tiled, binding)
    values = {n: np.ones(binding.types[n].shape, np.float32) for n in tiled.inputs}
    assert find_race(HostKernel.of(kernel, binding, values)) == "", tiled.head()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", SMALL)
def test_attention(case: str, rng: np.random.Generator) -> None:
    binding, options = ATTENTIONS[case][1], blocks(ATTENTIONS[case])
    option = options[int(rng.integers(len(options)))]
    assert race_of_warps(ATTENTION.kernel(option, binding), binding) == "", option.head()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", ["row", "strided", "three by three"])
def test_products_of_threads(case: str, rng: np.random.Generator) -> None:
    """Check ``gemm`` without and with prologue maps. Before sm_90 no sum is split over a cluster."""
    for operator, binding in (PRODUCTS[case], PROLOGUES[case]):
        found = [c.operator for c in choices(backend_of("sm_80"), operator, binding, WARPS)]
        found = [o for o in found if o.family == "gemm"]
        tiled = found[int(rng.integers(len(found)))]
        kernel = task_kernel(tiled, binding)
        ones = {n: np.ones(binding.types[n].shape, np.float32) for n in tiled.inputs}
        assert find_race(HostKernel.of(kernel, binding, ones, ffma_on_host(kernel))) == "", tiled.head()
