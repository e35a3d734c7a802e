"""The links between chips: topology, bandwidth, and arrival times of transfers.

Two chips form a card, and cards form a ladder. Dedicated links join the chips of one card. Each chip is linked to the chip at its
position on the cards above and below. A transfer to the other side of another card first crosses within its card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from rammer_ipu_sim.chip import Chip

if TYPE_CHECKING:
    from rammer.distributed.distributed_program import Link

__all__ = ["CARD", "SOURCE", "Traffic", "find_route", "make_link", "make_links"]

#: Number of chips per card.
CARD: Final = 2
#: Parallel links: between the chips of a card, those of them that forward to other cards, and from card to card.
SIDE_BY_SIDE: Final[Mapping[str, int]] = {"card": 4, "across": 2, "up": 2, "down": 2}
#: Source of the topology and these numbers.
SOURCE: Final = "Graphcore poplibs' IPU model of GC2 (poplibs_test, addGlobalExchangeConstraints)"

#: A chip, and the name of an outgoing link.
Hop: TypeAlias = tuple[int, str]


def find_route(source: int, target: int) -> Iterator[Hop]:
    """Yield the outgoing links on a message's route, in order."""
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
    """Return the bytes per second of an outgoing link."""
    return SIDE_BY_SIDE[hop[1]] * chip.link_bytes


def make_link(chip: Chip, source: int, target: int) -> Link:
    """Return the link from chip to chip without other traffic. Its latency is a sync of both chips, there and back over every
    hop. Its bandwidth is that of the slowest hop."""
    from rammer.distributed.distributed_program import Link

    hops = list(find_route(source, target))
    latency = chip.sync_cycles / chip.clock + 2 * len(hops) * chip.hop_seconds
    through = tuple((f"chip {at} {kind}", link_bandwidth(chip, (at, kind))) for at, kind in hops)
    return Link(source, target, latency, min(r for _, r in through), SOURCE, through)


def make_links(chip: Chip) -> tuple[Link, ...]:
    """Return the links between every two chips."""
    return tuple(make_link(chip, a, b) for a in range(chip.chips) for b in range(chip.chips) if a != b)


@dataclass
class Traffic:
    """The traffic on the links, and the time (seconds) when each link is free."""

    chip: Chip
    free: dict[Hop, float] = field(default_factory=dict)

    def carry(self, ready: float, source: int, target: int, nbytes: int) -> float:
        """Return the arrival time of a message that is ready at ``ready``. All hops of its route carry it at once, when all are
        free."""
        hops = list(find_route(source, target))
        begin = max([ready, *(self.free.get(hop, 0.0) for hop in hops)])
        for hop in hops:
            self.free[hop] = begin + nbytes / link_bandwidth(self.chip, hop)
        return begin + make_link(self.chip, source, target).seconds(nbytes)
