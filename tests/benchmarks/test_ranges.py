"""The table of programs for ranges of lengths: a sample on small models, what it calls wrong, GPT-2 as it is published."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from range_peers import Runner, Took
from ranges import ALONE, RANGE, Found, Measuring, Row, document, measured, parser
from registry import TABLES
from zoo.ranged import RANGED, find_ranged

from rammer.errors import BadInput, DeviceUnavailable
from rammer.testing.some import some

KEYS = ("bert_base", "gpt2", pytest.param("resnet50", marks=pytest.mark.large))
QUICK = ("--lengths", "4", "--exact", "1", "--rounds", "1", "--threads", "1")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
@pytest.mark.parametrize("key", KEYS)
def test_small_models_are_right_and_timed(device: str, key: str, seed: int) -> None:
    options = ["--option", "tiles=16"] if device == "ipu_sim" else []
    args = parser().parse_args(["--device", device, "--models", f"{key}:small", "--seed", str(seed), *QUICK, *options])
    args.words, args.load = [], "0"
    (found,) = measured(args)
    assert found.fine, found
    assert all(RANGE in r.took for r in some(found.rows))
    assert sum(ALONE in r.took for r in found.rows) == 1
    text = document([found], args)
    assert f"## {key}:small by length" in text
    assert "NOT FINE" not in text


def test_peers_that_fail_are_told(tmp_path: Path) -> None:
    """What one cannot run is in the table, and the others stay."""

    def fails(inputs: object) -> dict[str, np.ndarray]:
        raise RuntimeError("no such operator")

    def absent() -> list[Runner]:
        raise DeviceUnavailable("torch is not installed")

    model = find_ranged("gpt2:small")
    at_work = Measuring(model, tmp_path, parser().parse_args(QUICK), 0.0)
    good, bad = Runner("good", lambda inputs: {}, lambda inputs: 0.0), Runner("bad", fails, lambda inputs: 0.0)
    assert at_work.working(lambda: [bad, good]) == [good]
    assert at_work.working(absent) == []
    assert at_work.found.missing == ["gpt2:small: bad: RuntimeError: no such operator", "gpt2:small: torch is not installed"]


def test_nothing_is_timed_without_time() -> None:
    (found,) = measured(parser().parse_args(["--models", "gpt2:small", *QUICK, "--budget", "0"]))
    assert found.fine, found
    assert not any(r.took for r in some(found.rows))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": [Row(1, 1e-7), Row(2, math.nan)]},
        {"rows": [Row(1, 1e-7), Row(2, 1e-3)]},
        {"rows": [Row(1, 1e-7)]},
        {"programs": 6},
        {"resident": (0, 1 << 20, 100 << 20)},
    ],
)
def test_what_is_wrong_is_told(wrong: dict[str, object]) -> None:
    right = {"rows": [Row(1, 1e-7), Row(2, 1e-7)], "programs": 5, "resident": (0, 1 << 20, 1 << 20)}
    model = RANGED["bert_base"]
    assert Found(model, 2, **right).fine  # type: ignore[arg-type]
    assert not Found(model, 2, **{**right, **wrong}).fine  # type: ignore[arg-type]


def test_ratios_are_geometric_means_of_lengths_that_both_were_timed_at() -> None:
    rows = [Row(1, 0.0, {RANGE: Took(2.0, 1.0), ALONE: Took(1.0, 1.0)}), Row(2, 0.0, {RANGE: Took(8.0, 9.0)})]
    rows.append(Row(3, 0.0, {RANGE: Took(8.0, 4.0), ALONE: Took(1.0, 1.0)}))
    found = Found(RANGED["bert_base"], 3, rows=rows)
    assert (found.ratio(RANGE, ALONE, False), found.ratio(RANGE, ALONE, True)) == ("4.00", "2.00")
    assert found.ratio("torch", RANGE, False) == ""


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
