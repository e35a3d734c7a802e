"""Where the words and slots of transfers lie in the memory that each GPU exposes: every process works it out alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from rammer.errors import BadInput

#: Bytes between words that different GPUs write, and what slots are aligned to.
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
    """The memory of all GPUs, for ``depth`` runs in flight. Offsets are bytes from the begin of a GPU's memory.

    Of every route the receiver has a flag and ``depth`` slots, the sender a credit, and both a counter of their own runs, which
    nobody else touches. Words come first: they start as zeros.
    """

    routes: tuple[Route, ...]
    devices: int
    depth: int

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise BadInput(f"{self.depth} runs in flight", hint="at least 1")

    @cached_property
    def words(self) -> Sequence[Mapping[tuple[str, str], int]]:
        """Of each GPU: (route, ``flag``, ``credit``, ``sent`` or ``got``) -> offset."""
        result: list[dict[tuple[str, str], int]] = [{} for _ in range(self.devices)]
        for route in self.routes:
            for device, kinds in ((route.source, ("credit", "sent", "paid")), (route.target, ("flag", "got", "given"))):
                for kind in kinds:
                    result[device][route.name, kind] = len(result[device]) * LINE
        return result

    @cached_property
    def slots(self) -> Mapping[str, int]:
        """Route -> offset of its first slot in the receiver's memory; the others follow, ``stride`` apart."""
        end = [_round_up(len(words) * LINE) for words in self.words]
        result = {}
        for route in self.routes:
            result[route.name] = end[route.target]
            end[route.target] += self.depth * self.stride(route)
        return result

    @staticmethod
    def stride(route: Route) -> int:
        """Bytes from one slot of a route to the next; kernels may load whole vectors from behind one."""
        return _round_up(route.nbytes) + SLOT

    def word_bytes(self, device: int) -> int:
        """Bytes of words at the begin of a GPU's memory."""
        return _round_up(len(self.words[device]) * LINE)

    def nbytes(self, device: int) -> int:
        """Bytes of a GPU's memory; at least one slot, since nobody can give away nothing."""
        own = [r for r in self.routes if r.target == device]
        return max(SLOT, self.word_bytes(device), *(self.slots[r.name] + self.depth * self.stride(r) for r in own))


def _round_up(nbytes: int) -> int:
    return -(-nbytes // SLOT) * SLOT
