"""Recipes of arrays derived from other arrays, by concatenation or scaling. A recipe refers to its parts. Values in files stay
there, and the array is built only when it is read."""

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
#: Minimum ratio of an array's bytes to those of its factors, for which the array has a recipe.
MANY: Final = 4


@dataclass(eq=False)
class ArrayRecipe(ABC):
    """A recipe that makes an array from other arrays. ``content`` is its digest, "" until it is first computed. The array is
    built on demand and shared by all its users."""

    content: str = field(default="", kw_only=True)
    _made: ReferenceType[Array] | None = field(default=None, repr=False, kw_only=True)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the array. Raises ValueError if its parts do not fit."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """The element type of the array."""

    @abstractmethod
    def _build_values(self) -> Array:
        """Build the array. Raises ValueError if its parts do not fit."""

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def alive(self) -> bool:
        """True if the array currently exists."""
        return self._made is not None and self._made() is not None

    def array(self) -> Array:
        """Return the read-only array and release the pages of mapped pieces. Raises ValueError if the pieces do not fit."""
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
        """Return the digest of the array (``rammer.ir.constants.digest``)."""
        self.content = self.content or digest_array(self.array())
        return self.content


#: An array, or its recipe.
Part: TypeAlias = "Array | ArrayRecipe"
#: Recipes of live arrays, by identity.
_KNOWN: Final[dict[int, tuple[ReferenceType[Array], ArrayRecipe]]] = {}


@dataclass(eq=False)
class JoinRecipe(ArrayRecipe):
    """A concatenation of ``pieces`` along dimension ``axis``, or a stack along it if ``new``."""

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
    """A product of ``piece`` (floats) and ``factors`` (float64), rounded once. Both have equal rank; each extent of ``factors``
    is that of ``piece`` or 1."""

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
    """Return the values of a part."""
    return part.array() if isinstance(part, ArrayRecipe) else part


def content_of(part: Part) -> str:
    """Return the digest of a part's values (``rammer.ir.constants.digest``)."""
    return part.digest() if isinstance(part, ArrayRecipe) else digest_array(part)


def recipe_of(array: Array) -> ArrayRecipe | None:
    """Return the recipe of an array, or None."""
    known = _KNOWN.get(id(array))
    return known[1] if known is not None and known[0]() is array else None


def side_by_side(pieces: Sequence[Array], axis: int, new: bool) -> Array:
    """Concatenate the pieces along dimension ``axis``, or stack them if ``new``; the result is read-only.

    Adjacent pieces in memory become a view. Otherwise, a large array with a mapped piece has a recipe, so that its users need not
    store the values."""
    fewer = _merge_adjacent(pieces, axis, new) if all(recipe_of(p) is None for p in pieces) else list(pieces)
    if len(fewer) < len(pieces):
        if len(fewer) == 1:
            return fewer[0]
        pieces, new = fewer, False
    return _made_of(JoinRecipe(tuple(recipe_of(p) or p for p in pieces), axis, new), pieces)


def scale_array(values: Array, factors: Array) -> Array:
    """Multiply ``values`` (floats) by float64 ``factors`` (``ScaledRecipe``); the result is read-only. It has a recipe as in
    ``side_by_side``, unless the factors are large."""
    recipe = ScaledRecipe(recipe_of(values) or values, factors)
    return _made_of(recipe, (values,) if factors.nbytes * MANY <= values.nbytes else ())


def _made_of(recipe: ArrayRecipe, pieces: Sequence[Array]) -> Array:
    """Build a recipe's array and forget the recipe if storing it does not pay."""
    made = recipe.array()
    if made.nbytes <= SMALL or not any(recipe_of(p) is not None or is_mapped(p) for p in pieces):
        del _KNOWN[id(made)]
    return made


def _merge_adjacent(pieces: Sequence[Array], axis: int, new: bool) -> list[Array]:
    """Merge ``pieces`` that are adjacent in memory into views, all with the dimension if it is ``new``."""
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
    """A map from name to array, in which some arrays are built on each access."""

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
    """Return the arrays by name, with recipes for those that are built on access."""
    return constants.parts if isinstance(constants, Constants) else constants


@dataclass
class Contents:
    """A cache of arrays by content: equal arrays share the first one as long as it is in use."""

    held: WeakValueDictionary[str, Array] = field(default_factory=WeakValueDictionary)
    recipes: WeakValueDictionary[str, ArrayRecipe] = field(default_factory=WeakValueDictionary)

    def of(self, arrays: Mapping[str, Array]) -> Constants:
        """Return ``arrays``, read-only, or equal cached ones; arrays with a recipe are built on access."""
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
