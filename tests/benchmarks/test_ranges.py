"""The table of programs for ranges of lengths: a sample on small models, what it calls wrong, GPT-2 as it is published."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import pytest
from range_found import ALONE, RANGE, Found, Page, Row, by_length, kept
from range_peers import Runner, Took
from ranges import Measuring, measured, ordered, parser, settled
from registry import TABLES
from zoo.ranged import RANGED, find_ranged

from rammer.errors import BadInput, DeviceUnavailable
from rammer.runtime.lengths import bounds
from rammer.testing.some import some

KEYS = ("bert_base", "gpt2", pytest.param("resnet50", marks=pytest.mark.large))
QUICK = ("--lengths", "4", "--exact", "1", "--rounds", "1", "--threads", "1")


def asked(*words: str) -> argparse.Namespace:
    return settled(parser().parse_args([*QUICK, *words]))


def blank(markdown: Path | None = None) -> Page:
    return Page(markdown, "python -m benchmarks ranges", "Cores: 1.", {"cpu": "one"})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
@pytest.mark.parametrize("key", KEYS)
def test_small_models_are_right_and_timed(device: str, key: str, seed: int) -> None:
    options = ["--option", "tiles=16"] if device == "ipu_sim" else []
    page = blank()
    measured(asked("--device", device, "--models", f"{key}:small", "--seed", str(seed), *options), page)
    (found,) = page.found
    assert found.fine and len(found.compared) == 4 and len(found.resident) == 3, found
    assert all(RANGE in r.took for r in some(found.rows))
    assert sum(ALONE in r.took for r in found.rows) == 1
    assert ("ONNX Runtime" in found.first) == (device == "rocm")
    text = page.text()
    assert f"## {key}:small by length" in text
    assert "NOT FINE" not in text


def test_a_budget_gives_times_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that is spent after the first length: that has the program for it alone and peers; errors are of as many lengths
    as were asked for, and memory is not measured."""
    times = list[Took]()

    def spent(self: Measuring, row: Row, runners: list[Runner], peers: object) -> None:
        before(self, row, runners, peers)  # type: ignore[arg-type]
        times.extend(row.took.values())
        self.end = -math.inf

    before = Measuring.time
    monkeypatch.setattr(Measuring, "time", spent)
    page = blank()
    measured(asked("--models", "gpt2:small", "--budget", "1000", "--checks", "2"), page)
    (found,) = page.found
    assert [set(r.took) for r in found.rows] == [{RANGE, ALONE, "ONNX Runtime"}, set()]
    assert len(found.compared) == 2 and found.fine and not found.resident
    assert len(times) == 3


def test_nothing_is_timed_without_time() -> None:
    page = blank()
    measured(asked("--models", "gpt2:small", "--budget", "0", "--checks", "1"), page)
    (found,) = page.found
    assert found.fine and len(found.compared) == 1 and not any(r.took for r in some(found.rows))


def test_peers_that_fail_are_told(tmp_path: Path) -> None:
    """What one cannot run is in the table, and the others stay; nobody asks it again."""
    calls = list[str]()

    def fails(inputs: object) -> float:
        calls.append("bad")
        raise RuntimeError("no such operator")

    def absent() -> Runner:
        raise DeviceUnavailable("torch is not installed")

    at_work = Measuring(find_ranged("gpt2:small"), tmp_path, asked(), 0.0, lambda: None)
    good, bad = Runner("good", lambda inputs: {}, lambda inputs: 1e-3), Runner("bad", lambda inputs: {}, fails)
    for length in (3, 4):
        row = at_work.found.row(length)
        at_work.time(row, [], {"bad": lambda: bad, "good": lambda: good, "torch": absent})
        assert set(row.took) == {"good"}
    assert at_work.found.missing == [
        "gpt2:small: bad: RuntimeError: no such operator",
        "gpt2:small: torch: torch is not installed",
    ]
    assert calls == ["bad"] and at_work.found.first.keys() == {"good"}


@pytest.mark.parametrize("key", RANGED)
def test_lengths_begin_at_the_ends_and_are_spread(key: str, seed: int) -> None:
    model = RANGED[key]
    low, high = model.span
    found = ordered(model, 12, seed)
    assert len(set(found)) == 12 and found[0] == high and found[2] == low
    assert all(low <= n <= high for n in some(found))
    assert ordered(model, 5, seed) == found[:5]
    edges = {n for b in bounds(model.span)[1:] for n in (b, b + 1)}
    assert len(edges & set(found[3:])) >= 4 and set(found) - edges - {low, high}


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": [Row(1, 1e-7), Row(2, math.nan)]},
        {"rows": [Row(1, 1e-7), Row(2, 1e-3)]},
        {"rows": [Row(1, 1e-7), Row(2)]},
        {"programs": 6},
        {"resident": (0, 1 << 20, 100 << 20)},
    ],
)
def test_what_is_wrong_is_told(wrong: dict[str, object]) -> None:
    right = {"rows": [Row(1, 1e-7), Row(2, 1e-7)], "programs": 5, "resident": (0, 1 << 20, 1 << 20)}
    assert Found("bert_base", "seq", (1, 512), 2, **right).fine  # type: ignore[arg-type]
    assert not Found("bert_base", "seq", (1, 512), 2, **{**right, **wrong}).fine  # type: ignore[arg-type]


def test_ratios_are_geometric_means_of_lengths_that_both_were_timed_at() -> None:
    rows = [Row(1, 0.0, {RANGE: Took(2.0, 1.0), ALONE: Took(1.0, 1.0)}), Row(2, 0.0, {RANGE: Took(8.0, 9.0)})]
    rows.append(Row(3, None, {RANGE: Took(8.0, 4.0), ALONE: Took(1.0, 1.0)}))
    found = Found("bert_base", "seq", (1, 512), 3, rows=rows)
    assert (found.ratio(RANGE, ALONE, False), found.ratio(RANGE, ALONE, True)) == ("4.00", "2.00")
    assert found.ratio("torch", RANGE, False) == ""


def test_times_stand_below_who_took_them() -> None:
    """Also at a length that somebody before in the row was not timed at."""
    found = Found("gpt2", "past", (0, 63), 0, rows=[Row(2, None, {RANGE: Took(2.0, 1.0), "torch": Took(3.0, 1.0)})])
    found.rows.append(Row(1, 1e-7, {RANGE: Took(1.0, 1.0), ALONE: Took(0.5, 1.0), "torch": Took(4.0, 1.0)}))
    headers, lines = by_length(found)
    assert [dict(zip(headers, line, strict=True)).get("torch, ms") for line in lines] == ["4000.000", "3000.000"]
    assert dict(zip(headers, lines[1], strict=True))["alone, ms"] == ""


def test_models_are_kept_one_by_one(tmp_path: Path) -> None:
    """What was found of other models stays, what is found anew replaces; records of another machine are refused."""
    path = tmp_path / "ranges.md"
    first = blank(path)
    first.found += [Found("gpt2", "past", (0, 63), 0, rows=[Row(2, None, {RANGE: Took(2.0, 1.0)})]), Found("b", "n", (1, 2), 1)]
    first.tell()
    again = Page(path, "python -m benchmarks ranges --models b", "Cores: 2.", {"cpu": "one"})
    again.keep()
    again.found.append(Found("b", "n", (1, 2), 0, missing=["b: torch: none"], first={"torch": 2.5}))
    again.tell()
    assert [r.found for r in kept(path.with_suffix(".jsonl"))] == [first.found[0], again.found[0]]
    text = path.read_text()
    for part in some(["`python -m benchmarks ranges`", "--models b`", "2000.000", "Cores: 2", "b: torch 2.5", "b: torch: none"]):
        assert part in text
    with pytest.raises(BadInput, match="another environment"):
        Page(path, "", "", {"cpu": "two"}).keep()
    path.with_suffix(".jsonl").write_text('{"found": 3}\n')
    with pytest.raises(BadInput, match="no records"):
        again.keep()


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(BadInput, match="fewer than three"):
        asked("--lengths", "2")
    with pytest.raises(BadInput, match="unknown peer 'tensorflow'"):
        asked("--peers", "tensorflow,torch")
    assert asked("--peers", "none").peers == () and asked().peers is None
    assert (asked().memory, asked("--budget", "3").memory, asked("--budget", "3", "--memory", "3").memory) == (4, 0, 3)


def test_other_models_are_refused() -> None:
    assert set(TABLES["ranges"].keys) == {*RANGED}
    with pytest.raises(BadInput, match="alexnet"):
        find_ranged("alexnet:small")


@pytest.mark.large
def test_gpt2_is_as_published() -> None:
    proto = RANGED["gpt2"].build()
    learned = [t for t in proto.graph.initializer if t.data_type == 1 and t.dims]
    assert sum(math.prod(t.dims) for t in learned) == 124_439_808
    assert np.isfinite(np.frombuffer(learned[0].raw_data, np.float32)).all()
