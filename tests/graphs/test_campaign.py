"""Random graphs on every device that works here, with the seed in the message: a sample, `make search` runs 300."""

from __future__ import annotations

import os

import pytest
from one_process import campaign

from rammer.device.loader import Registry
from rammer.testing.graphs.campaign import CampaignPlan
from rammer.testing.graphs.judge import Setting

#: The same graphs every time, so that a commit is blamed for what it did; RAMMER_GRAPHS_SEED=N draws others.
SEED = int(os.environ.get("RAMMER_GRAPHS_SEED", "20"))


# Other voices are asked once: what a graph means does not depend on the device.
@pytest.mark.parametrize(("device", "graphs", "voices"), [("toy", 30, True), ("ipu_sim", 15, False), ("rocm", 8, False)])
def test_random_graphs(device: str, graphs: int, voices: bool) -> None:
    if Registry().status(device).state != "ok":
        pytest.skip(f"{device} does not work here")
    anything = Setting(device, "*", "*", "float32" if device == "toy" else "*")
    plan = CampaignPlan(anything, SEED, first=graphs, graphs=graphs, seconds=240, voices=voices, shrink=15, longest=8)
    tally = campaign(plan)
    kept = "\n".join(f.case.text() for f in tally.faults.values())
    assert not tally.raw, f"seed {SEED}\n{tally.text()}\n{kept}"
    assert tally.graphs > graphs * 0.75 and sum(tally.refused.values()) < graphs * 0.1, tally.text()
