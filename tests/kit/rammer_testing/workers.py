"""Combined results of processes that search kernels in parallel.

A process that dies, hangs or breaks its device is restarted (``rammer_testing.worker_pool``). Its counts are kept, since it
reports after every candidate. Processes exchange the cells that they have covered."""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from rammer_testing.coverage import Coverage
from rammer_testing.search import LIFE
from rammer_testing.worker_pool import HANG, UNFINISHED, Begin, Crew, Member

#: Seconds without a message until a process is ended. The fraction of the total time, and the maximum in seconds, reserved for
#: processes to exit: releasing a GPU takes a while if many processes do it.
PATIENCE, LEAVING, MOST_LEAVING = 90.0, 0.1, 8.0


@dataclass
class HuntOutcome:
    """The results of a search: coverage, failures as lines by kind, families of the device, and additive facts."""

    facts: dict[str, Any]
    coverage: Coverage = field(default_factory=Coverage)
    failures: dict[str, list[str]] = field(default_factory=dict)
    families: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.facts = {"device": "", "seeds": [], "seconds": 0.0, "cpu_seconds": 0.0, "started": 0, "peak": 0, **self.facts}

    def add(self, event: Mapping[str, Any]) -> None:
        """Add one message of a process."""
        self.coverage.add(event)
        self.families = self.families or list(event.get("families", ()))
        self.facts["peak"] = max(self.facts["peak"], event.get("peak", 0))
        if "failure" in event:
            self.failures.setdefault(event["kind"], []).append(event["failure"])

    def listed(self) -> dict[str, Any]:
        """Return the outcome as JSON data."""
        return {"facts": self.facts, "failures": self.failures, "families": self.families, **self.coverage.listed()}

    def merge(self, other: Mapping[str, Any]) -> None:
        """Add the outcome of another run, from the output of ``listed``."""
        facts = other["facts"]
        for name in ("seconds", "cpu_seconds", "started", "seeds"):
            self.facts[name] += facts[name]
        self.facts["device"] = " and ".join(dict.fromkeys(d for d in (self.facts["device"], facts["device"]) if d))
        self.add({**other, "peak": facts["peak"]})
        for kind, lines in other["failures"].items():
            self.failures.setdefault(kind, []).extend(lines)


def failed(outcome: HuntOutcome) -> bool:
    return bool(outcome.failures)


def hunt(
    begin: Begin,
    seconds: float,
    size: int,
    enough: Callable[[HuntOutcome], bool],
    facts: dict[str, Any],
    keep: Callable[[HuntOutcome], None] = lambda outcome: None,
) -> HuntOutcome:
    """Search in ``size`` processes for ``seconds`` or until ``enough`` returns True.

    ``begin`` sets up the search in each process; its cases are end times of the clock. ``keep`` receives the intermediate outcome
    every few seconds, so that it outlives this process."""
    outcome, started, before = HuntOutcome(facts), time.monotonic(), _cpu()
    leaving, last = min(seconds * LEAVING, MOST_LEAVING), dict[Member, str]()

    def heard(member: Member, event: Mapping[str, Any]) -> None:
        last[member] = event.get("start", last.get(member, ""))
        fresh = [(f, p, w) for f, p, w, _ in event.get("cells", ()) if not outcome.coverage.cells[f, p, w]]
        outcome.add(event)
        if fresh:
            crew.spread(fresh)
        if enough(outcome):
            crew.stop(0)

    def lost(member: Member, case: object, kind: str, why: str, answered: bool) -> None:
        if kind != UNFINISHED:
            said, _, trace = why.removeprefix("the ").partition("\n")
            said = f"process ended after {PATIENCE:.0f} s without a sign of life" if kind == HANG else said
            heard(member, {"kind": said, "failure": f"{last.get(member, '')}\n{trace}".rstrip()})

    def kept() -> None:
        outcome.facts |= {"seconds": time.monotonic() - started, "cpu_seconds": _cpu() - before, "started": crew.started}
        keep(outcome)
        for path in Path(folder).rglob("*"):  # files of the device that no process can still need
            with suppress(OSError):
                if path.is_file() and time.time() - path.stat().st_mtime > LIFE:
                    path.unlink()

    # The device's disk cache is private to this search: kernels are never requested twice.
    with tempfile.TemporaryDirectory(prefix="rammer-search-", ignore_cleanup_errors=True) as folder:
        end = started + seconds - leaving
        crew = Crew(
            begin,
            (end for _ in count()),
            size,
            end,
            heard,
            lost,
            kept,
            leaving / 2,
            PATIENCE,
            environment={"RAMMER_CACHE": folder, "XDG_CACHE_HOME": folder},
        )
        crew.run()
    return outcome


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
