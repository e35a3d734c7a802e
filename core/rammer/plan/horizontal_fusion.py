"""Horizontal fusion of launches with the same predecessors (FusionStitching's kernel packing).

The launch of a small operator leaves most of a device idle. Launches with the same predecessors are independent and start no
later as one kernel than alone. Consumers of one launch then wait for all. Their times may therefore differ by at most the launch
overhead, unless all have the same consumers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchPiece:
    """A launch: the positions of its predecessors (``after``), seconds of its tasks, and the fraction of the device that they
    fill. A fraction of 0 means that the kernel cannot share a launch."""

    after: tuple[int, ...]
    seconds: float
    share: float


def pack_launches(pieces: Sequence[LaunchPiece], launch: float) -> list[tuple[int, ...]]:
    """Return the positions of the launches by kernel, kernels in a legal order. All tasks of a kernel are resident at once.
    ``launch`` is the launch overhead in seconds."""
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
    """Return True if these launches fit on the device together and do not delay consumers by more than a launch."""
    times = [pieces[i].seconds for i in members]
    alike = all(readers[i] == readers[members[0]] for i in members)
    return sum(pieces[i].share for i in members) <= 1.0 and (alike or max(times) - min(times) <= launch)
