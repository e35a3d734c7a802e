"""Dynamic-shape transfers: for any sizes and delays, the receiver reads exactly the sent data."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from late_exchange import Plan, main

from rammer.distributed.distributed_program import RunShape, Transfer
from rammer.distributed.transport.counters import Counters
from rammer.distributed.transport.dynamic_shape import Pool, TensorRecord
from rammer.distributed.transport.endpoint import MemoryEndpoint
from rammer.distributed.transport.local import LOCAL
from rammer.distributed.transport.memory_layout import Exposed
from rammer.distributed.transport.protocol import Party, Site
from rammer.errors import DeviceFailure
from rammer.ir.extent import AffineExtent
from rammer.ir.types import TensorType, itemsize
from rammer_testing.nonempty import some

N = AffineExtent((("n", 1),), 0)
ROWS = Transfer("rows", "a", TensorType("float32", (64, 4)), 0, 1, RunShape((N, None), (0.0, 0.0)))
COLUMNS = Transfer("columns", "b", TensorType("float32", (4, 64)), 0, 1, RunShape((None, N), (0.0, -math.inf)))


def joined(*transfers: Transfer, depth: int = 2, timeout: float = 5.0) -> tuple[MemoryEndpoint, MemoryEndpoint]:
    ends = LOCAL.open(Party((Site("one"), Site("two")), timeout)).expose(Exposed(("one", "two"), transfers, depth))
    one, two = ends[0], ends[1]
    assert isinstance(one, MemoryEndpoint) and isinstance(two, MemoryEndpoint)
    return one, two


def test_a_pool_gives_each_its_own_and_has_all_of_it_again(rng: np.random.Generator) -> None:
    whole = 256 * int(rng.integers(1, 40))
    pool, taken, used = Pool(512, whole), dict[int, int](), np.zeros(512 + whole, bool)
    for _ in range(300):
        if taken and rng.random() < 0.5:
            start = int(rng.choice(list(taken)))
            pool.give(start)
            used[start : start + taken.pop(start)] = False
            continue
        want = int(rng.integers(1, 256 * 12))
        start = pool.take(want)
        if start is None:
            continue
        assert start % 256 == 0 and start >= 512 and start + want <= 512 + whole
        assert not used[start : start + want].any()
        used[start : start + want], taken[start] = True, want
    for start in list(taken):
        pool.give(start)
    assert pool.take(whole + 1) is None and pool.take(whole) == 512 and pool.take(1) is None


def check_counters(plan: Plan, counters: list[Counters]) -> None:
    """Check one record and one read of exactly the tensor's bytes per dynamic tensor and run. Static tensors have one write. No
    other operations occur."""
    for device, found in some(enumerate(counters)):
        sent = [(t, plan.values(t, r)) for t in plan.transfers() for r in range(plan.runs) if t.source == device]
        read = [(t, plan.values(t, r)) for t in plan.transfers() for r in range(plan.runs) if t.target == device]
        fixed = [(t, v) for t, v in sent if not t.late]
        kept, fetched = [v for t, v in sent if t.late and v.size], [v for t, v in read if t.late and v.size]
        assert found.payload_writes == len(fixed) and found.reads == len(fetched) and found.pool_allocations == len(kept)
        assert found.metadata_writes == sum(bool(t.late) for t, _ in sent)
        assert found.nbytes == sum(v.nbytes for _, v in fixed) + sum(v.nbytes for v in fetched)
        assert found.flag_writes == len(sent) + len(read) + len(fetched)
        assert found.allocations == found.serialisations == 0 and len(kept) <= found.copies <= len(kept) + len(fetched)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(40))
def test_threads_read_what_was_sent(number: int, rng: np.random.Generator) -> None:
    plan = Plan(int(rng.integers(2**31)))
    check_counters(plan, [Counters.of(v) for v in main(plan)["counters"]])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None or find_spec("mpi4py") is None, reason="needs mpirun and mpi4py")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(10))
def test_processes_read_what_was_sent(number: int, rng: np.random.Generator) -> None:
    plan = {"seed": int(rng.integers(2**31)), "runs": 60}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    line = ["mpirun", "-n", "2", "--oversubscribe", sys.executable, str(Path(__file__).with_name("late_exchange.py"))]
    found = subprocess.run([*line, json.dumps(plan)], capture_output=True, text=True, env=os.environ | root, timeout=120)
    assert found.returncode == 0, found.stderr
    check_counters(Plan(**plan), [Counters.of(v) for v in json.loads(found.stdout.splitlines()[-1])["counters"]])


def test_as_many_bytes_cross_as_there_are(rng: np.random.Generator) -> None:
    one, two = joined(ROWS, COLUMNS)
    for run, n in some(list(enumerate(map(int, (*rng.permutation(65)[:12], 0, 64, 1))))):
        rows, columns, before = rng.random((n, 4), np.float32), rng.random((4, 64), np.float32)[:, :n], two.counters.copy()
        one.put("rows", run, rows)
        one.put("columns", run, columns)
        for name in ("rows", "columns"):
            two.wait(name, run)
        assert np.array_equal(two.slot("rows", run)[:n], rows) and not two.slot("rows", run)[n:].any()
        found = two.slot("columns", run)
        assert np.array_equal(found[:, :n], columns) and (found[:, n:] == -math.inf).all()
        since = two.counters.minus(before)
        assert since.nbytes == 2 * n * 4 * itemsize("float32") and since.reads == 2 * bool(n)
        assert since.copies == (n not in (0, 64)), "rows lie in one piece where they are read to, columns do not"
        for name in ("rows", "columns"):
            two.release(name, run)
    with pytest.raises(ValueError, match=r"is too small for \(65, 4\)"):
        one.put("rows", 15, np.zeros((65, 4), np.float32))


def test_memory_is_used_again_only_when_it_was_read() -> None:
    one, two = joined(ROWS, depth=3, timeout=0.2)
    values = [np.full((40, 4), run, np.float32) for run in range(3)]
    one.put("rows", 0, values[0])
    said = r"0 \(one\) waits for device 1 \(two\): to read rows of run 0, for memory of the pool for transfer rows of run 1"
    with pytest.raises(DeviceFailure, match=said):
        one.put("rows", 1, values[1])
    assert two.arrived("rows", 0)
    one.put("rows", 1, values[1])
    assert two.arrived("rows", 1) and one.free("rows", 2) and not one.free("rows", 3), "read, and not given back"
    one.put("rows", 2, values[2])
    assert [two.arrived("rows", run) for run in range(4)] == [True, True, True, False]
    assert all(np.array_equal(two.slot("rows", run)[:40], values[run]) for run in range(3))
    with pytest.raises(DeviceFailure, match=r"1 \(two\) waits for device 0 \(one\): transfer rows of run 3"):
        two.wait("rows", 3)


def test_a_record_that_cannot_be_is_refused() -> None:
    assert TensorRecord.of(TensorRecord((64, 4), 0).array(), ROWS) == TensorRecord((64, 4), 0)
    for shape in ((65, 4), (-1, 4)):
        with pytest.raises(DeviceFailure, match="a shape record contains"):
            TensorRecord.of(TensorRecord(shape, 0).array(), ROWS)


# --- planted faults ---------------------------------------------------------------------------------


def unread(one: MemoryEndpoint, two: MemoryEndpoint) -> None:
    """Reuse memory of the pool before it was read."""
    kept = one.kept
    kept.reclaim = lambda: [kept.pool.give(k.place) for k in kept.held] and kept.held.clear()  # type: ignore[method-assign]


def early(one: MemoryEndpoint, two: MemoryEndpoint) -> None:
    """Set the flag before the record, and let the reader look between them."""
    tell = one.tell

    def told(transfer: Transfer, run: int, record: TensorRecord) -> None:
        one.flag(1, one.exposed.places[transfer.name].flags + 8 * (run % 2), run + 1)
        two.arrived(transfer.name, run)
        tell(transfer, run, record)

    one.tell = told  # type: ignore[method-assign]


def hasty(one: MemoryEndpoint, two: MemoryEndpoint) -> None:
    """Acknowledge before reading, and let the sender continue between them."""
    read = two.reach.read

    def late(source: int, place: int, into: np.ndarray) -> None:
        one.kept.acks["rows"][:] = 99
        one.kept.reclaim()
        one.reach.memory[slice(*np.cumsum(one.exposed.pool(0)))] = 7
        read(source, place, into)

    two.reach.read = late  # type: ignore[method-assign]


def short(one: MemoryEndpoint, two: MemoryEndpoint) -> None:
    """Write a record with one row less."""
    tell = one.tell
    one.tell = lambda t, run, r: tell(t, run, TensorRecord((r.shape[0] - 1, *r.shape[1:]), r.place))  # type: ignore[method-assign]


def stale(one: MemoryEndpoint, two: MemoryEndpoint) -> None:
    """Leave stale data past the extent."""
    two.arriving["rows"].shapes = [(0, 0)] * 2


def right(one: MemoryEndpoint, two: MemoryEndpoint) -> None:
    """Leave the endpoints without a fault."""


@pytest.mark.parametrize("plant", [right, unread, early, hasty, short, stale])
def test_planted_faults_are_seen(plant: Callable[[MemoryEndpoint, MemoryEndpoint], None]) -> None:
    one, two = joined(ROWS, timeout=0.3)
    plant(one, two)
    try:
        good = sent_right(one, two, lambda: plant(one, two) if plant is stale else None)
    except DeviceFailure:
        good = False
    assert good == (plant is right)


def sent_right(one: MemoryEndpoint, two: MemoryEndpoint, between: Callable[[], None]) -> bool:
    """Return True if the reader gets a long and a short tensor in flight, twice; it reads when both have arrived."""
    good, plan = True, [30, 20, 10, 5]
    for first in (0, 2):
        for run in (first, first + 1):
            one.put("rows", run, np.full((plan[run], 4), run + 1, np.float32))
        for run in (first, first + 1):
            two.wait("rows", run)
            between()
        for run in (first, first + 1):
            found = two.slot("rows", run)
            good &= bool((found[: plan[run]] == run + 1).all() and not found[plan[run] :].any())
            two.release("rows", run)
    return good
