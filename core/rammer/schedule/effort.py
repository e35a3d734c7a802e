"""How long a policy may search, by the processor time of its thread."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class SearchTime:
    """Tells when ``seconds`` of this thread's processor time are over; to be asked as often as one likes.

    The processor's clock is a system call, a millisecond on some machines. It is read only where the wall's clock, which the
    processor's cannot outrun, says that the time could be over.
    """

    seconds: float
    _begun: float = field(default_factory=time.thread_time)
    _ask: float = field(init=False)

    def __post_init__(self) -> None:
        self._ask = time.perf_counter() + self.seconds

    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.thread_time() - self._begun

    def over(self) -> bool:
        """Whether all of them are spent."""
        if time.perf_counter() < self._ask:
            return False
        left = self.seconds - self.spent()
        self._ask = time.perf_counter() + left
        return left <= 0
