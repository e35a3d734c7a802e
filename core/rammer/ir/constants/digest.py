"""What an array holds, as a digest: values that are equal are found to be so, wherever they came from."""

from __future__ import annotations

import hashlib
from typing import Any, Final, TypeAlias
from weakref import ReferenceType, ref

import numpy as np

from rammer.ir.constants.mapped_files import check_file, release_pages

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Bytes that are hashed at a time: of a mapped array no more are in memory.
PIECE: Final = 16 << 20
#: Bytes up to which an array that may be written to is copied, so that it can be shared: it may be a caller's.
SMALL: Final = 1 << 16
#: Digests of read-only arrays that are alive, by identity.
_KNOWN: Final[dict[int, tuple[ReferenceType[Array], str]]] = {}


def digest_array(array: Array) -> str:
    """Equal for arrays of one element type and shape with the same bytes. That of a read-only array is found once."""
    array = np.asarray(array)  # NumPy's results without axes are scalars, which nothing can refer to weakly
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
        release_pages(array)  # a copy was hashed of one whose axes lie in another order
    made = found.hexdigest()
    if not array.flags.writeable:
        key = id(array)
        _KNOWN[key] = ref(array, lambda _: _KNOWN.pop(key, None)), made
    return made


def record_digest(array: Array, made: str) -> None:
    """Say the digest of a read-only array, which was found before."""
    key = id(array)
    _KNOWN[key] = ref(array, lambda _: _KNOWN.pop(key, None)), made
