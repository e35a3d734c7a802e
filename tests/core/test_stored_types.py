"""Conversions between numbers and codes of storage-only types: every code and its surroundings, against ml_dtypes."""

from __future__ import annotations

import io
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import numpy_helper

from rammer.frontend.lower.type_codecs import ROUNDINGS, decode_expr, encode_expr
from rammer.ir.compute import Axis, Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.expr import Cast, Expr, Load, Ref
from rammer.ir.formats import FORMATS, FloatFormat, Format, IntegerFormat, from_carrier, to_carrier
from rammer.ir.types import TensorType
from rammer.runtime.inputs import load_npz, save_npz

Array = np.ndarray[Any, np.dtype[Any]]
FLOATS = [f for f in FORMATS.values() if isinstance(f, FloatFormat)]
SIGNED = [f for f in FLOATS if f.sign]
INTEGERS = [f for f in FORMATS.values() if isinstance(f, IntegerFormat)]


def computed(x: Array, body: Expr, dtype: str, precise: bool = False) -> Array:
    compute = Compute("y", dtype, (Axis("i", x.size),), body)
    return evaluate_compute(compute, {"x": x}, precise)


def codes(kind: Format) -> Array:
    """Return every code of a format, with garbage in unused high bits of its carrier."""
    return np.arange(1 << (16 if kind.carrier == "uint16" else 8)).astype(kind.carrier)


def decoded(kind: Format, given: Array) -> Array:
    return computed(given, Cast(kind.wide, decode_expr(Load("x", (Ref("i"),)), kind)), kind.wide)


def encoded(kind: Format, x: Array, saturate: bool = True, rounding: str = "up") -> Array:
    code = encode_expr(Load("x", (Ref("i"),)), str(x.dtype), kind, saturate, rounding)
    return computed(x, Cast(kind.carrier, code), kind.carrier)


@pytest.mark.parametrize("kind", FORMATS.values(), ids=list(FORMATS))
def test_every_code(kind: Format) -> None:
    bits = getattr(kind, "bits", 8)
    small = bits < 8 or (isinstance(kind, FloatFormat) and kind.sign in (0x8, 0x20))
    given = codes(kind)
    # ml_dtypes sometimes reads bits above a code of less than a byte; we do not.
    sane = given % (2 * kind.sign if isinstance(kind, FloatFormat) else 1 << bits) if small else given
    want = from_carrier(sane.astype(kind.carrier), kind.name).astype(kind.wide)
    found = decoded(kind, given)
    assert found.dtype == want.dtype
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(np.signbit(found[want == 0]), np.signbit(want[want == 0]))


@cache
def around(kind: FloatFormat) -> Array:
    """Return test values of a format. They are all its numbers, the middles between neighbours, and the floats next to both.
    Further values are all float16, the limits of float32, its least numbers, infinities, NaN and random bits."""
    every = from_carrier(codes(kind), kind.name).astype(np.float64)
    every = np.unique(np.abs(every[np.isfinite(every)]))
    middles = np.array([(a + b) / 2 for a, b in pairwise(every)])
    top = every[-1] + (every[-1] - every[-2]) / 2
    with np.errstate(over="ignore"):
        exact = np.concatenate([every, middles, [top, top * 2]]).astype(np.float32)
    near = np.concatenate([exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf))])
    halves = np.arange(1 << 16).astype(np.uint16).view(np.float16).astype(np.float32)
    bits = np.random.default_rng(5).integers(0, 1 << 32, 50_000, dtype=np.uint32).view(np.float32)
    ends = np.array([0, np.inf, np.nan, 2.0**-126, 2.0**-127, 2.0**-149, np.finfo(np.float32).max], np.float32)
    found = np.concatenate([near, halves, bits, ends])
    return np.concatenate([found, -found])


def nearest(kind: FloatFormat, x: Array, saturate: bool) -> Array:
    """Return codes by the definition: the nearest number, ties to the even code, and ONNX's table past the greatest."""
    table = from_carrier(np.arange(kind.greatest + 1).astype(kind.carrier), kind.name).astype(np.float64)
    size = np.abs(x.astype(np.float64))
    finite = np.where(np.isfinite(size), size, 0)
    low = np.clip(np.searchsorted(table, finite, "right") - 1, 0, len(table) - 1)
    ulp = table[-1] - table[-2]
    above = np.append(table, table[-1] + ulp)[low + 1]
    middle = table[low] + (above - table[low]) / 2
    code = low + ((finite > middle) | ((finite == middle) & (low % 2 == 1)))
    over = (code > kind.greatest) | np.isinf(size)
    outside = kind.infinity if kind.infinity is not None else kind.nan
    limited = outside is None or (saturate and kind.carrier == "uint8")
    code = np.where(over, kind.greatest if limited else outside or 0, code)
    code = np.where(np.isnan(size), kind.nan or 0, code)
    plain = (code & (kind.sign - 1)) == 0 if kind.nan == kind.sign else np.zeros(code.shape, bool)
    return np.where(np.signbit(x) & ~plain, code | kind.sign, code).astype(kind.carrier)


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("kind", SIGNED, ids=lambda f: f.name)
def test_numbers_around_every_code(kind: FloatFormat, saturate: bool) -> None:
    x = around(kind)
    found = encoded(kind, x, saturate)
    np.testing.assert_array_equal(found, nearest(kind, x, saturate))
    with np.errstate(all="ignore"):
        limited = kind.carrier == "uint8" and saturate
        want = numpy_helper.saturate_cast(x, np.dtype(kind.name)) if limited else x.astype(kind.name)
    known = ~np.isnan(x) if kind.nan is None else np.ones(x.shape, bool)  # NaN has no code in this format
    np.testing.assert_array_equal(decoded(kind, found)[known], want.astype(np.float32)[known])


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIGNED, ids=lambda f: f.name)
def test_float64_is_rounded_once(kind: FloatFormat) -> None:
    exact = around(kind).astype(np.float64)
    x = np.concatenate(
        [exact, np.nextafter(exact, 0), np.nextafter(exact, np.inf), exact * (1 + 2.0**-40), [1e300, -1e300, 5e-324]]
    )
    np.testing.assert_array_equal(encoded(kind, x, False), nearest(kind, x, False))


@pytest.mark.parametrize("rounding, saturate", list(product(ROUNDINGS, [True, False])))
def test_exponents(rounding: str, saturate: bool) -> None:
    kind = FORMATS["float8_e8m0fnu"]
    assert isinstance(kind, FloatFormat)
    x = around(kind)
    want = numpy_helper.to_float8e8m0(x, saturate, rounding).view(np.uint8)
    np.testing.assert_array_equal(encoded(kind, x, saturate, rounding), want)


@pytest.mark.parametrize("source", ["int8", "uint8", "int32", "int64", "uint64", "float32", "float16", "float64", "bool"])
@pytest.mark.parametrize("kind", INTEGERS, ids=lambda f: f.name)
def test_integers_keep_their_low_bits(kind: IntegerFormat, source: str) -> None:
    x = np.arange(-128, 128).astype(source)
    found = from_carrier(encoded(kind, x), kind.name)
    np.testing.assert_array_equal(found.astype(np.int32), x.astype(np.int64).astype(kind.name).astype(np.int32))
    assert to_carrier(found).max(initial=0) < 1 << kind.bits


@pytest.mark.parametrize("dtype", FORMATS)
def test_types_and_files(dtype: str, tmp_path: Path) -> None:
    kind = TensorType(dtype, (2, 3))
    assert TensorType.parse(str(kind)) == kind
    x = np.array([[0.5, 1, 2], [1, 0, 4]]).astype(ml_dtypes.bfloat16).astype(dtype)
    file = io.BytesIO()
    save_npz(file, {"x": x})
    (path := tmp_path / "x.npz").write_bytes(file.getvalue())
    assert load_npz(path)["x"].dtype == f"V{x.itemsize}"
