"""Measurement of a fabric's speed: small and large tensors make round trips between each two devices over their engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from rammer.distributed.distributed_program import Link, Transfer
from rammer.distributed.transport.handshake import said_by_all
from rammer.distributed.transport.memory_layout import Exposed
from rammer.distributed.transport.protocol import Endpoint, Fabric
from rammer.ir.types import TensorType

#: Bytes of the two tensors, and the number of round trips of each: the median is used, warm-up trips are dropped.
SMALL, LARGE, ROUNDS, WARM = 8, 1 << 20, {8: 40, 1 << 20: 8}, 3
#: Minimum fraction of the larger tensor's time that depends on its size, to distinguish it from noise.
SEEN: Final = 0.1
#: Sizes in the names of transfers.
SIZES: Final = (SMALL, LARGE)


def measured_links(fabric: Fabric, names: Sequence[str], timeout: float, origin: str) -> list[Link]:
    """Return the measured links between all devices in both directions, equal in every process. ``origin`` describes the
    measurement. Pairs are measured in sequence; all processes synchronise after each, within ``timeout`` seconds."""
    pairs = [(a, b) for a in range(len(names)) for b in range(a + 1, len(names))]
    both = [way for a, b in pairs for way in ((a, b), (b, a))]
    transfers = [Transfer(transfer_name(a, b, n), "", TensorType("uint8", (n,)), a, b) for a, b in both for n in SIZES]
    ends = fabric.expose(Exposed(tuple(names), tuple(transfers)))
    found: dict[int, dict[str, tuple[float, ...]]] = {d: {} for d in ends}
    for pair in pairs:
        for d, seconds in in_parallel({d: partial(_time_echoes, ends[d], d, pair) for d in pair if d in ends}).items():
            found[d]["{} {}".format(*pair)] = seconds
        fabric.meet(dict.fromkeys(ends, "measured"), timeout)  # other processes wait here for the pair
    words = said_by_all(fabric, found, timeout)
    links = []
    for a, b in pairs:
        small, large = words[a][f"{a} {b}"]
        links += [Link(*way, small, bandwidth_of(small, large), origin) for way in ((a, b), (b, a))]
    return links


def bandwidth_of(small: float, large: float) -> float:
    """Return bytes a second from the seconds for tensors of ``SMALL`` and ``LARGE`` bytes. Based on the difference of the two
    times if it exceeds the noise, else a lower bound."""
    more = large - small
    return (LARGE - SMALL) / more if more > SEEN * large else LARGE / large


def _time_echoes(end: Endpoint, device: int, pair: tuple[int, int]) -> tuple[float, ...]:
    """Return the seconds of one direction, by size, between the devices of ``pair``, the first of which sends first."""
    begins, other, seconds = device == pair[0], pair[device == pair[0]], list[float]()
    for n in SIZES:
        ways = transfer_name(device, other, n), transfer_name(other, device, n)
        end.echo(*ways, range(WARM), begins)
        seconds.append(end.echo(*ways, range(WARM, WARM + ROUNDS[n]), begins) / 2)
    return tuple(seconds)


def transfer_name(a: int, b: int, nbytes: int) -> str:
    """Return the name of a measured transfer."""
    return f"from_{a}_to_{b}_{nbytes}"


def in_parallel(
    calls: Mapping[int, Callable[[], Any]], tell: Callable[[int, BaseException], None] = lambda number, problem: None
) -> dict[int, Any]:
    """Return the result of each call, run in one thread each except the first; raises the first error. ``tell`` is called with
    each failed call's number and error."""
    if not calls:
        return {}
    found, problems = dict[int, Any](), list[BaseException]()

    def go(number: int) -> None:
        try:
            found[number] = calls[number]()
        except BaseException as problem:
            problems.append(problem)
            tell(number, problem)

    first, *others = calls
    threads = [threading.Thread(target=go, args=(n,), name=f"rammer device {n}", daemon=True) for n in others]
    for thread in threads:
        thread.start()
    go(first)
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return found
