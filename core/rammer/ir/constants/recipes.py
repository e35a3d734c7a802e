"""Arrays by what they hold, and such as are made of others: side by side, or times factors. These are known by what they are made
of, so that what lies in a file stays there, and is put together for who reads it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from weakref import ReferenceType, WeakValueDictionary, ref

import numpy as np

from rammer.ir.constants.digest import SMALL, digest_array, record_digest
from rammer.ir.constants.mapped_files import as_one, is_continuation, is_mapped, release_pages

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: How many times the bytes of its factors an array has at least that is known by them.
MANY: Final = 4


@dataclass(eq=False)
class ArrayRecipe(ABC):
    """How an array is made of others. ``content`` is its digest, "" as long as nobody has asked. The array is made for who asks,
    one for all who have it at a time."""

    content: str = field(default="", kw_only=True)
    _made: ReferenceType[Array] | None = field(default=None, repr=False, kw_only=True)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the array. ValueError where what it is made of does not fit."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """Of its elements."""

    @abstractmethod
    def _build_values(self) -> Array:
        """The array, made anew. ValueError where what it is made of does not fit."""

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def alive(self) -> bool:
        """Whether somebody has the array."""
        return self._made is not None and self._made() is not None

    def array(self) -> Array:
        """Its values, read-only; pieces of files take no memory afterwards. ValueError where they do not fit."""
        made = self._made() if self._made is not None else None
        if made is not None:
            return made
        made = self._build_values()
        made.flags.writeable = False
        if self.content:
            record_digest(made, self.content)
        key = id(made)
        self._made = ref(made)
        _KNOWN[key] = ref(made, lambda _: _KNOWN.pop(key, None)), self
        return made

    def digest(self) -> str:
        """That of the array (``rammer.ir.constants.digest``)."""
        self.content = self.content or digest_array(self.array())
        return self.content


#: An array, or how it is made.
Part: TypeAlias = "Array | ArrayRecipe"
#: Recipes of arrays that are alive, by identity.
_KNOWN: Final[dict[int, tuple[ReferenceType[Array], ArrayRecipe]]] = {}


@dataclass(eq=False)
class JoinRecipe(ArrayRecipe):
    """``pieces`` along dimension ``axis``, which is a new one if ``new``."""

    pieces: tuple[Part, ...]
    axis: int
    new: bool

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [p.shape for p in self.pieces]
        first, others = shapes[0], {s if self.new else (*s[: self.axis], *s[self.axis + 1 :]) for s in shapes}
        if len(others) > 1 or self.axis >= len(first) + self.new or len({len(s) for s in shapes}) > 1:
            raise ValueError("pieces of an array do not fit")
        extent = len(shapes) if self.new else sum(s[self.axis] for s in shapes)
        return (*first[: self.axis], extent, *first[self.axis + (not self.new) :])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.pieces[0].dtype

    def _build_values(self) -> Array:
        pieces = [as_array(p) for p in self.pieces]
        made: Array = np.stack(pieces, self.axis) if self.new else np.concatenate(pieces, self.axis)
        for piece in pieces:
            release_pages(piece)
        return made


@dataclass(eq=False)
class ScaledRecipe(ArrayRecipe):
    """``piece``, of floats, times ``factors`` of float64, rounded once. They have as many dimensions, of its extents or 1."""

    piece: Part
    factors: Array

    @property
    def shape(self) -> tuple[int, ...]:
        shape, factors = self.piece.shape, self.factors.shape
        if len(shape) != len(factors) or any(n not in (1, m) for n, m in zip(factors, shape, strict=True)):
            raise ValueError("factors of an array do not fit")
        return shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.piece.dtype

    def _build_values(self) -> Array:
        piece = as_array(self.piece)
        made = np.empty(self.shape, self.dtype)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            np.multiply(piece, self.factors, out=made, dtype=np.float64, casting="same_kind")
        release_pages(piece)
        return made


def as_array(part: Part) -> Array:
    """The values of a part."""
    return part.array() if isinstance(part, ArrayRecipe) else part


def content_of(part: Part) -> str:
    """The digest of a part's values (``rammer.ir.constants.digest``)."""
    return part.digest() if isinstance(part, ArrayRecipe) else digest_array(part)


def recipe_of(array: Array) -> ArrayRecipe | None:
    """How an array was made, where that is known."""
    known = _KNOWN.get(id(array))
    return known[1] if known is not None and known[0]() is array else None


def side_by_side(pieces: Sequence[Array], axis: int, new: bool) -> Array:
    """The pieces along dimension ``axis``, which is a new one if ``new``; read-only. What lies so in memory is a view. Else,
    where a piece is in a file, and the whole is not small, the array has a recipe: who keeps that need not keep the values."""
    fewer = _merge_adjacent(pieces, axis, new) if all(recipe_of(p) is None for p in pieces) else list(pieces)
    if len(fewer) < len(pieces):
        if len(fewer) == 1:
            return fewer[0]
        pieces, new = fewer, False
    return _made_of(JoinRecipe(tuple(recipe_of(p) or p for p in pieces), axis, new), pieces)


def scale_array(values: Array, factors: Array) -> Array:
    """``values``, of floats, times ``factors`` of float64 that fit them (``ScaledRecipe``), read-only. It has a recipe as pieces
    side by side have, unless the factors are many."""
    recipe = ScaledRecipe(recipe_of(values) or values, factors)
    return _made_of(recipe, (values,) if factors.nbytes * MANY <= values.nbytes else ())


def _made_of(recipe: ArrayRecipe, pieces: Sequence[Array]) -> Array:
    """What a recipe makes, which is forgotten unless it is worth keeping."""
    made = recipe.array()
    if made.nbytes <= SMALL or not any(recipe_of(p) is not None or is_mapped(p) for p in pieces):
        del _KNOWN[id(made)]
    return made


def _merge_adjacent(pieces: Sequence[Array], axis: int, new: bool) -> list[Array]:
    """``pieces`` with those as one that lie behind one another in memory, all with the dimension if it is ``new``."""
    runs = list[list[Array]]()
    for piece in pieces:
        if runs and is_continuation(runs[-1], piece, axis, new):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    found = list[Array]()
    for run in runs:
        whole = as_one(run, axis, new) if len(run) > 1 else None
        found += [whole] if whole is not None else [np.expand_dims(p, axis) if new else p for p in run]
    return found


@dataclass(frozen=True)
class Constants(Mapping[str, "Array"]):
    """Arrays by name, of which some are made whenever somebody asks."""

    parts: Mapping[str, Part]

    def __getitem__(self, name: str) -> Array:
        return as_array(self.parts[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __contains__(self, name: object) -> bool:
        return name in self.parts


def parts_of(constants: Mapping[str, Array]) -> Mapping[str, Part]:
    """Arrays by name, those that would be made for who asks as their recipes."""
    return constants.parts if isinstance(constants, Constants) else constants


@dataclass
class Contents:
    """Arrays by what they hold: of equal ones, all who ask get the first, as long as anybody has it."""

    held: WeakValueDictionary[str, Array] = field(default_factory=WeakValueDictionary)
    recipes: WeakValueDictionary[str, ArrayRecipe] = field(default_factory=WeakValueDictionary)

    def of(self, arrays: Mapping[str, Array]) -> Constants:
        """``arrays``, read-only, or equal ones that others have; those with a recipe are not kept but made for who asks."""
        return Constants({name: self._intern_part(part) for name, part in parts_of(arrays).items()})

    def _intern_part(self, part: Part) -> Part:
        recipe = part if isinstance(part, ArrayRecipe) else recipe_of(part)
        if recipe is not None:
            return self.recipes.setdefault(recipe.digest(), recipe)
        array = np.asarray(part)
        if array.flags.writeable:
            array = np.array(array) if array.nbytes <= SMALL else array.view()
            array.flags.writeable = False
        return self.held.setdefault(digest_array(array), array)
