"""A campaign in processes of its own: one that hangs or dies costs the graph it was at, which is counted and named."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from rammer.errors import RammerError
from rammer.testing.graphs.campaign import Key, Plan, Search, Tally
from rammer.testing.graphs.record import Record

#: Seconds after the end of a campaign for the graphs that are being run.
GRACE: Final = 5.0
#: Seconds for a process to begin: many of them read the same packages at once.
BEGINNING: Final = 90.0
#: Processes that may die before they have asked for a graph.
FALSE_STARTS: Final = 3


@dataclass
class Worker:
    """A process, the batch it is at (None: none yet), since when, and how many graphs it has judged."""

    number: int
    process: Any
    pipe: Connection
    known: int = 0
    at: int | None = None
    since: float = field(default_factory=time.monotonic)
    shrinks: bool = False

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass
class Crew:
    """The parent's view: what is left to do, who does what, and the total so far."""

    plan: Plan
    record: Record
    patience: float
    total: Tally
    left: deque[int]
    counts: list[int]
    workers: list[Worker] = field(default_factory=list)
    known: list[Key] = field(default_factory=list)
    false_starts: int = 0
    stopped: bool = False

    @property
    def over(self) -> bool:
        """Whether no graph may be begun."""
        return self.stopped or time.monotonic() > self.plan.end

    def run(self) -> None:
        """Until every batch is judged or the time is up. RammerError where the device cannot be opened."""
        try:
            for number in range(min(len(self.counts), len(self.left))):
                self.start(number)
            while self.workers:
                ready = wait([w.pipe for w in self.workers], timeout=0.2)
                for worker in [w for w in self.workers if w.pipe in ready]:
                    self.heard(worker)
                for worker in list(self.workers):
                    self.watch(worker)
        finally:
            for worker in self.workers:
                worker.end()

    def start(self, number: int) -> None:
        """A new process with this number."""
        ours, theirs = _CONTEXT.Pipe()
        # Not a daemon: those may not have the child that ONNX Runtime runs in.
        process = _CONTEXT.Process(target=_serve, args=(theirs, self.plan))
        with _pinned(number, len(self.counts)):
            process.start()
        theirs.close()
        self.workers.append(Worker(number, process, ours))

    def heard(self, worker: Worker) -> None:
        """A process says something, or has ended."""
        try:
            said = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(GRACE)
            self.lose(worker, f"the process ended with exit code {worker.process.exitcode}")
            return
        worker.since = time.monotonic()
        if isinstance(said, RammerError):
            raise said
        if isinstance(said, Tally):
            self.add(worker, said)
        else:
            self.next(worker)

    def add(self, worker: Worker, part: Tally) -> None:
        """Count what a batch gave, or a shrunk fault."""
        worker.shrinks = bool(part.faults)
        self.counts[worker.number] += part.graphs
        self.known += [f.key for f in part.faults.values() if f.key not in self.known] if not part.graphs else []
        self.total.add(part)
        self.record.note(self.total, part, self.counts)

    def next(self, worker: Worker) -> None:
        """Give the process another batch and what others have shrunk meanwhile, or let it go."""
        worker.shrinks = False
        if self.over or not self.left:
            self.dismiss(worker)
            return
        worker.at = self.left.popleft()
        try:
            worker.pipe.send((worker.at, self.known[worker.known :]))
        except OSError:
            self.lose(worker, "the process ended")
            return
        worker.known = len(self.known)

    def dismiss(self, worker: Worker) -> None:
        """It has nothing left to do."""
        worker.end()
        self.workers.remove(worker)

    def watch(self, worker: Worker) -> None:
        """End a process that hangs, or that is late when the time is up."""
        spent = time.monotonic() - worker.since
        if self.over and time.monotonic() > self.plan.end + GRACE:
            if worker.at is not None and not worker.shrinks:
                self.total.unfinished.append(worker.at)
            self.dismiss(worker)
        elif spent > self.patience + (BEGINNING if worker.at is None else self.plan.shrink if worker.shrinks else 0):
            self.lose(worker, f"nothing for {spent:.0f} s")

    def lose(self, worker: Worker, why: str) -> None:
        """Count the graph that a process was at, end it, and start another in its place."""
        self.dismiss(worker)
        if worker.at is None:
            self.false_starts += 1
            if self.false_starts > FALSE_STARTS + len(self.counts):
                raise RammerError(f"processes end before their first graph: {why}", hint="try --processes 0")
        elif not worker.shrinks:
            last = worker.at + self.plan.batch - 1
            which = f"graph {worker.at}" if self.plan.batch == 1 else f"a graph of {worker.at} to {last}"
            kind = "hang" if why.startswith("nothing") else "death"
            self.total.lost.append(f"{kind} | {which} | {why}")
        if self.left and not self.over:
            self.start(worker.number)


_CONTEXT: Final = multiprocessing.get_context("spawn")


def campaign(plan: Plan, processes: int = 1, record: Record | None = None, patience: float = 120.0) -> Tally:
    """Run ``plan`` in so many processes. A graph about which nothing is heard for ``patience`` seconds counts as one that
    hangs. SIGTERM and Control-C end it with what there is. RammerError where the device cannot be opened."""
    crew = Crew(plan, record or Record(plan), patience, Tally(), deque(plan.starts()), [0] * processes)

    def stop(*_: object) -> None:
        crew.stopped = True
        object.__setattr__(plan, "end", min(plan.end, time.monotonic()))

    before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        crew.run()
    finally:
        crew.record.close(crew.total, crew.counts)
        for number, handler in before.items():
            signal.signal(number, handler)
    return crew.total


@contextmanager
def _pinned(number: int, processes: int) -> Iterator[None]:
    """Children started here see two to four of the processors: runtimes that start a thread for each would fight."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    width = 2 + number % 3
    if processes < 2 or len(allowed) <= width:
        yield
        return
    first = number * len(allowed) // processes
    os.sched_setaffinity(0, {allowed[(first + i) % len(allowed)] for i in range(width)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _serve(pipe: Connection, plan: Plan) -> None:
    """The process: asks for batches and judges them, until the pipe is closed."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    try:
        search = Search(plan)
    except RammerError as error:
        pipe.send(error)
        return
    known = set[Key]()
    try:
        while True:
            pipe.send(None)
            start, news = pipe.recv()
            known.update(news)
            for part in search.batch(start, known):
                pipe.send(part)
    except (EOFError, OSError):
        pass
    finally:
        search.judge.outside.close()
