"""Element types and tensor types, shared by all other modules."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache, lru_cache

from rammer.ir.formats import FORMATS, numpy_type

__all__ = ["KNOWN", "SHORT", "TensorType", "is_float", "itemsize", "row_major"]

#: Element types of programs: dtype name -> short spelling used in printed text.
SHORT: dict[str, str] = {
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "bool": "b1",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
}
LONG: dict[str, str] = {short: name for name, short in SHORT.items()}
#: Element types of models: those of programs, and storage-only formats.
KNOWN: dict[str, str] = SHORT | {name: f.short for name, f in FORMATS.items()}
_NAMES: dict[str, str] = {short: name for name, short in KNOWN.items()}
_TYPE = re.compile(r"(\w+)\[((?:\d{1,18}(?:,\d{1,18})*)?)\]", re.ASCII)


@dataclass(frozen=True, slots=True)
class TensorType:
    """A dense tensor's element type and static shape (elements per axis). Types of ``FORMATS`` occur only in models."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in KNOWN:
            raise ValueError(f"unknown element type {self.dtype!r}; known: {', '.join(KNOWN)}")

    def __str__(self) -> str:
        return _format_type(self.dtype, self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes of dense storage."""
        return self.size * itemsize(self.dtype)

    @staticmethod
    def parse(text: str) -> TensorType:
        """Parse the text of ``str``: ``f32[1,3]`` -> ``TensorType('float32', (1, 3))``."""
        match = _TYPE.fullmatch(text)
        if match is None or match[1] not in _NAMES:
            raise ValueError(f"not a tensor type: {text[:80]!r}")
        return TensorType(_NAMES[match[1]], tuple(int(n) for n in match[2].split(",") if n))


@lru_cache(1 << 12)
def _format_type(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{KNOWN[dtype]}[{','.join(map(str, shape))}]"


@cache
def itemsize(dtype: str) -> int:
    """Return the bytes per element of ``dtype``."""
    return int(numpy_type(dtype).itemsize)


def is_float(dtype: str) -> bool:
    """Return True if ``dtype`` is a floating-point type."""
    return dtype.startswith("float")


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the element strides of a dense row-major tensor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
