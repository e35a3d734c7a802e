"""Cache of large constants: each is stored on disk once for all programs of a model.

A constant whose values are in a file of the model, in any axis order, is recorded as file and offset. A constant derived from
these values is recorded as its recipe. Derived constants are joined, or multiplied by factors, as weights with a folded batch
norm. Any other constant is a cache file named by its content. Files are mapped when a program is loaded.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.cache.cache_location import why_untrusted
from rammer.cache.disk_cache import Cache
from rammer.ir.constants.digest import digest_array, record_digest
from rammer.ir.constants.mapped_files import Mapped, dense_order, place_of, release_pages
from rammer.ir.constants.recipes import ArrayRecipe, JoinRecipe, Part, ScaledRecipe, as_array, recipe_of
from rammer.ir.types import is_float
from rammer.ir.untrusted_json import place_in

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: Bytes from which a constant is stored separately from programs.
LARGE: Final = 1 << 16
#: A constant in an index. In a file: the file of the model and the offset of the first byte, or the name of a cache file and 0;
#: its digest; and its axes in storage order, or the strides (bytes) of a strided part. Joined pieces: True if their axis is new,
#: and the axis; the digest of the whole; and shape and row of each piece. A scaled piece: the shape of the factors and their
#: bytes in base 64; the digest of the whole; and the row of the piece.
Row: TypeAlias = "list[Any]"
MODEL, STRIDED, CACHE, JOINED, SCALED = "model", "strided", "cache", "joined", "scaled"
#: Maximum nesting depth of derived arrays.
DEEPEST: Final = 8


@dataclass
class ConstantCache:
    """Cache of large constants in the cache folder ``root``. ``home`` is the folder of the model's files. ``opened`` maps their
    paths relative to it to files whose content was hashed."""

    root: Path
    home: Path | None
    opened: Mapping[str, Mapped]
    files: dict[Path, Mapped] = field(default_factory=dict)

    @property
    def entries(self) -> Cache:
        """The entries: the bytes of an array, by its digest."""
        return Cache("constants", root=self.root)

    def put(self, array: Array, sources: tuple[Mapped, ...]) -> Row:
        """Store an array, which may be in a file of the model. Raises OSError if that fails."""
        recipe = recipe_of(array)
        if recipe is not None:
            return self._made_of(recipe, sources)
        made = digest_array(array)
        for file in sources:
            at, order = place_of(array, file), dense_order(array)
            if at is None or self.home is None:
                continue
            name = next((n for n, f in self.opened.items() if f is file), None)
            if name is None:
                raise OSError(f"{file.path} is not a file of the model that was hashed")
            return [MODEL, name, at, made, list(order)] if order else [STRIDED, name, at, made, list(array.strides)]
        return self._put_elsewhere(array, made)

    def _put_elsewhere(self, array: Array, made: str) -> Row:
        """Store an array that is in no file of the model."""
        path = self.entries.find(made)
        if path is None or path.stat().st_size != array.nbytes:
            self.entries.write(made, lambda file: file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data))
        release_pages(array)
        return [CACHE, made, 0, made, list(range(array.ndim))]

    def _made_of(self, recipe: ArrayRecipe, sources: tuple[Mapped, ...]) -> Row:
        if isinstance(recipe, ScaledRecipe):
            factors = np.ascontiguousarray(recipe.factors, np.float64)
            text = b64encode(factors.data).decode()
            return [SCALED, list(factors.shape), text, recipe.digest(), self.put(as_array(recipe.piece), sources)]
        assert isinstance(recipe, JoinRecipe)
        pieces = [[list(p.shape), self.put(as_array(p), sources)] for p in recipe.pieces]
        return [JOINED, recipe.new, recipe.axis, recipe.digest(), pieces]

    def get(self, row: Row, dtype: str, shape: tuple[int, ...]) -> Part:
        """Return the array that a row describes, or its recipe. Raises ValueError or OSError if it is missing or differs."""
        part = self._part(row, dtype, shape, DEEPEST)
        if part.shape != shape:
            raise ValueError("the recipe of a cached constant yields another shape")
        return part

    def _part(self, row: Row, dtype: str, shape: tuple[int, ...], left: int) -> Part:
        kind = row[0] if isinstance(row, list) and len(row) == 5 else None
        if kind not in (JOINED, SCALED):
            return self._read_array(row, dtype, shape)
        if not left or not isinstance(row[3], str):
            raise ValueError("pieces of a cached constant are malformed")
        if kind == JOINED:
            return JoinRecipe(self._pieces(row, dtype, left), row[2], row[1], content=row[3])
        if not is_float(dtype):
            raise ValueError("a cached constant with factors is not of a float type")
        return ScaledRecipe(self._part(row[4], dtype, shape, left - 1), _read_factors(row[1], row[2]), content=row[3])

    def _pieces(self, row: Row, dtype: str, left: int) -> tuple[Part, ...]:
        _, new, axis, _, rows = row
        if not isinstance(new, bool) or type(axis) is not int or axis < 0 or not isinstance(rows, list) or not rows:
            raise ValueError("pieces of a cached constant are malformed")
        pieces = list[Part]()
        for pair in rows:
            shape, piece = pair if isinstance(pair, list) and len(pair) == 2 else (None, [])
            if not _is_shape(shape):
                raise ValueError("a piece of a cached constant has an invalid shape")
            pieces.append(self._part(piece, dtype, tuple(shape), left - 1))
            if pieces[-1].shape != tuple(shape):
                raise ValueError("a piece of a cached constant has an invalid shape")
        return tuple(pieces)

    def _read_array(self, row: Row, dtype: str, shape: tuple[int, ...]) -> Array:
        if not isinstance(row, list) or len(row) != 5:
            raise ValueError("cached constant record is malformed")
        kind, name, at, made, order = row
        if (
            not isinstance(name, str)
            or type(at) is not int
            or at < 0
            or not isinstance(made, str)
            or not (_are_strides if kind == STRIDED else _is_order)(order, len(shape))
        ):
            raise ValueError("cached constant record is malformed")
        if kind not in (MODEL, STRIDED, CACHE) or (kind != CACHE and (self.home is None or place_in(self.home, name) is None)):
            raise ValueError("cached constant is outside the cache and the model's folder")
        count = math.prod(shape)
        file = self._map_entry(name, count * np.dtype(dtype).itemsize) if kind == CACHE else self.opened.get(name)
        if file is None:
            raise ValueError(f"{name} is not a file of the model")
        if kind != CACHE:
            file.check()
        if kind == STRIDED:
            array = _strided_view(file, dtype, shape, at, order)
            self._check_content(array, made)
            return array
        lying = np.frombuffer(file.data, dtype, count, at).reshape([shape[d] for d in order])
        array = lying.transpose([order.index(d) for d in range(len(shape))])
        if kind == MODEL:
            self._check_content(array, made)
        elif digest_array(array) != made:
            with suppress(OSError):
                file.path.unlink()  # the next compilation writes it again
            raise ValueError(f"cached constant {file.path} is damaged")
        return array

    def _check_content(self, array: Array, made: str) -> None:
        """Record the digest of an array in a file of the model, which was hashed as a whole."""
        record_digest(array, made)

    def _map_entry(self, name: str, size: int) -> Mapped:
        """Map an entry. Raises ValueError if it is untrusted or has another size, OSError if it is missing."""
        path = self.entries.path(name)
        why = why_untrusted(path) or ("" if path.stat().st_size == size else "it is damaged")
        if why:
            raise ValueError(f"cached constant {path} is not used: {why}")
        self.entries.find(name)  # records the use
        if path not in self.files:
            self.files[path] = Mapped.of(path)
        return self.files[path]


class _NotInModel(Exception):
    """Error for an array that is in no file of the model."""


class ModelWeights(ConstantCache):
    """The weights of a compiled file that are in the model's own files, which are in its folder ``home`` or below. A recipe
    (joined or scaled weights) is stored so, too. Every array is compared with its digest when it is read."""

    def __init__(self, home: Path, opened: Mapping[str, Mapped] | None = None) -> None:
        super().__init__(home, home, dict(opened or {}))

    def put(self, array: Array, sources: tuple[Mapped, ...]) -> Row:
        """Return the row of an array, or [] if it is in no file of the model."""
        try:
            return super().put(array, sources)
        except _NotInModel:
            return []

    def _made_of(self, recipe: ArrayRecipe, sources: tuple[Mapped, ...]) -> Row:
        row = super()._made_of(recipe, sources)
        if all(piece for _, piece in row[4]) if row[0] == JOINED else row[4]:
            return row
        raise _NotInModel

    def _put_elsewhere(self, array: Array, made: str) -> Row:
        raise _NotInModel

    def _read_array(self, row: Row, dtype: str, shape: tuple[int, ...]) -> Array:
        if isinstance(row, list) and len(row) == 5 and row[0] in (MODEL, STRIDED) and isinstance(row[1], str):
            path = place_in(self.home or self.root, row[1])
            if path is not None and row[1] not in self.opened:
                self.opened = {**self.opened, row[1]: Mapped.of(path)}
            return super()._read_array(row, dtype, shape)
        raise ValueError("weights of a compiled file are outside the model's files")

    def _check_content(self, array: Array, made: str) -> None:
        if digest_array(array) != made:
            raise ValueError("the weights in the model's file are not those that were compiled")


def _read_factors(shape: Any, text: Any) -> Array:
    """Return the factors of these extents in a row. Raises ValueError if they are malformed."""
    if not _is_shape(shape) or not isinstance(text, str):
        raise ValueError("factors of a cached constant are malformed")
    return np.frombuffer(b64decode(text, validate=True), np.float64).reshape(shape)


def _is_shape(found: Any) -> bool:
    return isinstance(found, list) and all(type(n) is int and n >= 0 for n in found)


def _strided_view(file: Mapped, dtype: str, shape: tuple[int, ...], at: int, strides: list[int]) -> Array:
    """Return a strided part of a file of the model. Raises ValueError if it exceeds the file."""
    last = at + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    if last > len(file.data) or 0 in shape:
        raise ValueError("cached constant exceeds its file")
    array: Array = np.ndarray(shape, dtype, file.data, at, strides)
    return array


def _are_strides(found: object, axes: int) -> bool:
    return isinstance(found, list) and len(found) == axes and all(type(s) is int and s >= 0 for s in found)


def _is_order(found: object, axes: int) -> bool:
    return isinstance(found, list) and all(type(d) is int for d in found) and sorted(found) == list(range(axes))
