"""Frozen values that are asked for their hash again and again."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, ClassVar


class Hashed:
    """Keeps the hash of its fields, which ``KEY`` gets. A dataclass derived from it says ``__hash__ = Hashed.__hash__``, or makes
    one of its own.

    The hash is no field: copies and pickles go without, since another process hashes names otherwise.
    """

    __slots__ = ("_hash",)
    KEY: ClassVar[attrgetter[Any]]
    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", made := hash(self.KEY(self)))
            return made
