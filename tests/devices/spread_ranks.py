"""A pipeline over all processes of an MPI run, or over devices of this one: what ``test_spread_runs`` starts.

``mpirun -n 2 python spread_ranks.py '{"device": "rocm", "runs": 20, ...}'``. Each device doubles what the one
before it made, so a run's output says through how many it went.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rammer.device.loader import Registry
from rammer.errors import RammerError
from rammer.ir.program import Port, RProgram
from rammer.ir.spread import DevicePart, DeviceStep, Spread, SpreadInput, SpreadOutput, Transfer
from rammer.ir.types import TensorType
from rammer.runtime.spread_part import BoundPart, BoundStep
from rammer.runtime.spread_run import Joined, SpreadRuns
from rammer.schedule.wavefront import Wavefront
from rammer.testing.programs import TaskNet, adding
from rammer.transport import mpi
from rammer.transport.find import choose
from rammer.transport.protocol import Site


@dataclass(frozen=True)
class Wanted:
    """A run, and what goes wrong in it: device ``victim`` does ``fault`` (kill, stop, raise) ``after`` seconds, and each step
    takes up to ``delay`` seconds more."""

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
    lie: bool = False


def adds(reads: str, makes: str, length: int) -> RProgram:
    """``makes`` is ``reads`` and its neighbour."""
    net = TaskNet().tensor(reads, length).add(adding(makes, length, [reads, reads], 16))
    return replace(net.program(Wavefront(), 2), inputs=(Port(reads, reads),), outputs=(Port(makes, makes),))


def chain(devices: int, length: int) -> Spread:
    """Each device adds; the last one's result goes back to the first, which has a second step for it."""
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
    return Spread(tuple(parts), tuple(transfers), adds("x", "y", length), *ports)


def troubled(part: BoundPart, wanted: Wanted) -> None:
    """Steps take longer, at random, and one device ends badly."""
    chance, whole, until = random.Random(f"{wanted.seed} {part.device}"), part.compute, time.monotonic() + wanted.after

    def compute(bound: BoundStep) -> None:
        time.sleep(chance.random() * wanted.delay)
        if wanted.fault == "raise" and part.device == wanted.victim and time.monotonic() > until:
            raise RammerError("a planted fault")
        whole(bound)

    part.compute = compute  # type: ignore[method-assign]
    if wanted.fault in ("kill", "stop") and part.device == wanted.victim:
        number = signal.SIGKILL if wanted.fault == "kill" else signal.SIGSTOP
        signal.signal(signal.SIGALRM, lambda *_: None)
        if os.fork() == 0:  # a process that outlives nothing: it sends one signal
            time.sleep(wanted.after)
            os.kill(os.getppid(), number)
            os._exit(0)


def main(wanted: Wanted) -> dict[str, Any]:
    """Counters and times, where device 0 is; raises where outputs are not what one device makes."""
    registry, count = Registry(), wanted.devices
    rank, size = mpi.world() if mpi.launched() > 1 else (0, 1)
    sites = tuple(Site(wanted.device, "cpu", n % size) for n in range(count))
    spread = chain(count, wanted.length + (rank if wanted.lie else 0))
    mine = [rank] if size > 1 else range(count)
    joined = Joined(sites, choose(registry, sites), wanted.depth, wanted.timeout)
    runs = SpreadRuns(spread, {d: registry.open(wanted.device) for d in mine}, joined)
    for part in runs.parts.values():
        troubled(part, wanted)
    rng = np.random.default_rng(wanted.seed)
    inputs = [{"x": rng.random(wanted.length, np.float32)} for _ in range(wanted.runs)]
    if 0 in runs.mine:
        print("begun", flush=True)
    outputs, timed = runs.run_all(inputs)
    counters = runs.counters()
    runs.close()
    for given, made in zip(inputs, outputs, strict=False):
        if not np.array_equal(made["y"], given["x"] * np.float32(2 ** (count + 1))):
            raise AssertionError("another result than one device has")
    return {"runs": len(outputs), "counters": [c.values() for c in counters], "whole": timed.whole}


if __name__ == "__main__":
    try:
        found = main(Wanted(**json.loads(sys.argv[1])))
    except RammerError as problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        sys.exit(problem.exit_code)
    if found["runs"]:
        print(json.dumps(found))
