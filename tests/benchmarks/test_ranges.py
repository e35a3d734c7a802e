"""The table of programs for ranges of lengths: a sample on small models, reported errors, and the published GPT-2."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import pytest
from range_found import ALONE, BESIDE, RANGE, Found, Page, Row, by_length, kept
from range_peers import Runner, Took
from ranges import Measuring, measured, ordered, parser, settled
from registry import TABLES
from zoo.ranged import RANGED, find_ranged

from rammer.errors import BadInput, DeviceUnavailable
from rammer.runtime.shape_buckets import bucket_bounds
from rammer_testing.nonempty import some

KEYS = ("bert_base", "gpt2", pytest.param("resnet50", marks=pytest.mark.large))
QUICK = ("--lengths", "4", "--exact", "1", "--rounds", "1", "--threads", "1")


def asked(*words: str) -> argparse.Namespace:
    return settled(parser().parse_args([*QUICK, *words]))


def blank(markdown: Path | None = None) -> Page:
    return Page(markdown, "python -m benchmarks ranges", "Cores: 1.", {"cpu": "one"})


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
@pytest.mark.parametrize("key", KEYS)
def test_small_models_are_right_and_timed(device: str, key: str, seed: int) -> None:
    options = ["--option", "tiles=16"] if device == "ipu_sim" else []
    page = blank()
    measured(asked("--device", device, "--models", f"{key}:small", "--seed", str(seed), "--beside", "3", *options), page)
    (found,) = page.found
    assert found.fine and len(found.compared) == 4 and len(found.resident) == 3, found
    beside = f"{BESIDE}ONNX Runtime" if device == "rocm" else RANGE
    assert sum(beside in r.took for r in some(found.rows)) == (3 if device == "rocm" else 1)
    assert sum(ALONE in r.took for r in found.rows) == 1
    assert ("ONNX Runtime" in found.first) == (device == "rocm")
    text = page.text()
    assert f"## {key}:small by length" in text
    assert "NOT FINE" not in text


def test_programs_are_timed_before_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a budget that expires while the first length is timed with a peer. Programs for single lengths were timed before.
    Errors cover the requested number of lengths; memory is not measured."""
    who = list[tuple[str, ...]]()

    def spent(self: Measuring, length: int, runners: list[Runner]) -> None:
        before(self, length, runners)
        who.append(tuple(r.name for r in runners))
        self.end = -math.inf if len(who) == 3 else self.end

    before = Measuring.turns
    monkeypatch.setattr(Measuring, "turns", spent)
    page = blank()
    measured(asked("--models", "gpt2:small", "--budget", "1000", "--checks", "2", "--exact", "2"), page)
    (found,) = page.found
    assert who == [(RANGE, ALONE), (RANGE, ALONE), (f"{BESIDE}ONNX Runtime", "ONNX Runtime")]
    assert [len(r.took) for r in found.rows if r.took] == [4, 2]
    assert len(found.compared) == 2 and found.fine and not found.resident
    assert "ONNX Runtime / range" in page.text() and found.ratio("ONNX Runtime", f"{BESIDE}ONNX Runtime", False)


@pytest.mark.large
def test_programs_are_compiled_ahead(capfd: pytest.CaptureFixture[str]) -> None:
    """Check that timed programs were compiled by other processes and come from disk."""
    page = blank()
    measured(asked("--models", "gpt2:small", "--checks", "1", "--memory", "0", "--exact", "2", "--ahead", "2"), page)
    (found,) = page.found
    said = capfd.readouterr().err
    assert said.count("alone ahead: ") == 2 and said.count("range ahead: ") >= 1 and "Error" not in said
    assert found.fine and sum(ALONE in r.took for r in some(found.rows)) == 2


def test_nothing_is_timed_without_time() -> None:
    page = blank()
    measured(asked("--models", "gpt2:small", "--budget", "0", "--checks", "1"), page)
    (found,) = page.found
    assert found.fine and len(found.compared) == 1 and not any(r.took for r in some(found.rows))


def test_peers_that_fail_are_told(tmp_path: Path) -> None:
    """Check that failures of a peer are in the table and that other peers are opened once."""
    calls = list[str]()

    def fails(inputs: object) -> float:
        raise RuntimeError("no such operator")

    def absent() -> Runner:
        raise DeviceUnavailable("torch is not installed")

    def there() -> Runner:
        calls.append("good")
        return Runner("good", lambda inputs: {}, lambda inputs: 1e-3)

    at_work = Measuring(find_ranged("gpt2:small"), tmp_path, asked(), 0.0, lambda: None)
    assert at_work.peer("bad", lambda: Runner("bad", lambda inputs: {}, fails), 3) is None
    assert at_work.peer("torch", absent, 3) is None
    assert at_work.peer("good", there, 3) is at_work.peer("good", there, 4) is not None
    assert at_work.found.missing == [
        "gpt2:small: bad: RuntimeError: no such operator",
        "gpt2:small: torch: torch is not installed",
    ]
    assert calls == ["good"] and at_work.found.first.keys() == {"good"}


@pytest.mark.parametrize("key", RANGED)
def test_lengths_begin_at_the_ends_and_are_spread(key: str, seed: int) -> None:
    model = RANGED[key]
    low, high = model.span
    found = ordered(model, 12, seed, edges=True)
    assert len(set(found)) == 12 and found[0] == high and found[2] == low
    assert all(low <= n <= high for n in some(found))
    assert ordered(model, 5, seed, edges=True) == found[:5]
    edges = {n for b in bucket_bounds(model.span)[1:] for n in (b, b + 1)}
    assert len(edges & set(found[3:])) >= 4 and set(found) - edges - {low, high}


@pytest.mark.parametrize("key", RANGED)
def test_lengths_are_spread_evenly(key: str, seed: int) -> None:
    """Check that each eighth of the range has its share of the first lengths. All lengths occur in the end."""
    model = RANGED[key]
    low, high = model.span
    size = high - low + 1
    assert sorted(ordered(model, size, seed)) == list(range(low, high + 1))
    for count in (8, 12, min(32, size)):
        found = ordered(model, count, seed)
        assert found == ordered(model, size, seed)[:count] and len(set(found)) == count
        shares = np.bincount([(n - low) * 8 // size for n in found], minlength=8)
        assert all(abs(int(n) - count / 8) <= 2 for n in some(shares)), shares
        assert abs(np.mean(found) - (low + high) / 2) < 0.15 * size


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
    """Check the columns, also at a length where an earlier runner of the row was not timed."""
    found = Found("gpt2", "past", (0, 63), 0, rows=[Row(2, None, {RANGE: Took(2.0, 1.0), "torch": Took(3.0, 1.0)})])
    found.rows.append(Row(1, 1e-7, {RANGE: Took(1.0, 1.0), ALONE: Took(0.5, 1.0), "torch": Took(4.0, 1.0)}))
    headers, lines = by_length(found)
    assert [dict(zip(headers, line, strict=True)).get("torch, ms") for line in lines] == ["4000.000", "3000.000"]
    assert dict(zip(headers, lines[1], strict=True))["alone, ms"] == ""


def test_models_are_kept_one_by_one(tmp_path: Path) -> None:
    """Check that results of other models stay, new results replace old ones, and records of another machine are refused."""
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


def test_a_greatest_length_may_be_given() -> None:
    """Check a length within the model's range, for small forms, too."""
    assert find_ranged("bert_base:small").until(128).span == (1, 128)
    assert find_ranged("gpt2").until(5).arguments == find_ranged("gpt2").arguments
    for key, most in some([("bert_base:small", 513), ("gpt2", 64), ("resnet50:small", 33), ("gpt2", 0), ("resnet50", 1)]):
        with pytest.raises(BadInput, match=f"{most} is no greatest length"):
            find_ranged(key).until(most)


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
