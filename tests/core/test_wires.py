"""Connections between processes: what is written arrives where it belongs, in order; strangers stay out, the dead are missed."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from rammer.device.loader import Registry
from rammer.errors import DeviceFailure
from rammer.ir.spread import Transfer
from rammer.ir.types import TensorType
from rammer.testing.some import some
from rammer.transport.counters import Counters
from rammer.transport.endpoint import MemoryEndpoint
from rammer.transport.exposed import Exposed
from rammer.transport.find import choose
from rammer.transport.local import zeros
from rammer.transport.measure import in_parallel
from rammer.transport.protocol import Site
from rammer.transport.tcp import TcpWriter
from rammer.transport.wires import HEADER, HELLO, Inbox, Introduction, Wire, wired

#: Seconds that anything here may take on a busy machine.
PATIENCE = 60.0


class Unwatched:
    """In the place of what ends a process."""

    def doing(self, what: str, last: str = "") -> None:
        """Nobody ends this one."""


class Meeting:
    """Threads in the place of processes."""

    def __init__(self, count: int) -> None:
        self.words, self._all = [""] * count, threading.Barrier(count)

    def say(self, number: int, word: str) -> list[str]:
        self.words[number] = word
        self._all.wait(PATIENCE)
        return list(self.words)


@contextmanager
def joined(*transfers: Transfer, count: int = 2, depth: int = 1) -> Iterator[tuple[list[MemoryEndpoint], list[dict[int, Wire]]]]:
    """Endpoints of some devices, joined as processes would be, and their wires."""
    exposed, meeting = Exposed(tuple(f"d{n}" for n in range(count)), transfers, depth), Meeting(count)
    inboxes = [Inbox() for _ in range(count)]
    for number, inbox in enumerate(inboxes):
        inbox.add(zeros(exposed.sizes[number], exposed.aligned), exposed)

    def join(number: int) -> dict[int, Wire]:
        return wired(number, inboxes[number], lambda word: meeting.say(number, word), PATIENCE)

    found = in_parallel({n: lambda n=n: join(n) for n in range(count)})  # type: ignore[misc]
    wires = [found[n] for n in range(count)]
    ends = [
        MemoryEndpoint(n, exposed, TcpWriter(wires[n], inboxes[n], 0, Unwatched()), PATIENCE)  # type: ignore[arg-type]
        for n in range(count)
    ]
    try:
        yield ends, wires
    finally:
        for wire in [w for those in wires for w in those.values()]:
            wire.done()
        for wire in [w for those in wires for w in those.values()]:
            wire.close(PATIENCE)


def test_all_that_is_written_is_read_in_order(rng: np.random.Generator) -> None:
    sizes = [*(int(n) for n in rng.integers(0, 4000, 4)), 1, 8, 9, 300_000]
    kinds = [TensorType(str(rng.choice(["float32", "int8", "float64"])), (n,)) for n in sizes]
    ways = [tuple(int(n) for n in rng.permutation(3)[:2]) for _ in kinds]
    transfers = tuple(Transfer(f"t{i}", f"t{i}", t, *w) for i, (t, w) in enumerate(zip(kinds, ways, strict=True)))
    runs, depth = 40, int(rng.integers(1, 4))
    patterns = {t.name: rng.integers(0, 100, t.type.shape).astype(t.type.dtype) for t in transfers}

    def play(end: MemoryEndpoint) -> bool:
        right = True
        for run in range(runs):
            for t in transfers:
                if t.source == end.device:
                    end.put(t.name, run, patterns[t.name] + patterns[t.name].dtype.type(run % 27))
            for t in transfers:
                if t.target == end.device:
                    end.wait(t.name, run)
                    right &= bool((end.slot(t.name, run) == patterns[t.name] + patterns[t.name].dtype.type(run % 27)).all())
                    end.release(t.name, run)
        return right

    with joined(*transfers, count=3, depth=depth) as (ends, _):
        assert all(in_parallel({e.device: lambda e=e: play(e) for e in ends}).values())  # type: ignore[misc]
        counted = [e.counters for e in ends]
    assert sum(c.payload_writes for c in counted) == runs * sum(t.nbytes > 0 for t in transfers)
    assert sum(c.nbytes for c in counted) == runs * sum(t.nbytes for t in transfers)
    for c in some(counted):
        assert c.allocations == c.copies == c.serialisations == c.reads == 0 and isinstance(c, Counters)


def test_two_that_write_much_to_each_other_do_not_wait_for_each_other() -> None:
    kind = TensorType("uint8", (24 << 20,))  # more than systems keep for a connection
    there, back = Transfer("there", "a", kind, 0, 1), Transfer("back", "b", kind, 1, 0)
    with joined(there, back) as (ends, _):
        full = np.full(kind.shape, 7, np.uint8)
        in_parallel({0: lambda: ends[0].put("there", 0, full), 1: lambda: ends[1].put("back", 0, full)})
        for end, name in some(list(zip(ends, ("back", "there"), strict=True))):
            end.wait(name, 0)
            assert (end.slot(name, 0) == 7).all()


def test_a_tensor_arrives_while_its_reader_computes() -> None:
    there = Transfer("there", "a", TensorType("uint8", (4 << 20,)), 0, 1)
    with joined(there) as (ends, _):
        ends[0].put("there", 0, np.ones(4 << 20, np.uint8))
        until = time.monotonic() + PATIENCE
        while not ends[1].arrived("there", 0) and time.monotonic() < until:  # which calls nothing of the transport's
            time.sleep(0.001)
        assert (ends[1].slot("there", 0) == 1).all()


def test_who_dies_is_missed_and_who_tells_is_believed() -> None:
    there = Transfer("there", "a", TensorType("uint8", (4,)), 0, 1)
    with joined(there) as (ends, wires):
        wires[0][1].done()
        with pytest.raises(DeviceFailure, match=r"device 0 \(d0\) ended: its process has died, or the network") as told:
            ends[1].wait("there", 0)
        assert "transfer there of run 0" in told.value.where
    with joined(there) as (ends, wires):
        ends[0].fail("a kernel broke")
        wires[0][1].done()
        with pytest.raises(DeviceFailure, match=r"device 0 \(d0\) ended: a kernel broke"):
            ends[1].wait("there", 0)
        with pytest.raises(DeviceFailure, match="connection to device 1 failed") as told:
            ends[0].put("there", 0, np.zeros(4, np.uint8))
        assert told.value.where == "device 0 (d0) waits for device 1 (d1): the write of transfer there of run 0"
    with joined(there) as (ends, wires):
        ends[1].fail("a cable broke")
        wires[1][0].done()
        until = time.monotonic() + PATIENCE
        while not ends[0].reach.memory[512:520].any() and time.monotonic() < until:
            time.sleep(0.001)
        wires[0][1].done()
        with pytest.raises(DeviceFailure, match=r"device 1 \(d1\) ended: a cable broke"):
            ends[0].put("there", 0, np.zeros(4, np.uint8))


@pytest.mark.parametrize("wrong", ["memory", "place", "size"])
def test_nothing_is_written_where_nothing_is_exposed(wrong: str) -> None:
    there = Transfer("there", "a", TensorType("uint8", (4,)), 0, 1)
    with joined(there) as (ends, wires):
        size = ends[1].reach.memory.size
        before = ends[1].reach.memory.copy()
        bad = {"memory": (1, 0, 16), "place": (0, 2**63, 16), "size": (0, size - 8, 16)}[wrong]
        wires[0][1].connection.sendall(HEADER.pack(*bad) + bytes([255]) * 16)
        with pytest.raises(DeviceFailure, match="ended: it wrote 16 bytes where nothing is exposed"):
            ends[1].wait("there", 0)
        assert (ends[1].reach.memory[1024:] == before[1024:]).all()


def test_strangers_are_not_let_in() -> None:
    own = Introduction(0)
    port = own.listener.getsockname()[1]
    words = [own.words, f"{'0' * 32} 1 127.0.0.1"]
    sent = [HELLO.pack(b"x" * 32, 1), HELLO.pack(own.words[:32].encode(), 9), b"GET / HTTP/1.1\r\n\r\n" + bytes(40)]
    for hello in sent:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(hello)
            with pytest.raises(DeviceFailure, match="process 0 waits for others to connect"):
                own.accept(words, time.monotonic() + 0.3)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    with pytest.raises(DeviceFailure, match=r"process 0 cannot connect to process 1 at 127\.0\.0\.1, port 1"):
        own.connect(1, words[1], time.monotonic() + 5)
    with pytest.raises(DeviceFailure, match="at no address"):
        own.connect(1, f"{'0' * 32} 1", time.monotonic() + 5)
    own.listener.close()


def test_words_are_never_seen_in_halves() -> None:
    """A word comes in two packets: before the second one its first half is not there."""
    there = Transfer("there", "a", TensorType("uint8", (4,)), 0, 1)
    with joined(there) as (ends, wires):
        place = ends[1].exposed.places["there"].flags
        connection, word = wires[0][1].connection, struct.pack("<Q", 0x0101)
        connection.sendall(HEADER.pack(0, place, 8) + word[:1])
        time.sleep(0.05)
        assert not ends[1].arrived("there", 0)
        connection.sendall(word[1:])
        ends[1].wait("there", 0)


def test_between_hosts_tcp_is_taken_and_within_one_mpi() -> None:
    pytest.importorskip("mpi4py")
    for apart, name in some([(True, "tcp"), (False, "mpi")]):
        sites = [Site(f"d{n}", "cpu", n, apart) for n in range(3)]
        assert choose(Registry([]), sites).name == name
        assert choose(Registry([]), sites, "tcp").name == "tcp"
