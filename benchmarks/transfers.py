"""Transfers of one tensor between processes, and of a stream of them: transports compared with remote calls.

    python -m benchmarks transfers                                      (two processes of this machine; a minute)
    python benchmarks/transfers_table.py --delay 1 --markdown FILE      (and two network namespaces; needs root)

The kind *socket* is a plain socket: the lower bound. *ours* is the selected transport: `mpi` between processes, `messages`
between namespaces, where *mpi* is measured too. Times end when the reader may read, by a clock that both processes share.
*pickled* is multiprocessing.connection: an array is sent, and a word is returned. *gRPC* is a unary call with the array's bytes,
if grpcio is installed (``--grpc PYTHON``: an interpreter that has it). Processor time is that of both sides, with all threads.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

HERE: Final = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent))

#: Tensor sizes in bytes, and the number of transfers: single and in a stream. ``WARM`` further single ones are not counted.
SIZES: Final = {4096: (100, 400), 1 << 20: (40, 60), 16 << 20: (6, 12)}
WARM: Final = 3
#: Transfers of a stream in flight, by size.
AHEAD: Final = {4096: 8, 1 << 20: 8, 16 << 20: 4}
#: Seconds that one side waits for the other.
PATIENCE: Final = 120.0
#: Measured kinds. Each has these figures per size, in seconds: *alone*, one transfer until its arrival; *back*, until its sender
#: is notified; *stream*, one of a stream; *cpu*, its processor time on both sides; for calls also *one by one*, one of a stream
#: of single calls.
KINDS: Final = ("socket", "ours", "mpi", "pickled", "gRPC")
KEY: Final = b"of this benchmark"
PORT: Final = 7177


def ours(name: str) -> None:
    """Run both sides, selected by rank, over transport ``name``."""
    from rammer.distributed.distributed_program import Transfer
    from rammer.distributed.transport.memory_layout import Exposed
    from rammer.distributed.transport.mpi_launch import rank_and_size
    from rammer.distributed.transport.protocol import Party, Site
    from rammer.distributed.transport.transport_registry import BUILT_IN
    from rammer.ir.types import TensorType

    rank, _ = rank_and_size()
    transport = next(t for t in BUILT_IN if t.name == name)
    fabric = transport.open(Party((Site("near", "cpu", 0), Site("far", "cpu", 1)), PATIENCE))
    found, counters = {}, ""
    for nbytes in SIZES:
        transfer = Transfer("t", "", TensorType("uint8", (nbytes,)), 0, 1)
        end = fabric.expose(Exposed(("near", "far"), (transfer,), AHEAD[nbytes]))[rank]
        said = fabric.meet({rank: json.dumps((taken if rank else sent)(end, nbytes))}, PATIENCE)
        (back, stream, cost), (alone, other) = (json.loads(s) for s in said)
        found[nbytes] = {"alone": alone, "back": back, "stream": stream, "cpu": cost + other}
        counters += f"{'; ' if counters else ''}{nbytes} bytes: {end.counters}"
    fabric.close()
    if rank == 0:
        print(json.dumps({"found": found, "counters": counters}))


def sent(end: Any, nbytes: int) -> tuple[float, float, float]:
    """Run the sender: return seconds until a single transfer is acknowledged, per transfer of a stream, and of processor time."""
    values, times, (alone, many) = np.ones(nbytes, np.uint8), list[float](), SIZES[nbytes]
    ahead, run = AHEAD[nbytes], 0
    for _ in range(WARM + alone):
        begin = values[:8].view(np.float64)[0] = time.monotonic()
        end.put("t", run, values)
        known(end, run + ahead)
        times.append(time.monotonic() - begin)
        run += 1
    begin, spent = time.monotonic(), time.process_time()
    for _ in range(many):
        end.put("t", run, values)
        run += 1
    for last in range(run, run + ahead):
        known(end, last)
    return median(times[WARM:]), (time.monotonic() - begin) / many, (time.process_time() - spent) / many


def known(end: Any, run: int) -> None:
    """Wait until the slot of a run is free, i.e. its tensor was read."""
    if not end.free("t", run):
        end.reach.until(lambda: end.free("t", run), lambda: False, PATIENCE)


def taken(end: Any, nbytes: int) -> tuple[float, float]:
    """Run the reader. Return the seconds from the sender's start until a single tensor may be read, and the processor time per
    tensor of a stream."""
    times, (alone, many) = list[float](), SIZES[nbytes]
    for run in range(WARM + alone):
        end.wait("t", run)
        times.append(time.monotonic() - float(end.slot("t", run)[:8].view(np.float64)[0]))
        end.release("t", run)
    spent = time.process_time()
    for run in range(WARM + alone, WARM + alone + many):
        end.wait("t", run)
        end.release("t", run)
    return median(times[WARM:]), (time.process_time() - spent) / many


def called(ask: Callable[[Any], Any], answer: Callable[[Any], float]) -> dict[int, dict[str, float]]:
    """Run a caller and return its figures by size. ``ask`` starts a call with an array. ``answer`` waits for its end, in order,
    and returns the processor seconds of the other side."""
    found = {}
    for nbytes, (alone, many) in SIZES.items():
        values, times = np.ones(nbytes, np.uint8), list[float]()
        for _ in range(WARM + alone):
            begin = time.monotonic()
            answer(ask(values))
            times.append(time.monotonic() - begin)
        seconds, costs = [], []
        for ahead in (AHEAD[nbytes], 1):
            there, waiting = answer(ask(values)), deque[Any]()
            begin, spent = time.monotonic(), time.process_time()
            for _ in range(many):
                if len(waiting) == ahead:
                    answer(waiting.popleft())
                waiting.append(ask(values))
            last = [answer(w) for w in waiting][-1]
            seconds.append((time.monotonic() - begin) / many)
            costs.append((time.process_time() - spent + last - there) / many)
        both = median(times[WARM:])
        found[nbytes] = {"alone": both, "back": both, "stream": seconds[0], "one by one": seconds[1], "cpu": costs[0]}
    return found


def pickled(place: str, serve: bool) -> None:
    """Run one side of multiprocessing.connection."""
    from multiprocessing.connection import Client, Listener

    where: Any = place if place.startswith("/") else (place.partition(":")[0], PORT)
    if serve:
        with Listener(where, authkey=KEY) as listener:
            print("ready", flush=True)
            with listener.accept() as there:
                while there.recv() is not None:
                    there.send(time.process_time())
        return
    with Client(where, authkey=KEY) as there:
        found = called(there.send, lambda _: float(there.recv()))
        there.send(None)
    print(json.dumps({"found": found}))


def plain(place: str, serve: bool) -> None:
    """Run one side of a plain socket, the lower bound of all transports: bytes are received into one array."""
    near = place.startswith("/")
    with socket.socket(socket.AF_UNIX if near else socket.AF_INET) as end:
        where: Any = place if near else (place.partition(":")[0], PORT)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        if serve:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            end.bind(where)
            end.listen()
            print("ready", flush=True)
            with end.accept()[0] as there:
                plain_reader(there)
            return
        end.connect(where)
        found, answer = {}, bytearray(16)
        for nbytes, (alone, many) in SIZES.items():
            values, times = np.ones(nbytes, np.uint8), list[float]()
            for _ in range(WARM + alone):
                values[:8].view(np.float64)[0] = time.monotonic()
                end.sendall(values.data)
                end.recv_into(answer, 16, socket.MSG_WAITALL)
                times.append(struct.unpack("dd", answer)[0])
            begin, spent, there_before = time.monotonic(), time.process_time(), struct.unpack("dd", answer)[1]
            for _ in range(many):
                end.sendall(values.data)
            end.recv_into(answer, 16, socket.MSG_WAITALL)
            cost = time.process_time() - spent + struct.unpack("dd", answer)[1] - there_before
            found[nbytes] = {"alone": median(times[WARM:]), "stream": (time.monotonic() - begin) / many, "cpu": cost / many}
    print(json.dumps({"found": found}))


def plain_reader(there: socket.socket) -> None:
    """Reply after each single transfer and each stream with its seconds and the total processor seconds."""
    there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    for nbytes, (alone, many) in SIZES.items():
        memory = bytearray(nbytes)
        for count in [*[1] * (WARM + alone), many]:
            for _ in range(count):
                got = 0
                while got < nbytes:
                    got += there.recv_into(memoryview(memory)[got:], nbytes - got, socket.MSG_WAITALL)
            took = time.monotonic() - struct.unpack("d", memory[:8])[0]
            there.sendall(struct.pack("dd", took, time.process_time()))


def grpc_bytes(place: str, serve: bool) -> None:
    """Run one side of gRPC; the server's array is a view of the received bytes."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    where = f"unix:{place}" if place.startswith("/") else place
    if serve:

        def take(request: bytes, context: Any) -> bytes:
            np.frombuffer(request, np.uint8)
            return np.float64(time.process_time()).tobytes()

        server = grpc.server(ThreadPoolExecutor(1), options=options)
        handlers = {"Put": grpc.unary_unary_rpc_method_handler(take)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("T", handlers),))
        server.add_insecure_port(where)
        server.start()
        print("ready", flush=True)
        sys.stdin.read()
        server.stop(None)
        return
    with grpc.insecure_channel(where, options=options) as channel:
        call = channel.unary_unary("/T/Put")
        found = called(lambda v: call.future(v.tobytes()), lambda future: float(np.frombuffer(future.result(), np.float64)[0]))
    print(json.dumps({"found": found}))


def measured(kind: str, hosts: Any, python: str) -> dict[str, Any] | None:
    """Return the figures of ``kind``, in this machine or between two hosts; None if it is unavailable."""
    if kind in ("ours", "mpi"):
        if kind == "mpi" and hosts is None:
            return None
        return mpi_run("messages" if kind == "ours" and hosts else "mpi", hosts)
    if kind == "gRPC" and subprocess.run([python, "-P", "-c", "import grpc"], capture_output=True).returncode:
        return None
    with tempfile.TemporaryDirectory() as folder:
        place = f"{hosts.addresses[1]}:{PORT}" if hosts else f"{folder}/socket"
        interpreter = python if kind == "gRPC" else sys.executable
        lines = [[interpreter, str(HERE), kind, place, side] for side in ("serve", "call")]
        if hosts:
            lines = [hosts.inside(1 - n, line) for n, line in enumerate(lines)]
        with subprocess.Popen(lines[0], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None and server.stdin is not None
            try:
                server.stdout.readline()
                return output(lines[1])
            finally:
                server.stdin.close()
                server.kill()


def mpi_run(transport: str, hosts: Any) -> dict[str, Any]:
    """Run two MPI processes and return their figures."""
    os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, str(HERE), "ours", transport]
    return output(hosts.mpirun(line) if hosts else ["mpirun", "-n", "2", "--oversubscribe", *line])


def output(line: list[str]) -> dict[str, Any]:
    """Return the last output line of a command, parsed as JSON. Raises RuntimeError if the command fails."""
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line[:8])} failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"]:
        ours(sys.argv[2])
    else:
        {"socket": plain, "pickled": pickled, "gRPC": grpc_bytes}[sys.argv[1]](sys.argv[2], sys.argv[3] == "serve")
