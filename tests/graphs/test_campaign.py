"""Random graphs on every working device, with the seed in the message: a sample, `make search` runs 300."""

from __future__ import annotations

import pytest
from one_process import campaign

from rammer.device.loader import Registry
from rammer_testing.graphs.campaign import CampaignPlan
from rammer_testing.graphs.judge import Setting


# Other references are queried once: the meaning of a graph does not depend on the device.
@pytest.mark.slow
@pytest.mark.parametrize(("device", "graphs", "voices"), [("toy", 30, True), ("ipu_sim", 15, False), ("rocm", 8, False)])
def test_random_graphs(device: str, graphs: int, voices: bool, pytestconfig: pytest.Config) -> None:
    if Registry().status(device).state != "ok":
        pytest.skip(f"{device} does not work here")
    seed = pytestconfig.getoption("--seed")
    anything = Setting(device, "*", "*", "float32" if device == "toy" else "*", form="*")
    plan = CampaignPlan(anything, seed, first=graphs, graphs=graphs, seconds=240, voices=voices, shrink=15, longest=8)
    tally = campaign(plan)
    kept = "\n".join(f.case.text() for f in tally.faults.values())
    assert not tally.raw, f"seed {seed}\n{tally.text()}\n{kept}"
    assert tally.graphs > graphs * 0.75 and sum(tally.refused.values()) < graphs * 0.1, tally.text()
