"""Vector functions of the C99 dialect: all magnitudes of float32, all special values and all vector widths."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rammer.codegen.dialects import C99
from rammer.codegen.vector_math import WHOLE
from rammer.codegen.vector_text import WIDTHS
from rammer_testing.nonempty import some

COMPILERS = [c for c in ("gcc", "clang") if shutil.which(c)]
pytestmark = pytest.mark.skipif(not COMPILERS, reason="there is no C compiler")

Array = np.ndarray[Any, np.dtype[Any]]
ERF = np.frompyfunc(math.erf, 1, 1)
#: Reference functions, in float64, or in float32 where the result is exact.
TRUTH: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "round": np.rint,
    "floor": np.floor,
    "ceil": np.ceil,
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "erf": lambda x: ERF(x).astype(np.float64),
}
#: Largest errors in units in the last place; 0 means bitwise equal, including signs of zeros.
ULPS = {"abs": 0.0, "round": 0.0, "floor": 0.0, "ceil": 0.0, "exp": 2.0, "log": 2.0, "tanh": 2.0, "erf": 2.0}
#: Every 2,003rd number by its bits, and numbers around the points where a formula changes.
STRIDE = 2003
EDGES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.5,
    0.625,
    0.93,
    3.95,
    9.0,
    10.0,
    88.0,
    88.7228394,
    89.0,
    87.3365,
    103.97,
    104.0,
    8388607.5,
    8388608.0,
)


@pytest.fixture(scope="module", params=COMPILERS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return ``rm_all_NAME_WIDTH(p, q, n)`` for each function and width."""
    folder = tmp_path_factory.mktemp("vector_math")
    loops = "".join(
        f"void rm_all_{f}_{w}(float *p, const float *q, long n) {{ for (long i = 0; i + {w} <= n; i += {w}) "
        f"rm_vstore{w}(p + i, rm_v{f}{w}(rm_vload{w}(q + i))); }}\n"
        for f in WHOLE
        for w in WIDTHS
    )
    loops += "void rm_less(float *p, const float *q) { rm_vstore8(p, rm_vexp8(rm_vload8(q)) - rm_vload8(q)); }\n"
    (folder / "all.c").write_text(C99.preamble + loops)
    command = [request.param, "-O2", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-w", "all.c", "-o", "all.so", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "all.so"))


def numbers() -> Array:
    """Return float32 of all magnitudes and both signs, with NaN, infinities and subnormal numbers. Their count is a multiple of
    every width."""
    bits = np.arange(0, 1 << 32, STRIDE, dtype=np.uint64).astype(np.uint32)
    edges = np.array(EDGES, np.float32).view(np.uint32)
    near = np.concatenate([edges + np.uint32(d) for d in range(3)] + [edges - np.uint32(d) for d in range(1, 3)])
    special = np.array([0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001], np.uint32)
    chosen = np.concatenate([bits, near, near | np.uint32(1 << 31), special, special | np.uint32(1 << 31)])
    return np.resize(chosen, -(-chosen.size // 16) * 16).view(np.float32)


def computed(library: ctypes.CDLL, function: str, width: int, x: Array) -> Array:
    result = np.empty_like(x)
    getattr(library, f"rm_all_{function}_{width}")(
        ctypes.c_void_p(result.ctypes.data), ctypes.c_void_p(x.ctypes.data), ctypes.c_long(x.size)
    )
    return result


@pytest.mark.slow
@pytest.mark.parametrize("function", WHOLE)
def test_every_result_is_near_and_every_special_one_is_right(function: str, library: ctypes.CDLL) -> None:
    x = numbers()
    have = computed(library, function, 8, x)
    with np.errstate(all="ignore"):
        exact = TRUTH[function](x if not ULPS[function] else x.astype(np.float64))
        want = exact.astype(np.float32)
        assert np.array_equal(np.isnan(have), np.isnan(want))
        there = ~np.isnan(want)
        assert np.array_equal(np.signbit(have[there]), np.signbit(want[there]))
        if not ULPS[function]:
            assert np.array_equal(have[there], want[there])
            return
        # Beyond the largest number, rounding may reach infinity one unit early or late.
        ends = np.isfinite(want) & np.isfinite(have)
        assert np.all(np.abs(x[there & ~ends & (have != want)] - 88.72284) < 1e-4)
        unit = np.spacing(np.maximum(np.abs(want[ends]), np.float32(2.0**-126))).astype(np.float64)
        worst = np.abs(have[ends].astype(np.float64) - exact[ends]) / unit
    assert worst.max() <= ULPS[function], (x[ends][worst.argmax()], worst.max())


def test_an_infinity_is_one_where_a_subtraction_follows(library: ctypes.CDLL) -> None:
    """Check infinities because a compiler may fuse an overflowing product with a subtraction, so that nothing overflows."""
    x, have = np.array([np.inf, 89, 100, 1e30, -np.inf, np.nan, 0, 1], np.float32), np.zeros(8, np.float32)
    library.rm_less(ctypes.c_void_p(have.ctypes.data), ctypes.c_void_p(x.ctypes.data))
    assert np.isnan(have[[0, 5]]).all() and np.isposinf(have[1:5]).all() and have[6] == 1 and abs(have[7] - np.e + 1) < 1e-6


@pytest.mark.parametrize("function", WHOLE)
def test_all_widths_give_the_same_bits(function: str, library: ctypes.CDLL) -> None:
    x = numbers()[::7][: 16 * 4000].copy()
    first, *others = (computed(library, function, w, x).view(np.uint32) for w in WIDTHS)
    nan = np.isnan(first.view(np.float32))
    for other in some(others):
        assert np.array_equal(first[~nan], other[~nan]) and np.isnan(other.view(np.float32))[nan].all()
