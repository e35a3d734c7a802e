"""Policies: every task placed once, waves as in Rammer, and kernels chosen by vEU occupancy."""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rammer.errors import BadInput
from rammer.ir.operator import RKernel
from rammer.schedule.baselines import Greedy, Sequential
from rammer.schedule.ios import IOS
from rammer.schedule.policy import OperatorGraph, Schedule
from rammer.schedule.policy_registry import FAR, GAIN, Auto, list_policies, parse_policy
from rammer.schedule.task_placement import (
    append_tasks,
    fastest_kernel,
    leanest_kernel,
    predict_latency,
    side_by_side,
    spread_tasks,
)
from rammer.schedule.wavefront import Wavefront
from rammer_testing.nonempty import some
from rammer_testing.programs import adding, device, kernel, random_net


def graph_of(kernels: dict[str, list[RKernel]], after: dict[str, tuple[str, ...]]) -> OperatorGraph:
    return OperatorGraph({n: tuple(ks) for n, ks in kernels.items()}, after)


def simple(name: str, tasks: int, alone: float, crowded: float = 0.0) -> RKernel:
    return kernel(adding(name, tasks, ["x"], 1), alone, crowded)


def placed(schedule: Schedule) -> Tally[tuple[str, int]]:
    return Tally(task for row in schedule.rows for task in row)


def loads(schedule: Schedule, seconds: dict[str, float]) -> list[float]:
    return [sum(seconds[name] for name, _ in row) for row in schedule.rows]


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 40), st.sampled_from(sorted(list_policies())))
def test_every_policy_places_every_task_once(seed: int, operators: int, veus: int, policy: str) -> None:
    net = random_net(Random(seed), operators)
    schedule = net.schedule(parse_policy(policy), veus)
    assert placed(schedule) == {(o.name, i): 1 for o in net.operators for i in range(o.task_count)}
    assert len(schedule.rows) == veus
    assert sorted(n for stage in schedule.stages for n in stage) == sorted(o.name for o in net.operators)
    assert schedule.predicted > 0


def test_sequential_deals_tasks_round_robin() -> None:
    graph = graph_of({"a": [simple("a", 5, 2e-6, 4e-6)], "b": [simple("b", 2, 1e-6)]}, {"a": (), "b": ("a",)})
    schedule = Sequential()(graph, device(4, launch=1e-6))
    assert schedule.rows == ((("a", 0), ("a", 4), ("b", 0)), (("a", 1), ("b", 1)), (("a", 2),), (("a", 3),))
    assert schedule.stages == (("a",), ("b",)) and schedule.barriers
    # a: two rounds with every vEU busy; b: one round; a launch each.
    assert schedule.predicted == pytest.approx(2 * 4e-6 + 1e-6 + 2 * 1e-6)


def test_sequential_takes_the_fastest_kernel() -> None:
    slow, quick = simple("a", 2, 9e-6), simple("a", 8, 1e-6)
    graph = graph_of({"a": [slow, quick]}, {"a": ()})
    assert Sequential()(graph, device(8)).kernels == (quick,)
    assert Sequential()(graph, device(1)).kernels == (quick,)
    assert fastest_kernel([simple("a", 2, 3e-6), quick], device(1)).operator.task_count == 2


def test_wavefront_runs_a_wave_side_by_side() -> None:
    after = {"a": (), "b": (), "c": ("a", "b")}
    graph = graph_of({"a": [simple("a", 2, 4e-6)], "b": [simple("b", 4, 2e-6)], "c": [simple("c", 4, 1e-6)]}, after)
    schedule = Wavefront()(graph, device(4, launch=0.5e-6))
    assert schedule.stages == (("a", "b"), ("c",)) and not schedule.barriers
    # The long tasks of a come first; b's four tasks share the remaining vEUs.
    assert [row[:-1] for row in schedule.rows] == [(("a", 0),), (("a", 1),), (("b", 0), ("b", 1)), (("b", 2), ("b", 3))]
    assert loads(schedule, {"a": 4e-6, "b": 2e-6, "c": 1e-6}) == pytest.approx([5e-6] * 4)
    assert schedule.predicted == pytest.approx(4e-6 + 1e-6 + 2 * 0.5e-6)
    assert Sequential()(graph, device(4, launch=0.5e-6)).predicted == pytest.approx(4e-6 + 2e-6 + 1e-6 + 3 * 0.5e-6)


def test_greedy_runs_all_that_may_run_and_waits_for_all_of_it() -> None:
    """Check that greedy runs the wavefront's waves, ended by barriers: a chain waits for a concurrent long operator."""
    after = {"long": (), "a": (), "b": ("a",), "c": ("b", "long")}
    kernels = {n: [simple(n, 2, 8e-6 if n == "long" else 1e-6)] for n in after}
    greedy = Greedy()(graph_of(kernels, after), device(4, launch=0.5e-6))
    assert greedy.stages == (("long", "a"), ("b",), ("c",)) and greedy.barriers
    assert greedy.predicted == pytest.approx(8e-6 + 1e-6 + 1e-6 + 3 * 0.5e-6)


def test_wavefront_is_quick_while_vEUs_are_idle_and_lean_when_they_are_full() -> None:
    def kernels(name: str) -> list[RKernel]:
        # fastest: 8 tasks, 8 vEU-seconds in all; leanest: 2 tasks, 4 vEU-seconds.
        return [simple(name, 8, 1e-6), simple(name, 2, 2e-6)]

    one = graph_of({"a": kernels("a")}, {"a": ()})
    assert Wavefront()(one, device(16)).kernels[0].operator.task_count == 8
    names = [f"o{i}" for i in range(8)]
    many = graph_of({n: kernels(n) for n in names}, {n: () for n in names})
    schedule = Wavefront()(many, device(16))
    assert {k.operator.task_count for k in schedule.kernels} == {2}
    assert schedule.predicted == pytest.approx(2e-6 + 1e-6)  # 16 lean tasks fill 16 vEUs once; fastest: 4 us
    fast = Wavefront(lean=0)(many, device(16))
    assert {k.operator.task_count for k in fast.kernels} == {8} and fast.predicted == pytest.approx(4e-6 + 1e-6)


def test_wavefront_keeps_the_fastest_where_lean_predicts_worse() -> None:
    quick, lean = simple("a", 8, 1e-6), simple("a", 1, 6e-6)
    assert leanest_kernel([quick, lean]) is lean
    schedule = Wavefront()(graph_of({"a": [quick, lean]}, {"a": ()}), device(4))
    assert schedule.kernels == (quick,)


def test_runs_stay_together_on_a_row() -> None:
    graph = graph_of({"a": [simple("a", 10, 1e-6)]}, {"a": ()})
    rows = Wavefront()(graph, device(4)).rows
    assert [[i for _, i in row] for row in rows] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(0, 60), st.integers(1, 9))
def test_spread_is_greedy_list_scheduling(start: list[int], tasks: int, seconds: int) -> None:
    counts = spread_tasks(np.array(start, dtype=float) * 1e-6, tasks, seconds * 1e-6)
    greedy = list(start)
    for _ in range(tasks):
        greedy[greedy.index(min(greedy))] += seconds
    assert counts.sum() == tasks
    assert sorted(s + c * seconds for s, c in zip(start, counts.tolist(), strict=True)) == sorted(greedy)


def sharing(name: str, weights: str, tasks: int) -> RKernel:
    return kernel(adding(name, tasks, [weights, f"x_{name}"], 1), 1e-6)


def test_operators_with_the_same_weights_run_where_they_were() -> None:
    """Check two layers of four steps in consecutive waves: every task stays on its vEU, whatever else runs."""
    kernels = {f"l{layer}s{step}": [sharing(f"l{layer}s{step}", f"w{layer}", 3)] for step in range(4) for layer in range(2)}
    after = {n: tuple(m for m in (f"l{n[1]}s{int(n[3]) - 1}", f"l{int(n[1]) - 1}{n[2:]}") if m in kernels) for n in kernels}
    graph = OperatorGraph({n: tuple(k) for n, k in kernels.items()}, after, frozenset({"w0", "w1"}))
    rows = Wavefront()(graph, device(8)).rows
    assert [{(name[1], i) for name, i in row} for row in rows if row] == [{(str(v // 3), v % 3)} for v in range(6)]


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 12), st.sampled_from(sorted(list_policies())))
def test_every_policy_places_every_task_once_where_operators_of_other_sizes_share_constants(
    seed: int, operators: int, veus: int, policy: str
) -> None:
    """Check with scalars, such as an epsilon, that operators of any size read, possibly with the same tile."""
    rng, kernels, after = Random(seed), dict[str, tuple[RKernel, ...]](), dict[str, tuple[str, ...]]()
    for i in range(operators):
        reads = [rng.choice(("w", "v")), *rng.sample(list(kernels), min(len(kernels), rng.randint(0, 2)))]
        made = adding(f"t{i}", rng.randint(1, 6), reads, rng.randint(1, 2))
        kernels[made.name], after[made.name] = (kernel(made, rng.choice((1e-6, 3e-6))),), tuple(reads[1:])
    schedule = parse_policy(policy)(OperatorGraph(kernels, after, frozenset("wv")), device(veus))
    assert placed(schedule) == {(n, i): 1 for n, (k,) in kernels.items() for i in range(k.operator.task_count)}


def test_weights_stay_where_they_were_only_if_that_delays_nobody() -> None:
    """Check the second operator that reads ``w`` while a longer one occupies the same two vEUs."""
    kernels = {"a": [sharing("a", "w", 1)], "b": [simple("b", 1, 5e-6)], "c": [sharing("c", "w", 2)]}
    graph = OperatorGraph({n: tuple(k) for n, k in kernels.items()}, {"a": (), "b": ("a",), "c": ("a",)}, frozenset({"w"}))
    assert Wavefront()(graph, device(4)).predicted == pytest.approx(1e-6 + 5e-6 + 2e-6)


def test_spread_with_one_vEU_far_ahead_of_many_others() -> None:
    counts = spread_tasks(np.array([5.0] + [0.0] * 4999), 10_000, 1e-3)
    assert counts[0] == 0 and counts.sum() == 10_000 and set(counts[1:].tolist()) <= {2, 3}


def test_tasks_without_a_time_still_spread() -> None:
    assert spread_tasks(np.zeros(4), 8, 0.0).tolist() == [2, 2, 2, 2]


def test_short_tasks_of_a_staged_device_do_not_pile_up() -> None:
    """Check that short tasks spread over all vEUs if their operands arrive in one transfer, and are predicted so, unless that
    delays the wave."""
    long, short = simple("long", 6, 100e-6, 100e-6), simple("short", 8, 5e-6, 5e-6)
    staged, other = replace(device(8, launch=0.0), staged=True), device(8, launch=0.0)
    for target, most in ((other, 4), (staged, 1)):
        rows = [list[tuple[str, int]]() for _ in range(8)]
        seconds = side_by_side([long, short], {}, target, rows)
        assert max(sum(name == "short" for name, _ in row) for row in rows) == most
        assert seconds == pytest.approx(predict_latency([long, short], {}, target))
    longer = simple("longer", 8, 40e-6, 40e-6)
    rows = [list[tuple[str, int]]() for _ in range(8)]
    assert side_by_side([long, longer], {}, staged, rows) == pytest.approx(predict_latency([long, longer], {}, staged))
    assert max(sum(name == "longer" for name, _ in row) for row in rows) > 1


def test_fill_puts_each_task_on_its_row() -> None:
    rows: list[list[tuple[str, int]]] = [[], [], []]
    append_tasks(rows, "a", [0, 0, 2])
    assert rows == [[("a", 0), ("a", 1)], [], [("a", 2)]]


def test_groups_of_one_stage_overlap() -> None:
    # Two chains, long-short and short-long: in lockstep the levels take 4 + 4, concurrently 5.
    ks = [simple("a", 1, 4e-6), simple("b", 1, 1e-6), simple("a2", 1, 1e-6), simple("b2", 1, 4e-6)]
    after = {"a2": ("a",), "b2": ("b",)}
    assert side_by_side(ks, after, device(2, launch=0.0)) == pytest.approx(5e-6)


def wide(name: str, tasks: int, spread: int, seconds: float) -> RKernel:
    return replace(simple(name, tasks, seconds), spread=spread)


def test_tasks_that_keep_several_vEUs_busy_fill_the_device() -> None:
    """Check that two operators of 14 tasks with 8 vEUs each alternate: 112 of 132 vEUs are busy. Kernels that need less vEU time
    run concurrently."""
    unit = device(132, launch=0.0)
    fast, lean = {n: wide(n, 14, 8, 5e-6) for n in "ab"}, {n: wide(n, 56, 1, 8e-6) for n in "ab"}
    assert fast["a"].operator_time(132) == pytest.approx(5e-6) and fast["a"].busy_time() == pytest.approx(560e-6)
    assert side_by_side([*fast.values()], {}, unit) == pytest.approx(10e-6)
    assert side_by_side([*lean.values()], {}, unit) == pytest.approx(8e-6)
    assert leanest_kernel([fast["a"], lean["a"]]) is lean["a"]
    graph = graph_of({n: [fast[n], lean[n]] for n in "ab"}, {"a": (), "b": ()})
    for policy in some((Greedy(), Wavefront(), IOS())):
        schedule = policy(graph, unit)
        assert schedule.predicted == pytest.approx(8e-6) and {k.spread for k in schedule.kernels} == {1}
        assert placed(schedule) == {(n, i): 1 for n in "ab" for i in range(56)}
    assert placed(Wavefront(lean=0)(graph, unit)) == {(n, i): 1 for n in "ab" for i in range(14)}


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from(sorted(list_policies())))
def test_no_schedule_is_predicted_to_do_more_than_all_vEUs_can(seed: int, operators: int, policy: str) -> None:
    random = Random(seed)
    net = random_net(random, operators)
    kernels = {o.name: [replace(kernel(o, 1e-6), spread=random.choice([1, 4, 8]))] for o in net.operators}
    graph = graph_of(kernels, dict(net.after))
    schedule = parse_policy(policy)(graph, device(13, launch=0.0))
    assert schedule.predicted >= sum(k.busy_time() for k in schedule.kernels) / 13 * (1 - 1e-9)


def test_task_times_depend_on_how_many_vEUs_are_busy() -> None:
    half = side_by_side([simple("a", 2, 1e-6, 3e-6)], {}, device(4, launch=0.0))
    assert half == pytest.approx(2e-6)


def test_auto_proposes_what_every_policy_would_do_best_prediction_first() -> None:
    net = random_net(Random(7), 12)
    graph, unit = net.graph(), device(6)
    proposed = Auto().proposals(graph, unit)
    predicted = [schedule.predicted for _, schedule in some(proposed)]
    every = [p(graph, unit) for p in (Sequential(), Wavefront(), Wavefront(lean=0), IOS())]
    assert predicted == sorted(predicted) and predicted[0] == min(s.predicted for s in every) == Auto()(graph, unit).predicted
    assert all(policy(graph, unit) == schedule for policy, schedule in some(proposed))
    shapes = [replace(schedule, predicted=0.0) for _, schedule in proposed]
    near = [s for s in every if s.predicted <= FAR * predicted[0]]
    assert all(replace(s, predicted=0.0) in shapes for s in some(near))
    assert all(shapes.count(shape) == 1 for shape in some(shapes))


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 9))
def test_auto_searches_no_stages_only_where_none_could_gain(seed: int, operators: int) -> None:
    """Check that the bound that skips the search holds for the result of the search."""
    net, unit = random_net(Random(seed), operators), device(1 + seed % 7)
    others = min(p(net.graph(), unit).predicted for p in (Sequential(), Wavefront(), Wavefront(lean=0)))
    found, auto = IOS()(net.graph(), unit).predicted, Auto()(net.graph(), unit).predicted
    assert auto <= min(others, GAIN * found) * (1 + 1e-9)


def test_auto_proposes_nothing_that_is_far_from_the_best() -> None:
    """Check eight independent operators of one task each: sequentially they are predicted to take eight times as long."""
    names = "abcdefgh"
    graph = graph_of({n: [simple(n, 1, 1e-6)] for n in names}, dict.fromkeys(names, ()))
    proposed = Auto().proposals(graph, device(8, launch=0.0))
    assert proposed and all(str(policy) != "sequential" for policy, _ in some(proposed))
    few = graph_of({n: [simple(n, 1, 1e-6)] for n in "ab"}, dict.fromkeys("ab", ()))
    assert "sequential" in {str(policy) for policy, _ in Auto().proposals(few, device(8, launch=0.0))}


@pytest.mark.parametrize(
    "text",
    [
        "sequential",
        "greedy",
        "wavefront",
        "wavefront{lean=0}",
        "auto",
        "auto{seconds=3}",
        "ios{r=3}",
        "ios{r=3,s=8}",
        "ios{r=2,s=4}",
        "ios{r=3,s=8,seconds=1}",
    ],
)
def test_policies_parse_from_their_spelling(text: str) -> None:
    policy = parse_policy(text)
    assert str(policy) == policy.name == text
    assert parse_policy(str(policy)) == policy


def test_left_out_arguments_take_defaults() -> None:
    assert parse_policy("ios") == IOS()
    assert parse_policy("ios{s=4}") == IOS(3, 4)
    assert parse_policy(" ios { r = 1 , s = 2 } ") == IOS(1, 2)


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("wavefornt", "unknown policy 'wavefornt'", "did you mean wavefront?"),
        ("ios{q=3}", "policy ios has no argument 'q'", "it takes r, s, seconds"),
        ("sequential{r=3}", "policy sequential has no argument 'r'", "it takes no arguments"),
        ("ios{r=x}", "argument r of policy ios must be an integer, got 'x'", ""),
        ("ios{r=0}", "policy ios: r must be at least 1 and s at least 0, got r=0, s=0", ""),
        ("wavefront{lean=2}", "policy wavefront: lean must be 0 or 1, got 2", ""),
        ("ios{r=3", "not a policy: 'ios{r=3'", "write NAME"),
    ],
)
def test_bad_spellings_say_what_is_wrong(text: str, what: str, hint: str) -> None:
    with pytest.raises(BadInput) as error:
        parse_policy(text)
    assert error.value.what == what and hint in error.value.hint


def test_policies_from_plugins_are_found() -> None:
    class Mine(Sequential):
        name = "mine"

    assert parse_policy("mine", extra=[Mine()]).name == "mine"
