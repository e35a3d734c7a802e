"""Registered memory and its flags: tensors are not read early, not overwritten unread, and waits end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from rammer.device.hooks import hookimpl
from rammer.device.loader import Registry
from rammer.distributed.distributed_program import Transfer
from rammer.distributed.joining import SIZES, launched_processes
from rammer.distributed.transport import local, transport_registry
from rammer.distributed.transport.counters import Counters
from rammer.distributed.transport.endpoint import MemoryEndpoint
from rammer.distributed.transport.handshake import check_agreement, gather_counters, said_by_all
from rammer.distributed.transport.local import LOCAL, LocalFabric
from rammer.distributed.transport.measure_links import LARGE, bandwidth_of, measured_links
from rammer.distributed.transport.memory_layout import Exposed
from rammer.distributed.transport.protocol import TIMEOUT, Endpoint, Fabric, Party, Site, Transport
from rammer.errors import DeviceFailure, DeviceUnavailable, MissingDependency
from rammer.ir.types import TensorType
from rammer_testing.nonempty import some

THERE = Transfer("a_to_1", "a", TensorType("float32", (33,)), 0, 1)
BACK = Transfer("b_to_0", "b", TensorType("int64", (2, 3)), 1, 0)
NOTHING = Transfer("c_to_1", "c", TensorType("float32", (0, 4)), 0, 1)


def joined(*transfers: Transfer, depth: int = 2, timeout: float = 5.0) -> tuple[Endpoint, Endpoint]:
    """Return two devices of this process."""
    party = Party((Site("one"), Site("two")), timeout)
    ends = LOCAL.open(party).expose(Exposed(("one", "two"), transfers, depth))
    return ends[0], ends[1]


def test_places_are_apart_and_aligned(rng: np.random.Generator) -> None:
    types = [TensorType(str(rng.choice(["float32", "int8", "float64"])), (int(rng.integers(0, 300)),)) for _ in range(12)]
    ways = [tuple(int(n) for n in rng.permutation(3)[:2]) for _ in types]
    transfers = tuple(Transfer(f"t{i}", f"t{i}", t, *w) for i, (t, w) in enumerate(zip(types, ways, strict=True)))
    depth = int(rng.integers(1, 5))
    exposed = Exposed(("a", "b", "c"), transfers, depth)
    used: dict[int, list[tuple[int, int]]] = {d: [(0, 512 * 3)] for d in range(3)}
    for t in some(transfers):
        place = exposed.places[t.name]
        assert place.slots % 256 == place.stride % 256 == place.flags % 8 == place.credits % 8 == 0
        used[t.target] += [(place.slots + n * place.stride, t.nbytes) for n in range(depth)] + [(place.flags, 8 * depth)]
        used[t.source].append((place.credits, 8 * depth))
    for device, parts in some(used.items()):
        parts = sorted(p for p in parts if p[1])
        assert all(a + n <= b for (a, n), (b, _) in pairwise(parts))
        assert parts[-1][0] + parts[-1][1] <= exposed.sizes[device]


def test_a_tensor_crosses_by_one_write_and_one_flag(rng: np.random.Generator) -> None:
    one, two = joined(THERE, BACK, NOTHING)
    for run in range(7):
        values = rng.random(33, np.float32)
        assert not two.arrived("a_to_1", run)
        one.put("a_to_1", run, values)
        one.put("c_to_1", run, np.zeros((0, 4), np.float32))
        two.wait("a_to_1", run)
        two.wait("c_to_1", run)
        assert np.array_equal(two.slot("a_to_1", run), values) and two.slot("c_to_1", run).shape == (0, 4)
        for name in ("a_to_1", "c_to_1"):
            two.release(name, run)
    assert (one.counters.payload_writes, one.counters.flag_writes, one.counters.nbytes) == (7, 14, 7 * 132)
    assert (two.counters.payload_writes, two.counters.flag_writes) == (0, 14)
    assert one.counters.copies == one.counters.allocations == one.counters.serialisations == 0
    one.put("a_to_1", 7, rng.random((33, 2), np.float32)[:, 0])
    assert (one.counters.copies, one.counters.allocations) == (1, 1)


def test_a_slot_is_not_written_before_it_is_read() -> None:
    one, two = joined(THERE, depth=2, timeout=0.2)
    for run in (0, 1):
        assert one.free("a_to_1", run)
        one.put("a_to_1", run, np.full(33, run, np.float32))
    assert not one.free("a_to_1", 2)
    with pytest.raises(DeviceFailure, match=r"0 \(one\) waits for device 1 \(two\): a free slot of transfer a_to_1 of run 2"):
        one.put("a_to_1", 2, np.zeros(33, np.float32))
    assert two.slot("a_to_1", 0)[0] == 0 and two.slot("a_to_1", 1)[0] == 1
    two.release("a_to_1", 0)
    assert one.free("a_to_1", 2) and not one.free("a_to_1", 3)
    assert one.counters.waited >= 0.2


def test_a_wait_ends_in_time_and_says_who_waits_for_whom() -> None:
    _, two = joined(THERE, timeout=0.2)
    begin = time.perf_counter()
    with pytest.raises(DeviceFailure, match=r"device 1 \(two\) waits for device 0 \(one\): transfer a_to_1 of run 3") as told:
        two.wait("a_to_1", 3)
    assert 0.15 < time.perf_counter() - begin < TIMEOUT and "0.2 s" in str(told.value)


def test_a_device_that_ends_tells_all_who_wait() -> None:
    one, two = joined(THERE, timeout=30)
    later = threading.Timer(0.05, lambda: one.fail("a kernel broke\nhere é"))
    later.start()
    with pytest.raises(DeviceFailure, match=r"device 0 \(one\) ended: a kernel broke") as told:
        two.wait("a_to_1", 0)
    assert "transfer a_to_1 of run 0" in told.value.where
    one.fail("x" * 5000)  # as much of it as fits


class Early(MemoryEndpoint):
    """A planted fault: the flag is sent before the data."""

    def put(self, name: str, run: int, values: np.ndarray) -> None:
        place, transfer = self.exposed.places[name], self.exposed.transfer[name]
        self.flag(transfer.target, place.flags + 8 * (run % self.exposed.depth), run + 1)
        time.sleep(0.001)
        super().put(name, run, values)


class Unread(MemoryEndpoint):
    """A planted fault: the sender does not check if a slot is free."""

    def free(self, name: str, run: int) -> bool:
        return True


def exchange(source: Callable[..., MemoryEndpoint], runs: int) -> bool:
    """Return True if all that one thread sends is read by the other, which is slower now and then."""
    exposed = Exposed(("one", "two"), (THERE,), 2)
    fabric = LOCAL.open(Party((Site("one"), Site("two")), 5.0))
    assert isinstance(fabric, LocalFabric)
    ends = fabric.expose(exposed)
    one, two = source(0, exposed, ends[0].reach, 5.0), ends[1]  # type: ignore[attr-defined]
    sender = threading.Thread(target=lambda: [one.put("a_to_1", r, np.full(33, r, np.float32)) for r in range(runs)])
    sender.start()
    right = True
    for run in range(runs):
        two.wait("a_to_1", run)
        if run % 7 == 0:
            time.sleep(0.002)
        right &= bool((two.slot("a_to_1", run) == run).all())
        two.release("a_to_1", run)
    sender.join()
    return right


def test_planted_faults_are_seen() -> None:
    assert exchange(MemoryEndpoint, 100)
    assert not exchange(Early, 30)
    assert not exchange(Unread, 100)


class Timing(MemoryEndpoint):
    """An engine with a simulated clock: 2 us, and 100 GB/s."""

    def echo(self, out: str, into: str, runs: range, begins: bool) -> float:
        for run in runs:
            if begins:
                self.put(out, run, self.slot(into, run))
            self.wait(into, run)
            if not begins:
                self.put(out, run, self.slot(into, run))
            self.release(into, run)
        return 2 * (2e-6 + self.exposed.transfer[out].nbytes / 1e11)


def test_an_engine_may_measure_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    party = Party((Site("one"), Site("two"), Site("three")), 20.0)
    names = [s.device for s in party.sites]
    by_host = measured_links(LOCAL.open(party), names, 20.0, "by host")
    assert all(k.latency > 0 and k.bandwidth > 0 and k.origin == "by host" for k in some(by_host))
    monkeypatch.setattr(local, "MemoryEndpoint", Timing)
    links = measured_links(LOCAL.open(party), names, 20.0, "by itself")
    assert {(k.source, k.target) for k in links} == {(k.source, k.target) for k in by_host} and len(links) == 6
    for link in some(links):
        assert link.latency == pytest.approx(2e-6 + 8e-11) and link.bandwidth == pytest.approx(1e11)


class Turns:
    """A fabric whose devices note which pairs measure concurrently, and when all meet."""

    def __init__(self, count: int) -> None:
        self.mine, self.noted = tuple(range(count)), [set[frozenset[str]]()]

    def meet(self, words: dict[int, str], seconds: float) -> list[str]:
        self.noted.append(set())
        return [words[n] for n in self.mine]

    def expose(self, exposed: Exposed) -> dict[int, Turns]:
        return dict.fromkeys(self.mine, self)

    def echo(self, out: str, into: str, runs: range, begins: bool) -> float:
        self.noted[-1].add(frozenset(out.split("_")[1:4:2]))
        return 1.0


def test_who_waits_for_its_turn_waits_for_no_transfer(rng: np.random.Generator) -> None:
    """Check that one pair of devices measures at a time. On a slow network, the last of many devices exceeded the timeout of a
    transfer."""
    count = int(rng.integers(2, 7))
    fabric = Turns(count)
    links = measured_links(fabric, [str(n) for n in fabric.mine], 1.0, "turns")  # type: ignore[arg-type]
    assert len(links) == count * (count - 1)
    turns = [pairs for pairs in fabric.noted if pairs]
    assert len(turns) == count * (count - 1) // 2 and all(len(pairs) == 1 for pairs in some(turns))


@pytest.mark.parametrize("small, large", [(1e-4, 1e-4), (1e-4, 1.05e-4), (1e-4, 0.5e-4)])
def test_what_noise_hides_is_no_bandwidth(small: float, large: float) -> None:
    """Check this because two GPUs once measured a million gigabytes a second."""
    assert bandwidth_of(small, large) == LARGE / large


class Several:
    """A fabric whose devices report different values."""

    mine = (0,)

    def __init__(self, *others: str) -> None:
        self.others = others

    def meet(self, words: dict[int, str], seconds: float) -> list[str]:
        return [words[0], *self.others]


def test_who_differs_is_named() -> None:
    def refused(other: str) -> str:
        fabric: Fabric = Several('{"program": "abc"}', other)  # type: ignore[assignment]
        with pytest.raises(DeviceUnavailable) as told:
            check_agreement(fabric, {"program": "abc"}, ["a", "b", "c"], 1.0)
        return str(told.value)

    said = refused('{"program": "def"}')
    assert "device 2 (c) has another program than device 0 (a)" in said and "def and abc" in said
    assert "another NumPy" in refused('{"program": "abc", "NumPy": "1"}')
    fabric = LOCAL.open(Party((Site("a"), Site("b"))))
    check_agreement(fabric, {"program": "abc"}, ["a", "b"], 1.0)
    assert said_by_all(fabric, {0: {"n": 1}, 1: [2]}, 1.0) == [{"n": 1}, [2]]
    counted = {0: Counters(payload_writes=3, waited=0.5), 1: Counters(nbytes=7)}
    assert gather_counters(fabric, counted, 1.0) == [*counted.values()]


def test_counters_know_what_was_since() -> None:
    counters = Counters(payload_writes=2, waited=0.25)
    before = counters.copy()
    counters.payload_writes += 3
    assert counters.minus(before) == Counters(payload_writes=3) and "5 payload writes" in str(counters)


def test_the_transport_that_joins_all_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking() -> None:
        raise MissingDependency("a network", "plug it in")

    def gpus_only(a: Site, b: Site) -> str | None:
        return None if a.kind == b.kind == "gpu" else "no GPU"

    class Plugin:
        @hookimpl
        def rammer_transports(self) -> list[Transport]:
            fast = Transport("fast", "", lambda: None, gpus_only, LOCAL.open, 5)
            return [fast, Transport("lame", "", lacking, lambda a, b: None, LOCAL.open, 9)]

    class Point:
        name = "several"

        def load(self) -> Plugin:
            return Plugin()

    registry = Registry([Point()])
    gpus, cpus = [Site("g:0", "gpu"), Site("g:1", "gpu")], [Site("c"), Site("g:0", "gpu")]
    assert (
        transport_registry.choose_transport(registry, gpus).name == "fast"
        and transport_registry.choose_transport(registry, cpus).name == "local"
    )
    assert transport_registry.choose_transport(registry, gpus, "local").name == "local"
    with pytest.raises(DeviceUnavailable, match="no transport joins c, g:0") as told:
        transport_registry.choose_transport(registry, cpus, "fast")
    assert "no GPU" in str(told.value)
    with pytest.raises(DeviceUnavailable, match="plug it in"):
        transport_registry.choose_transport(registry, gpus, "lame")
    with pytest.raises(DeviceUnavailable, match="no transport 'none'"):
        transport_registry.choose_transport(registry, gpus, "none")
    for name in SIZES:
        monkeypatch.delenv(name, raising=False)
    assert launched_processes() == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert launched_processes() == 3
