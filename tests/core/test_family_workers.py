"""The processes of the search over kernels: what they count is kept, whatever becomes of them; reports add up."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from rammer.testing import workers
from rammer.testing.families import main
from rammer.testing.search import BROKEN
from rammer.testing.workers import Outcome, hunt

#: A process that counts two candidates, hears what others know, and then does something.
CHILD = """
import json, os, sys, time
print(json.dumps({"families": ["a", "b"], "start": "one case", "peak": 5}), flush=True)
for what in ("whole", "partial"):
    print(json.dumps({"cells": [["a", "float32", what, 1]], "fates": [["a", "float32", "run", 1]]}), flush=True)
@THEN@
"""


def searched(tmp_path: Path, then: str, seconds: float = 3.0, size: int = 1, stop: bool = False) -> Outcome:
    path = tmp_path / "child.py"
    path.write_text(CHILD.replace("@THEN@", then))
    return hunt([sys.executable, str(path)], seconds, size, stop, {"device": "toy", "seeds": [1]})


@pytest.mark.parametrize(("then", "said"), [
    (f"sys.exit({BROKEN})", ""), ("os.kill(os.getpid(), 11)", "process ended with -11"),
    ("raise ValueError", "process ended with 1"),
])  # fmt: skip
def test_a_process_that_dies_is_started_again_and_its_counts_are_kept(tmp_path: Path, then: str, said: str) -> None:
    outcome = searched(tmp_path, "time.sleep(0.2)\n" + then)
    started = outcome.facts["started"]
    assert started > 1
    assert outcome.coverage.candidates == 2 * started
    assert list(outcome.failures) == ([said] if said else [])
    assert all(lines == ["one case"] * len(lines) for lines in outcome.failures.values())


def test_the_end_is_kept_to(tmp_path: Path) -> None:
    """Also by processes that would never end; being ended is no failure."""
    begin = time.monotonic()
    outcome = searched(tmp_path, "time.sleep(100)", 3.0, 2)
    assert time.monotonic() - begin < 6
    assert outcome.coverage.candidates == 4
    assert not outcome.failures


def test_what_was_found_is_kept_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it outlives the search's own process."""
    monkeypatch.setattr(workers, "KEPT", 0.2)
    path, kept = tmp_path / "child.py", list[int]()
    path.write_text(CHILD.replace("@THEN@", "time.sleep(100)"))

    def keep(outcome: Outcome) -> None:
        kept.append(json.loads(json.dumps(outcome.listed()))["facts"]["started"])

    hunt([sys.executable, str(path)], 2.0, 1, False, {"device": "toy", "seeds": [1]}, keep)
    assert len(kept) > 3
    assert kept[-1] == 1


def test_silence_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 0.5)
    outcome = searched(tmp_path, "time.sleep(100)", 4.0)
    assert outcome.failures
    assert all("without a sign of life" in kind for kind in outcome.failures)


def test_others_hear_what_was_covered(tmp_path: Path) -> None:
    """By stdin: at the start all of it, later what is new."""
    then = """
heard = json.loads(sys.stdin.readline())
print(json.dumps({"kind": "heard", "failure": json.dumps(sorted(heard))}), flush=True)
sys.exit(3)
"""
    outcome = searched(tmp_path, then)
    assert outcome.failures["heard"][0] == "[]"
    assert json.loads(outcome.failures["heard"][1]) == [["a", "float32", "partial"], ["a", "float32", "whole"]]


def test_the_first_failure_ends_all(tmp_path: Path) -> None:
    begin = time.monotonic()
    then = "print(json.dumps({'kind': 'a float32 x', 'failure': 'case'}), flush=True); time.sleep(100)"
    assert searched(tmp_path, then, 60.0, 2, True).failures
    assert time.monotonic() - begin < 30


def test_reports_add_up(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.json" for n in "ab"]
    for path, seed in zip(paths, (1, 2), strict=True):
        outcome = searched(tmp_path, "sys.exit(3)", 1.0)
        outcome.facts["seeds"] = [seed]
        outcome.coverage.offered.add(("a", "float32", "deep"))
        path.write_text(json.dumps(outcome.listed()))
    runs = sum(json.loads(p.read_text())["facts"]["started"] * 2 for p in paths)
    result = CliRunner().invoke(main, ["--merge", *map(str, paths), "--report", str(tmp_path / "sum.json")])
    assert result.exit_code == 0, result.output
    said = ("seeds 1, 2", "offered and not run: a float32: deep", "families never run: b", "nothing was found")
    for text in (f"{runs} candidates in", *said):
        assert text in result.output
    total = json.loads((tmp_path / "sum.json").read_text())
    assert ["a", "float32", "whole", runs // 2] in total["cells"]
    failed = json.loads(paths[0].read_text())
    paths[0].write_text(json.dumps({**failed, "failures": {"a float32 x": ["line"]}}))
    assert CliRunner().invoke(main, ["--merge", *map(str, paths)]).exit_code == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"facts": 1}', "{"])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    result = CliRunner().invoke(main, ["--merge", str(path)])
    assert result.exit_code == 2
    assert "is no report of this search" in result.output


def test_a_device_is_needed(tmp_path: Path) -> None:
    assert CliRunner().invoke(main, []).exit_code == 2
