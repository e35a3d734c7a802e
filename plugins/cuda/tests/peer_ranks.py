"""A pipeline over host-emulated GPUs with one MPI process each, started by ``test_peer_processes``.

``mpirun -n 2 python -m plugins.cuda.tests.peer_ranks '{"folder": "/tmp/x", "runs": 20, ...}'``. Memory of a GPU is a file, which
the other process maps."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx.reference import ReferenceEvaluator

from rammer.device.manifest import Backend
from rammer.distributed.runtime.distributed_run import Joined, SpreadRuns
from rammer.distributed.transport import mpi_launch
from rammer.distributed.transport.measure_links import measured_links
from rammer.distributed.transport.protocol import Party, Site
from rammer.errors import RammerError
from rammer_testing.small_models import dense_layers

from .fake_gpus import HostBackend, HostBlocks, HostEnd, HostUnit, host_cupy, host_place
from .fake_nvshmem import FakeNvshmem
from .test_peer_part import SHAPE, looped, recurrent_over, spread_over
from rammer_cuda.peer import exchange, fabric, memory, part, symmetric
from rammer_cuda.peer.symmetric import SymmetricEnd
from rammer_cuda.transports import PEER, SYMMETRIC

LAYERS = 5


@dataclass(frozen=True)
class Asked:
    """The job: folders for the GPUs' memory and for the processes' results, runs of one seed, and a fault. With a fault, the last
    process is ``kill``ed or stopped after half of the runs, or cannot ``map`` the others' memory."""

    folder: str
    told: str
    runs: int = 8
    seed: int = 0
    depth: int = 2
    timeout: float = 20.0
    fault: str = ""
    transport: str = PEER.name


class HostSymmetricEnd(SymmetricEnd, HostEnd):
    """A symmetric end whose launches the host executes."""


def played(folder: Path, fault: bool) -> HostBlocks:
    """Replace CUDA by the host in all modules, and return its memory."""
    cupy, blocks = host_cupy(), HostBlocks(folder)
    for name in ("malloc", "memset", "free", "ipcGetMemHandle", "ipcOpenMemHandle", "ipcCloseMemHandle"):
        setattr(cupy.cuda.runtime, name, getattr(blocks, name))
    if fault:
        cupy.cuda.runtime.ipcOpenMemHandle = lambda handle: blocks.ipcOpenMemHandle(b"none")
    for module in (exchange, fabric, memory, part, symmetric):
        module.import_cupy = lambda: cupy  # type: ignore[attr-defined]
    part.place_arrays = host_place  # type: ignore[attr-defined]
    memory.Unit = symmetric.Unit = HostUnit  # type: ignore[misc, assignment]
    shmem = FakeNvshmem(folder)
    symmetric.import_nvshmem = lambda: shmem  # type: ignore[attr-defined]
    symmetric.nvshmem_device = lambda index: None  # type: ignore[attr-defined]
    symmetric.SymmetricEnd = HostSymmetricEnd  # type: ignore[misc, attr-defined]
    memory.allow_access = lambda index, bus: None  # type: ignore[attr-defined]
    memory.bus_of = lambda index: f"0000:{index:02x}:00.0"  # type: ignore[attr-defined]
    fabric.End = HostEnd  # type: ignore[attr-defined]
    return blocks


def main(asked: Asked) -> dict[str, Any]:
    """Return the counters. Raises if outputs differ from those of one device."""
    rank, size = mpi_launch.rank_and_size()
    blocks, last = played(Path(asked.folder), asked.fault == "map" and rank == size - 1), rank == size - 1
    spread, backend = spread_over(size, LAYERS)
    sites = tuple(Site(f"cuda:{n}", "gpu", n) for n in range(size))
    manifest = next(t for t in (PEER, SYMMETRIC) if t.name == asked.transport)
    transport, party = replace(manifest, probe=lambda: None), Party(sites, asked.timeout)
    joined = transport.open(party)
    joined.meet({rank: ""}, 60.0)  # all processes have compiled
    names = [s.device for s in sites]
    links = measured_links(joined, names, asked.timeout, "here")
    here: Backend = HostBackend(backend)  # type: ignore[assignment]
    runs = SpreadRuns(spread, {rank: here}, Joined(sites, transport, asked.depth, asked.timeout), joined, 60.0)
    rng = np.random.default_rng(asked.seed)
    inputs = [{"x": rng.standard_normal(SHAPE).astype(np.float32)} for _ in range(asked.runs)]
    half, outputs = asked.runs // 2, list[dict[str, np.ndarray]]()
    for given in (inputs[:half], inputs[half:]):
        outputs += runs.run_all(given)[0]
        if last and asked.fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if asked.fault == "kill" else signal.SIGSTOP)
    counters = [c.values() for c in runs.counters()]
    runs.leave()
    stayed, _ = recurrent_over(size, LAYERS)
    joined.meet({rank: ""}, 60.0)
    kept = SpreadRuns(stayed, {rank: here}, Joined(sites, transport, asked.depth, asked.timeout), joined, 60.0)
    for made, wanted in zip(kept.run_all(inputs)[0], looped(LAYERS, inputs), strict=False):
        np.testing.assert_allclose(made["y"], wanted, rtol=1e-4, atol=1e-5)
    kept.close()
    model = ReferenceEvaluator(dense_layers(LAYERS, first=True))
    for given, made in zip(inputs, outputs, strict=False):
        for name, want in zip(("y", "h0"), model.run(None, given), strict=True):
            np.testing.assert_allclose(made[name], want, rtol=1e-5, atol=1e-6)
    return {"rank": rank, "runs": len(outputs), "counters": counters, "links": len(links), "left": len(blocks.names)}


if __name__ == "__main__":
    asked = Asked(**json.loads(sys.argv[1]))
    try:
        found = main(asked)
    except RammerError as problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        os._exit(problem.exit_code)
    Path(asked.told, str(found["rank"])).write_text(json.dumps(found))
