"""A campaign of mutants in several processes with separate seeds, a time limit and a report."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from rammer.cache.whole_files import write_whole
from rammer_testing.mutants.tally import Tally
from rammer_testing.sandbox import Machinery
from rammer_testing.worker_pool import UNFINISHED, Crew, Line, Member, Work

#: Seconds for running mutants after the end of time; seconds of silence, since making valid files and shrinking need many runs.
GRACE, PATIENCE = 3.0, 1200.0
#: Consecutive runs that fail to start before the search ends.
MOST: Final = 3
#: The fault recorded for a process that ends unexpectedly.
DIED: Final = "a process of the campaign ended"


@dataclass(frozen=True)
class MutantPlan:
    """Kinds of mutants for the device of a command line; failing mutants are written to ``keep``."""

    kinds: Sequence[str]
    device: Sequence[str]
    seed: int
    keep: Path | None = None


def search(asked: MutantPlan, count: int, processes: int, seconds: float, report: Path | None) -> Tally:
    """Run ``count`` mutants, or as many as ``seconds`` allow. ``report`` gets the counts every few seconds. Raises RammerError if
    mutants cannot be run."""
    total, end = Tally(), time.monotonic() + seconds

    def heard(member: Member, part: Tally) -> None:
        total.add(part)

    def lost(member: Member, number: int, kind: str, why: str, answered: bool) -> None:
        if kind != UNFINISHED:
            total.faults.append((f"{DIED}: {why}", f"mutant {number}"))

    def kept() -> None:
        if report is not None:
            left = max(0.0, end - time.monotonic())
            entry = {"mutants": total.mutants, "running": crew.running, "seconds_left": round(left, 1), **total.data()}
            text = f"{total}\n\n{json.dumps(entry)}\n"
            write_whole(report, lambda file: file.write(text.encode()))

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        drawing = partial(begin, asked, Path(folder))
        crew = Crew(drawing, range(count), min(processes, count), end, heard, lost, kept, GRACE, PATIENCE)
        crew.run()
    return total


def begin(asked: MutantPlan, folder: Path, member: Member) -> Work:
    """Return the function that draws mutants in one process. It cycles through the kinds, so that an early end covers each."""
    from rammer_testing.mutants.campaign import Campaign

    unbegun = 0
    own = f"{asked.seed} {member.seed}" if member.number or member.turn else f"{asked.seed}"
    made = [Campaign(kind, asked.device, own, folder / member.seed / kind, asked.keep) for kind in asked.kinds]

    def work(number: int, line: Line) -> None:
        nonlocal unbegun
        campaign = made[number % len(made)]
        campaign.tally = Tally()
        try:
            campaign.one(campaign.drawn())
            unbegun = 0
        except Machinery as error:
            unbegun += 1
            if unbegun > MOST:
                raise
            campaign.tally.unbegun[f"{error.what} {error.hint[-200:]}".strip()] += 1
        line.tell(campaign.tally)

    return work
