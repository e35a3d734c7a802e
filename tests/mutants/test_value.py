"""Numerical checks of mutated models, and campaigns in several processes that share a count and end in time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from rammer_testing.mutants.campaign import Campaign
from rammer_testing.mutants.crew import MutantPlan, begin
from rammer_testing.mutants.kinds import INPUTS, OUTPUTS
from rammer_testing.mutants.tally import FAULT, RIGHT, Tally
from rammer_testing.mutants.value import NOT_JUDGED, Voices
from rammer_testing.nonempty import some
from rammer_testing.sandbox import Machinery
from rammer_testing.worker_pool import Line, Member

HEAD = '<ir_version: 9, opset_import: ["" : 21]> m (float[4] x) => (float[4] y)'


@pytest.fixture(scope="module")
def voices() -> Iterator[Voices]:
    made = Voices()
    yield made
    made.outside.close()


@pytest.mark.parametrize(
    "body, answer, said",
    [
        ("y = Celu<alpha = 2.0>(x)", None, ""),
        ("y = Celu<alpha = 2.0>(x)", 1.0, "lowering"),
        ("y = Celu<alpha = 2.0>(x)", float("nan"), "lowering"),
        ("s = Sin(x) y = Relu(s)", 0.5, "lowering"),
        ("k = Constant<value = float[3] {1, 2, 3}>() y = Add(x, k)", 1.0, NOT_JUDGED),
    ],
)
def test_values_of_models(voices: Voices, tmp_path: Path, body: str, answer: float | None, said: str) -> None:
    """Check the verdicts on mutated models. ``answer`` is a wrong last element; models that ONNX refuses are not judged."""
    x = np.array([-1.0, 0.5, 2.0, -3.0], np.float32)
    right = np.where(x < 0, 2 * (np.exp(x / 2) - 1), x).astype(np.float32)
    if answer is not None:
        right[-1] = answer
    np.savez(tmp_path / INPUTS, x=x)
    np.savez(tmp_path / OUTPUTS, y=right)
    model = onnx.parser.parse_model(HEAD + "{" + body + "}").SerializeToString()
    assert voices(model, tmp_path).replace("device:", "lowering:").partition(":")[0] == said


def test_counts_add_up() -> None:
    total, tally = Tally(), Tally()
    for what in (RIGHT, FAULT, FAULT):
        tally.count("model", "fields", what, 1.5)
    tally.faults.append(("traceback", "a file"))
    tally.unbegun["no memory"] += 1
    for _ in range(2):
        total.add(tally)
    assert total.mutants == 6 and "2 times traceback" in str(total) and "2 runs could not begin: no memory" in str(total)
    assert json.loads(json.dumps(total.data()))["unbegun"] == {"no memory": 2}


def test_runs_that_cannot_begin_are_no_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a single failed start is not a finding, and that many in a row end the search."""
    told, able = list[Tally](), iter((False, True, False, False, False, False))

    def one(self: object, mutant: object) -> None:
        if not next(able):
            raise Machinery("a run did not start", hint="no memory")

    class Told(Line):
        def tell(self, part: Tally, silent: float = 0.0) -> None:
            told.append(part)

    monkeypatch.setattr(Campaign, "__init__", lambda *arguments: None)
    monkeypatch.setattr(Campaign, "drawn", lambda self: None)
    monkeypatch.setattr(Campaign, "one", one)
    work, line = begin(MutantPlan(["model"], [], 0), tmp_path, Member(0, 1)), Told(Pipe()[0])
    for number in range(5):
        work(number, line)
    assert [t.unbegun.total() for t in told] == [1, 0, 1, 1, 1] and not any(t.faults for t in some(told))
    with pytest.raises(Machinery):
        work(5, line)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("count, seconds", [(4, 600), (100_000, 1)])
def test_several_processes(tmp_path: Path, count: int, seconds: int) -> None:
    """Check that processes share the count and end at the time limit in any state."""
    report = tmp_path / "report"
    words = [
        sys.executable,
        "-m",
        "rammer_testing.mutants",
        "--kind",
        "model",
        "--processes",
        "2",
        "--count",
        str(count),
        "--seconds",
        str(seconds),
        "--report",
        str(report),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)  # a hundred thousand mutants need hours
    said = json.loads(report.read_text().splitlines()[-1])
    assert done.returncode == (0 if said["mutants"] else 2) and said["running"] == 0, done.stdout + done.stderr
    assert bool(said["mutants"]) == ("no mutant was tried" not in done.stderr)
    assert (said["mutants"] == count) == (count == 4)
