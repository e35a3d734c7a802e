"""The crew that runs every search: children that die, hang or are late are reported, and no child is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from crew_children import dying, failing, unable, working

from rammer.errors import BadInput
from rammer_testing.sandbox import Machinery
from rammer_testing.worker_pool import DEATH, HANG, UNFINISHED, Crew, Member


def worked(*cases: str, seconds: float = 60.0, **options: Any) -> tuple[list[Any], list[tuple[str, str, bool]], Crew]:
    """Return the messages of a crew of one, and the cases that it lost."""
    parts, gone = list[Any](), list[tuple[str, str, bool]]()

    def lost(member: Member, case: str, kind: str, why: str, answered: bool) -> None:
        gone.append((case, kind, answered))

    crew = Crew(working, cases, 1, time.monotonic() + seconds, lambda member, part: parts.append(part), lost, **options)
    crew.run()
    return parts, gone, crew


def test_what_children_lose_is_told_and_the_rest_is_done() -> None:
    parts, gone, crew = worked("a", "raise", "b", "speak 1.5", "sleep 100", "c", patience=1.0)
    assert [p for p in parts if not isinstance(p, int)] == ["a", "b", "speak 1.5", "c"] and len(parts) == 5
    assert gone == [("raise", DEATH, False), ("sleep 100", HANG, False)]
    assert crew.started == 3 and crew.running == 0


@pytest.mark.parametrize("long", ["speak 100", "chatter"])
def test_the_end_is_kept_to(long: str) -> None:
    """Check that a busy child is stopped at the end, whether it is silent or never stops sending."""
    parts, gone, start = list[Any](), list[tuple[str, str, bool]](), time.monotonic()

    def heard(member: Member, part: Any) -> None:
        parts.append(part)
        if part == long:
            crew.stop(0.2)

    def lost(member: Member, case: str, kind: str, why: str, answered: bool) -> None:
        gone.append((case, kind, answered))

    crew = Crew(working, ["a", long, "b"], 1, start + 60, heard, lost)
    crew.run()
    assert parts[0] == "a" and {*parts[1:]} == {long} and gone == [(long, UNFINISHED, True)] and time.monotonic() - start < 60


@pytest.mark.slow
def test_an_exception_is_told_with_its_traceback() -> None:
    """Check the traceback of a case and that of a start."""
    said = list[str]()
    Crew(working, ["raise", "a"], 1, time.monotonic() + 60, print, lambda *told: said.append(told[3])).run()
    (why,) = said
    first, second, *rest = why.splitlines()
    assert (first, second) == ("the process ended by ValueError: no such tile", "Traceback (most recent call last):")
    assert any("crew_children.py" in line and line.endswith("in work") for line in rest) and rest[-1] == first.partition("by ")[2]
    with pytest.raises(Machinery, match=r"(?s)before their first case: .*TypeError: no such device.*in failing"):
        Crew(failing, ["a"], 1, time.monotonic() + 60, print, print).run()


def test_memory_is_limited() -> None:
    """Check a child's limit, which counts from its initial mapped memory."""
    assert worked(f"large {1 << 28}", f"large {1 << 30}", "a", memory=1 << 29)[0] == ["True", "refused", "a"]


@pytest.mark.slow
def test_children_that_cannot_begin_end_the_search() -> None:
    for begin, error in ((unable, BadInput), (dying, Machinery)):
        with pytest.raises(error):
            Crew(begin, ["a"] * 100, 1, time.monotonic() + 60, print, print).run()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_its_parent(sent: signal.Signals) -> None:
    """Check that an interrupted search returns its partial results."""
    folder = str(Path(__file__).parent)
    words = [sys.executable, "-c", "import crew_children; crew_children.several(60)"]
    path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as process:
        assert process.stdout is not None
        children = dict(json.loads(process.stdout.readline())[::-1] for _ in range(2))
        assert set(children) == {0, 1} and all(map(_lives, children.values()))
        process.send_signal(sent)
        said = [json.loads(line) for line in process.stdout]
    assert said == ([] if sent == signal.SIGKILL else [[UNFINISHED, True], [UNFINISHED, True], "done"])
    deadline = time.monotonic() + 10
    while any(map(_lives, children.values())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_lives, children.values()))


def _lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
