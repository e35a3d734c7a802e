"""Processes that search kernels side by side, and what all of them together have found.

A process that dies, hangs or breaks its device is started again; what it had counted is kept, since it tells after every
candidate. What one has covered the others hear of.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from rammer.testing.coverage import Cell, Coverage
from rammer.testing.search import BROKEN, LIFE

#: Seconds without a sign of life after which a process is ended. The share of all the time, and most seconds, that processes get
#: to end themselves: giving back a GPU takes a while where many do it.
PATIENCE, LEAVING, MOST_LEAVING = 90.0, 0.1, 8.0
#: Seconds between looks at a process, and between reports of what was found so far.
LOOK, KEPT = 0.1, 10.0


@dataclass
class Outcome:
    """What was run and what failed: coverage, failures as lines by their kind, families of the device, and facts that add up."""

    facts: dict[str, Any]
    coverage: Coverage = field(default_factory=Coverage)
    failures: dict[str, list[str]] = field(default_factory=dict)
    families: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.facts = {"device": "", "seeds": [], "seconds": 0.0, "cpu_seconds": 0.0, "started": 0, "peak": 0, **self.facts}

    def add(self, event: Mapping[str, Any]) -> None:
        """One line of a process."""
        self.coverage.add(event)
        self.families = self.families or list(event.get("families", ()))
        self.facts["peak"] = max(self.facts["peak"], event.get("peak", 0))
        if "failure" in event:
            self.failures.setdefault(event["kind"], []).append(event["failure"])

    def listed(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {"facts": self.facts, "failures": self.failures, "families": self.families, **self.coverage.listed()}

    def merge(self, other: Mapping[str, Any]) -> None:
        """Add another run's, as ``listed`` gave it."""
        facts = other["facts"]
        for name in ("seconds", "cpu_seconds", "started", "seeds"):
            self.facts[name] += facts[name]
        self.facts["device"] = " and ".join(dict.fromkeys(d for d in (self.facts["device"], facts["device"]) if d))
        self.add({**other, "peak": facts["peak"]})
        for kind, lines in other["failures"].items():
            self.failures.setdefault(kind, []).extend(lines)


class Team:
    """All processes of one search, for ``seconds`` or (with ``stop``) until a failure."""

    def __init__(self, command: Sequence[str], size: int, seconds: float, stop: bool, outcome: Outcome) -> None:
        self.command, self.size, self.stop, self.outcome = command, size, stop, outcome
        self.last = time.monotonic() + seconds - min(seconds * LEAVING, MOST_LEAVING)  # for new candidates
        self.end = time.monotonic() + seconds - min(seconds * LEAVING, MOST_LEAVING) / 2  # of every process
        self.lock, self.over = Lock(), Event()
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="rammer-search-")

    def run(self, keep: Callable[[Outcome], None]) -> None:
        """Everything, from the first process' start to the last one's end; ``keep`` gets what was found so far."""
        threads = [Thread(target=self._member, args=(i,), daemon=True) for i in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(KEPT)
                with self.lock:
                    keep(self.outcome)
        with suppress(OSError):
            self.folder.cleanup()

    def _member(self, number: int) -> None:
        """Start processes one after another."""
        # What the device keeps on disk is for this search alone: kernels are never asked for again.
        cache = {"RAMMER_CACHE": self.folder.name, "XDG_CACHE_HOME": self.folder.name}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **cache}
        turn = 0
        while (left := self.last - time.monotonic()) > 0.5 and not self.over.is_set():
            command = [*self.command, "--seconds", str(left), "--child", f"{number}.{self.size}.{turn}"]
            with suppress(BrokenPipeError), subprocess.Popen(
                command, text=True, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as process:
                self._follow(number, process)
            turn += 1
            self._prune()

    def _follow(self, number: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with self.lock:
            self.outcome.facts["started"] += 1
            self.processes[number] = process
            self._tell(process, [c for c, n in self.outcome.coverage.cells.items() if n])
        last, alive, ended = "", [time.monotonic()], [""]
        Thread(target=self._watch, args=(process, alive, ended), daemon=True).start()
        for line in process.stdout:
            alive[0] = time.monotonic()
            try:
                event = json.loads(line)
            except ValueError:
                continue
            last = event.get("start", last)
            with self.lock:
                self._heard(number, event)
        code = process.wait()
        with self.lock:
            del self.processes[number]
            if code not in (0, BROKEN) and ended[0] != "over":
                self._heard(number, {"kind": f"process ended with {code}{ended[0]}", "failure": last})

    def _heard(self, number: int, event: Mapping[str, Any]) -> None:
        """Count an event; tell the others what is new in it. Holding the lock."""
        cells = [(f, p, w) for f, p, w, _ in event.get("cells", ())]
        fresh = [c for c in cells if not self.outcome.coverage.cells[c]]
        self.outcome.add(event)
        for other, process in self.processes.items() if fresh else ():
            if other != number:
                self._tell(process, fresh)
        if self.stop and "failure" in event:
            self.over.set()

    @staticmethod
    def _tell(process: subprocess.Popen[str], cells: Sequence[Cell]) -> None:
        assert process.stdin is not None
        with suppress(OSError, ValueError):  # it may have ended
            process.stdin.write(json.dumps(cells) + "\n")
            process.stdin.flush()

    def _watch(self, process: subprocess.Popen[str], alive: list[float], ended: list[str]) -> None:
        while process.poll() is None:
            if time.monotonic() > self.end or self.over.is_set():
                ended[0] = "over"
            elif time.monotonic() - alive[0] > PATIENCE:
                ended[0] = f" after {PATIENCE:.0f} s without a sign of life"
            if ended[0]:
                process.kill()
            time.sleep(LOOK)

    def _prune(self) -> None:
        """Delete what the device kept on disk and no process can still want."""
        for path in Path(self.folder.name).rglob("*"):
            with suppress(OSError):
                if path.is_file() and time.time() - path.stat().st_mtime > LIFE:
                    path.unlink()


def hunt(command: Sequence[str], seconds: float, size: int, stop: bool, facts: dict[str, Any],
         keep: Callable[[Outcome], None] = lambda outcome: None) -> Outcome:  # fmt: skip
    """Search in ``size`` processes for ``seconds``: each is ``command`` with its own part. ``keep`` gets what was found so far
    every few seconds, so that it outlives this process, too."""
    outcome, begin, before = Outcome(facts), time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)

    def counted(so_far: Outcome) -> None:
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        so_far.facts |= {"seconds": time.monotonic() - begin, "cpu_seconds": cpu}
        keep(so_far)

    Team(command, size, seconds, stop, outcome).run(counted)
    counted(outcome)
    return outcome
