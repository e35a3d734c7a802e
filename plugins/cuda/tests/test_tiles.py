"""Tiles of parts of several rows: the conditions for offering them, and correctness of kernels with them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from families import operator as from_text

pytest.importorskip("cuda.bindings")

from rammer.codegen.products.depth import taps_of
from rammer.codegen.products.tiles import FULLER, LEAST_WIDE, filled_fraction, patch_tiles, task_count, tile_parts
from rammer.ir.compute import Axis
from rammer_testing.nonempty import some

from .cuda_choices import WARPGROUPS, choices
from .emulator.launch import COMPILER
from .host_wgmma import run_warpgroups
from .test_single import TOLERANCE, alone, backend, given, reference
from rammer_cuda.contraction.block import warpgroup_shape
from rammer_cuda.contraction.cost import WGMMA_TF32X3_COST
from rammer_cuda.source import task_kernel

#: Sums of a float32 convolution of 5 x 66 pixels: a row is two groups of 64, pieces of 5 x 12 are one.
TEXT = "y: f32[m:16, h:5, w:66] = sum[c:64, kh:3, kw:2] pad(x[c, h + kh + -1, w + kw + -1], 0.0) * k[m, c, kh, kw]"
CASE = from_text([TEXT], {"x": (64, 5, 66), "k": (16, 64, 3, 2)}, "k")


def test_patches_are_offered_where_rows_leave_groups_empty(rng: np.random.Generator) -> None:
    """Check that each is much fuller than all tiles that cut one axis, and than another by groups and tasks."""
    offered = list[tuple[list[int], float, list[tuple[int, ...]]]]()
    for _ in range(300):
        extents = [*([int(rng.integers(1, 3))] if rng.integers(2) else []), *(int(n) for n in rng.integers(1, 200, 2))]
        others = tile_parts(extents, 8, 256, frozenset())
        best = max(filled_fraction(extents, t, 64) for t in others)
        offered.append((extents, best, patch_tiles(extents, 64, 256, others)))
    for extents, best, found in some([o for o in offered if o[2]]):
        assert len({(-(-math.prod(t) // 64), task_count(tuple(extents), t)) for t in found}) == len(found)
        assert all(FULLER * best <= filled_fraction(extents, t, 64) <= 1 and math.prod(t) <= 256 for t in found)
        assert all(LEAST_WIDE <= t[-1] < extents[-1] and 2 <= t[-2] <= extents[-2] for t in found)
    assert not patch_tiles([56, 56], 64, 256, tile_parts([56, 56], 8, 256, frozenset()))
    assert not patch_tiles([3136], 64, 256, tile_parts([3136], 8, 256, frozenset()))
    assert patch_tiles([75, 86], 64, 256, tile_parts([75, 86], 8, 256, frozenset()))


@pytest.mark.parametrize("channels, halos", [(8, 1), (32, 1), (33, 2), (96, 2)])
def test_a_second_halo_is_for_channels_that_are_copied_meanwhile(channels: int, halos: int) -> None:
    """Check convolutions with taps. The tiles above have one halo, which is half of the shared memory."""
    depth = taps_of((Axis("c", channels), Axis("kh", 5)), 32)
    assert depth.halos == halos
    block = warpgroup_shape(16, 60, {"bk": 32, "stages": 3, "halo": 1}, down=False)
    one, two = (WGMMA_TF32X3_COST.shared(block, 300, n) for n in (1, 2))
    assert two - one == 4 * 32 * (300 + 16)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_kernels_of_patches_on_host_threads(precision: str, rng: np.random.Generator) -> None:
    operator, binding = CASE[0], replace(CASE[1], precision=precision)
    offered = choices(backend(), operator, binding, WARPGROUPS, 60)
    found = [c for c in offered if c.operator.tile[1] > 1 and c.operator.tile[2] < 66]
    drawn = [next(c for c in found if dict(c.operator.config)["halo"]), found[int(rng.integers(len(found)))]]
    for tiled in some([alone(c).operator for c in drawn]):
        values = given(rng, tiled, binding)
        late = [bool(n) for n in rng.integers(2, size=2)]
        have = run_warpgroups(task_kernel(tiled, binding), tiled, binding, values, *late)["y"]
        want = reference(tiled, values, precision)
        error = np.linalg.norm(have.astype(np.float64) - want) / np.linalg.norm(want)
        assert error <= TOLERANCE[precision], (error, tiled.head())
