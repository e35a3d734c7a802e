"""Hops with a process a GPU: ours, NCCL's, torch's symmetric memory's. Prints one line of JSON for ``peer_transfers.py``."""

from __future__ import annotations

import json
import os
import queue
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any


def timed(rounds: Callable[[int], None], count: int, graph: bool) -> float:
    """Seconds of a hop; a call of ``rounds`` queues ``count`` round trips."""
    import torch

    rounds(3)
    torch.cuda.synchronize()
    replay = lambda: rounds(count)  # noqa: E731
    if graph:
        made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made, capture_error_mode="thread_local"):
            rounds(count)
        replay = made.replay
    best = float("inf")
    for _ in range(4):
        torch.distributed.barrier()
        torch.cuda.synchronize()
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        replay()
        events[1].record()
        torch.cuda.synchronize()
        best = min(best, events[0].elapsed_time(events[1]) * 1e-3)
    return best / (2 * count)


def torch_side(rank: int, devices: Sequence[int], sizes: Sequence[int], port: int, answer: Any) -> None:
    """One GPU's process."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(devices[rank])
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", devices[rank]))
    found: dict[str, dict[str, float]] = {}
    other = 1 - rank

    def note(name: str, size: int, make: Callable[[], float]) -> None:
        try:
            found.setdefault(name, {})[str(size)] = make()
        except Exception as problem:  # a library without this is a gap in the table
            sys.stderr.write(f"{name}: {problem}\n")

    for size in sizes:
        count = 100 if size <= 1 << 20 else 6
        mine, got = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))

        def nccl(times: int, mine: Any = mine, got: Any = got) -> None:
            for _ in range(times):
                for step in (0, 1) if rank == 0 else (1, 0):
                    dist.send(mine, other) if step == 0 else dist.recv(got, other)

        note("NCCL", size, partial(timed, nccl, count, graph=False))
        note("NCCL in a graph", size, partial(timed, nccl, count, graph=True))
    if rank == 0:
        answer.put(dict(found))
    for size in sizes:
        count = 100 if size <= 1 << 20 else 6
        mine = torch.zeros(size, dtype=torch.uint8, device="cuda")
        shared = symmetric.empty(size, dtype=torch.uint8, device=f"cuda:{devices[rank]}")
        handle = symmetric.rendezvous(shared, dist.group.WORLD)
        theirs = handle.get_buffer(other, (size,), torch.uint8)

        def put(times: int, theirs: Any = theirs, mine: Any = mine, handle: Any = handle) -> None:
            for _ in range(times):
                if rank:
                    handle.wait_signal(other, 0)
                theirs.copy_(mine)
                handle.put_signal(other, 0)
                if not rank:
                    handle.wait_signal(other, 0)

        note("symmetric memory", size, partial(timed, put, count, graph=False))
        note("symmetric memory in a graph", size, partial(timed, put, count, graph=True))
    if rank == 0:
        answer.put(found)
    time.sleep(0.5)
    dist.destroy_process_group()


def our_side(rank: int, devices: Sequence[int], sizes: Sequence[int], way_of: Sequence[tuple[int, int]], pipe: Any) -> None:
    """One GPU's process; what went there and came back is compared."""
    import cupy as cp
    from peer_pair import captured, side

    from rammer_cuda.hardware import Unit
    from rammer_cuda.peer.exchange import End
    from rammer_cuda.peer.layout import PeerLayout, Route
    from rammer_cuda.peer.memory import PeerMemory, ReachedMemory

    found: dict[str, float] = {}
    for size, way in zip(sizes, way_of, strict=True):
        layout, index = PeerLayout((Route("there", size, 0, 1), Route("back", size, 1, 0)), 2, 1), devices[rank]
        exposed = PeerMemory(index, layout.nbytes(rank))
        pipe.send(exposed.offer(abroad=True))
        offers = [exposed.offer(abroad=False), pipe.recv()]
        mapped = ReachedMemory(index, offers if rank == 0 else offers[::-1])
        end, count = End(index, rank, layout, mapped.addresses, 5.0), 100 if size <= 1 << 20 else 6
        with Unit(index):
            stream = cp.cuda.Stream(non_blocking=True)
            arrived = exposed.address + layout.slots["back" if rank == 0 else "there"]
            here = cp.ndarray((size,), cp.uint8, cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(arrived, size, exposed), 0))
            source = cp.random.default_rng(size).integers(0, 256, size, dtype=cp.uint8) if rank == 0 else here
            cp.cuda.get_current_stream().synchronize()
            kept = side(end, rank, source, way, count)
            graph = captured(end, stream, lambda s, q=kept: [f(s) for f in q])
            best = float("inf")
            for _ in range(4):
                pipe.send(None)
                pipe.recv()
                events = cp.cuda.Event(), cp.cuda.Event()
                events[0].record(stream)
                graph.launch(stream)
                events[1].record(stream)
                events[1].synchronize()
                end.check()
                best = min(best, cp.cuda.get_elapsed_time(*events) * 1e-3)
            if not bool((here == source).all()):
                raise ValueError(f"{size} bytes came back as others")
        pipe.send(best)
        found[str(size)] = min(best, pipe.recv()) / (2 * count)
        mapped.close()
        pipe.send(None)
        pipe.recv()
        exposed.close()
        end.close()
    pipe.send(found)
    pipe.recv()


def ours(devices: Sequence[int], sizes: Sequence[int]) -> dict[str, float]:
    """Seconds of a hop between two processes, whose pipes' ends are joined here."""
    context = get_context("spawn")
    way_of = [(4 << 10, 64) if size <= 1 << 20 else (16 << 10, 132) for size in sizes]
    pipes = [context.Pipe() for _ in range(2)]
    workers = [context.Process(target=our_side, args=(r, devices, sizes, way_of, pipes[r][1])) for r in range(2)]
    for worker in workers:
        worker.start()
    try:
        while True:
            said = []
            for mine, _ in pipes:
                if not mine.poll(30):
                    raise TimeoutError("a process says nothing")
                said.append(mine.recv())
            for (mine, _), word in zip(pipes, said[::-1], strict=True):
                mine.send(word)
            if isinstance(said[0], dict):
                return said[0]
    finally:
        for worker in workers:
            worker.join(10)
            if worker.is_alive():
                worker.terminate()


def main() -> None:
    """All of them, and one line."""
    import torch.multiprocessing as processes

    sys.path.insert(0, str(Path(__file__).resolve().parent))
    devices, sizes = ([int(x) for x in text.split(",")] for text in sys.argv[1:3])
    try:
        own = ours(devices, sizes)
    except Exception as problem:  # the others are worth having
        sys.stderr.write(f"ours: {problem}\n")
        own = {}
    answer = processes.get_context("spawn").Queue()
    started = processes.spawn(torch_side, (devices, sizes, 29500 + os.getpid() % 500, answer), nprocs=2, join=False)
    found = {}
    try:
        found |= answer.get(timeout=40)
        found |= answer.get(timeout=20)
    except queue.Empty:
        sys.stderr.write("a library did not answer in time\n")
    print(json.dumps({"ours, two processes": own, **found}), flush=True)
    for process in started.processes:
        process.join(5)
        process.kill()


if __name__ == "__main__":
    main()
