"""Arrays by what they hold, and of others side by side: such are known by their pieces, so that what lies in a file stays there,
and is put together for who reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from weakref import ReferenceType, WeakValueDictionary, ref

import numpy as np

from rammer.ir.content import SMALL, digest, remembered
from rammer.ir.mapped import is_mapped, released

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(eq=False)
class JoinRecipe:
    """How an array is made: ``pieces`` along dimension ``axis``, which is a new one if ``new``. ``content`` is its digest, "" as
    long as nobody has asked. The array is made for who asks, one for all who have it at a time."""

    pieces: tuple[Array | JoinRecipe, ...]
    axis: int
    new: bool
    content: str = ""
    _made: ReferenceType[Array] | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array. ValueError where pieces do not fit."""
        shapes = [p.shape for p in self.pieces]
        first, others = shapes[0], {s if self.new else (*s[: self.axis], *s[self.axis + 1 :]) for s in shapes}
        if len(others) > 1 or self.axis >= len(first) + self.new or len({len(s) for s in shapes}) > 1:
            raise ValueError("pieces of an array do not fit")
        extent = len(shapes) if self.new else sum(s[self.axis] for s in shapes)
        return (*first[: self.axis], extent, *first[self.axis + (not self.new) :])

    @property
    def alive(self) -> bool:
        """Whether somebody has the array."""
        return self._made is not None and self._made() is not None

    def array(self) -> Array:
        """Its values, read-only; pieces of files take no memory afterwards. ValueError where they do not fit."""
        made = self._made() if self._made is not None else None
        if made is not None:
            return made
        pieces = [p.array() if isinstance(p, JoinRecipe) else p for p in self.pieces]
        made = np.stack(pieces, self.axis) if self.new else np.concatenate(pieces, self.axis)
        made.flags.writeable = False
        for piece in pieces:
            released(piece)
        if self.content:
            remembered(made, self.content)
        key = id(made)
        self._made = ref(made)
        _KNOWN[key] = ref(made, lambda _: _KNOWN.pop(key, None)), self
        return made

    def digest(self) -> str:
        """That of the array (``rammer.ir.content``)."""
        self.content = self.content or digest(self.array())
        return self.content


#: Recipes of arrays that are alive, by identity.
_KNOWN: Final[dict[int, tuple[ReferenceType[Array], JoinRecipe]]] = {}


def recipe_of(array: Array) -> JoinRecipe | None:
    """How an array was made, where that is known."""
    known = _KNOWN.get(id(array))
    return known[1] if known is not None and known[0]() is array else None


def side_by_side(pieces: Sequence[Array], axis: int, new: bool) -> Array:
    """The pieces along dimension ``axis``, which is a new one if ``new``; read-only. Where a piece lies in a file, and the whole
    is not small, the array has a recipe: whoever keeps that need not keep the values."""
    known = tuple(recipe_of(p) or p for p in pieces)
    recipe = JoinRecipe(known, axis, new)
    made = recipe.array()
    if made.nbytes <= SMALL or not any(isinstance(p, JoinRecipe) or is_mapped(p) for p in known):
        del _KNOWN[id(made)]
    return made


@dataclass(frozen=True)
class Constants(Mapping[str, "Array"]):
    """Arrays by name, of which some are made whenever somebody asks."""

    parts: Mapping[str, Array | JoinRecipe]

    def __getitem__(self, name: str) -> Array:
        part = self.parts[name]
        return part.array() if isinstance(part, JoinRecipe) else part

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __contains__(self, name: object) -> bool:
        return name in self.parts


@dataclass
class Contents:
    """Arrays by what they hold: of equal ones, all who ask get the first, as long as anybody has it."""

    held: WeakValueDictionary[str, Array] = field(default_factory=WeakValueDictionary)
    recipes: WeakValueDictionary[str, JoinRecipe] = field(default_factory=WeakValueDictionary)

    def of(self, arrays: Mapping[str, Array]) -> Constants:
        """``arrays``, read-only, or equal ones that others have; those with a recipe are not kept but made for who asks."""
        parts = arrays.parts if isinstance(arrays, Constants) else arrays
        return Constants({name: self._one(part) for name, part in parts.items()})

    def _one(self, part: Array | JoinRecipe) -> Array | JoinRecipe:
        recipe = part if isinstance(part, JoinRecipe) else recipe_of(part)
        if recipe is not None:
            return self.recipes.setdefault(recipe.digest(), recipe)
        array = np.asarray(part)
        if array.flags.writeable:
            array = np.array(array) if array.nbytes <= SMALL else array.view()
            array.flags.writeable = False
        return self.held.setdefault(digest(array), array)
