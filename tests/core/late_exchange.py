"""Two devices that exchange tensors of random shapes, by threads of one process or by MPI. ``mpirun -n 2 python late_exchange.py
'{"seed": 3}'`` prints the counters of both."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rammer.distributed.distributed_program import RunShape, Transfer
from rammer.distributed.joining import launched_processes
from rammer.distributed.transport.handshake import gather_counters
from rammer.distributed.transport.local import LOCAL
from rammer.distributed.transport.measure_links import in_parallel
from rammer.distributed.transport.memory_layout import Exposed
from rammer.distributed.transport.mpi import MPI
from rammer.distributed.transport.protocol import Endpoint, Party, Site
from rammer.ir.extent import AffineExtent
from rammer.ir.types import TensorType

DTYPES = ("float32", "float16", "int8", "int64", "bool", "float64")


@dataclass(frozen=True)
class Plan:
    """The tensors of ``runs`` runs and the maximal random delay of a device before a step (seconds); all from ``seed``."""

    seed: int = 0
    runs: int = 30
    delay: float = 0.001
    timeout: float = 30.0

    def transfers(self) -> tuple[Transfer, ...]:
        """Return up to four transfers in each direction; some have one shape in all runs."""
        chance, found = random.Random(self.seed), list[Transfer]()
        for source in (0, 1):
            for number in range(chance.randint(1, 4)):
                shape = tuple(chance.choice((1, 2, 7, 30)) for _ in range(chance.randint(0, 3)))
                kind = TensorType(chance.choice(DTYPES), shape)
                name = f"t{number}_from_{source}"
                found.append(Transfer(name, name, kind, source, 1 - source, late_shape(name, kind, chance)))
        return tuple(found)

    @property
    def depth(self) -> int:
        """The number of runs in flight."""
        return random.Random(~self.seed).randint(1, 4)

    def point(self, run: int) -> dict[str, int]:
        """Return the lengths of a run: often short, sometimes maximal."""
        chance = random.Random(f"{self.seed} {run}")
        most = chance.choice((3, 10, 31))
        return {f"{t.name}_{d}": chance.randint(0, most) for t in self.transfers() for d in range(3)}

    def values(self, transfer: Transfer, run: int) -> np.ndarray:
        """Return a run's tensor, without the elements past its extents."""
        rng = np.random.default_rng([self.seed, run, *transfer.name.encode()])
        return rng.integers(2, 100, transfer.shape(self.point(run))).astype(transfer.type.dtype)

    def slot(self, transfer: Transfer, run: int) -> np.ndarray:
        """Return the expected content of the reader's slot."""
        values, found = self.values(transfer, run), np.zeros(transfer.type.shape, transfer.type.dtype)
        found[tuple(map(slice, values.shape))] = values
        late = transfer.late or RunShape((), ())
        for axis in reversed([d for d, e in enumerate(late.extents) if e is not None]):
            found[(*[slice(None)] * axis, slice(values.shape[axis], None))] = late.fills[axis]
        return found


def late_shape(name: str, kind: TensorType, chance: random.Random) -> RunShape | None:
    """Return a shape in which some axes end at separate lengths, or None if no axis does."""
    ends = tuple(AffineExtent(((f"{name}_{d}", 1),), 0) if chance.random() < 0.6 else None for d in range(len(kind.shape)))
    real = kind.dtype.startswith("float")
    fills = tuple(chance.choice((0.0, 0.0, -1.0)) if real else 0.0 for _ in ends)
    return RunShape(ends, fills) if any(e is not None for e in ends) else None


def exchanged(end: Endpoint, device: int, plan: Plan) -> list[str]:
    """Run one device's side, with some reads delayed past later sends; return the wrong reads."""
    chance, wrong, transfers = random.Random(f"{plan.seed} {device}"), list[str](), plan.transfers()
    behind = 0
    for run in range(plan.runs + plan.depth):
        time.sleep(chance.random() * plan.delay)
        if run < plan.runs:
            for t in transfers:
                if t.source == device:
                    end.put(t.name, run, plan.values(t, run))
        while behind <= min(run - chance.randrange(plan.depth), plan.runs - 1):
            mine = [t for t in transfers if t.target == device]
            for t in chance.sample(mine, len(mine)):
                end.wait(t.name, behind)
                if not np.array_equal(end.slot(t.name, behind), plan.slot(t, behind)):
                    wrong.append(f"{t} of run {behind}")
                end.release(t.name, behind)
            behind += 1
    return wrong


def main(plan: Plan) -> dict[str, Any]:
    """Send and read everything; raise an error if a read gave wrong data."""
    several = launched_processes() > 1
    sites = tuple(Site(n, "cpu", k * several) for k, n in enumerate(("one", "two")))
    fabric = (MPI if several else LOCAL).open(Party(sites, plan.timeout))
    ends = fabric.expose(Exposed(("one", "two"), plan.transfers(), plan.depth))
    fabric.meet(dict.fromkeys(fabric.mine, ""), plan.timeout)
    calls = {d: partial(exchanged, e, d, plan) for d, e in ends.items()}
    found = in_parallel(calls, lambda device, problem: ends[device].fail(str(problem)))
    counters = gather_counters(fabric, {d: e.counters for d, e in ends.items()}, plan.timeout)
    fabric.close()
    wrong = [said for d in fabric.mine for said in found[d]]
    if wrong:
        raise AssertionError(f"{len(wrong)} tensors are others than what was sent: {wrong[:3]}")
    return {"counters": [c.values() for c in counters], "here": list(fabric.mine)}


if __name__ == "__main__":
    told = main(Plan(**json.loads(sys.argv[1])))
    if 0 in told["here"]:
        print(json.dumps(told))
