"""Tile memory: the locations of every buffer's blocks, and the bytes. A buffer is striped over the tiles in equal blocks at one
offset in every tile (its home). Memory without valid data holds a pattern that is NaN in every float type."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.ir.program import Buffer
from rammer.ir.types import is_float, itemsize

from rammer_ipu_sim.chip import Chip

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Repeated, these 16 bits are a quiet NaN as float16, float32 and float64, and an implausible integer.
POISON = np.uint16(0x7FF5)
NONE: Final[Mapping[str, Array]] = MappingProxyType({})

#: Home blocks start and end at multiples of this many bytes, the widest element.
GRAIN = 8


def poison_value(dtype: str) -> float | int | bool:
    """Return one poisoned element of ``dtype``: the value that a task reads without a delivery."""
    if is_float(dtype):
        return float("nan")
    return np.full(4, POISON).view(dtype)[0].item()  # type: ignore[no-any-return]


def make_poisoned(shape: tuple[int, ...], dtype: str) -> Array:
    """Return an array full of poison."""
    return np.full(shape, poison_value(dtype), dtype=dtype)


@dataclass(frozen=True, slots=True)
class Home:
    """The home of ``buffer``: block ``k`` (below ``blocks``) has ``block`` elements in tile ``k`` at byte ``offset``."""

    buffer: Buffer
    offset: int
    block: int
    blocks: int

    @property
    def nbytes(self) -> int:
        """Number of bytes in a tile."""
        return self.block * itemsize(self.buffer.dtype)


def stripe_buffer(buffer: Buffer, offset: int, tiles: int) -> Home:
    """Stripe ``buffer`` over ``tiles`` tiles in blocks rounded up to 8 bytes."""
    grain = GRAIN // itemsize(buffer.dtype)
    block = -(-max(1, -(-buffer.size // tiles)) // grain) * grain
    return Home(buffer, offset, block, -(-buffer.size // block))


def plan_homes(buffers: Sequence[Buffer], tiles: int) -> dict[str, Home]:
    """Return a home for every buffer, arena buffers above all others. The height is ``peak_tile_bytes(homes)``."""
    homes: dict[str, Home] = {}
    top = 0
    for b in buffers:
        if b.kind != "arena":
            homes[b.name] = stripe_buffer(b, top, tiles)
            top += homes[b.name].nbytes
    return homes | _place_arena([b for b in buffers if b.kind == "arena"], top, tiles)


def _place_arena(buffers: Sequence[Buffer], base: int, tiles: int) -> dict[str, Home]:
    """Place each buffer above all buffers that are entirely below it in the program's arena.

    If the byte ranges of two buffers are disjoint in the program, one buffer is entirely below the other. Their homes are
    therefore disjoint too: only buffers that share memory in the program can share it here."""
    homes: dict[str, Home] = {}
    open_: list[tuple[int, int]] = []
    floor = base
    for b in sorted(buffers, key=lambda b: (b.offset, b.name)):
        while open_ and open_[0][0] <= b.offset:
            floor = max(floor, heapq.heappop(open_)[1])
        homes[b.name] = stripe_buffer(b, floor, tiles)
        heapq.heappush(open_, (b.offset + b.nbytes, floor + homes[b.name].nbytes))
    return homes


def peak_tile_bytes(homes: Mapping[str, Home]) -> int:
    """Return the bytes of the fullest tile."""
    return max((h.offset + h.nbytes for h in homes.values()), default=0)


class HomeMemory:
    """The home region of all tiles, ``[tiles, bytes]``; access by whole buffers, as the exchange does. ``constants`` are
    read-only flat buffers that other programs may share: their homes are counted, not simulated."""

    def __init__(self, chip: Chip, homes: Mapping[str, Home], constants: Mapping[str, Array] = NONE) -> None:
        self.constants = constants
        self.homes = (
            homes if not constants else plan_homes([h.buffer for n, h in homes.items() if n not in constants], chip.tiles)
        )
        homes = self.homes
        width = -(-max(peak_tile_bytes(homes), GRAIN) // GRAIN) * GRAIN
        self.words = np.full((chip.tiles, width // 2), POISON, dtype=np.uint16)

    def _home_blocks(self, name: str) -> Array:
        h = self.homes[name]
        size = itemsize(h.buffer.dtype)
        first = h.offset // size
        rows: Array = self.words.view(h.buffer.dtype)
        return rows[: h.blocks, first : first + h.block]

    def read(self, name: str) -> Array:
        """Return a flat copy of a buffer, gathered from its home blocks, or a constant itself."""
        if name in self.constants:
            return self.constants[name]
        return self._home_blocks(name).reshape(-1)[: self.homes[name].buffer.size].copy()

    def write(self, name: str, values: Array) -> None:
        """Scatter a flat buffer to its home blocks; the rest of the last block is unchanged."""
        h, blocks = self.homes[name], self._home_blocks(name)
        whole = h.buffer.size // h.block
        blocks[:whole] = values[: whole * h.block].reshape(whole, h.block)
        if whole < h.blocks:
            blocks[whole, : h.buffer.size - whole * h.block] = values[whole * h.block :]

    def poison(self, name: str) -> None:
        """Mark this buffer's contents as invalid."""
        h = self.homes[name]
        self.words[: h.blocks, h.offset // 2 : (h.offset + h.nbytes) // 2] = POISON
