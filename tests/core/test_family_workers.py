"""Worker processes of the kernel search: their counts survive any exit, and reports are summed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from crew_children import Then, begin, dies, fails, finds, hears, leaves, sleeps, ticks

from rammer_testing import worker_pool, workers
from rammer_testing.families import finish, main
from rammer_testing.workers import HuntOutcome, failed, hunt

#: Most seconds of a search; each ends after the expected message, long before its children do.
LONG = 300.0


def searched(then: Then, enough: Callable[[HuntOutcome], bool], size: int = 1) -> HuntOutcome:
    return hunt(partial(begin, then), LONG, size, enough, {"device": "toy", "seeds": [1]})


def counted(number: int) -> Callable[[HuntOutcome], bool]:
    """Return a predicate that is True after this number of reported candidates."""
    return lambda outcome: outcome.coverage.candidates >= number


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "said"),
    [
        (leaves, ""),
        (dies, "process ended with -11"),
        (fails, "process ended by ValueError: no such tile"),
    ],
)
def test_a_process_that_dies_is_started_again_and_its_counts_are_kept(then: Then, said: str) -> None:
    outcome = searched(then, counted(4))
    assert outcome.facts["started"] == 2 and outcome.coverage.candidates == 4
    assert list(outcome.failures) == ([said] if said else [])
    assert all(line.startswith("one case") for lines in outcome.failures.values() for line in lines)


def test_what_a_process_raised_is_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the report contains the traceback with the line, not only the exit of the process."""
    report = tmp_path / "found.json"
    with pytest.raises(SystemExit) as ended:
        finish(searched(fails, failed), report)
    assert ended.value.code == 1
    for text in (capsys.readouterr().out, json.loads(report.read_text())["failures"].popitem()[1][0]):
        assert "one case\nTraceback (most recent call last):" in text and "ValueError: no such tile" in text
        assert re.search(r'crew_children\.py", line \d+, in fails', text)


def test_the_end_is_kept_to() -> None:
    """Check processes that never end; stopping them is not a failure."""
    start = time.monotonic()
    outcome = searched(sleeps, counted(4), 2)
    assert time.monotonic() - start < LONG
    assert outcome.coverage.candidates == 4
    assert not outcome.failures


def test_what_was_found_is_kept_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that results survive the death of the search process."""
    monkeypatch.setattr(worker_pool, "PERIOD", 0.2)
    kept = list[int]()

    def keep(outcome: HuntOutcome) -> None:
        kept.append(json.loads(json.dumps(outcome.listed()))["facts"]["started"])

    hunt(partial(begin, ticks), LONG, 1, lambda outcome: len(kept) > 2, {"device": "toy", "seeds": [1]}, keep)
    assert len(kept) > 3
    assert kept[-1] == 1


def test_silence_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 0.5)
    outcome = searched(sleeps, failed)
    assert outcome.failures
    assert all("without a sign of life" in kind for kind in outcome.failures)


def test_others_hear_what_was_covered() -> None:
    """Check also a process that starts later."""
    outcome = searched(hears, lambda outcome: len(outcome.failures.get("heard", ())) > 1)
    assert len(outcome.failures["heard"]) > 1
    for said in outcome.failures["heard"]:
        assert json.loads(said) == [[["a", "float32", "whole"]], [["a", "float32", "partial"]]]


def test_the_first_failure_ends_all() -> None:
    start = time.monotonic()
    assert searched(finds, failed, 2).failures
    assert time.monotonic() - start < LONG / 2


def test_reports_add_up(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.json" for n in "ab"]
    for path, seed in zip(paths, (1, 2), strict=True):
        outcome = searched(leaves, counted(2))
        outcome.facts["seeds"] = [seed]
        outcome.coverage.offered.add(("a", "float32", "deep"))
        path.write_text(json.dumps(outcome.listed()))
    runs = sum(n for p in paths for _, _, what, n in json.loads(p.read_text())["fates"] if what == "run")
    assert runs >= 4
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
    assert "is not a report of this search" in result.output


def test_a_device_is_needed(tmp_path: Path) -> None:
    assert CliRunner().invoke(main, []).exit_code == 2
