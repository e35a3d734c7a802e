"""Campaigns in worker processes: graphs that hang or end a process are counted, and all findings are retained."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rammer.errors import RammerError
from rammer_testing.graphs import workers
from rammer_testing.graphs.campaign import CampaignPlan
from rammer_testing.graphs.case import GraphCase
from rammer_testing.graphs.judge import Setting
from rammer_testing.graphs.record import CASES, Record
from rammer_testing.graphs.workers import campaign
from rammer_testing.nonempty import some

ONLY = ("Sin", "Cos", "Neg", "Abs", "Relu")
BAD = CampaignPlan(
    Setting("bad_device"), seed=14, graphs=16, seconds=600, voices=False, shrink=1, only=ONLY, plugins=("bad_device",), longest=1
)


@pytest.fixture(autouse=True)
def _device_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    # Spawned processes inherit this process's path.
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.mark.slow
def test_hanging_dying_and_wrong_graphs_are_all_counted(tmp_path: Path) -> None:
    plan = CampaignPlan(**{**vars(BAD), "end": 0.0})
    tally = campaign(plan, 2, Record(plan, tmp_path / "report.jsonl", tmp_path / "cases"), patience=4)
    kinds = [text.split(" | ")[0] for text in tally.lost]
    assert kinds.count("hang") >= 1 and kinds.count("death") >= 1, tally.text()
    assert sum(n for (kind, _), n in tally.raw.items() if kind == "device") >= 2, tally.text()
    # Every graph is counted, even if its process hangs or ends.
    assert tally.graphs + tally.invalid + len(tally.lost) == 16 and not tally.unfinished
    lines = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert lines[-1]["done"] and lines[-1]["graphs"] == tally.graphs and lines[-1]["differences"] == tally.differences
    kept = [GraphCase.parse(line) for line in (tmp_path / "cases" / CASES).read_text().splitlines()]
    assert {extra["index"] for _, extra in kept} == set(tally.faults)
    small = {extra["signature"] for case, extra in kept if len(case.nodes) == 1}
    assert any("Neg" in text for text in small) and all(extra["whole"]["nodes"] for _, extra in some(kept))


@pytest.mark.slow
def test_a_campaign_ends_in_time_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    campaign(CampaignPlan(**{**vars(BAD), "only": ("Abs",), "graphs": 1, "end": 0.0}), 1)
    seconds = 3 * (time.monotonic() - start)  # enough for a process to start, also on a loaded machine
    plan = CampaignPlan(**{**vars(BAD), "only": ("Cos",), "graphs": 1000, "seconds": seconds, "end": 0.0})
    monkeypatch.setattr(workers, "GRACE", 1.0)
    tally = campaign(plan, 1, patience=1000)
    assert time.monotonic() < plan.end + 60  # a hanging graph waits for 1,000 seconds
    assert len(tally.unfinished) + tally.invalid >= 1 and not tally.lost and not tally.differences


@pytest.mark.slow
def test_no_device_is_no_campaign() -> None:
    with pytest.raises(RammerError, match="nowhere"):
        campaign(CampaignPlan(**{**vars(BAD), "setting": Setting("nowhere"), "end": 0.0}), 1)
