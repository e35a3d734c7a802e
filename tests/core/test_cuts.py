"""Cuts of graphs that are too large for IOS' search, and the agreement of its prediction with the placement."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rammer.schedule import ios as module
from rammer.schedule.ios import IOS
from rammer.schedule.ios_blocks import find_chains, split_blocks, split_windows
from rammer.schedule.ios_dp import Dag
from rammer.schedule.policy import Memory, OperatorGraph
from rammer.schedule.stage_clock import stage_latency
from rammer.schedule.task_placement import predict_latency, side_by_side
from rammer_testing.nonempty import some
from rammer_testing.programs import adding, device, kernel, random_net

#: Slowdown of a task when all vEUs are busy: below one where tasks hide each other's latency.
CROWDED = (lambda random: random.uniform(1, 3), lambda random: random.uniform(0.05, 1))


@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_a_stage_takes_as_long_counted_as_placed(seed: int) -> None:
    random = Random(seed)
    seconds = [random.choice([1e-6, 2e-6, random.uniform(1e-7, 9e-6)]) for _ in range(random.randint(1, 9))]
    kernels = [
        replace(
            kernel(
                adding(f"o{i}", random.choice([1, 3, random.randint(1, 600)]), ["x"], 1),
                time,
                time * random.choice(CROWDED)(random),
            ),
            spread=random.choice([1, 1, 2, 8]),
        )
        for i, time in enumerate(seconds)
    ]
    unit = device(random.choice([1, 8, 132, random.randint(1, 200)]))
    assert predict_latency(kernels, {}, unit) == pytest.approx(side_by_side(kernels, {}, unit), rel=1e-5)
    assert predict_latency(kernels, {}, unit) >= max(seconds), "no operator ends sooner than one task alone"
    for one in some(kernels):
        assert predict_latency([one], {}, unit) == pytest.approx(one.operator_time(unit.veus) + unit.launch, rel=1e-5)


def grid(layers: int, steps: int) -> OperatorGraph:
    """Make an unrolled recurrent network, layer by layer: each cell reads the cell below and the previous step."""
    cells = [(i, t) for i in range(layers) for t in range(steps)]
    after = {f"c{i}_{t}": tuple(f"c{a}_{b}" for a, b in ((i - 1, t), (i, t - 1)) if min(a, b) >= 0) for i, t in cells}
    return OperatorGraph({n: (kernel(adding(n, 3, ["x"], 1), 1e-6),) for n in after}, after)


@pytest.mark.parametrize(("layers", "steps"), [(3, 60), (7, 40)])
def test_a_grid_is_cut_between_its_waves_into_parts_that_are_alike(layers: int, steps: int) -> None:
    graph = grid(layers, steps)
    parts = split_windows(graph.names, graph.after, 32)
    waves = [{sum(map(int, n[1:].split("_"))) for n in part} for part in parts]
    assert all(max(a) < min(b) for a, b in some(list(pairwise(waves))))
    assert sum(map(len, parts)) == layers * steps
    assert len({Dag.of(part, graph.after).pred for part in parts}) < len(parts) - 2


@pytest.mark.parametrize(("layers", "steps"), [(2, 60), (3, 40), (9, 9)])  # the widest wave has nine
def test_a_long_recurrent_network_is_searched_in_all_its_parts(layers: int, steps: int, caplog: pytest.LogCaptureFixture) -> None:
    graph, unit = grid(layers, steps), device(64)
    found = IOS().search(graph, unit)
    assert not caplog.records and found.seconds == pytest.approx((layers + steps - 1) * 2e-6)  # one wave per stage is optimal
    tried = graph.memory.transitions
    assert 0 < tried < 5_000_000
    assert IOS().search(graph, unit) == found and graph.memory.transitions == tried  # another program of the same model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_parts_of_a_cut_come_in_order_and_a_larger_r_is_not_worse(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, unit = random_net(Random(seed), 20).graph(), device(16)
    done: set[str] = set()
    for part in some(split_windows(graph.names, graph.after, 6)):
        assert len(part) <= 6 and all(p in done or p in part for n in part for p in graph.after[n])
        done |= set(part)
    assert done == set(graph.names)
    for limit in ("FIRST_TRANSITIONS", "MAX_TRANSITIONS"):
        monkeypatch.setattr(module, limit, 200)
    found = [IOS(r, 8).search(replace(graph, memory=Memory()), unit).seconds for r in (1, 2, 3)]
    assert found[2] <= found[1] * (1 + 1e-9) <= found[0] * (1 + 1e-9) ** 2


def in_chains(seed: int, nodes: int = 8) -> OperatorGraph:
    """Make a random graph of nodes, each a chain of one to three operators with few tasks, like RandWire's."""
    random = Random(seed)
    after: dict[str, tuple[str, ...]] = {}
    ends = list[str]()
    for node in range(nodes):
        reads = tuple(sorted({random.choice(ends[-5:]) for _ in range(random.randint(1, 3))})) if ends else ()
        for i in range(random.randint(1, 3)):
            after[f"o{node}_{i}"] = (f"o{node}_{i - 1}",) if i else reads
        ends.append(next(reversed(after)))
    kernels = {n: (kernel(adding(n, random.randint(1, 5), ["x"], 1), random.uniform(1e-6, 5e-6)),) for n in after}
    return OperatorGraph(kernels, after)


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.integers(1, 12))
def test_chains_are_as_long_as_they_can_be_and_in_order(seed: int, nodes: int) -> None:
    graph = in_chains(seed, nodes)
    found, after = find_chains(graph.names, graph.after), graph.after
    assert sorted(n for c in found for n in c) == sorted(graph.names)
    readers = {n: [m for m in after if n in after[m]] for n in after}
    inside = {(a, b) for c in found for a, b in pairwise(c)}
    assert inside == {(a, b) for a in after for b in readers[a] if readers[a] == [b] and tuple(after[b]) == (a,)}
    place = {n: i for i, c in enumerate(found) for n in c}
    assert all(place[p] <= place[n] for n in graph.names for p in after[n])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", range(12))
def test_what_is_cut_is_searched_in_chains_too(case: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that contracting chains leaves few enough operators to search a block, and that the better result wins. This holds
    for every ``r``."""
    graph, unit = in_chains(seed + case), device(16)
    monkeypatch.setattr(module, "MAX_OPERATORS", 8)
    monkeypatch.setattr(module, "PART", 6)
    found = [IOS(r, 4).search(replace(graph, memory=Memory()), unit) for r in (1, 2, 3)]
    for result in some(found):
        done: set[str] = set()
        for stage in result.stages:
            assert all(p in done or p in stage for n in stage for p in graph.after[n])
            done |= {*stage}
        assert done == {*graph.names}
        assert result.seconds == pytest.approx(sum(stage_latency(graph, stage, unit) for stage in result.stages))
    monkeypatch.setattr(module, "find_chains", lambda names, after: [(n,) for n in names])
    apart = [IOS(r, 4).search(replace(graph, memory=Memory()), unit) for r in (1, 2, 3)]
    assert all(a.seconds <= b.seconds * (1 + 1e-9) for a, b in some(list(zip(found, apart, strict=True))))
    assert found[2].seconds <= found[1].seconds * (1 + 1e-9) <= found[0].seconds * (1 + 1e-9) ** 2


@pytest.mark.parametrize("case", range(4))
def test_what_is_proved_by_chains_no_schedule_of_chains_beats(case: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, unit = in_chains(seed + case, 5), device(4)
    inside = [graph.names[b.start : b.stop] for b in split_blocks(graph.names, graph.after)]
    units = [u for names in inside for u in find_chains(names, graph.after)]
    monkeypatch.setattr(module, "MAX_OPERATORS", len(units))
    found = IOS(12, 12).search(graph, unit)
    assert found.proved != "none"

    @cache
    def least(done: frozenset[str]) -> float:
        left = [u for u in units if not {*u} <= done]
        costs = [0.0] if not left else []
        for part in (p for n in range(1, len(left) + 1) for p in combinations(left, n)):
            now = {n for u in part for n in u}
            if all(p in done or p in now for n in now for p in graph.after[n]):
                costs.append(stage_latency(graph, [n for n in graph.names if n in now], unit) + least(done | now))
        return min(costs)

    assert found.seconds <= least(frozenset()) * (1 + 1e-9)


def test_chains_gain_where_waves_wait_for_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check two chains of four operators that alternate long and short in opposite phase. In separate stages, each chain waits
    for the other."""
    after = {f"{c}{i}": (f"{c}{i - 1}",) if i else () for c in "ab" for i in range(4)}
    times = {n: 3e-6 if (n[0] == "a") == (int(n[1]) % 2 == 0) else 1e-6 for n in after}
    graph = OperatorGraph({n: (kernel(adding(n, 1, ["x"], 1), times[n]),) for n in after}, after)
    monkeypatch.setattr(module, "MAX_OPERATORS", 3)
    found = IOS(1, 2).search(graph, device(4))
    assert (
        found.proved == "chains"
        and len(found.stages) == 1
        and found.seconds == pytest.approx(stage_latency(graph, list(after), device(4)))
    )
    monkeypatch.setattr(module, "find_chains", lambda names, after: [(n,) for n in names])
    assert found.seconds < IOS(1, 2).search(replace(graph, memory=Memory()), device(4)).seconds
