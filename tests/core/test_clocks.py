"""Clocks of other processes, by clock exchanges at meetings: correct within the reported error, however late messages are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

import numpy as np

from rammer.distributed.transport.clock_offsets import CommonClock, Sighted, estimate_offsets
from rammer.distributed.transport.measure_links import in_parallel
from rammer.distributed.transport.protocol import Site
from rammer_testing.nonempty import some


class Meeting:
    """A fabric for threads that simulate processes; each arrives and leaves after a random delay."""

    def __init__(self, number: int, all_words: list[str], gate: threading.Barrier, chance: Random) -> None:
        self.mine, self.all_words, self.gate, self.chance = (number,), all_words, gate, chance

    def meet(self, words: Mapping[int, str], seconds: float) -> list[str]:
        """Return all words after every thread has arrived."""
        ((number, text),) = words.items()
        time.sleep(self.chance.random() * 2e-4)
        self.all_words[number] = text
        self.gate.wait(seconds)
        found = list(self.all_words)
        self.gate.wait(seconds)
        time.sleep(self.chance.random() * 2e-4)
        return found


def set_to(ahead: float, rate: float) -> Callable[[], float]:
    return lambda: time.perf_counter() * rate + ahead


def test_clocks_are_known_to_their_error(rng: np.random.Generator) -> None:
    count = 3
    ahead = [float(a) for a in rng.uniform(-1e4, 1e4, count)]
    rates = [1.0, *(1 + float(r) for r in rng.uniform(-1e-4, 1e-4, count - 1))]
    clocks = [set_to(a, r) for a, r in zip(ahead, rates, strict=True)]
    words, gate = [""] * count, threading.Barrier(count)
    fabrics: list[Any] = [Meeting(n, words, gate, Random(int(rng.integers(2**31)))) for n in range(count)]
    sites = [Site(f"d{n}", process=n) for n in range(count)]

    def look() -> list[Sighted]:
        found = in_parallel({n: partial(estimate_offsets, fabrics[n], sites, 30.0, clocks[n]) for n in range(count)})
        assert found[1] == found[2] == []
        first: list[Sighted] = found[0]
        return first

    begun = look()
    time.sleep(0.05)
    middle = time.perf_counter()
    time.sleep(0.05)
    ended = look()
    pairs = [CommonClock(a, b) for a, b in zip(begun, ended, strict=True)]
    assert pairs[0].error == 0 and pairs[0].common(1.5) == 1.5
    for number, clock in some(list(enumerate(pairs))[1:]):
        shown = middle * rates[number] + ahead[number]
        wrong = abs(clock.common(shown) - (middle + ahead[0]))
        # A clock that is 1e-4 fast adds that fraction of the error. Values of 1e4 s are accurate to about 1e-12.
        assert wrong <= clock.error * 1.001 + 1e-9, (wrong, clock)
        assert 0 < clock.error < 1


def test_devices_of_one_process_have_one_clock() -> None:
    words, gate = [""], threading.Barrier(1)
    fabric: Any = Meeting(0, words, gate, Random(0))
    (found,) = estimate_offsets(fabric, [Site("one")], 5.0, time.perf_counter)
    assert (found.ahead, found.error) == (0.0, 0.0)


def test_between_two_looks_a_clock_goes_evenly() -> None:
    clock = CommonClock(Sighted(10.0, 2.0, 0.25), Sighted(20.0, 3.0, 0.5))
    assert [clock.common(s) for s in (12.0, 23.0, 17.5)] == [10.0, 20.0, 15.0] and clock.error == 0.5
    assert CommonClock(Sighted(1.0), Sighted(1.0)).common(7.0) == 7.0
