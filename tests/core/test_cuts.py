"""Where IOS cuts what is too large to search, and that what it predicts is what is placed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rammer.schedule import ios as module
from rammer.schedule.cuts import windows
from rammer.schedule.endings import Dag
from rammer.schedule.ios import IOS
from rammer.schedule.place import latency, side_by_side
from rammer.schedule.policy import Memory, OperatorGraph
from rammer.testing.programs import adding, device, kernel, random_net
from rammer.testing.some import some


@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_a_stage_takes_as_long_counted_as_placed(seed: int) -> None:
    random = Random(seed)
    seconds = [random.choice([1e-6, 2e-6, random.uniform(1e-7, 9e-6)]) for _ in range(random.randint(1, 9))]
    kernels = [
        replace(
            kernel(adding(f"o{i}", random.choice([1, 3, random.randint(1, 600)]), ["x"], 1), time, time * random.uniform(1, 3)),
            spread=random.choice([1, 1, 2, 8]),
        )
        for i, time in enumerate(seconds)
    ]
    unit = device(random.choice([1, 8, 132, random.randint(1, 200)]))
    assert latency(kernels, {}, unit) == pytest.approx(side_by_side(kernels, {}, unit), rel=1e-5)


def grid(layers: int, steps: int) -> OperatorGraph:
    """A recurrent network unrolled, layer by layer: each cell reads the one below and the one before."""
    cells = [(i, t) for i in range(layers) for t in range(steps)]
    after = {f"c{i}_{t}": tuple(f"c{a}_{b}" for a, b in ((i - 1, t), (i, t - 1)) if min(a, b) >= 0) for i, t in cells}
    return OperatorGraph({n: (kernel(adding(n, 3, ["x"], 1), 1e-6),) for n in after}, after)


@pytest.mark.parametrize(("layers", "steps"), [(3, 60), (7, 40)])
def test_a_grid_is_cut_between_its_waves_into_parts_that_are_alike(layers: int, steps: int) -> None:
    graph = grid(layers, steps)
    parts = windows(graph.names, graph.after, 32)
    waves = [{sum(map(int, n[1:].split("_"))) for n in part} for part in parts]
    assert all(max(a) < min(b) for a, b in some(list(pairwise(waves))))
    assert sum(map(len, parts)) == layers * steps
    assert len({Dag.of(part, graph.after).pred for part in parts}) < len(parts) - 2


@pytest.mark.parametrize(("layers", "steps"), [(2, 60), (3, 40)])
def test_a_long_recurrent_network_is_searched_in_all_its_parts(layers: int, steps: int, caplog: pytest.LogCaptureFixture) -> None:
    graph, unit = grid(layers, steps), device(64)
    found = IOS().search(graph, unit)
    assert not caplog.records and found.seconds == pytest.approx((layers + steps - 1) * 2e-6)  # a wave a stage: nothing is lost
    tried = graph.memory.transitions
    assert 0 < tried < 5_000_000
    assert IOS().search(graph, unit) == found and graph.memory.transitions == tried  # another program of the same model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_parts_of_a_cut_come_in_order_and_a_larger_r_is_not_worse(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, unit = random_net(Random(seed), 20).graph(), device(16)
    done: set[str] = set()
    for part in some(windows(graph.names, graph.after, 6)):
        assert len(part) <= 6 and all(p in done or p in part for n in part for p in graph.after[n])
        done |= set(part)
    assert done == set(graph.names)
    for limit in ("FIRST_TRANSITIONS", "MAX_TRANSITIONS"):
        monkeypatch.setattr(module, limit, 200)
    found = [IOS(r, 8).search(replace(graph, memory=Memory()), unit).seconds for r in (1, 2, 3)]
    assert found[2] <= found[1] * (1 + 1e-9) <= found[0] * (1 + 1e-9) ** 2
