"""Arrays of other libraries, by the protocols they share: NumPy's, DLPack's and ``__cuda_array_interface__``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rammer.errors import BadInput
from rammer.ir.types import TensorType

__all__ = ["HostRoom", "check_names", "host_view", "on_host"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Device types of DLPack (dlpack.h) with host-readable memory: kDLCPU, and page-locked memory of a GPU driver.
HOST_TYPES = frozenset({1, 3, 11})
#: Attributes by which an array of a device offers its memory.
_INTERFACES = ("__cuda_array_interface__", "__dlpack_device__")


def by_name(what: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays by name: arrays of any library as they are (they have ``dtype`` and ``shape``), all else as NumPy's. ``what``
    is input or output. Raises BadInput unless ``given`` is a mapping of arrays."""
    given = check_mapping(what, given)
    return {n: v if hasattr(v, "dtype") and hasattr(v, "shape") else as_numpy(f"{what} {n!r}", v) for n, v in given.items()}


def check_mapping(what: str, given: Any) -> Mapping[str, Any]:
    """Return ``given``. Raises BadInput if it is not a mapping."""
    if not isinstance(given, Mapping):
        raise BadInput(f"{what}s are a {type(given).__name__}, not arrays by name", hint='give them as {"name": array}')
    return given


def as_numpy(what: str, value: Any) -> Array:
    """Return ``value`` (an array that the host reads, nested lists or a number) as a NumPy array. Raises BadInput naming ``what``
    for other values, for example lists of different lengths or a tensor on a GPU."""
    try:
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            return np.from_dlpack(value)
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError, BufferError) as problem:
        raise BadInput(f"{what} cannot be read: {problem}") from problem


def dtype_of(array: Any) -> str:
    """Return the element type by NumPy's name, for NumPy, CuPy, torch, JAX and libraries with similar type names."""
    return str(array.dtype).rpartition(".")[2]


def shape_of(array: Any) -> tuple[int, ...]:
    """Return the number of elements per axis."""
    return tuple(int(n) for n in array.shape)


def on_host(array: Any) -> bool:
    """Return True if the array is in memory that the host reads."""
    if isinstance(array, np.ndarray | np.generic):
        return True
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[0]) in HOST_TYPES
    return hasattr(array, "__array__") and not any(hasattr(array, name) for name in _INTERFACES)


def host_view(what: str, array: Any) -> Array:
    """Return the array as NumPy's, sharing its memory. Raises BadInput naming ``what`` unless that is host memory."""
    if not on_host(array):
        raise BadInput(f"{what} is in the memory of another device", hint="copy it to the host first")
    try:
        if hasattr(array, "__array__") or not hasattr(array, "__dlpack__"):
            return np.asarray(array)
        return np.from_dlpack(array)
    except (TypeError, RuntimeError, BufferError) as problem:  # for example a torch tensor that requires its gradient
        raise BadInput(f"{what} cannot be read: {problem}") from problem


def check_type(what: str, array: Any, want: TensorType) -> None:
    """Raise BadInput naming ``what`` unless the array has exactly this element type and shape."""
    have = dtype_of(array), shape_of(array)
    if have != (want.dtype, want.shape):
        raise BadInput(f"{what} is {have[0]}{list(have[1])}, not {want.dtype}{list(want.shape)}")


def check_distinct(what: str, array: Any) -> None:
    """Raise BadInput naming ``what``, which is written to, if two of its elements share memory."""
    array = host_view(what, array) if on_host(array) else array
    shape, size = shape_of(array), np.dtype(dtype_of(array)).itemsize
    strides, reach = _strides_of(array, size), size
    if strides is None or 0 in shape:
        return
    for extent, step in sorted(((n, abs(s)) for n, s in zip(shape, strides, strict=True) if n > 1), key=lambda a: a[1]):
        if step < reach:
            break
        reach += (extent - 1) * step
    else:
        return
    # The axes interleave: all offsets must be compared.
    places = np.zeros(1, np.int64)
    for extent, stride in zip(shape, strides, strict=True):
        places = np.add.outer(places, np.arange(extent, dtype=np.int64) * stride).ravel()
    places.sort()
    if (np.diff(places) < size).any():
        raise BadInput(f"elements of {what} share memory with each other", hint="bind a separate array without overlaps")


def _strides_of(array: Any, size: int) -> tuple[int, ...] | None:
    """Return the bytes between elements along each axis, or None if the array is dense or has no strides."""
    if isinstance(strides := getattr(array, "strides", None), tuple):
        return strides
    if callable(stride := getattr(array, "stride", None)):
        return tuple(int(n) * size for n in stride())
    found = getattr(array, "__cuda_array_interface__", {}).get("strides")
    return tuple(found) if found is not None else None


def check_names(what: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise BadInput for a name in ``given`` that is not a ``what`` (input, output)."""
    unknown = [n for n in given if n not in known]
    if unknown:
        raise BadInput(f"the model has no {what} {unknown[0]!r}", hint=f"its {what}s are: {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class HostRoom:
    """The requirements on a dense host array that a device's programs access in place. It starts at a multiple of ``aligned``
    bytes. The ``beyond`` bytes after it are readable, with arbitrary content."""

    aligned: int = 64
    beyond: int = 0

    def has(self, array: Any) -> bool:
        """Return True if ``array`` meets the requirements, as far as its base array shows."""
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or not array.nbytes:
            return False
        whole = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        end = np.lib.array_utils.byte_bounds(whole)[1] - array.nbytes - array.ctypes.data
        return array.ctypes.data % self.aligned == 0 and end >= self.beyond

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return a new zero-filled array that meets the requirements."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        whole = np.zeros(size + self.aligned + self.beyond, np.uint8)
        start = -whole.ctypes.data % self.aligned
        return whole[start : start + size].view(dtype).reshape(shape)

    def with_that_of(self, other: HostRoom) -> HostRoom:
        """Return the requirements that satisfy both."""
        return HostRoom(int(np.lcm(self.aligned, other.aligned)), max(self.beyond, other.beyond))
