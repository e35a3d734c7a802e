"""The matrix of all models and policies: separate cases, clear reports of errors, and resumption."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import matrix
import pytest
from matrix_page import Case, MatrixPage, Outcome
from measuring import Settings

from rammer.errors import BadInput, DeviceFailure
from rammer_testing.nonempty import some
from rammer_testing.worker_pool import DEATH, HANG, UNFINISHED

ROOT = Path(__file__).parents[2]
CASE = Case("nerf_mlp:small", "ipu_sim", "sequential")
TINY = Settings(("ipu_sim",), (CASE.model,), options={"tiles": "8"}, say=print)


@pytest.mark.slow
def test_cases_are_processes_and_those_that_are_kept_are_not_done_again(tmp_path: Path) -> None:
    """Check that the first call runs one model, the second only the other of two, and the third call none."""
    words = [sys.executable, "-m", "benchmarks", "matrix", "--device", "ipu_sim", "--option", "tiles=8", "--keep"]
    more = ["--", "--processes", "2", "--policies", "sequential,ios{r=1,s=2}", "--folder", str(tmp_path)]
    said = []
    for models in ("nerf_mlp", *("lstm_tc_bs4,nerf_mlp",) * 2):
        done = subprocess.run(
            [*words, "--small", "--models", models, "--out", str(tmp_path / "out"), *more],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stderr.count("CPU s"))
    assert said == [2, 2, 0]
    text = (tmp_path / "out" / "ipu_sim_matrix.md").read_text()
    assert text.startswith("# Every model by every policy") and "4 of 4 cases are right" in text and "| ios{r=1,s=2}" in text


@pytest.mark.slow
def test_what_is_near_either_reference_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not matrix.judged(CASE, TINY, tmp_path).said
    for distances, cell in (
        ((2e-4, 1.5e-4, 9e-5), "9.0e-05 (float64)"),
        ((2e-4, 1e-7, 2e-4), "**wrong** 2.0e-04 (float64)"),
        ((float("nan"), 0.0, float("nan")), "**wrong** nan (float64)"),
    ):
        given = iter(distances)
        monkeypatch.setattr(matrix, "relative_error", lambda have, want, given=given: next(given))
        outcome = matrix.judged(CASE, TINY, tmp_path)
        assert outcome.cell == cell and bool(outcome.said) == ("wrong" in cell)


def test_what_a_device_declines_is_said_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object) -> None:
        raise DeviceFailure("no tile fits")

    monkeypatch.setattr(matrix, "opened", refused)
    outcome = matrix.judged(CASE, TINY, tmp_path)
    assert outcome.cell == "declined" and "no tile fits" in str(outcome)


def test_a_process_that_is_lost_is_told_from_one_that_did_not_end(tmp_path: Path) -> None:
    page = MatrixPage(tmp_path / "m.md", {"cpu": "one"}, keep=True)
    for number, (kind, cell) in enumerate(((HANG, "did not end"), (UNFINISHED, "did not end"), (DEATH, "failed"))):
        case = Case("a", f"d{number}", "p")
        page.add(matrix.ended(case, kind, "why it was\ntraceback"))
        assert page.found[case].cell == cell and "why it was" in page.text()
    page.add(Outcome(CASE, 1e-7, "ONNX Runtime", seconds=1.0))
    again = MatrixPage(tmp_path / "m.md", {"cpu": "one"}, keep=True)
    assert [c.device for c in some(again.found)] == ["d2", "ipu_sim"]
    with pytest.raises(BadInput, match="another environment"):
        MatrixPage(tmp_path / "m.md", {"cpu": "two"}, keep=True)
    first = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[0])
    assert first["environment"] == {"cpu": "one"} and first["said"] == "did not end"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policies", "sequental"), "unknown policy 'sequental'"),
        (("--models", "alexnt"), "unknown model 'alexnt'"),
        (("--processes", "0"), "fewer than one process"),
    ],
)
def test_what_cannot_be_asked_is_said_before_anything_starts(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        matrix.main(words)
