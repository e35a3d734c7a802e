"""Changed models that run are judged by their numbers; campaigns in several processes count together and end in time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from rammer.testing.mutants.kinds import INPUTS, OUTPUTS
from rammer.testing.mutants.tally import FAULT, RIGHT, Tally
from rammer.testing.mutants.value import NOT_JUDGED, Voices

HEAD = '<ir_version: 9, opset_import: ["" : 21]> m (float[4] x) => (float[4] y)'


@pytest.fixture(scope="module")
def voices() -> Iterator[Voices]:
    made = Voices()
    yield made
    made.outside.close()


@pytest.mark.parametrize("body, answer, said", [
    ("y = Celu<alpha = 2.0>(x)", None, ""), ("y = Celu<alpha = 2.0>(x)", 1.0, "lowering"),
    ("y = Celu<alpha = 2.0>(x)", float("nan"), "lowering"), ("s = Sin(x) y = Relu(s)", 0.5, "lowering"),
    ("k = Constant<value = float[3] {1, 2, 3}>() y = Add(x, k)", 1.0, NOT_JUDGED),
])  # fmt: skip
def test_values_of_models(voices: Voices, tmp_path: Path, body: str, answer: float | None, said: str) -> None:
    """``answer`` is a wrong last element; a model that ONNX refuses is not judged."""
    x = np.array([-1.0, 0.5, 2.0, -3.0], np.float32)
    right = np.where(x < 0, 2 * (np.exp(x / 2) - 1), x).astype(np.float32)
    if answer is not None:
        right[-1] = answer
    np.savez(tmp_path / INPUTS, x=x)
    np.savez(tmp_path / OUTPUTS, y=right)
    model = onnx.parser.parse_model(HEAD + "{" + body + "}").SerializeToString()
    assert voices(model, tmp_path).replace("device:", "lowering:").partition(":")[0] == said


def test_counts_survive_json() -> None:
    tally = Tally()
    for what in (RIGHT, FAULT, FAULT):
        tally.count("model", "fields", what, 1.5)
    tally.faults.append(("traceback", "a file"))
    again = Tally.of(json.loads(json.dumps(tally.data())))
    assert str(Tally.sum([again, again])) == str(Tally.sum([tally, tally])) and again.mutants == 3


@pytest.mark.parametrize("count, seconds", [(4, 200), (100_000, 1)])
def test_several_processes(tmp_path: Path, count: int, seconds: int) -> None:
    """They share the count, and end when the time is up whatever they are at."""
    start, report = time.monotonic(), tmp_path / "report"
    words = [sys.executable, "-m", "rammer.testing.mutants", "--kind", "model", "--processes", "2", "--count", str(count),
             "--seconds", str(seconds), "--report", str(report)]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=seconds + 60)
    said = json.loads(report.read_text().splitlines()[-1])
    assert done.returncode == 0 and said["running"] == 0, done.stdout + done.stderr
    assert said["mutants"] == count or time.monotonic() - start < seconds + 20
