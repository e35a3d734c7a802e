"""Messages between processes: writes arrive at their target and in order, whatever the network's timing."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rammer.device.loader import Registry
from rammer.distributed.distributed_program import Transfer
from rammer.distributed.transport.endpoint import Array, MemoryEndpoint
from rammer.distributed.transport.local import aligned_zeros
from rammer.distributed.transport.memory_layout import Exposed
from rammer.distributed.transport.messages import PIECE, Mailbox, MessageWriter
from rammer.distributed.transport.protocol import Site
from rammer.distributed.transport.transport_registry import choose_transport
from rammer.errors import DeviceFailure
from rammer.ir.types import TensorType
from rammer_testing.nonempty import some


class Post:
    """A network in place of MPI's: each poll may deliver the next message of a process; order is preserved."""

    def __init__(self, count: int, rng: np.random.Generator) -> None:
        self.size, self._rng = count, rng
        self.sent = {(a, b): deque[tuple[int, Array]]() for a in range(count) for b in range(count)}

    def later(self) -> bool:
        return bool(self._rng.random() < 0.5)


class Receipt:
    """A request: a send is done when MPI has copied the bytes, a receive when they have arrived."""

    def __init__(self, comm: PostComm, source: int | None = None, into: Array | None = None) -> None:
        self.comm, self.source, self.into, self.done = comm, source, into, False

    def test(self) -> bool:
        if not self.done and not self.comm.post.later():
            if self.into is not None and self.source is not None:
                waiting = self.comm.post.sent[self.source, self.comm.rank]
                if not waiting or waiting[0][0] != 2 or self.comm.posted[self.source][0] is not self:
                    return False
                self.comm.posted[self.source].popleft()
                self.into[:] = waiting.popleft()[1]
            self.done = True
        return self.done


class PostComm:
    """The communicator of one process."""

    def __init__(self, post: Post, rank: int) -> None:
        self.post, self.rank, self.size = post, rank, post.size
        self.posted = {n: deque[Receipt]() for n in range(post.size)}

    def Isend(self, what: Any, target: int, tag: int) -> Receipt:
        values = what[0] if isinstance(what, list) else what.view(np.uint8)
        assert values.size <= PIECE
        self.post.sent[self.rank, target].append((tag, values.copy()))
        return Receipt(self)

    def Iprobe(self, source: int, tag: int) -> bool:
        waiting = self.post.sent[source, self.rank]
        return bool(waiting) and waiting[0][0] == tag and not self.post.later()

    def Recv(self, into: Array, source: int, tag: int) -> None:
        found, values = self.post.sent[source, self.rank].popleft()
        assert found == tag
        into.view(np.uint8)[:] = values

    def Irecv(self, what: Any, source: int, tag: int) -> Receipt:
        self.posted[source].append(Receipt(self, source, what[0]))
        return self.posted[source][-1]


MPI = SimpleNamespace(
    BYTE=None, Exception=RuntimeError, Request=SimpleNamespace(Testall=lambda requests: all([r.test() for r in requests]))
)


class Unwatched:
    """A stand-in for the watchdog that ends a process."""

    def doing(self, what: str, last: str = "") -> None:
        """Do nothing, since this process has no watchdog."""


def boxes(exposed: Exposed, rng: np.random.Generator) -> list[Mailbox]:
    count = len(exposed.devices)
    post = Post(count, rng)
    found = [Mailbox(MPI, PostComm(post, n)) for n in range(count)]
    for number, box in enumerate(found):
        box.memories.append(aligned_zeros(exposed.sizes[number], exposed.aligned))
    return found


@pytest.mark.parametrize("nbytes", [0, 4, PIECE - 4, PIECE, PIECE + 4, 5 * PIECE + 12])
def test_a_flag_is_never_there_before_its_tensor(nbytes: int, rng: np.random.Generator) -> None:
    """Check two processes that send to each other without waiting for reception."""
    kind = TensorType("float32", (nbytes // 4,))
    there, back = Transfer("there", "x", kind, 0, 1), Transfer("back", "y", kind, 1, 0)
    exposed = Exposed(("d0", "d1"), (there, back), int(rng.integers(1, 4)))
    made = boxes(exposed, rng)
    ends = [MemoryEndpoint(n, exposed, MessageWriter(MPI, box, 0, Unwatched()), 60.0) for n, box in enumerate(made)]  # type: ignore[arg-type]
    tensors = rng.standard_normal((6, 2, nbytes // 4)).astype(np.float32)
    for run in range(6):
        for number, name in enumerate(("there", "back")):
            while not ends[number].free(name, run):
                made[number].receive()
            ends[number].put(name, run, tensors[run, number])
        for number, name in ((1, "there"), (0, "back")):
            while not ends[number].arrived(name, run):
                made[number].receive()
            assert np.array_equal(ends[number].slot(name, run), tensors[run, 1 - number])
            ends[number].release(name, run)
    for box in some(made):
        box.end()
    while not all(box.over for box in made):
        for box in made:
            box.receive()


@pytest.mark.parametrize(("number", "place", "size"), [(1, 0, 4), (-2, 0, 4), (0, -4, 4), (0, 1 << 40, 4)])
def test_a_header_that_points_nowhere_is_refused(number: int, place: int, size: int, rng: np.random.Generator) -> None:
    exposed = Exposed(("d0", "d1"), (), 1)
    first, second = boxes(exposed, rng)
    first.send(1, number, place, np.zeros(size, np.uint8))
    with pytest.raises(DeviceFailure, match="where nothing is exposed"):
        for _ in range(1000):
            second.receive()


@pytest.mark.parametrize(("apart", "name"), [(True, "messages"), (False, "mpi")])
def test_hosts_that_are_apart_send_messages(apart: bool, name: str) -> None:
    pytest.importorskip("mpi4py")
    assert choose_transport(Registry([]), [Site(f"d{n}", "cpu", n, apart) for n in range(2)]).name == name
