"""Transfers between two GPUs of one host: ours, copies by the driver, NCCL and torch's symmetric memory.

python benchmarks/peer_transfers.py --devices 0,1 --markdown transfers.md     (about two minutes on two H200s)

A hop is what a program sees: from the end of the kernel that made the tensor to the begin of the one that reads it on the
other GPU, in a CUDA graph on each side, half of a round trip.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of, section
from peer_pair import WAYS, graphs_of, pair, round_trips, seconds, sender

from rammer.errors import DeviceFailure
from rammer.report.table import markdown

#: What a hop is.
ABOUT = "A hop is half of a round trip between a CUDA graph on either side."
#: Payloads in bytes.
SIZES = tuple(4 << 10 << 2 * k for k in range(9))
#: A kernel that takes so many cycles.
NAP = 'extern "C" __global__ void nap(long long n) { long long b = clock64(); while (clock64() - b < n) ; }'
#: What runs in processes of its own.
OTHERS = ("ours, two processes", "NCCL", "NCCL in a graph", "symmetric memory", "symmetric memory in a graph")
#: Seconds for what runs in processes of its own.
PATIENCE = 75


def hops(
    devices: Sequence[int], nbytes: int, ways: Sequence[tuple[int, int]], fused: bool = False
) -> dict[tuple[int, int], float]:
    """Seconds of a hop by every way."""
    joined, found = pair(devices, nbytes), {}
    count = 100 if nbytes <= 1 << 20 else 20 if nbytes <= 16 << 20 else 6
    try:
        for way in ways:
            found[way] = seconds(joined, round_trips(joined, way, count, fused)) / (2 * count)
    finally:
        joined.close()
    return found


def one_way(devices: Sequence[int], nbytes: int, way: tuple[int, int]) -> float:
    """Bytes a second of payloads one behind the other, the slots given back as they arrive."""
    joined, count = pair(devices, nbytes), 200 if nbytes <= 1 << 20 else 16
    first, second = joined.ends
    queues = [
        [f for i in range(count) for f in sender(first, "there", i, joined.sources[0], way)],
        [
            f
            for _ in range(count)
            for f in (second.exchange([second.wait("there")]).launch, second.exchange([second.credit("there")]).launch)
        ],
    ]
    try:
        return nbytes * count / seconds(joined, graphs_of(joined, queues), whole=True)
    finally:
        joined.close()


def checked(devices: Sequence[int], rounds: int, seed: int) -> str:
    """Fresh payloads of drawn sizes with drawn delays, all compared where they arrive."""
    import cupy as cp
    import numpy as np

    rng = np.random.default_rng(seed)
    nap = cp.RawKernel(NAP, "nap")
    wrong, moved = 0, 0
    for nbytes in (1, 15, 16, 4097, 65536, int(rng.integers(1, 1 << 20)), (8 << 20) + 3):
        joined = pair(devices, nbytes, depth=int(rng.integers(1, 4)))
        a, b = joined.ends
        depth, kept, bad = a.layout.depth, [], []
        try:
            for i in range(rounds):
                with a.unit, joined.streams[0] as stream:
                    nap((1,), (1,), (np.int64(rng.integers(0, 20000)),))
                    source = (cp.arange(max(nbytes, 16), dtype=cp.uint32) * 7 + i * 31).astype(cp.uint8)
                    way = WAYS[int(rng.integers(len(WAYS)))]
                    kept.append((source, queue := sender(a, "there", i % depth, source, way)))
                    [f(stream.ptr) for f in queue]
                with b.unit, joined.streams[1] as stream:
                    kept.append(wait := b.exchange([b.wait("there")]))
                    wait.launch(stream.ptr)
                    nap((1,), (1,), (np.int64(rng.integers(0, 20000)),))
                    memory = cp.cuda.UnownedMemory(b.slot("there", i % depth), nbytes, b)
                    got = cp.ndarray((nbytes,), cp.uint8, cp.cuda.MemoryPointer(memory, 0))
                    bad.append((got != (cp.arange(nbytes, dtype=cp.uint32) * 7 + i * 31).astype(cp.uint8)).sum())
                    kept.append(credit := b.exchange([b.credit("there")]))
                    credit.launch(stream.ptr)
                if i % 32 == 31:
                    [s.synchronize() for s in joined.streams]
                    kept.clear()
            [s.synchronize() for s in joined.streams]
            a.check(), b.check()
            with b.unit:
                wrong += sum(int(x) > 0 for x in bad)
            moved += len(bad)
        finally:
            joined.close()
    return f"{moved} payloads of 7 sizes compared where they arrived, {wrong} wrong (seed {seed})"


def lost(devices: Sequence[int]) -> str:
    """What becomes of a wait for a flag that nobody writes."""
    joined = pair(devices, 4096, limit=0.5)
    begin = time.perf_counter()
    try:
        joined.ends[1].exchange([joined.ends[1].wait("there")]).launch(joined.streams[1].ptr)
        joined.streams[1].synchronize()
        joined.ends[1].check()
    except DeviceFailure as problem:
        return f"a flag that never comes: after {time.perf_counter() - begin:.2f} s, {str(problem).splitlines()[0]}"
    finally:
        joined.close()
    raise DeviceFailure("a wait for a flag that nobody writes ended")


def stream_waits(devices: Sequence[int], count: int = 100) -> tuple[float, float]:
    """Seconds of a hop of 4 KiB queued on streams, with the stream's own waits and with kernels that wait."""
    import cupy as cp

    from rammer_cuda.driver import check, driver

    api, found = driver(), []
    held = cp.RawKernel(NAP, "nap")
    for own in (True, False):
        joined, events, queues = pair(devices, 4096), [], list[list[Any]]()
        for device, (out, back) in enumerate((("there", "back"), ("back", "there"))):
            end, queue = joined.ends[device], list[Any]()
            flag, waiting = end.word(device, back, "flag"), end.exchange([end.wait(back)]).launch
            for i in range(count):
                put = sender(end, out, i, joined.sources[device], WAYS[2], [end.credit(back)] if i or device else [])
                wait = (lambda s, f=flag, n=i + 1: check(api.cuStreamWaitValue32(s, f, n, 0), "waiting")) if own else waiting
                queue += [wait, *put] if device else [*put, wait]
            queues.append(queue)
        for end, stream, queue in zip(joined.ends, joined.streams, queues, strict=True):
            with end.unit, stream:
                held((1,), (1,), (100_000_000,))
                events.append((cp.cuda.Event(), cp.cuda.Event()))
                events[-1][0].record(stream)
                for launch in queue:
                    launch(stream.ptr)
                events[-1][1].record(stream)
        for end, stream in zip(joined.ends, joined.streams, strict=True):
            with end.unit:
                stream.synchronize()
            end.check()
        found.append(min(cp.cuda.get_elapsed_time(*e) for e in events) * 1e-3 / (2 * count))
        joined.close()
    return found[0], found[1]


def driver_copies(devices: Sequence[int], nbytes: int, count: int = 20) -> float:
    """Seconds of a peer copy by the driver, one behind the other on a stream."""
    import cupy as cp

    from rammer_cuda.hardware import Unit

    memory = []
    for d in devices:
        with Unit(d):
            memory.append(cp.zeros(nbytes, cp.uint8))
            cp.cuda.get_current_stream().synchronize()
    best = float("inf")
    with Unit(devices[0]):
        stream = cp.cuda.Stream(non_blocking=True)
        for _ in range(4):
            events = cp.cuda.Event(), cp.cuda.Event()
            events[0].record(stream)
            for _ in range(count):
                cp.cuda.runtime.memcpyPeerAsync(
                    memory[1].data.ptr, devices[1], memory[0].data.ptr, devices[0], nbytes, stream.ptr
                )
            events[1].record(stream)
            events[1].synchronize()
            best = min(best, cp.cuda.get_elapsed_time(*events) * 1e-3 / count)
    return best


def others(devices: Sequence[int]) -> dict[str, dict[str, float]]:
    """Seconds of a hop by NCCL and by torch's symmetric memory, in processes of their own; a library that fails says so."""
    script = Path(__file__).resolve().parent / "peer_transfers_apart.py"
    command = [sys.executable, str(script), ",".join(map(str, devices)), ",".join(map(str, SIZES))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    click.echo(done.stderr[-1500:], err=True)
    if done.returncode:
        click.echo(done.stderr[-1500:], err=True)
        return {}
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def microseconds(value: float | None) -> str:
    """Of a cell."""
    return "" if value is None else f"{value * 1e6:.2f}" if value < 1e-5 else f"{value * 1e6:.1f}"


def called(way: tuple[int, int]) -> str:
    """A way in words."""
    return f"{way[0] >> 10} KiB a block, {way[1]}" if way[1] else "copy engine"


@click.command()
@click.option("--devices", default="0,1", show_default=True, help="Two GPUs.")
@click.option("--rounds", default=150, show_default=True, help="Payloads of each size that are compared.")
@click.option("--seed", default=0, show_default=True)
@click.option("--torch/--no-torch", "torch", default=True, help="NCCL and symmetric memory as well.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the table.")
def main(devices: str, rounds: int, seed: int, torch: bool, markdown_file: Path | None) -> None:
    """Measure and print the table."""
    pair_of = [int(d) for d in devices.split(",")]
    begin = time.perf_counter()

    def say(text: str) -> None:
        click.echo(f"{time.perf_counter() - begin:6.1f} s  {text}", err=True)

    lines = [checked(pair_of, rounds, seed)]
    say(lines[-1])
    lines.append(lost(pair_of))
    say(lines[-1])
    by_size = {}
    for size in SIZES:
        ways = [w for w in WAYS if w[1] == 0 or w[1] > 1]
        by_size[size] = found = hops(pair_of, size, ways)
        say(f"{size >> 10} KiB: " + ", ".join(f"{called(w)}: {microseconds(t)}" for w, t in found.items()))
    fused = hops(pair_of, SIZES[0], WAYS[:-1], fused=True)
    lines.append(f"4 KiB, a write and the wait for the answer in one launch: {microseconds(min(fused.values()))} us a hop")
    say(lines[-1])
    copies = {size: driver_copies(pair_of, size) for size in SIZES}
    say("driver: " + ", ".join(f"{s >> 10}: {microseconds(t)}" for s, t in copies.items()))
    flow = {size: one_way(pair_of, size, min(by_size[size], key=by_size[size].__getitem__)) for size in SIZES}
    say("one way GB/s: " + ", ".join(f"{s >> 10}: {t / 1e9:.1f}" for s, t in flow.items()))
    beside = others(pair_of) if torch else {}
    own, kernel = stream_waits(pair_of)
    told = f"{microseconds(own)} us a hop with the streams' waits, {microseconds(kernel)} with waiting kernels"
    lines.append(f"4 KiB queued on streams: {told}")
    say(lines[-1])
    rows = []
    for size, found in by_size.items():
        best = min(found, key=found.__getitem__)
        rest = [microseconds(beside.get(n, {}).get(str(size))) for n in OTHERS]
        rate, steady = f"{size / found[best] / 1e9:.0f}", f"{flow[size] / 1e9:.0f}"
        rows.append(
            [f"{size >> 10} KiB", microseconds(found[best]), called(best), rate, steady, microseconds(copies[size]), *rest]
        )
    headers = ["payload", "ours us", "how", "GB/s", "GB/s, one behind the other", "driver's copy us"]
    headers += [f"{n} us" for n in OTHERS]
    text = markdown(rows, headers)
    click.echo("\n".join([*lines, "", text]))
    if markdown_file:
        parts = ["# Transfers between two GPUs", f"Made by `python benchmarks/peer_transfers.py --devices {devices}`. {ABOUT}"]
        parts += [text, "\n".join(f"- {line}" for line in lines), section(environment_of(gpu=True))]
        markdown_file.write_text("\n\n".join(parts))


if __name__ == "__main__":
    run(main)
