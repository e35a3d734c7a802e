"""The layout of transfer words and slots in each GPU's exposed memory: every process computes the same layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from rammer.errors import BadInput

#: Bytes between words that different GPUs write, and the alignment of slots.
LINE: Final = 128
SLOT: Final = 256


@dataclass(frozen=True, slots=True)
class Route:
    """A tensor of ``nbytes`` that GPU ``source`` writes into the memory of GPU ``target``, once a run."""

    name: str
    nbytes: int
    source: int
    target: int


@dataclass(frozen=True)
class PeerLayout:
    """The memory of all GPUs, for ``depth`` runs in flight. Offsets are bytes from the start of a GPU's memory.

    For every route the receiver has a flag and ``depth`` slots, and the sender a credit. Both also have private run counters.
    Words come first, since they start as zeros."""

    routes: tuple[Route, ...]
    devices: int
    depth: int

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise BadInput(f"{self.depth} runs in flight", hint="at least 1")

    @cached_property
    def words(self) -> Sequence[Mapping[tuple[str, str], int]]:
        """Offsets of each GPU's words by route and kind, such as ``flag``, ``credit``, ``sent`` or ``got``."""
        result: list[dict[tuple[str, str], int]] = [{} for _ in range(self.devices)]
        for route in self.routes:
            for device, kinds in ((route.source, ("credit", "sent", "paid")), (route.target, ("flag", "got", "given"))):
                for kind in kinds:
                    result[device][route.name, kind] = len(result[device]) * LINE
        return result

    @cached_property
    def slots(self) -> Mapping[str, int]:
        """The offset of each route's first slot in the receiver's memory; the others follow at ``stride``."""
        end = [_round_up(len(words) * LINE) for words in self.words]
        result = {}
        for route in self.routes:
            result[route.name] = end[route.target]
            end[route.target] += self.depth * self.stride(route)
        return result

    @staticmethod
    def stride(route: Route) -> int:
        """Return the bytes from one slot of a route to the next; kernels may load whole vectors past a slot's end."""
        return _round_up(route.nbytes) + SLOT

    def word_bytes(self, device: int) -> int:
        """Return the bytes of words at the start of a GPU's memory."""
        return _round_up(len(self.words[device]) * LINE)

    def nbytes(self, device: int) -> int:
        """Return the bytes of a GPU's memory, at least one slot, since empty memory cannot be shared."""
        own = [r for r in self.routes if r.target == device]
        return max(SLOT, self.word_bytes(device), *(self.slots[r.name] + self.depth * self.stride(r) for r in own))


def _round_up(nbytes: int) -> int:
    return -(-nbytes // SLOT) * SLOT
