"""Storage-only element types: bfloat16, floats of 8, 6 and 4 bits, integers of 4 and 2 bits.

A tensor of these types is stored in a carrier of unsigned integers, one element per value. NumPy's arrays of these types, and
their names, are those of ``ml_dtypes``, which documents the formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A float format, described by its bit patterns.

    ``mantissa`` counts bits, and ``sign`` is the sign bit (0 if unsigned). ``greatest`` is the pattern of the largest number;
    ``infinity`` and ``nan`` are patterns without sign (None if unsupported)."""

    name: str
    short: str
    carrier: str
    mantissa: int
    bias: int
    sign: int
    greatest: int
    infinity: int | None = None
    nan: int | None = None

    @property
    def wide(self) -> str:
        """The type of its arithmetic, which holds all its values."""
        return "float32"


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """An integer format of a few ``bits``; higher bits of a carrier are ignored."""

    name: str
    short: str
    bits: int
    signed: bool
    carrier: str = "uint8"

    @property
    def wide(self) -> str:
        """The type of its arithmetic: the smallest that holds all its values."""
        return "int8" if self.signed else "uint8"

    @property
    def ends(self) -> tuple[int, int]:
        """The least and the greatest value."""
        return (-(1 << self.bits - 1), (1 << self.bits - 1) - 1) if self.signed else (0, (1 << self.bits) - 1)


Format: TypeAlias = FloatFormat | IntegerFormat

#: Storage-only formats by the names of ml_dtypes.
FORMATS: Final[Mapping[str, Format]] = {
    f.name: f
    for f in (
        FloatFormat("bfloat16", "bf16", "uint16", 7, 127, 0x8000, 0x7F7F, 0x7F80, 0x7FC0),
        FloatFormat("float8_e4m3fn", "f8e4m3fn", "uint8", 3, 7, 0x80, 0x7E, nan=0x7F),
        FloatFormat("float8_e4m3fnuz", "f8e4m3fnuz", "uint8", 3, 8, 0x80, 0x7F, nan=0x80),
        FloatFormat("float8_e5m2", "f8e5m2", "uint8", 2, 15, 0x80, 0x7B, 0x7C, 0x7E),
        FloatFormat("float8_e5m2fnuz", "f8e5m2fnuz", "uint8", 2, 16, 0x80, 0x7F, nan=0x80),
        FloatFormat("float8_e8m0fnu", "f8e8m0fnu", "uint8", 0, 127, 0, 0xFE, nan=0xFF),
        FloatFormat("float6_e2m3fn", "f6e2m3fn", "uint8", 3, 1, 0x20, 0x1F),
        FloatFormat("float6_e3m2fn", "f6e3m2fn", "uint8", 2, 3, 0x20, 0x1F),
        FloatFormat("float4_e2m1fn", "f4e2m1fn", "uint8", 1, 1, 0x8, 0x7),
        IntegerFormat("int4", "i4", 4, True),
        IntegerFormat("uint4", "u4", 4, False),
        IntegerFormat("int2", "i2", 2, True),
        IntegerFormat("uint2", "u2", 2, False),
    )
}


def carrier_dtype(dtype: str) -> str:
    """Return the type in which programs store ``dtype``: its carrier, or ``dtype`` itself."""
    return FORMATS[dtype].carrier if dtype in FORMATS else dtype


@lru_cache(256)
def name_of(dtype: np.dtype[Any]) -> str:
    """Return NumPy's name of a type. Cached: NumPy builds the name at each call, at a cost of microseconds per run."""
    return str(dtype)


def to_carrier(array: Array) -> Array:
    """Return an array as its carrier, in the same memory."""
    kind = FORMATS.get(name_of(array.dtype))
    return array if kind is None else array.view(kind.carrier)


def from_carrier(array: Array, dtype: str) -> Array:
    """Return a carrier as an array of ``dtype``, in the same memory; other arrays are returned unchanged."""
    return array if dtype not in FORMATS else array.view(numpy_type(dtype))


def to_readable(array: Array) -> Array:
    """Return an array that NumPy can compare and print, converted only if its type is one of ``FORMATS``."""
    kind = FORMATS.get(name_of(array.dtype))
    return array if kind is None else array.astype(kind.wide)


def from_file(array: Array, dtype: str) -> Array:
    """Convert an array of raw bytes, as NumPy's files store ``dtype``, back to ``dtype``; others are returned unchanged."""
    plain = dtype in FORMATS and array.dtype.kind == "V" and array.dtype.names is None
    fits = plain and name_of(array.dtype) not in FORMATS and array.dtype.itemsize == numpy_type(dtype).itemsize
    return from_carrier(array, dtype) if fits else array


def numpy_type(dtype: str) -> np.dtype[Any]:
    """Return the NumPy type of a name."""
    if dtype in FORMATS:
        import ml_dtypes  # noqa: F401  # which tells NumPy of it; most models need it not, and starting takes long enough

    return np.dtype(dtype)
