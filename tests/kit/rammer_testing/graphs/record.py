"""Records of a running campaign, robust against a kill: a report, and one file of cases."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rammer_testing.graphs.campaign import CampaignPlan, CampaignTally, Fault

#: Seconds between two lines of a report.
PERIOD: Final = 5.0
#: Name of the file of cases in the folder. ``GraphCase.parse`` reads a line; ``whole`` is the graph as drawn.
CASES: Final = "cases.jsonl"


@dataclass
class Record:
    """A writer of reports and cases.

    Every few seconds it writes a JSON line with all counts to ``report``. It writes each fault to ``folder`` on discovery and
    again after shrinking; ``close`` leaves one line per fault. A path of None disables the file."""

    plan: CampaignPlan
    report: Path | None = None
    folder: Path | None = None
    started: float = field(default_factory=time.monotonic)
    written: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        for path in (self.report and self.report.parent, self.folder):
            if path is not None:
                path.mkdir(parents=True, exist_ok=True)

    def note(self, total: CampaignTally, new: CampaignTally, counts: Sequence[int] = ()) -> None:
        """Record ``new`` after it was added to ``total``; ``counts`` are the graphs of each process."""
        if self.folder is not None and new.faults:
            with (self.folder / CASES).open("a") as file:
                file.writelines(line(f, self.plan) for f in new.faults.values())
        if time.monotonic() - self.written > PERIOD:
            self._write(total, counts, False)

    def close(self, total: CampaignTally, counts: Sequence[int] = ()) -> None:
        """Write the last line, and the cases in their final form."""
        self._write(total, counts, True)
        if self.folder is not None and total.faults:
            ready = self.folder / f"{CASES}.new"
            ready.write_text("".join(line(f, self.plan) for f in total.faults.values()))
            ready.replace(self.folder / CASES)

    def _write(self, total: CampaignTally, counts: Sequence[int], done: bool) -> None:
        self.written = time.monotonic()
        if self.report is None:
            return
        entry = {
            "setting": str(self.plan.setting),
            "seed": self.plan.seed,
            "first": self.plan.first,
            "done": done,
            "seconds": round(time.monotonic() - self.started, 1),
            "graphs": total.graphs,
            "nodes": total.nodes,
            "invalid": total.invalid,
            "refused": sum(total.refused.values()),
            "told": round(total.told / max(total.graphs, 1), 4),
            "differences": total.differences,
            "lost": total.lost,
            "unfinished": total.unfinished,
            "found": {" | ".join(k): n for k, n in total.raw.items()},
            "processes": list(counts),
        }
        with self.report.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def line(fault: Fault, plan: CampaignPlan) -> str:
    """Return one line of the file of cases."""
    extra = {
        "signature": fault.signature,
        "says": fault.verdict.detail[-600:],
        "setting": _setting(fault.setting),
        "seed": plan.seed,
        "index": fault.index,
    }
    whole = fault.whole.data(setting=_setting(fault.drawn))
    return json.dumps(fault.case.data(**extra, whole=whole)) + "\n"


def _setting(setting: Any) -> dict[str, Any]:
    return {k: v for k, v in asdict(setting).items() if k != "options" or v}
