"""One tensor from one process to another, until the sender knows that it is there: one-sided writes beside remote calls.

python benchmarks/transfers.py --markdown results/cpu_transfers.md          (two processes of this machine; a minute)
python benchmarks/transfers.py --delay 1 --markdown FILE                    (and two network namespaces; needs root)

*ours* is transport mpi: a payload, a flag, and the receiver's credit. *pickled* is multiprocessing.connection: an array is sent,
and a word comes back. *gRPC* is a unary call with the array's bytes, where grpcio is there (``--grpc PYTHON``: an interpreter
that has it). The namespaces are joined by a process that holds every packet back for so many milliseconds, each way
(``delayed.py``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

HERE: Final = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent))

#: Bytes, and how often each crosses; the first few do not count.
SIZES: Final = {4096: 200, 1 << 20: 60, 64 << 20: 8}
WARM: Final = 3
#: Seconds that one side waits for the other.
PATIENCE: Final = 120.0
KINDS: Final = ("ours", "pickled", "gRPC")
KEY: Final = b"of this benchmark"


def timed(count: int, send: Callable[[int], object]) -> float:
    """Median seconds of ``send(round)``."""
    times = []
    for number in range(WARM + count):
        begin = time.perf_counter()
        send(number)
        times.append(time.perf_counter() - begin)
    return median(times[WARM:])


def ours() -> None:
    """Both sides, by rank."""
    from rammer.ir.spread import Transfer
    from rammer.ir.types import TensorType
    from rammer.transport.endpoint import MemoryEndpoint
    from rammer.transport.exposed import Exposed
    from rammer.transport.launch import world
    from rammer.transport.mpi import MPI
    from rammer.transport.protocol import Party, Site

    rank, _ = world()
    fabric = MPI.open(Party((Site("near", "cpu", 0), Site("far", "cpu", 1)), PATIENCE))
    transfers = tuple(Transfer(f"t{n}", "", TensorType("uint8", (n,)), 0, 1) for n in SIZES)
    end = fabric.expose(Exposed(("near", "far"), transfers))[rank]
    assert isinstance(end, MemoryEndpoint)
    found = {}
    for nbytes, count in SIZES.items():
        name, values = f"t{nbytes}", np.ones(nbytes, np.uint8)

        def send(run: int, name: str = name, values: Any = values) -> None:
            end.put(name, run, values)
            end.reach.until(lambda: end.free(name, run + 1), lambda: False, PATIENCE)

        def take(run: int, name: str = name) -> None:
            end.wait(name, run)
            end.release(name, run)

        found[nbytes] = timed(count, take if rank else send)
    counters = end.counters
    fabric.close()
    if rank == 0:
        print(json.dumps({"seconds": found, "counters": str(counters)}))


def pickled(address: str, serve: bool) -> None:
    """One side."""
    from multiprocessing.connection import Client, Listener

    place: Any = address if address.startswith("/") else (address.partition(":")[0], int(address.partition(":")[2]))
    if serve:
        with Listener(place, authkey=KEY) as listener:
            print("ready", flush=True)
            with listener.accept() as there:
                while there.recv() is not None:
                    there.send(True)
        return
    with Client(place, authkey=KEY) as there:

        def send(values: Any, run: int) -> None:
            there.send(values)
            there.recv()

        found = {}
        for nbytes, count in SIZES.items():
            found[nbytes] = timed(count, partial(send, np.ones(nbytes, np.uint8)))
        there.send(None)
    print(json.dumps({"seconds": found}))


def grpc_bytes(address: str, serve: bool) -> None:
    """One side; the server's array is a view of the bytes that came."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    place = f"unix:{address}" if address.startswith("/") else address
    if serve:

        def take(request: bytes, context: Any) -> bytes:
            return bytes(np.frombuffer(request, np.uint8)[:1])

        server = grpc.server(ThreadPoolExecutor(1), options=options)
        handlers = {"Put": grpc.unary_unary_rpc_method_handler(take)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("T", handlers),))
        server.add_insecure_port(place)
        server.start()
        print("ready", flush=True)
        sys.stdin.read()
        server.stop(None)
        return
    with grpc.insecure_channel(place, options=options) as channel:
        call = channel.unary_unary("/T/Put")

        def put(values: Any, run: int) -> None:
            call(values.tobytes())

        found = {}
        for nbytes, count in SIZES.items():
            found[nbytes] = timed(count, partial(put, np.ones(nbytes, np.uint8)))
    print(json.dumps({"seconds": found}))


def measured(kind: str, far: bool, python: str) -> dict[str, Any] | None:
    """What ``kind`` takes, in this machine or between the namespaces; None where it is not there."""
    if kind == "ours":
        return json.loads(output(mpi_line(far)))
    if kind == "gRPC" and subprocess.run([python, "-c", "import grpc"], capture_output=True).returncode:
        return None
    from delayed import ENDS, inside

    with tempfile.TemporaryDirectory() as folder:
        address = f"{ENDS['rammer_far']}:7177" if far else f"{folder}/socket"
        interpreter = python if kind == "gRPC" else sys.executable
        lines = [[interpreter, str(HERE), kind, address, side] for side in ("serve", "call")]
        if far:
            lines = [inside(name, line) for name, line in zip(reversed(ENDS), lines, strict=True)]
        with subprocess.Popen(lines[0], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None and server.stdin is not None
            server.stdout.readline()
            found = json.loads(output(lines[1]))
            server.stdin.close()
            server.kill()
    return dict(found)


def mpi_line(far: bool) -> list[str]:
    """Two processes of MPI."""
    os.environ.update(
        {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    line = ["mpirun", "-n", "2", sys.executable, str(HERE), "ours"]
    if not far:
        return [*line[:3], "--oversubscribe", *line[3:]]
    from delayed import ENDS, NETWORK, inside

    agent = Path(tempfile.mkdtemp()) / "agent"
    command = " ".join(inside("rammer_far", ["sh", "-c"])[:6])
    agent.write_text(f'#!/bin/sh\nshift\nexec {command} sh -c "hostname rammer-far; $*"\n')
    agent.chmod(0o755)
    settings = {
        "plm_rsh_agent": str(agent),
        "pml": "ob1",
        "btl": "tcp,self",
        "osc": "pt2pt",
        "mpi_yield_when_idle": "1",
        "btl_tcp_if_include": NETWORK,
        "oob_tcp_if_include": NETWORK,
    }
    mca = [word for name, value in settings.items() for word in ("--mca", name, value)]
    return inside("rammer_near", [*line[:3], "-x", "PYTHONPATH", "--host", ",".join(ENDS.values()), *mca, *line[3:]])


def output(line: list[str]) -> str:
    """The last line that a command prints. RuntimeError where it fails."""
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line[:8])} failed: {done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"]:
        ours()
    elif sys.argv[1:2] in (["pickled"], ["gRPC"]):
        (pickled if sys.argv[1] == "pickled" else grpc_bytes)(sys.argv[2], sys.argv[3] == "serve")
    else:
        from transfers_table import main

        main()
