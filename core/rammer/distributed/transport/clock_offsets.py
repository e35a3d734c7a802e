"""One clock for several processes: how far ahead each one's is of device 0's, and how well that is known.

All processes meet again and again. Each looks at its clock between two meetings, so after device 0 has come to the first of them
and before it has left the second. Those two moments by its clock are bounds, and the closest ones count: the other's look is half
way, give or take half of the time between them (as in Cristian, Probabilistic clock synchronization, 1989).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rammer.distributed.transport.handshake import said_by_all
from rammer.distributed.transport.protocol import Fabric, Site

__all__ = ["CommonClock", "Sighted", "estimate_offsets"]

#: Meetings, of which the shortest counts.
MEETINGS: Final = 200


@dataclass(frozen=True, slots=True)
class Sighted:
    """Another clock, looked at when device 0's showed ``at``: it was ``ahead`` by so much, give or take ``error``. In seconds."""

    at: float
    ahead: float = 0.0
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class CommonClock:
    """A device's clock between two looks; in between it goes evenly, as clocks of quartz do."""

    first: Sighted
    last: Sighted

    @property
    def error(self) -> float:
        """Seconds by which ``common`` may be wrong."""
        return max(self.first.error, self.last.error)

    def common(self, seconds: float) -> float:
        """What device 0's clock shows when this one shows ``seconds``."""
        begin, end = (s.at + s.ahead for s in (self.first, self.last))
        share = (seconds - begin) / (end - begin) if end > begin else 0.0
        return seconds - self.first.ahead - share * (self.last.ahead - self.first.ahead)


def estimate_offsets(fabric: Fabric, sites: Sequence[Site], seconds: float, now: Callable[[], float]) -> list[Sighted]:
    """All devices' clocks, in the process of device 0; elsewhere nothing. Called in every process alike. Devices of device 0's
    process have its clock, and no error. DeviceFailure where the others do not come for so many ``seconds``."""
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
