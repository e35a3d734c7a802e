"""What one launch of ``rm_exchange`` carries out, as numbers that the device reads (``device/peer.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

import numpy as np

from rammer.device.manifest import Array

from rammer_cuda.device import device_source, fill_template

#: Threads of a block, bytes that one of them moves at a time, and polls of a word between two looks at the clock.
THREADS: Final = 512
VECTOR: Final = 16
PATIENCE: Final = 64
#: Entries of a launch, which are its parameters: 4 KiB at most.
ENTRIES: Final = 32
#: 64-bit and 32-bit fields of an entry, in the order of the device, and of what a wait in vain leaves.
LONG: Final = ("to", "from", "bytes", "flag", "credit", "count")
SHORT: Final = ("kind", "first", "blocks", "depth", "name", "unused")
FAILURE: Final = ("failed", "kind", "name", "wanted", "seen")
#: Bytes of an entry.
ENTRY: Final = 8 * len(LONG) + 4 * len(SHORT)


class PeerKind(IntEnum):
    """What an entry does: writes a payload and its flag (or the flag alone); says that a slot may be written again; waits for a
    flag; or waits until a slot is free, for a copy that follows."""

    PUT = 0
    CREDIT = 1
    WAIT = 2
    ROOM = 3


@dataclass(frozen=True, slots=True)
class PeerEntry:
    """One entry. Addresses are the device's; ``flag`` is the word that is written, or waited for; ``credit`` the word that a
    put waits for first (0: none); ``count`` words of this end alone: its runs, the blocks that have arrived, and 64 bits of
    nanoseconds that it has waited."""

    kind: PeerKind
    name: int
    flag: int
    count: int
    credit: int = 0
    depth: int = 1
    to: int = 0
    source: int = 0
    nbytes: int = 0
    blocks: int = 1


def encode_entries(entries: Sequence[PeerEntry]) -> Array:
    """The entries as the device reads them, and nothing behind them."""
    form = np.dtype([(n, np.uint64) for n in LONG] + [(n, np.uint32) for n in SHORT])
    if len(entries) > ENTRIES:
        raise ValueError(f"{len(entries)} entries in one launch of {ENTRIES}")
    result, first = np.zeros(ENTRIES, form), 0
    for record, e in zip(result, entries, strict=False):
        if e.to % VECTOR or e.source % VECTOR:
            raise ValueError(f"a payload from {e.source:#x} to {e.to:#x} is not aligned to {VECTOR} bytes")
        longs = (e.to, e.source, e.nbytes, e.flag, e.credit, e.count)
        shorts = (e.kind, first, e.blocks, e.depth, e.name, 0)
        for field, value in zip((*LONG, *SHORT), (*longs, *shorts), strict=True):
            record[field] = value
        first += e.blocks
    return result


def blocks_of(entries: Sequence[PeerEntry]) -> int:
    """Blocks of a launch."""
    return sum(e.blocks for e in entries)


def spread_over(entry: PeerEntry, most: int, each: int) -> PeerEntry:
    """A put by as many blocks as it has shares of ``each`` bytes, at most ``most``."""
    return replace(entry, blocks=max(1, min(most, -(-entry.nbytes // each))))


def exchange_text() -> str:
    """The translation unit of ``rm_exchange``."""
    return device_source("order") + device_text()


def device_text() -> str:
    """What of it is its own."""
    kinds = {k.name.lower(): int(k) for k in PeerKind}
    fields = {"long": ", ".join(LONG), "short": ", ".join(SHORT), "failure": ", ".join(FAILURE)}
    return fill_template("peer", patience=PATIENCE, threads=THREADS, most=ENTRIES, **kinds, **fields)
