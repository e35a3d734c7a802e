"""A pipeline over all processes of an MPI run, or over devices of this process, for ``test_spread_runs``.

``mpirun -n 2 python spread_ranks.py '{"device": "rocm", "runs": 20, ...}'``. Each device doubles its predecessor's result, so a
run's output shows the number of devices passed."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rammer.device.loader import Registry
from rammer.distributed.distributed_program import (
    DevicePart,
    DeviceStep,
    DistributedProgram,
    RunShape,
    SpreadInput,
    SpreadOutput,
    Transfer,
)
from rammer.distributed.joining import launched_processes
from rammer.distributed.report.distributed_text import SpreadTrace
from rammer.distributed.runtime.device_part import BoundPart, BoundStep
from rammer.distributed.runtime.distributed_run import Joined, SpreadRuns
from rammer.distributed.runtime.run_trace import traced_runs
from rammer.distributed.transport import mpi_launch
from rammer.distributed.transport.protocol import Site
from rammer.distributed.transport.transport_registry import choose_transport
from rammer.errors import RammerError
from rammer.ir.extent import AffineExtent
from rammer.ir.program import Port, RProgram
from rammer.ir.types import TensorType
from rammer.schedule.wavefront import Wavefront
from rammer_testing.programs import TaskNet, adding

#: Least difference in seconds that is allowed between the starts of processes.
PATIENCE = 20.0


@dataclass(frozen=True)
class Wanted:
    """A run with a fault ``after`` some seconds.

    Device ``victim`` raises, becomes slow (each step takes ``pause`` seconds more), or gets a signal from its parent. Signals are
    kill, stop, or pause, a stop for ``pause`` seconds. The time counts from the process's start if ``early``, else from the first
    run. Processes then write their ids to the folder ``told``. Each step takes up to ``delay`` seconds more. With ``trace``, some
    more runs are traced, and each process's clock is ``ahead`` seconds ahead of the previous one's."""

    device: str = "rocm"
    devices: int = 2
    runs: int = 20
    seed: int = 0
    depth: int = 2
    length: int = 1000
    timeout: float = 10.0
    delay: float = 0.0
    victim: int = -1
    fault: str = ""
    after: float = 0.0
    pause: float = 0.0
    early: bool = False
    told: str = ""
    lie: bool = False
    ahead: float = 0.0
    trace: bool = False
    transport: str = ""


def adds(reads: str, makes: str, length: int) -> RProgram:
    """Return a program that computes ``makes`` as ``reads`` plus itself."""
    net = TaskNet().tensor(reads, length).add(adding(makes, length, [reads, reads], 16))
    return replace(net.program(Wavefront(), 2), inputs=(Port(reads, reads),), outputs=(Port(makes, makes),))


def late_chain(devices: int, length: int) -> DistributedProgram:
    """Return ``chain`` with transfers of ``n`` elements, a length that every device reads."""
    made = chain(devices, length)
    late = RunShape((AffineExtent((("n", 1),), 0),), (0.0,))
    lengths = SpreadInput("n", "n", TensorType("int64", ()), tuple(range(devices)))
    return replace(made, transfers=tuple(replace(t, late=late) for t in made.transfers), inputs=(*made.inputs, lengths))


def chain(devices: int, length: int) -> DistributedProgram:
    """Return a chain of additions over devices. The last result returns to the first device, which has a second step for it."""
    kind = TensorType("float32", (length,))
    transfers = [Transfer(f"t{d}", f"v{d}", kind, d, (d + 1) % devices) for d in range(devices)]
    parts = []
    for d in range(devices):
        come = (f"t{d - 1}",) if d else ()
        step = DeviceStep(adds(f"v{d - 1}" if d else "x", f"v{d}", length), {}, come, (f"t{d}",), come)
        parts.append(DevicePart("any", (step,)))
    back = f"t{devices - 1}"
    last = DeviceStep(adds(f"v{devices - 1}", "y", length), {}, (back,), (), (back,))
    parts[0] = DevicePart("any", (*parts[0].steps, last))
    ports = (SpreadInput("x", "x", kind, (0,)),), (SpreadOutput("y", "y", kind, 0),)
    return DistributedProgram(tuple(parts), tuple(transfers), adds("x", "y", length), *ports)


def troubled(part: BoundPart, wanted: Wanted) -> None:
    """Delay steps at random, and make one device fail."""
    chance, whole, until = random.Random(f"{wanted.seed} {part.device}"), part.compute, time.monotonic() + wanted.after

    def compute(bound: BoundStep) -> float:
        time.sleep(chance.random() * wanted.delay)
        late = part.device == wanted.victim and time.monotonic() > until
        if late and wanted.fault == "raise":
            raise RammerError("a planted fault")
        time.sleep(wanted.pause if late and wanted.fault == "slow" else 0)
        return whole(bound)

    part.compute = compute  # type: ignore[method-assign]


def present(wanted: Wanted, rank: int) -> None:
    """Report the rank of this process to its parent."""
    if wanted.told:
        made = Path(wanted.told, f"making {rank}")
        made.write_text(str(os.getpid()))
        made.rename(made.with_name(str(rank)))


def main(wanted: Wanted) -> dict[str, Any]:
    """Return counters and times on device 0. Raise AssertionError if outputs differ from those of one device."""
    registry, count = Registry(), wanted.devices
    if wanted.early:
        present(wanted, int(os.environ["OMPI_COMM_WORLD_RANK"]))
    # A late start on a loaded machine is not a fault, unless faults at the start are wanted.
    patience = PATIENCE if wanted.early else 3 * PATIENCE
    rank, size = mpi_launch.rank_and_size(patience / mpi_launch.STARTS) if launched_processes() > 1 else (0, 1)
    if wanted.told:
        Path(wanted.told, f"begun {rank}").touch()
    if size > 1:
        mpi_launch.leave_at_exit(wanted.timeout / mpi_launch.ENDS)
    sites = tuple(Site(wanted.device, "cpu", n % size) for n in range(count))
    spread = chain(count, wanted.length + (rank if wanted.lie else 0))
    mine = [rank] if size > 1 else range(count)
    joined = Joined(sites, choose_transport(registry, sites, wanted.transport), wanted.depth, wanted.timeout)
    runs = SpreadRuns(spread, {d: registry.open(wanted.device) for d in mine}, joined, patience=patience)
    for part in runs.parts.values():
        troubled(part, wanted)
    rng = np.random.default_rng(wanted.seed)
    inputs = [{"x": rng.random(wanted.length, np.float32)} for _ in range(wanted.runs)]
    if not wanted.early:
        present(wanted, rank)
    if 0 in runs.mine:
        print("begun", flush=True)
    outputs, timed = runs.run_all(inputs)
    counters = runs.counters()
    marks = traced_runs(runs, inputs, lambda: time.perf_counter() + rank * wanted.ahead) if wanted.trace else None
    runs.close()
    for given, made in zip(inputs, outputs, strict=False):
        if not np.array_equal(made["y"], given["x"] * np.float32(2 ** (count + 1))):
            raise AssertionError("another result than one device has")
    traced = SpreadTrace(spread, marks).chrome() if marks is not None else ""
    return {"runs": len(outputs), "counters": [c.values() for c in counters], "whole": timed.whole, "trace": traced}


if __name__ == "__main__":
    try:
        found = main(Wanted(**json.loads(sys.argv[1])))
    except RammerError as problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        sys.exit(problem.exit_code)
    if found["runs"]:
        print(json.dumps(found))
