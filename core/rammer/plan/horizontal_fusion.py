"""Independent packing: which launches that wait for the same become one (FusionStitching's kernel packing).

A launch of a small operator leaves most of a device idle and takes its time all the same. Launches with the same predecessors
depend on none of each other, and as one kernel start no later than each would alone. Nobody waits longer for it either: what
reads one of them waits for all, so their times may differ by what a launch takes, no more, or all must have the same readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchPiece:
    """A launch: the positions of those that it is ``after``, seconds of its tasks, and what share of the device they fill at
    once (0: its kernel cannot stand beside others)."""

    after: tuple[int, ...]
    seconds: float
    share: float


def pack_launches(pieces: Sequence[LaunchPiece], launch: float) -> list[tuple[int, ...]]:
    """The positions of the launches by kernel, kernels in a legal order; all of a kernel's tasks are on the device at once.
    ``launch`` is what a launch takes, in seconds."""
    readers: list[list[int]] = [[] for _ in pieces]
    for i, piece in enumerate(pieces):
        for before in piece.after:
            readers[before].append(i)
    open_: dict[tuple[int, ...], list[list[int]]] = {}
    found: list[list[int]] = []
    for i, piece in enumerate(pieces):
        known = open_.setdefault(tuple(sorted(piece.after)), [])
        home = next((p for p in known if piece.share and _can_pack(pieces, readers, [*p, i], launch)), None)
        if home is not None:
            home.append(i)
            continue
        found.append([i])
        if piece.share:
            known.append(found[-1])
    return [tuple(p) for p in found]


def _can_pack(pieces: Sequence[LaunchPiece], readers: Sequence[list[int]], members: Sequence[int], launch: float) -> bool:
    """Whether these launches are on the device at once, and nobody waits for one of them much longer than for itself."""
    times = [pieces[i].seconds for i in members]
    alike = all(readers[i] == readers[members[0]] for i in members)
    return sum(pieces[i].share for i in members) <= 1.0 and (alike or max(times) - min(times) <= launch)
