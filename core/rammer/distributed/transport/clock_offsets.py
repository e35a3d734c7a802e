"""One clock for several processes: the offset of each clock from that of device 0, with its uncertainty.

All processes synchronise repeatedly. Each reads its clock between two synchronisations: after device 0 has entered the first and
before it has left the second. These two times on its clock are bounds, and the closest bounds are used. The estimate is their
midpoint, plus or minus half of their distance (as in Cristian, Probabilistic clock synchronization, 1989).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rammer.distributed.transport.handshake import said_by_all
from rammer.distributed.transport.protocol import Fabric, Site

__all__ = ["CommonClock", "Sighted", "estimate_offsets"]

#: Number of synchronisations, of which the shortest is used.
MEETINGS: Final = 200


@dataclass(frozen=True, slots=True)
class Sighted:
    """A reading of another clock when device 0's showed ``at``: it was ``ahead``, plus or minus ``error``. In seconds."""

    at: float
    ahead: float = 0.0
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class CommonClock:
    """A device's clock, interpolated linearly between two readings."""

    first: Sighted
    last: Sighted

    @property
    def error(self) -> float:
        """The maximum error of ``common`` in seconds."""
        return max(self.first.error, self.last.error)

    def common(self, seconds: float) -> float:
        """Return the time of device 0's clock when this clock shows ``seconds``."""
        begin, end = (s.at + s.ahead for s in (self.first, self.last))
        share = (seconds - begin) / (end - begin) if end > begin else 0.0
        return seconds - self.first.ahead - share * (self.last.ahead - self.first.ahead)


def estimate_offsets(fabric: Fabric, sites: Sequence[Site], seconds: float, now: Callable[[], float]) -> list[Sighted]:
    """Return the offsets of all devices' clocks in the process of device 0, an empty list elsewhere.

    Called in every process alike. Devices of device 0's process share its clock, with error 0. Raises DeviceFailure if other
    processes do not arrive within ``seconds``."""
    best: list[Sighted | None] = [None] * len(sites)
    fabric.meet(dict.fromkeys(fabric.mine, ""), seconds)
    entered = now()
    fabric.meet(dict.fromkeys(fabric.mine, ""), seconds)
    for _ in range(MEETINGS):
        look = now()
        said = said_by_all(fabric, dict.fromkeys(fabric.mine, look), seconds)
        left = now()
        middle, error = (entered + left) / 2, (left - entered) / 2
        for device, (shown, known) in enumerate(zip(said, best, strict=True)):
            if known is None or error < known.error:
                best[device] = Sighted(middle, shown - middle, error)
        entered = look
    if 0 not in fabric.mine:
        return []
    found = [s or Sighted(entered) for s in best]
    return [Sighted(f.at) if s.process == sites[0].process else f for s, f in zip(sites, found, strict=True)]
