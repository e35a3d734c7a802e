"""Memory in which senders keep tensors whose size a run decides, until their readers have fetched them."""

from __future__ import annotations

from rammer.transport.exposed import ALIGNED, rounded

__all__ = ["Pool"]


class Pool:
    """Blocks of some bytes, which begin at multiples of ``ALIGNED``. Whatever fits into all of it fits once all blocks were given
    back: neighbours that are free are one."""

    def __init__(self, begin: int, nbytes: int) -> None:
        """``nbytes`` from byte ``begin`` on, both multiples of ``ALIGNED``."""
        self.nbytes = nbytes
        self._free: dict[int, int] = {begin: nbytes} if nbytes else {}  # first byte -> bytes
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """The first byte of a block, cut from the smallest stretch that it fits into; None where there is none."""
        need = max(ALIGNED, rounded(nbytes, ALIGNED))
        fitting = [(size, start) for start, size in self._free.items() if size >= need]
        if not fitting:
            return None
        size, start = min(fitting)
        del self._free[start]
        if size > need:
            self._free[start + need] = size - need
        self._taken[start] = need
        return start

    def give(self, start: int) -> None:
        """The block that begins there is free. KeyError where none does."""
        end = start + self._taken.pop(start)
        behind = self._free.pop(end, 0)
        before = next((s for s, size in self._free.items() if s + size == start), start)
        self._free[before] = end + behind - before
