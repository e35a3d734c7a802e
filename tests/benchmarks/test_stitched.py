"""The draw of graphs that are timed stitched and apart on a GPU, and what is said of their times."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

pytest.importorskip("cuda.bindings")

import stitched_cuda
from click.testing import CliRunner
from stitched_cuda import PRICES, WORK, DrawnGraph, TimedGraph, cells, main, programs, summary
from stitching import drawn

from rammer_testing.cases import NetCase


@pytest.fixture(autouse=True)
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is compiled."""
    monkeypatch.setattr(stitched_cuda, "write", lambda made, backend: None)


@pytest.mark.slow
def test_prices_make_programs_of_the_same_graph(seed: int) -> None:
    """By every price; without any doubt no less is stitched than with it, and apart nothing is."""
    case = drawn(Random(seed), WORK)
    found = programs(case, "sm_90a")
    assert not found.why and set(found.by) == {"apart", *PRICES}
    assert found.stitched == (set(found.by.values()) != {found.by["apart"]})
    count = {name: len(found.programs[n][0].operators) for name, n in found.by.items()}
    assert max(count.values()) == count["apart"]
    again = programs(case, "sm_90a")
    assert found.by == again.by and [p.operators for p, _ in found.programs] == [p.operators for p, _ in again.programs]
    assert stitched_cuda.opened("sm_90a").vdevice.doubt > 0, "the device is as it was"


def timed(case: NetCase, stitched: float) -> TimedGraph:
    times = dict.fromkeys(PRICES, (stitched, 1)) | {"apart": (10e-6, 2)}
    return TimedGraph(case, times)


def test_the_summary_counts_what_is_slower_and_what_is_left_apart() -> None:
    case = drawn(Random(0), WORK)
    rows = [timed(case, s) for s in (5e-6, 10.4e-6, 12e-6)]
    rows.append(TimedGraph(case, dict.fromkeys(("apart", *PRICES), (10e-6, 2))))
    said = summary(rows, 5, 9)
    assert "9 graphs drawn some price stitches 5; 4 of these" in said
    assert "as built: apart takes 0.98 as long in the median, 0.83 to 2.00; slower 2 by more than 3% and 1 by more" in said
    assert said.endswith("1 left apart")
    assert cells(rows[0])[1:4] == ["2 kernels, 10 us", "1 kernels, 5 us", "2.00"]


def test_a_kept_draw_is_of_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made once, and refused for others; what runs nowhere is not timed."""
    case, kept = drawn(Random(0), WORK), str(tmp_path / "made")
    monkeypatch.setattr(stitched_cuda, "draw", lambda *asked: [DrawnGraph(case, why="planted")])
    asked = ["--graphs", "1", "--programs", kept, "--ahead"]
    said = CliRunner().invoke(main, asked, catch_exceptions=False).output
    assert "planted" in said and "1 graphs drawn, 0 that some price stitches" in said
    monkeypatch.setattr(stitched_cuda, "draw", None)
    assert CliRunner().invoke(main, asked, catch_exceptions=False).output == said
    for words, why in ((["--graphs", "2", *asked[2:]], "has 1 graphs"), (["--target", "sm_90a"], "nothing runs")):
        assert why in str(CliRunner().invoke(main, words).exception)
