"""Digests of arrays by content: equal values have equal digests, whatever their origin."""

from __future__ import annotations

import hashlib
from typing import Any, Final, TypeAlias
from weakref import ReferenceType, ref

import numpy as np

from rammer.ir.constants.mapped_files import check_file, release_pages

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Bytes that are hashed at a time: the maximum resident part of a mapped array.
PIECE: Final = 16 << 20
#: Maximum bytes of a writable array that is copied before it is shared, since it may belong to the caller.
SMALL: Final = 1 << 16
#: Digests of live read-only arrays, by identity.
_KNOWN: Final[dict[int, tuple[ReferenceType[Array], str]]] = {}


def digest_array(array: Array) -> str:
    """Return a digest that is equal for arrays of equal element type, shape and bytes. Cached for read-only arrays."""
    array = np.asarray(array)  # NumPy's zero-dimensional results are scalars, which do not support weak references
    known = _KNOWN.get(id(array))
    if known is not None and known[0]() is array:
        return known[1]
    check_file(array)
    found = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    if array.dtype.kind == "O":
        found.update(repr(array.tolist()).encode())
    else:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for at in range(0, flat.size, PIECE):
            piece = flat[at : at + PIECE]
            found.update(piece.data)
            release_pages(piece)
        release_pages(array)  # if the axes are permuted, a copy was hashed
    made = found.hexdigest()
    if not array.flags.writeable:
        key = id(array)
        _KNOWN[key] = ref(array, lambda _: _KNOWN.pop(key, None)), made
    return made


def record_digest(array: Array, made: str) -> None:
    """Store a precomputed digest of a read-only array."""
    key = id(array)
    _KNOWN[key] = ref(array, lambda _: _KNOWN.pop(key, None)), made
