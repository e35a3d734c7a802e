"""Two GPUs of one process, joined for measuring what crosses between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: (bytes a block, most blocks) that are tried; 0 blocks: the copy engine.
WAYS = (
    (1 << 10, 16),
    (2 << 10, 32),
    (4 << 10, 64),
    (4 << 10, 132),
    (16 << 10, 32),
    (16 << 10, 64),
    (16 << 10, 132),
    (64 << 10, 264),
    (0, 0),
)
#: Seconds after which a wait gives up.
LIMIT = 5.0


@dataclass
class Pair:
    """Both ends of two routes, ``there`` and ``back``, with a stream each."""

    ends: list[Any]
    streams: list[Any]
    sources: list[Any]
    memory: list[Any]

    def close(self) -> None:
        """Free all memory."""
        for end, stream in zip(self.ends, self.streams, strict=True):
            with end.unit:
                stream.synchronize()
        for thing in (*self.memory, *self.ends):
            thing.close()


def pair(devices: Sequence[int], nbytes: int, depth: int = 2, limit: float = LIMIT) -> Pair:
    """Two GPUs of this process, joined."""
    import cupy as cp

    from rammer_cuda.hardware import Unit
    from rammer_cuda.peer.exchange import End
    from rammer_cuda.peer.layout import PeerLayout, Route
    from rammer_cuda.peer.memory import PeerMemory, ReachedMemory

    layout = PeerLayout((Route("there", nbytes, 0, 1), Route("back", nbytes, 1, 0)), 2, depth)
    exposed = [PeerMemory(d, layout.nbytes(i)) for i, d in enumerate(devices)]
    offers = [e.offer(abroad=False) for e in exposed]
    mapped = [ReachedMemory(d, offers) for d in devices]
    ends = [End(d, i, layout, m.addresses, limit) for i, (d, m) in enumerate(zip(devices, mapped, strict=True))]
    streams, sources = [], []
    for d in devices:
        with Unit(d):
            streams.append(cp.cuda.Stream(non_blocking=True))
            sources.append(cp.zeros(max(nbytes, 16), cp.uint8))
            cp.cuda.get_current_stream().synchronize()
    return Pair(ends, streams, sources, [*mapped, *exposed])


def captured(end: Any, stream: Any, queue: Callable[[int], None]) -> Any:
    """What ``queue`` puts on the stream, as a graph."""
    with end.unit, stream:
        stream.begin_capture()
        queue(stream.ptr)
        return stream.end_capture()


def sender(end: Any, name: str, slot: int, source: Any, way: tuple[int, int], more: Sequence[Any] = ()) -> list[Any]:
    """Launches that write a payload one way, with other entries in the last of them."""
    import cupy as cp

    from rammer_cuda.peer.entries import spread_over

    each, most = way
    if most:
        return [end.exchange([spread_over(end.put(name, slot, source.data.ptr), most, each), *more]).launch]
    to, size = end.slot(name, slot), end.routes[name].nbytes
    copy = lambda stream: cp.cuda.runtime.memcpyAsync(to, source.data.ptr, size, 3, stream)  # noqa: E731
    return [end.exchange([end.room(name)]).launch, copy, end.exchange([end.put(name, slot, 0, 0), *more]).launch]


def side(end: Any, device: int, source: Any, way: tuple[int, int], count: int, fused: bool = False) -> list[Any]:
    """Launches of one GPU for so many round trips: device 0 begins. ``fused``: a put and the next wait are one launch."""
    out, back = ("there", "back") if device == 0 else ("back", "there")
    wait, credit, result = end.wait(back), end.credit(back), []
    if device:
        result.append(end.exchange([wait]).launch)
    for i in range(count):
        last = i == count - 1 and device == 1
        credits = [credit] if i or device else []
        waits = [] if last else [wait]
        result += sender(end, out, i, source, way, [*credits, *(waits if fused else [])])
        if waits and not fused:
            result.append(end.exchange(waits).launch)
    if not device:
        result.append(end.exchange([credit]).launch)
    return result


def round_trips(joined: Pair, way: tuple[int, int], count: int, fused: bool = False) -> list[Any]:
    """Graphs of both sides; the launches live as long as ``joined``."""
    queues = [side(e, i, s, way, count, fused) for i, (e, s) in enumerate(zip(joined.ends, joined.sources, strict=True))]
    return graphs_of(joined, queues)


def graphs_of(joined: Pair, queues: Sequence[Sequence[Any]]) -> list[Any]:
    """A graph of each side's launches, which live as long as ``joined``."""
    joined.memory.append(_Kept(queues))
    return [
        captured(e, s, lambda stream, q=q: [f(stream) for f in q])
        for e, s, q in zip(joined.ends, joined.streams, queues, strict=True)
    ]


@dataclass
class _Kept:
    things: Any

    def close(self) -> None:
        """Let go."""
        self.things = None


def seconds(joined: Pair, graphs: Sequence[Any], rounds: int = 5, whole: bool = False) -> float:
    """The least seconds of a run of both graphs by the events of the GPU that began later (``whole``: of the other one)."""
    import cupy as cp

    best = float("inf")
    for _ in range(rounds):
        events = []
        for end, stream, graph in zip(joined.ends, joined.streams, graphs, strict=True):
            with end.unit:
                begin, done = cp.cuda.Event(), cp.cuda.Event()
                begin.record(stream)
                graph.launch(stream)
                done.record(stream)
                events.append((begin, done))
        for end, (_, done) in zip(joined.ends, events, strict=True):
            with end.unit:
                done.synchronize()
            end.check()
        taken = [cp.cuda.get_elapsed_time(*e) * 1e-3 for e in events]
        best = min(best, max(taken) if whole else min(taken))
    return best
