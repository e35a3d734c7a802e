"""Programmatic dependent launch: kernels that let their dependents start early, chosen by measurement at load time.

A dependent kernel that starts early fetches its constants while its predecessors still work, which hides most of the launch cost.
But its blocks are placed while the predecessors still occupy their SMs. They may share some SMs and leave others idle, which
costs more than it gains if blocks are few and large. Only the whole graph can be measured. Results do not depend on the choice:
every kernel waits for its predecessors before it reads their results.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from rammer_cuda.driver import check_result, import_driver

#: The device variable that switches early starts of a kernel, in every module (``device/order.cuh``).
SWITCH = b"rm_pdl"
#: Replays of one measurement, its maximum repetitions if disturbed, and the kernels tried singly, most launches first.
REPLAYS, AGAIN, TRIED = 7, 3, 24
#: Seconds after which no further kernel is tried: a large program gains too little for a longer search.
LONGEST = 0.2
#: A change stays if it saves more than this fraction: about the difference of two measurements of one graph.
NOISE = 0.004


class Switches:
    """The switches of the loaded kernels: addresses by entry point. All are initially off."""

    def __init__(self, modules: Mapping[str, object]) -> None:
        self.address = {
            e: check_result(import_driver().cuModuleGetGlobal(m, SWITCH), f"finding a switch of {e}")[0]
            for e, m in modules.items()
        }
        self.on: frozenset[str] = frozenset()

    def set(self, entries: Iterable[str]) -> None:
        """Let the dependents of exactly these kernels start early."""
        wanted = frozenset(entries)
        for entry in wanted ^ self.on:
            value = np.array([entry in wanted], np.int32)
            check_result(import_driver().cuMemcpyHtoD(self.address[entry], value.ctypes.data, 4), "setting a switch")
        self.on = wanted

    def recall(self, known: object) -> bool:
        """Set an earlier process's choice from ``known``. Return False if it is malformed."""
        if not isinstance(known, list) or not all(isinstance(e, str) and e in self.address for e in known):
            return False
        self.set(known)
        return True

    def choose(self, launched: Iterable[str], replay: Callable[[], float]) -> float:
        """Keep the switches that minimise ``replay`` (seconds of one run): none or all, then kernel by kernel. ``launched`` names
        the kernel of every launch. Returns the seconds measured at the end."""
        from rammer.tuning.interleaved_timing import Rounds, time_interleaved

        warming = Rounds(burst=7, seconds=(0.05, 0.1), until_steady=True)  # until the clock is up
        least = time_interleaved({"": replay}, warming).all_run().best[""]
        counts, begin = Counter(launched), time.perf_counter()
        best = self._measure_replays(least, replay)
        self.set(counts)
        best = self._retain_if_faster(best, frozenset(), replay)
        for entry, _ in counts.most_common(TRIED):
            if time.perf_counter() - begin > LONGEST:
                break
            before = self.on
            self.set(before ^ {entry})
            best = self._retain_if_faster(best, before, replay)
        return best

    def _retain_if_faster(self, best: float, before: frozenset[str], replay: Callable[[], float]) -> float:
        """Restore ``before`` unless the current switches are faster than ``best``; return the better time."""
        seconds = self._measure_replays(best, replay)
        if seconds < best * (1 - NOISE):
            return seconds
        self.set(before)
        return best

    @staticmethod
    def _measure_replays(best: float, replay: Callable[[], float]) -> float:
        """Return the minimum of some replays, of more if all were clearly longer than ``best``, as with another process."""
        from rammer.tuning.interleaved_timing import STEADY

        least = math.inf
        for _ in range(AGAIN):
            least = min(least, *(replay() for _ in range(REPLAYS)))
            if least <= STEADY * best:
                break
        return least
