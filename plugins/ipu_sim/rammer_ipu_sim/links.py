"""The links between chips: which ways there are, how fast each is, and when what crosses has arrived.

Two chips are a card, and cards are a ladder: chips of one card are joined by links of their own, and each chip to the one in its
place on the cards above and below. What goes to the other side of another card first crosses within its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from rammer.distributed.distributed_program import Link

from rammer_ipu_sim.chip import Chip

__all__ = ["CARD", "SOURCE", "Traffic", "find_route", "make_link", "make_links"]

#: Chips of a card.
CARD: Final = 2
#: Links side by side: between the chips of a card, those there that pass on what goes to other cards, and from card to card.
SIDE_BY_SIDE: Final[Mapping[str, int]] = {"card": 4, "across": 2, "up": 2, "down": 2}
#: Where the topology and these numbers come from.
SOURCE: Final = "Graphcore poplibs' IPU model of GC2 (poplibs_test, addGlobalExchangeConstraints)"

#: A chip, and which of its ways out.
Hop: TypeAlias = tuple[int, str]


def find_route(source: int, target: int) -> Iterator[Hop]:
    """The ways out that a message takes, one behind the other."""
    if source // CARD == target // CARD:
        yield source, "card"
        return
    here = source
    if here % CARD != target % CARD:
        yield here, "across"
        here ^= 1
    while here != target:
        kind, step = ("up", CARD) if here < target else ("down", -CARD)
        yield here, kind
        here += step


def link_bandwidth(chip: Chip, hop: Hop) -> float:
    """Bytes a second of a way out."""
    return SIDE_BY_SIDE[hop[1]] * chip.link_bytes


def make_link(chip: Chip, source: int, target: int) -> Link:
    """From chip to chip where nobody else sends: a sync of both, there and back over every hop, and then the slowest hop."""
    hops = list(find_route(source, target))
    latency = chip.sync_cycles / chip.clock + 2 * len(hops) * chip.hop_seconds
    through = tuple((f"chip {at} {kind}", link_bandwidth(chip, (at, kind))) for at, kind in hops)
    return Link(source, target, latency, min(r for _, r in through), SOURCE, through)


def make_links(chip: Chip) -> tuple[Link, ...]:
    """Between any two of the chips."""
    return tuple(make_link(chip, a, b) for a in range(chip.chips) for b in range(chip.chips) if a != b)


@dataclass
class Traffic:
    """What is on the links, and until when (seconds)."""

    chip: Chip
    free: dict[Hop, float] = field(default_factory=dict)

    def carry(self, ready: float, source: int, target: int, nbytes: int) -> float:
        """When a message that is ready at some time has arrived: all hops of its route carry it at once, when all are free."""
        hops = list(find_route(source, target))
        begin = max([ready, *(self.free.get(hop, 0.0) for hop in hops)])
        for hop in hops:
            self.free[hop] = begin + nbytes / link_bandwidth(self.chip, hop)
        return begin + make_link(self.chip, source, target).seconds(nbytes)
