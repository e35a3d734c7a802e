"""IOS: published search sizes, reproduced exactly, and the brute-force optimum on small graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from random import Random
from time import thread_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rammer.ir.operator import RKernel
from rammer.schedule import ios as module
from rammer.schedule.baselines import Sequential
from rammer.schedule.ios import IOS
from rammer.schedule.ios_blocks import split_blocks
from rammer.schedule.ios_dp import Dag, Found, Latency, TooLarge, iter_bits, search_stages
from rammer.schedule.policy import Memory, OperatorGraph
from rammer.schedule.stage_clock import stage_latency
from rammer.schedule.wavefront import Wavefront
from rammer_testing.nonempty import some
from rammer_testing.programs import adding, device, kernel, random_net, recurrent_net

After = Mapping[str, Sequence[str]]

#: Fire module with complex bypass (SqueezeNet): the bypass convolution joins after the concat.
SQUEEZE = {
    "squeeze": [],
    "expand1": ["squeeze"],
    "expand3": ["squeeze"],
    "concat": ["expand1", "expand3"],
    "bypass": [],
    "add": ["concat", "bypass"],
}
#: Inception V3's widest block (Mixed_7b): four branches, two of them forked, and their concat.
INCEPTION = {
    "a": [],
    "b": [],
    "b13": ["b"],
    "b31": ["b"],
    "c": [],
    "c33": ["c"],
    "c13": ["c33"],
    "c31": ["c33"],
    "pool": [],
    "p": ["pool"],
    "concat": ["a", "b13", "b31", "c13", "c31", "p"],
}


def unpruned(after: After) -> tuple[int, int, int]:
    dag = Dag.of(list(after), after)
    found = search_stages(dag, Latency(lambda ending: 1.0), r=dag.size, s=dag.size, limit=10**6)
    return dag.size, found.transitions, found.schedules


def width(after: After) -> int:
    before = {n: ancestors(n, after) for n in after}

    def apart(part: tuple[str, ...]) -> bool:
        return all(i not in before[j] and j not in before[i] for i, j in combinations(part, 2))

    return max(d for d in range(1, len(after) + 1) if any(map(apart, combinations(after, d))))


def test_squeezenet_block_has_the_published_counts() -> None:
    assert width(SQUEEZE) == 3
    assert unpruned(SQUEEZE) == (6, 60, 152)


def test_inception_block_has_the_published_counts() -> None:
    assert width(INCEPTION) == 6
    size, transitions, schedules = unpruned(INCEPTION)
    assert (size, transitions) == (11, 5040)
    assert schedules == 4_410_136  # published as 4.4e6


def test_a_chain_of_n_has_two_to_the_n_minus_one_schedules() -> None:
    chain = {f"o{i}": [f"o{i - 1}"] if i else [] for i in range(7)}
    assert unpruned(chain) == (7, 7 * 8 // 2, 2**6)


def random_graph(seed: int, operators: int) -> OperatorGraph:
    random = Random(seed)
    kernels: dict[str, tuple[RKernel, ...]] = {}
    after: dict[str, tuple[str, ...]] = {}
    for i in range(operators):
        name = f"o{i}"
        after[name] = tuple(f"o{j}" for j in range(i) if random.random() < 0.35)
        kernels[name] = tuple(
            kernel(adding(name, random.randint(1, 9), ["x"], 1), random.uniform(1e-6, 5e-6), random.uniform(2e-6, 9e-6))
            for _ in range(random.randint(1, 2))
        )
    return OperatorGraph(kernels, after)


def components(part: frozenset[str], after: After) -> list[set[str]]:
    groups: list[set[str]] = []
    for name in part:
        touching = [g for g in groups if any(name in after[m] or m in after[name] for m in g)]
        groups = [g for g in groups if g not in touching] + [set().union({name}, *touching)]
    return groups


def ancestors(name: str, after: After) -> set[str]:
    return {a for p in after[name] for a in {p} | ancestors(p, after)}


def series_cuts(after: After) -> list[int]:
    """Return the positions at which every later operator waits for every earlier one."""
    names, before = list(after), {n: ancestors(n, after) for n in after}
    return [i for i in range(1, len(names)) if all(set(names[:i]) <= before[n] for n in names[i:])]


def cut_crosser(graph: OperatorGraph) -> Callable[[frozenset[str]], bool]:
    """Return a predicate that is True if some operators cross a series cut."""
    names = graph.names
    halves = [(frozenset(names[:i]), frozenset(names[i:])) for i in series_cuts(graph.after)]
    return lambda part: any(part & early and part & late for early, late in halves)


def brute_force(graph: OperatorGraph, r: int, s: int, veus: int, crossing: bool = False) -> float:
    """Return the cheapest cut into a first stage and a rest, by exhaustive search without memoised rests."""
    crosses_a_cut = cut_crosser(graph)

    @cache
    def latency(part: frozenset[str]) -> float:
        """Return the latency of a stage if it is legal; else infinity."""
        groups = components(part, graph.after)
        if len(groups) > s or any(len(g) > r for g in groups) or (not crossing and crosses_a_cut(part)):
            return math.inf
        return stage_latency(graph, [n for n in graph.names if n in part], device(veus))

    def best(done: frozenset[str]) -> float:
        left = [n for n in graph.names if n not in done]
        if not left:
            return 0.0
        costs = []
        for count in range(1, len(left) + 1):
            for part in map(frozenset, combinations(left, count)):
                legal = all(p in done or p in part for n in part for p in graph.after[n])
                if legal and latency(part) < math.inf:
                    costs.append(latency(part) + best(done | part))
        return min(costs)

    return best(frozenset())


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 8))
def test_equals_brute_force(seed: int, operators: int, r: int, s: int, veus: int) -> None:
    graph = random_graph(seed, operators)
    result = IOS(r, s).search(graph, device(veus))
    assert result.exact
    assert result.seconds == pytest.approx(brute_force(graph, r, s, veus), rel=1e-9)


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 8))
def test_unpruned_it_equals_brute_force_over_the_whole_graph(seed: int, operators: int, veus: int) -> None:
    graph = random_graph(seed, operators)
    whole = brute_force(graph, operators, operators, veus, crossing=True)
    assert IOS(operators, operators).search(graph, device(veus)).seconds == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_equals_brute_force_on_eight_operators(seed: int) -> None:
    graph = random_graph(seed, 8)
    assert IOS(3, 8).search(graph, device(5)).seconds == pytest.approx(brute_force(graph, 3, 8, 5), rel=1e-9)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 9))
def test_stages_are_legal_and_cost_what_is_predicted(seed: int, operators: int) -> None:
    graph, unit = random_graph(seed, operators), device(4)
    policy = IOS(2, 2)
    schedule = policy(graph, unit)
    done: set[str] = set()
    for stage in some(schedule.stages):
        groups = components(frozenset(stage), graph.after)
        assert len(groups) <= 2 and all(len(g) <= 2 for g in groups)
        assert all(p in done or p in stage for n in stage for p in graph.after[n])
        done |= set(stage)
    assert done == set(graph.names)
    latency = sum(stage_latency(graph, stage, unit) for stage in schedule.stages)
    assert schedule.predicted == pytest.approx(latency, rel=1e-9)


@settings(max_examples=5)
@given(st.integers(0, 10**6))
def test_less_pruning_never_costs_more(seed: int) -> None:
    graph, unit = random_graph(seed, 8), device(6)
    seconds = {(r, s): IOS(r, s).search(graph, unit).seconds for r in (1, 2, 3, 8) for s in (1, 2, 3, 8)}
    for (r, s), value in some(seconds.items()):
        for (more_r, more_s), other in some(seconds.items()):
            if more_r >= r and more_s >= s:
                assert other <= value * (1 + 1e-9)


def test_blocks_end_where_all_that_follows_waits_for_all_before() -> None:
    after = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"], "e": ["d"], "f": ["d"], "g": ["e", "f"], "h": ["e", "f"]}
    assert [list(b) for b in split_blocks(list(after), after)] == [[0], [1, 2], [3], [4, 5], [6, 7]]
    after["h"] = ["e"]  # f and h could share a stage
    assert [list(b) for b in split_blocks(list(after), after)] == [[0], [1, 2], [3], [4, 5, 6, 7]]


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 10), st.sampled_from([0.2, 0.5, 0.8]))
def test_blocks_end_at_every_such_place_and_nowhere_else(seed: int, operators: int, dense: float) -> None:
    random = Random(seed)
    after = {f"o{i}": [f"o{j}" for j in range(i) if random.random() < dense] for i in range(operators)}
    assert [b.start for b in split_blocks(list(after), after)] == [0, *series_cuts(after)]


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 8))
def test_cutting_into_blocks_loses_nothing_without_pruning(seed: int, operators: int) -> None:
    graph, unit = random_graph(seed, operators), device(3)
    dag = Dag.of(graph.names, graph.after)
    whole = search_stages(dag, Latency(lambda e: stage_latency(graph, [graph.names[i] for i in iter_bits(e)], unit)), 8, 8, 10**6)
    assert IOS(8, 8).search(graph, unit).seconds <= whole.cost * (1 + 1e-9)


def test_stage_sharing_beats_one_after_another() -> None:
    kernels = {n: (kernel(adding(n, 4, ["x"], 1), 1e-6),) for n in ("a", "b", "c")}
    schedule = IOS()(OperatorGraph(kernels, {"a": (), "b": (), "c": ()}), device(12))
    assert schedule.stages == (("a", "b", "c"),) and schedule.barriers
    assert schedule.predicted == pytest.approx(1e-6 + 1e-6)


def test_a_block_beyond_the_limit_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    net = recurrent_net(layers=4, steps=5, tasks=2)
    graph, unit = net.graph(), device(4)
    exact = IOS().search(graph, unit)
    for limit in ("FIRST_TRANSITIONS", "MAX_TRANSITIONS"):
        monkeypatch.setattr(module, limit, 50)
    cut = IOS().search(replace(graph, memory=Memory()), unit)
    assert exact.exact and not cut.exact and cut.proved in ("chains", "none")
    assert exact.seconds <= cut.seconds and cut.transitions < exact.transitions
    assert net.program(IOS(), 4).task_count == 40


def test_the_search_stops_at_its_limit() -> None:
    dag = Dag.of(list(INCEPTION), INCEPTION)
    with pytest.raises(TooLarge, match="more than 5039 transitions for 11 operators"):
        search_stages(dag, Latency(lambda e: 1.0), 11, 11, 5039)


def test_alike_blocks_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Dag] = []

    def counted(dag: Dag, *rest: Any) -> Found:
        calls.append(dag)
        return search_stages(dag, *rest)

    monkeypatch.setattr(module, "search_stages", counted)
    kernels: dict[str, tuple[RKernel, ...]] = {}
    after: dict[str, tuple[str, ...]] = {}
    last: tuple[str, ...] = ()
    for cell in range(5):
        for name in SQUEEZE:
            kernels[f"{name}{cell}"] = (kernel(adding(f"{name}{cell}", 3, ["x"], 1), 1e-6),)
            after[f"{name}{cell}"] = tuple(f"{p}{cell}" for p in SQUEEZE[name]) or last
        last = (f"add{cell}",)
    result = IOS().search(OperatorGraph(kernels, after), device(4))
    assert result.exact and sorted(dag.size for dag in calls) == [1, 5]


def test_programs_of_ios_verify() -> None:
    for seed in range(8):
        net = random_net(Random(seed), 10)
        for policy in (IOS(), IOS(1, 2), Wavefront()):
            assert net.program(policy, 5).veus == 5


def plain_graph(size: int, after: Callable[[int], Sequence[int]]) -> OperatorGraph:
    random = Random(size)
    kernels = {
        f"o{i}": (kernel(adding(f"o{i}", random.randint(1, 9), ["x"], 1), random.uniform(1e-6, 5e-6)),) for i in range(size)
    }
    return OperatorGraph(kernels, {f"o{i}": tuple(f"o{j}" for j in after(i)) for i in range(size)})


WIDE: Mapping[str, Callable[[int], Sequence[int]]] = {
    "apart": lambda i: (),
    "four chains": lambda i: (i - 4,) if i > 3 else (),
    "fork": lambda i: (0,) if i else (),
    "fork and join": lambda i: () if i == 0 else (0,) if i < 39 else range(1, 39),
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", WIDE)
def test_forty_operators_in_one_block_end_in_time(shape: str) -> None:
    graph, unit = plain_graph(40, WIDE[shape]), device(16)
    begun = thread_time()
    schedule = IOS(seconds=1)(graph, unit)
    assert thread_time() - begun < 8
    done: set[str] = set()
    for stage in some(schedule.stages):
        assert all(p in done or p in stage for n in stage for p in graph.after[n])
        done |= set(stage)
    assert done == set(graph.names) and sum(map(len, schedule.stages)) == 40
    assert schedule.predicted <= Sequential()(graph, unit).predicted * (1 + 1e-9)


def test_a_search_without_time_is_greedy_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    graph, unit = plain_graph(40, WIDE["four chains"]), device(16)
    schedule = IOS(2, 3, seconds=0)(graph, unit)
    assert "40 of 40 operators are in stages that were not searched" in caplog.text
    assert all(len(stage) <= 3 for stage in some(schedule.stages))
    assert sum(stage_latency(graph, s, unit) for s in schedule.stages) == pytest.approx(schedule.predicted)


def test_transitions_of_a_model_are_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    graph, unit = plain_graph(40, WIDE["four chains"]), device(16)
    monkeypatch.setattr(module, "MAX_TOTAL", 100)
    first = IOS().search(graph, unit)
    assert first == IOS().search(replace(graph, memory=Memory()), unit) and not first.exact
    assert "operators are in stages that were not searched" in caplog.text


@pytest.mark.slow
def test_cuts_of_a_long_chain_are_found_in_one_walk() -> None:
    graph = plain_graph(20_000, lambda i: (i - 1,) if i else ())
    begun = thread_time()
    assert [len(b) for b in split_blocks(graph.names, graph.after)] == [1] * 20_000
    assert thread_time() - begun < 1


def watts_strogatz(seed: int, nodes: int = 32, near: int = 4, rewired: float = 0.75) -> dict[str, list[str]]:
    """Make RandWire's random graphs (ICCV'19, section 3.3): a ring, randomly rewired, with edges directed by number."""
    random = Random(seed)
    edges = {frozenset((i, (i + j) % nodes)) for i in range(nodes) for j in range(1, near // 2 + 1)}
    for j in range(1, near // 2 + 1):
        for i in range(nodes):
            edge = frozenset((i, (i + j) % nodes))
            free = [k for k in range(nodes) if k != i and frozenset((i, k)) not in edges]
            if random.random() < rewired and edge in edges and free:
                edges = edges - {edge} | {frozenset((i, random.choice(free)))}
    ends = [sorted(edge) for edge in edges]
    return {f"o{i}": [f"o{a}" for a, b in ends if b == i] for i in range(nodes)}


def random_wired(seed: int, nodes: int) -> OperatorGraph:
    random, after = Random(seed), watts_strogatz(seed, nodes)
    kernels = {n: (kernel(adding(n, random.randint(1, 40), ["x"], 1), random.uniform(1e-6, 5e-6)),) for n in after}
    return OperatorGraph(kernels, {n: tuple(p) for n, p in after.items()})


@pytest.mark.parametrize(("seed", "nodes"), [(2, 24), *(pytest.param(n, 32, marks=pytest.mark.large) for n in range(11))])
def test_random_wired_networks_are_searched_exactly(seed: int, nodes: int) -> None:
    graph, unit = random_wired(seed, nodes), device(132)
    found = [IOS(r, 8).search(replace(graph, memory=Memory()), unit) for r in (1, 2, 3)]
    assert all(f.exact for f in some(found))
    assert found[2].seconds <= found[1].seconds * (1 + 1e-9) <= found[0].seconds * (1 + 1e-9) ** 2
    assert found[0].transitions < found[1].transitions < found[2].transitions


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 3), st.integers(1, 4), st.integers(1, 8))
def test_measured_stages_count_and_beat_every_schedule_that_was_run(seed: int, operators: int, r: int, s: int, veus: int) -> None:
    graph, unit = random_graph(seed, operators), device(veus)
    true: dict[tuple[str, ...], float] = {}

    def timed(kernels: Sequence[RKernel]) -> float | None:
        names = tuple(k.operator.name for k in kernels)
        predicted = stage_latency(graph, names, unit)
        true[names] = predicted * Random(f"{seed} {names}").uniform(0.3, 3.0)
        return true[names]

    predicted = IOS(r, s).search(graph, unit)
    found = IOS(r, s).search(replace(graph, timed=timed), unit)
    assert found.seconds == pytest.approx(sum(true[stage] for stage in found.stages))
    assert found.seconds <= sum(true[n,] for n in graph.names) * (1 + 1e-9)  # one after another
    if all(stage in true for stage in predicted.stages):
        assert found.seconds <= sum(true[stage] for stage in predicted.stages) * (1 + 1e-9)
    done: set[str] = set()
    for stage in some(found.stages):
        assert all(p in done or p in stage for n in stage for p in graph.after[n])
        done |= set(stage)
    assert done == set(graph.names)


def test_a_stage_that_cannot_be_run_is_predicted() -> None:
    graph, unit = random_graph(3, 6), device(4)
    alone = IOS().search(graph, unit)
    assert IOS().search(replace(graph, timed=lambda kernels: None), unit).seconds == pytest.approx(alone.seconds)
