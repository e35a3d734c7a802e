"""Large constants of kept programs: once on disk, whichever programs of a model read them.

What a model's own files hold, whatever the order of its axes, stays there, and a program names the file and the place; of what
was put together of such, it names the pieces. Anything else is a file of the cache, named after what it holds. Files are mapped
when a program is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.compiled.files import write_whole
from rammer.ir.content import digest, remembered
from rammer.ir.data import place_in
from rammer.ir.joined import JoinRecipe, recipe_of
from rammer.ir.mapped import Mapped, dense_order, place_of, released

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: Bytes from which a constant is kept apart from programs.
LARGE: Final = 1 << 16
#: A constant in an index: the file of the model and the first byte, or the name of a file of the cache and 0; its digest; and its
#: axes in the order in which its values lie in the file. Of pieces side by side: whether their axis is a new one, and which; the
#: digest of the whole; and shape and row of each.
Row: TypeAlias = "list[Any]"
MODEL, CACHE, JOINED = "model", "cache", "joined"
#: How often pieces are put together of pieces, at most.
DEEPEST: Final = 8


@dataclass
class KeptConstants:
    """``folder`` is the cache's, ``home`` that of the model's files, which were as ``seen`` (bytes, and nanoseconds of the last
    change, by name) when their content was told from others'."""

    folder: Path
    home: Path | None
    seen: Mapping[str, tuple[int, int]]
    files: dict[Path, Mapped] = field(default_factory=dict)

    def put(self, array: Array, sources: tuple[Mapped, ...]) -> Row:
        """Keep an array, which may be in a file of the model. OSError where that fails."""
        recipe = recipe_of(array)
        if recipe is not None:
            return self._put_together(recipe, sources)
        made = digest(array)
        for file in sources:
            at, order = place_of(array, file), dense_order(array)
            if at is None or order is None or self.home is None:
                continue
            name = file.path.relative_to(self.home).as_posix()
            if self.seen.get(name) != file.state:
                raise OSError("the model file was written to meanwhile")
            return [MODEL, name, at, made, list(order)]
        path = self.folder / made
        if not path.is_file() or path.stat().st_size != array.nbytes:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, lambda file: file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data))
        released(array)
        return [CACHE, made, 0, made, list(range(array.ndim))]

    def _put_together(self, recipe: JoinRecipe, sources: tuple[Mapped, ...]) -> Row:
        pieces = [p.array() if isinstance(p, JoinRecipe) else p for p in recipe.pieces]
        return [JOINED, recipe.new, recipe.axis, recipe.digest(), [[list(p.shape), self.put(p, sources)] for p in pieces]]

    def get(self, row: Row, dtype: str, shape: tuple[int, ...]) -> Array:
        """The array that a row tells of. ValueError or OSError where it is not there, or is another one."""
        if isinstance(row, list) and row[:1] == [JOINED]:
            recipe = self._recipe(row, dtype, DEEPEST)
            if recipe.shape != shape:
                raise ValueError("pieces of a kept constant come to another one")
            return recipe.array()
        return self._one(row, dtype, shape)

    def _recipe(self, row: Row, dtype: str, left: int) -> JoinRecipe:
        _, new, axis, made, rows = row if len(row) == 5 else ("", None, None, None, None)
        if not isinstance(new, bool) or type(axis) is not int or axis < 0 or not isinstance(made, str) or not left:
            raise ValueError("pieces of a kept constant are none")
        if not isinstance(rows, list) or not rows:
            raise ValueError("pieces of a kept constant are none")
        pieces: list[Array | JoinRecipe] = []
        for pair in rows:
            shape, piece = pair if isinstance(pair, list) and len(pair) == 2 else (None, [])
            if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError("a piece of a kept constant has an impossible shape")
            joined = isinstance(piece, list) and piece[:1] == [JOINED]
            pieces.append(self._recipe(piece, dtype, left - 1) if joined else self._one(piece, dtype, tuple(shape)))
        return JoinRecipe(tuple(pieces), axis, new, made)

    def _one(self, row: Row, dtype: str, shape: tuple[int, ...]) -> Array:
        if not isinstance(row, list) or len(row) != 5:
            raise ValueError("a kept constant is none")
        kind, name, at, made, order = row
        if (
            not isinstance(name, str)
            or type(at) is not int
            or at < 0
            or not isinstance(made, str)
            or not _is_order(order, len(shape))
        ):
            raise ValueError("a kept constant is none")
        home = self.home if kind == MODEL else self.folder
        path = place_in(home, name) if home is not None else None
        if path is None or kind not in (MODEL, CACHE):
            raise ValueError("a kept constant lies elsewhere")
        count, file = math.prod(shape), self._mapped(path)
        if kind == MODEL and self.seen.get(name) != file.state:
            raise ValueError("the model file was written to meanwhile")
        lying = np.frombuffer(file.data, dtype, count, at).reshape([shape[d] for d in order])
        array = lying.transpose([order.index(d) for d in range(len(shape))])
        if kind == MODEL:  # its content was told from others' as a whole
            remembered(array, made)
        elif len(file.data) != array.nbytes or digest(array) != made:
            with suppress(OSError):
                path.unlink()  # it is made again
            raise ValueError("a kept constant is damaged")
        return array

    def _mapped(self, path: Path) -> Mapped:
        if path not in self.files:
            self.files[path] = Mapped.of(path)
        return self.files[path]


def _is_order(found: object, axes: int) -> bool:
    return isinstance(found, list) and all(type(d) is int for d in found) and sorted(found) == list(range(axes))
