"""Devices on which tables for the shorter and the longer lengths of a range pay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from rammer.device.manifest import Array, Binding, Loaded
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram

__all__ = ["Cased"]


@runtime_checkable
class Cased(Protocol):
    """A Backend may also want several tables for a range of lengths: another one for each of so many ``cases``."""

    @property
    def cases(self) -> int:
        """Parts of a range that get tables of their own, at most; 0 for none."""
        ...

    def recast(self, operator: ROperator, binding: Binding, within: float) -> ROperator:
        """What a tiled operator computes, with the tile and kernel that are best at the lengths of ``binding`` of those that want
        constants arranged as it does; itself where none is predicted to be faster by more than that part."""
        ...

    def load_case(self, program: RProgram, constants: Mapping[str, Array], first: Loaded) -> Loaded:
        """A table for other lengths than those of ``first``, of the same ports, which never runs at the same time: in its memory,
        as far as that fits."""
        ...
