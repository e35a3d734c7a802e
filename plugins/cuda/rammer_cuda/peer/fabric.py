"""The transport ``cuda-peer``: GPUs of one host, in one process or several. Control messages use another transport before the
first run: the in-process one, or MPI."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from typing import Any

import numpy as np

from rammer.device.manifest import Array, Backend
from rammer.distributed.distributed_program import DistributedProgram
from rammer.distributed.transport import LOCAL, MPI, Counters, Endpoint, Exposed, Fabric, Party, Site
from rammer.errors import DeviceFailure, DeviceUnavailable, MissingDependency

from rammer_cuda.hardware import gpu_count, import_cupy
from rammer_cuda.peer.exchange import ANYWHERE, TO_HOST, End
from rammer_cuda.peer.layout import PeerLayout, Route
from rammer_cuda.peer.memory import Offer, PeerMemory, ReachedMemory, can_reach
from rammer_cuda.peer.part import CudaPart, chain_launches


class PeerFabric:
    """A fabric of GPUs that reach each other's memory. Processes exchange control messages by ``words`` (default for several:
    MPI)."""

    def __init__(self, party: Party, words: Fabric | None = None) -> None:
        self.party = party
        self.words = words or (LOCAL if len({s.process for s in party.sites}) == 1 else MPI).open(party)
        self.mine = self.words.mine
        self.opened: list[Any] = []

    def meet(self, words: Mapping[int, str], seconds: float) -> list[str]:
        """Exchange messages by the other transport."""
        return self.words.meet(words, seconds)

    def expose(self, exposed: Exposed) -> Mapping[int, Endpoint]:
        """Allocate memory on each GPU and map it on all. The memory is zero before the first write."""
        routes = tuple(Route(t.name, t.nbytes, t.source, t.target) for t in exposed.transfers)
        layout = PeerLayout(routes, len(exposed.devices), exposed.depth)
        abroad = len(self.mine) < len(exposed.devices)
        memory = {d: PeerMemory(index_of(exposed.devices[d]), layout.nbytes(d)) for d in self.mine}
        self.opened += memory.values()
        said = self.meet({d: encode_offer(m.offer(abroad)) for d, m in memory.items()}, self.party.timeout)
        offers = [decode_offer(text) for text in said]
        check_apart(exposed.devices, offers)
        ends, flags = {}, self.words.expose(Exposed(exposed.devices, (), exposed.depth))
        for d in self.mine:
            reached = ReachedMemory(index_of(exposed.devices[d]), offers)
            end = End(index_of(exposed.devices[d]), d, layout, reached.addresses, self.party.timeout)
            self.opened = [end, reached, *self.opened]  # unmap memory before its owner frees it
            ends[d] = PeerEndpoint(end, flags[d], self.party.timeout)
        self.meet(dict.fromkeys(self.mine, "mapped"), self.party.timeout)
        return ends

    def close(self, failed: bool = False) -> None:
        """Unmap the memory of other processes, then free this process's memory once all have unmapped. If a device has
        ``failed``, errors of its GPU are suppressed."""
        mapped = [x for x in self.opened if not isinstance(x, PeerMemory)]
        with suppress(*[DeviceFailure] * failed):
            for thing in mapped:
                thing.close()
        if not failed and self.opened:
            self.meet(dict.fromkeys(self.mine, "let go"), self.party.timeout)
        for thing in self.opened:
            with suppress(*[DeviceFailure] * failed):
                thing.close()
        self.opened = []
        self.words.close(failed)


class PeerEndpoint(Endpoint):
    """The endpoint of a GPU, which runs its part without the host. The host
    waits for all other operations."""

    def __init__(self, end: End, words: Endpoint, timeout: float) -> None:
        self.end, self.words, self.timeout, self.counters = end, words, timeout, Counters()
        with end.unit:
            self.stream = import_cupy().cuda.Stream(non_blocking=True)

    def part(self, spread: DistributedProgram, device: int, backend: Backend) -> CudaPart:
        """Return the device's part: waits, steps and writes are queued on the GPU, without the host."""
        return CudaPart(spread, device, backend, self.end, self.counters)

    def slot(self, name: str, run: int) -> Any:
        """Return the GPU memory in which a transfer arrives, as bytes."""
        nbytes, cp = self.end.routes[name].nbytes, import_cupy()
        memory = cp.cuda.UnownedMemory(self.end.slot(name, run), max(nbytes, 1), self.end)
        return cp.ndarray((nbytes,), np.uint8, cp.cuda.MemoryPointer(memory, 0))

    def arrived(self, name: str, run: int) -> bool:
        """Return True if the transfer has arrived completely."""
        return self._read_word(name, "flag") > run

    def free(self, name: str, run: int) -> bool:
        """Return True if the slot that ``put`` would write is free."""
        return self._read_word(name, "credit") > run - self.end.layout.depth

    def wait(self, name: str, run: int) -> None:
        """Wait on the host for a launch that waits."""
        self._all([self.end.exchange([self.end.wait(name)])])

    def put(self, name: str, run: int, values: Array) -> None:
        """Write values from the GPU's memory, or from the host's by a copy, which is counted. A GPU allocation is avoided, since
        another GPU may be waiting."""
        end, route = self.end, self.end.routes[name]
        if isinstance(values, np.ndarray):
            given = np.ascontiguousarray(values)
            copy = HostCopy(end.landing(name, run), given)
            self._all([end.exchange([end.room(name)])])  # a timed-out wait must prevent the copy
            self._all([copy, end.exchange([end.put(name, run, 0, 0)])])
            self.counters.host_copies += 1
        else:
            self._all([end.exchange([end.put(name, run, values.data.ptr)])])
        self.counters.payload_writes += 1 if route.nbytes else 0
        self.counters.nbytes += route.nbytes
        self.counters.flag_writes += 1

    def release(self, name: str, run: int) -> None:
        """Release the slot to the sender."""
        self._all([self.end.exchange([self.end.credit(name)])])
        self.counters.flag_writes += 1

    def echo(self, out: str, into: str, runs: range, begins: bool) -> float:
        """Return the seconds of a round of writes and waits, by the GPU's clock.

        Each GPU runs a graph, as in a model's run. The first of several rounds is uncounted. Both graphs are queued at once, so
        the other host's delays are not measured. The payload is the content of slot 0 of ``into``."""
        end, source, rounds = self.end, self.end.slot(into, 0), list[list[Any]]()
        for run in runs:
            sent, got = end.exchange([end.put(out, run, source)]), end.exchange([end.wait(into)])
            rounds.append([*((sent, got) if begins else (got, sent)), end.exchange([end.credit(into)])])
        met = rounds[: len(rounds) > 1]
        with end.unit, chain_launches([*chain(*met)]) as meeting, chain_launches([*chain(*rounds[len(met) :])]) as timed:
            first, last = (import_cupy().cuda.Event() for _ in range(2))
            meeting.launch(self.stream.ptr)
            first.record(self.stream)
            timed.launch(self.stream.ptr)
            last.record(self.stream)
            self.stream.synchronize()
            seconds = float(import_cupy().cuda.get_elapsed_time(first, last)) * 1e-3
        end.check()
        self.counters.payload_writes += len(runs) if end.routes[out].nbytes else 0
        self.counters.nbytes += len(runs) * end.routes[out].nbytes
        self.counters.flag_writes += 2 * len(runs)
        return seconds / (len(rounds) - len(met))

    def fail(self, why: str) -> None:
        """Report a failure by the other transport; the GPU's waits end by timeout."""
        self.words.fail(why)

    def _read_word(self, name: str, kind: str) -> int:
        word = np.zeros(1, np.uint32)
        with self.end.unit:
            import_cupy().cuda.runtime.memcpy(word.ctypes.data, self.end.word(self.end.number, name, kind), word.nbytes, TO_HOST)
        return int(word[0])

    def _all(self, launches: Sequence[Any]) -> None:
        begin = time.perf_counter()
        with self.end.unit:
            for launch in launches:
                launch.launch(self.stream.ptr)
            self.stream.synchronize()
        self.counters.waited += time.perf_counter() - begin
        self.end.check()


class HostCopy:
    """A copy of host memory to an address of any GPU."""

    def __init__(self, to: int, values: Array) -> None:
        self.to, self.values = to, values

    def launch(self, stream: int) -> None:
        """Queue the copy on the stream with this handle."""
        if self.values.nbytes:
            import_cupy().cuda.runtime.memcpyAsync(self.to, self.values.ctypes.data, self.values.nbytes, ANYWHERE, stream)


def index_of(device: str) -> int:
    """Return the GPU's number, such as 1 for ``cuda:1``."""
    return int(device.partition(":")[2] or 0)


def check_apart(devices: Sequence[str], offers: Sequence[Offer]) -> None:
    """Raise DeviceUnavailable if two devices are one GPU, which happens if several processes see all GPUs."""
    seen: dict[str, int] = {}
    for number, offer in enumerate(offers):
        other = seen.setdefault(offer.bus, number)
        if other != number:
            raise DeviceUnavailable(
                f"devices {other} ({devices[other]}) and {number} ({devices[number]}) are one GPU, the one at {offer.bus}",
                hint="name a GPU for each process (--device cuda:0,cuda:1), or show each one its own (CUDA_VISIBLE_DEVICES)",
            )


def encode_offer(offer: Offer) -> str:
    """Encode an offer as text."""
    return json.dumps(asdict(offer) | {"handle": offer.handle.hex()})


def decode_offer(text: str) -> Offer:
    """Decode an offer. Raises DeviceFailure if another process sent an invalid text."""
    try:
        found = json.loads(text)
        return Offer(**{**found, "handle": bytes.fromhex(found["handle"])})
    except (ValueError, TypeError, KeyError) as problem:
        raise DeviceFailure(f"another process sent an invalid memory offer: {text[:80]!r}") from problem


def connects(a: Site, b: Site) -> str | None:
    """Return the reason why two sites cannot join by peer access, or None. Between processes, the driver's permission is checked
    on joining."""
    for site in (a, b):
        if site.device.partition(":")[0] != "cuda" or site.kind != "gpu":
            return f"{site.device} is not a GPU of cuda"
        if site.multi_host:
            return "the processes run on several hosts"
    if a.process == b.process:
        if index_of(a.device) == index_of(b.device):
            return f"{a.device} twice: a GPU cannot be two devices of one run"
        try:
            if gpu_count() <= max(index_of(a.device), index_of(b.device)):
                return f"this process does not see both {a.device} and {b.device}"
            if not can_reach(index_of(a.device), index_of(b.device)):
                return f"the driver allows no access between {a.device} and {b.device}"
        except (MissingDependency, DeviceFailure) as problem:
            return str(problem)
    return None
