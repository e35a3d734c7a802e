"""Entries of one ``rm_exchange`` launch, as numbers that the device reads (``device/peer.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

import numpy as np

from rammer.device.manifest import Array

from rammer_cuda.device import device_source, fill_template

#: Threads of a block, bytes that a thread moves at a time, and polls of a word between two checks of the clock.
THREADS: Final = 512
VECTOR: Final = 16
PATIENCE: Final = 64
#: Maximum entries of a launch, which are its parameters: 4 KiB at most.
ENTRIES: Final = 32
#: 64-bit and 32-bit fields of an entry, in the order of the device, and fields of the record of a wait that timed out.
LONG: Final = ("to", "from", "bytes", "flag", "credit", "count")
SHORT: Final = ("kind", "first", "blocks", "depth", "name", "unused")
FAILURE: Final = ("failed", "kind", "name", "wanted", "seen")
#: Bytes of an entry.
ENTRY: Final = 8 * len(LONG) + 4 * len(SHORT)


class PeerKind(IntEnum):
    """The action of an entry. PUT writes a payload and its flag (or the flag alone). CREDIT marks a slot as writable again. WAIT
    waits for a flag. ROOM waits until a slot is free, for a subsequent copy."""

    PUT = 0
    CREDIT = 1
    WAIT = 2
    ROOM = 3


@dataclass(frozen=True, slots=True)
class PeerEntry:
    """An entry of a launch. Addresses are the device's; ``flag`` is the word that is written or awaited.

    ``credit`` is the word that a put first waits for (0: none). ``count`` are private words of this end: its runs, the blocks
    that have arrived, and its waiting time (64 bits, ns)."""

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
    """Encode the entries for the device, padded with zeros."""
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
    """Return the number of blocks of a launch."""
    return sum(e.blocks for e in entries)


def spread_over(entry: PeerEntry, most: int, each: int) -> PeerEntry:
    """Split a put over blocks of ``each`` bytes, at most ``most`` blocks."""
    return replace(entry, blocks=max(1, min(most, -(-entry.nbytes // each))))


def exchange_text() -> str:
    """Return the translation unit of ``rm_exchange``."""
    return device_source("order") + device_text()


def device_text() -> str:
    """Return the device text of ``rm_exchange`` only."""
    kinds = {k.name.lower(): int(k) for k in PeerKind}
    fields = {"long": ", ".join(LONG), "short": ", ".join(SHORT), "failure": ", ".join(FAILURE)}
    return fill_template("peer", patience=PATIENCE, threads=THREADS, most=ENTRIES, **kinds, **fields)
