"""Programmatic dependent launch: which kernels let their dependents start early, chosen by measurement when a program is loaded.

A dependent kernel that starts early fetches its constants while its predecessors still work, which hides most of what a
launch costs. But its blocks are placed while the predecessors' still occupy their SMs: they may share some SMs and leave
others idle, which costs more than it gains where blocks are few and large. Only the whole graph can tell. Results do not
depend on the choice: every kernel waits for its predecessors before it reads what they write.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from rammer_cuda.driver import check_result, import_driver
from rammer_cuda.interleaved_timing import STEADY, in_turns

#: The device variable by which a kernel is told, in every module (``device/order.cuh``).
SWITCH = b"rm_pdl"
#: Replays of one measurement, of which there are so many where it is disturbed; kernels tried singly, those with most launches
#: first.
REPLAYS, AGAIN, TRIED = 7, 3, 24
#: Seconds of runs before the first measurement: at least, and at most.
BEFORE = (0.05, 0.1)
#: Seconds after which no further kernel is tried: a large program should not wait for what little it may gain.
LONGEST = 0.2
#: A change stays if it saves more than this share: about what two measurements of one graph differ by.
NOISE = 0.004


class Switches:
    """The switches of the loaded kernels: addresses by entry point. All are off at first."""

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
        """Set what an earlier process chose, if ``known`` is that; whether it was."""
        if not isinstance(known, list) or not all(isinstance(e, str) and e in self.address for e in known):
            return False
        self.set(known)
        return True

    def choose(self, launched: Iterable[str], replay: Callable[[], float]) -> float:
        """Leave on what makes ``replay`` (seconds of one run) fastest: none or all, then kernel by kernel.

        ``launched`` names the kernel of every launch. Returns the seconds measured at the end.
        """
        least = in_turns({"": replay}, BEFORE).seconds[""]
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
        """Go back to ``before`` unless what is on now is faster than ``best``; returns the better time."""
        seconds = self._measure_replays(best, replay)
        if seconds < best * (1 - NOISE):
            return seconds
        self.set(before)
        return best

    @staticmethod
    def _measure_replays(best: float, replay: Callable[[], float]) -> float:
        """The least of some replays; of more where all took clearly longer than ``best``, as beside another process."""
        least = math.inf
        for _ in range(AGAIN):
            least = min(least, *(replay() for _ in range(REPLAYS)))
            if least <= STEADY * best:
                break
        return least
