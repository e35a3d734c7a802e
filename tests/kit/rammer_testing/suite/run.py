"""Parallel runs of all matching tests in separate processes: a crash or hang of a process fails only its test."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rammer.errors import BadInput
from rammer_testing.suite.score import FAILED, UNRUN, Score
from rammer_testing.worker_pool import Begin, Crew, Line, Member, Work

#: Time limits in seconds: for one test, and for all.
PATIENCE, FOREVER = 300.0, 24 * 3600.0
#: One thread for NumPy in each process.
_ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Beginning:
    """The first action of a process: opening the device, so that an unavailable device ends the run with its message."""

    device: str
    options: tuple[tuple[str, str], ...]

    def __call__(self, member: Member) -> Work:
        from rammer.device.loader import Registry
        from rammer_testing.suite.score import score

        Registry().open(self.device, options=dict(self.options))

        def work(case: Any, line: Line) -> None:
            line.tell(score(case, self.device, dict(self.options)).listed())

        return work


def scores(
    device: str,
    pattern: str = "",
    options: Mapping[str, str] | None = None,
    processes: int = 0,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> list[Score]:
    """Return the scores of all tests in which ``pattern`` (a regular expression) is found, by name. ``told`` receives the number
    of finished tests and the total. After SIGTERM or Control-C, the remaining tests are scored as not run. Raises BadInput if no
    test matches, and the errors of opening the device."""
    # Loading takes seconds per process, so processes receive loaded cases.
    from rammer_testing.suite.cases import load, names

    wanted = names(pattern)
    if not wanted:
        raise BadInput(f"no test of ONNX is called {pattern!r}", hint="-k takes a regular expression, such as conv or ^test_lstm")
    found: dict[str, Score] = {}

    def heard(member: Member, part: Any) -> None:
        found[part["name"]] = Score.of(part)
        told(len(found), len(wanted))

    def lost(member: Member, case: Any, kind: str, why: str, answered: bool) -> None:
        if not answered:
            found[case.name] = Score(case.name, FAILED, f"{kind}: {why}")

    begin: Begin = Beginning(device, tuple((options or {}).items()))
    count = min(processes or len(os.sched_getaffinity(0)), len(wanted))
    end = time.monotonic() + FOREVER
    Crew(begin, map(load, wanted), count, end, heard, lost, patience=PATIENCE, environment=_ENVIRONMENT).run()
    return [found.get(n, Score(n, UNRUN, "the run was stopped")) for n in wanted]


def grouped(found: Sequence[Score]) -> dict[str, list[Score]]:
    """Return scores grouped by verdict and message (without names and numbers), the most frequent first."""
    groups: dict[str, list[Score]] = {}
    for score in found:
        plain = re.sub(r"\d+", "#", re.sub(r"'[^']*'", "'..'", score.why))[:110]
        groups.setdefault(f"{score.verdict}: {plain}", []).append(score)
    return dict(sorted(groups.items(), key=lambda g: -len(g[1])))
