"""The peers table: ratios, order, resumption, torn files and failed peers."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import peers
import pytest
from click.testing import CliRunner
from rows import OURS, Row, cells, document, keep, ratio, read_rows, summary
from zoo import ZOO

from rammer.errors import DeviceUnavailable
from rammer.report.peers import Prepared, peer_names
from rammer_bench.prepare import PEERS, open_peer, relative_error

OURS_ROW = Row("r1", "m", "float32", OURS, "gpu", median=0.5, p10=0.4, p90=0.6, error=1e-6)
SLOW = replace(OURS_ROW, runner="torch", median=2.0)
FAST = replace(OURS_ROW, runner="torch-graph", median=1.0)
FAILED = Row("r1", "m", "float32", "jax", "gpu", failure="jax is not installed")


def test_ratio_is_against_the_best_peer_of_the_same_model_precision_and_hardware() -> None:
    others = [
        replace(FAST, model="n", median=0.1),
        replace(FAST, precision="tf32", median=0.1),
        replace(FAST, hardware="cpu", median=0.1),
    ]
    rows = [OURS_ROW, SLOW, FAST, FAILED, *others]
    assert ratio(OURS_ROW, rows) == "2.00x (torch-graph)"
    assert ratio(SLOW, rows) == "4.00x"
    assert ratio(FAILED, rows) == ""


def test_a_peer_with_wrong_numbers_sets_no_record() -> None:
    bad = replace(FAST, error=math.inf)
    assert ratio(OURS_ROW, [OURS_ROW, SLOW, bad]) == "4.00x (torch)"


def test_rows_of_two_runs_are_marked() -> None:
    rows = [OURS_ROW, replace(FAST, run="r2")]
    assert ratio(OURS_ROW, rows) == "2.00x* (torch-graph)"
    assert "come from different runs" in document(rows, {})
    assert "different runs" not in document([OURS_ROW, FAST], {})


def test_table_ranks_by_time_and_says_why_a_row_is_missing() -> None:
    table = cells([FAILED, SLOW, OURS_ROW, FAST])
    assert [line[2] for line in table] == [OURS, "torch-graph", "torch", "jax"]
    assert "jax is not installed" in table[-1]


def test_rows_are_kept_replaced_and_survive_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    assert read_rows(path) == []
    keep(path, SLOW)
    keep(path, FAST)
    with path.open("a") as file:
        file.write(json.dumps({"run": "r9"})[:-4])
    again = replace(SLOW, median=3.0, run="r2")
    keep(path, again)
    assert read_rows(path) == [FAST, again]


def test_summary_is_in_milliseconds() -> None:
    assert summary([1e-3 * n for n in range(1, 12)]) == pytest.approx({"p10": 2.0, "median": 6.0, "p90": 10.0})


def test_relative_error_lets_no_nan_pass() -> None:
    want = {"y": np.ones(4)}
    assert relative_error({"y": np.array([1.0, 1.0, 1.0, np.nan])}, want) == math.inf
    assert relative_error({"y": np.full(4, 1.1)}, want) == pytest.approx(0.1)


class Fake:
    """A stand-in that counts openings of each runner."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def peer(self, name: str, *_: object) -> Prepared:
        self.opened.append(name)
        if name == "jax":
            raise DeviceUnavailable("jax is not installed")
        return Prepared(lambda: 2e-3, lambda: {"y": np.ones(2)}, 0.1, "wall")

    def rammer(self, *_: object) -> tuple[Prepared, int]:
        self.opened.append(OURS)
        return Prepared(lambda: 1e-3, lambda: {"y": np.ones(2)}, 0.1, "wall"), 7


def test_a_run_resumes_and_again_measures_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    monkeypatch.setattr(peers, "open_peer", fake.peer)
    monkeypatch.setattr(peers, "open_rammer", fake.rammer)
    monkeypatch.setattr(peers, "reference_outputs", lambda *_: {"y": np.ones(2)})
    common = [
        "--quick",
        "--models",
        "nerf_mlp",
        "--iterations",
        "3",
        "--duration",
        "0",
        "--out",
        str(tmp_path / "r.jsonl"),
        "--folder",
        str(tmp_path),
    ]

    def call(*more: str) -> str:
        result = CliRunner().invoke(peers.main, [*common, *more])
        assert result.exit_code == 0, result.output
        return result.output

    call("--runners", "rammer,torch")
    call("--runners", "rammer,torch,jax", "--markdown", str(tmp_path / "t.md"))
    assert fake.opened == [OURS, "torch", "jax"]
    shown = call("--runners", "rammer,torch,jax", "--again", "rammer,failed")
    assert fake.opened == [OURS, "torch", "jax", OURS, "jax"]
    assert "2.00x* (torch)" in shown and "jax is not installed" in shown
    assert "2.00x" in (tmp_path / "t.md").read_text()


def test_the_bench_command_offers_every_peer() -> None:
    assert set(peer_names()) == set(PEERS)


def test_unknown_names_say_what_there_is() -> None:
    result = CliRunner().invoke(peers.main, ["--quick", "--models", "vgg"])
    assert result.exit_code != 0 and "unknown model 'vgg'" in str(result.exception)


@pytest.mark.slow
def test_onnxruntime_peer_computes_the_model() -> None:
    entry = ZOO["squeezenet"]
    model, feeds = entry.build(), entry.feeds(5)
    made = open_peer("onnxruntime", model, feeds, "cpu")
    assert made.seconds() > 0
    assert relative_error(made.outputs(), peers.reference_outputs(model, feeds, "cpu")) < 1e-5


def test_a_missing_framework_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ZOO["squeezenet"]
    model, feeds = entry.build(), entry.feeds(5)
    for package in ("torch", "jax"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(DeviceUnavailable, match=f"{package} is not installed"):
            open_peer(package, model, feeds, "cpu")
