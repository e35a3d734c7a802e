"""Stitching: choice of memory-bound operators to fuse, by both evaluators, and unchanged results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from random import Random
from typing import Any

import numpy as np
import pytest
from stitched_graphs import Seconds, device, evaluator, graph_of, in_one_wave, stitched

from rammer.codegen.dialects import C99
from rammer.device.manifest import Binding
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.fusion.connect import connect
from rammer.fusion.stitch import stitch
from rammer.fusion.stitch_latency import Evaluator
from rammer.fusion.tile_search import ranked_tiles
from rammer.ir.operator import ROperator
from rammer.passes.pass_pipeline import Pipeline, default_passes
from rammer_testing.cases import Sampler
from rammer_testing.host_c import THREADED, HostCase, check
from rammer_testing.nets import model_of
from rammer_testing.nonempty import some
from rammer_testing.small_models import SmallModel

ROWS = "float[128,192] x"
#: Models by name, and their number of operators after stitching (and before).
CASES = {
    "residual and norm": (
        SmallModel(
            "residual",
            f"""({ROWS}, float[128,192] r, float[192] w_g, float[192] w_b) => (float[128,192] y, float[128,192] s) {{
            s = Add(x, r)
            y = LayerNormalization<axis=-1>(s, w_g, w_b)
        }}""",
        ),
        1,
        2,
    ),
    "map with two reductions": (
        SmallModel(
            "exponential",
            f"""({ROWS}) => (float[128,1] p, float[128,1] q) <int64[1] along = {{1}}> {{
            e = Exp(x)
            p = ReduceSum(e, along)
            q = ReduceMax(e, along)
        }}""",
        ),
        1,
        3,
    ),
    "two reductions": (
        SmallModel(
            "two",
            f"""({ROWS}) => (float[128] p, float[128] q) <int64[1] along = {{1}}> {{
            p = ReduceSum<keepdims=0>(x, along)
            q = ReduceMax<keepdims=0>(x, along)
        }}""",
        ),
        1,
        2,
    ),
    "statistics of columns": (
        SmallModel(
            "columns",
            """(float[512,64] x) => (float[1,64] mean, float[1,64] var, float[1,64] high, float[1,64] low)
            <int64[1] along = {0}> {
            mean = ReduceMean(x, along)
            d = Sub(x, mean)
            e = Mul(d, d)
            var = ReduceMean(e, along)
            high = ReduceMax(x, along)
            low = ReduceMin(x, along)
        }""",
        ),
        1,
        4,
    ),
    "other rows": (
        SmallModel(
            "apart",
            f"""({ROWS}) => (float[128] p, float[192] q) <int64[1] a = {{1}}, int64[1] b = {{0}}> {{
            p = ReduceSum<keepdims=0>(x, a)
            q = ReduceMax<keepdims=0>(x, b)
        }}""",
        ),
        2,
        2,
    ),
}


def waves(operators: Sequence[ROperator], of: Evaluator) -> float:
    """Return the time of operators of a graph, in any order, under an evaluator."""
    owner = {c.name: o.name for o in operators for c in o.computes}
    after = {o.name: {owner[n] for n in o.inputs if n in owner} for o in operators}
    order, by_name = list(TopologicalSorter(after).static_order()), {o.name: o for o in operators}
    return of.seconds({n: of.kernels(by_name[n]) for n in order}, {n: tuple(after[n]) for n in order})


@pytest.mark.parametrize("name", CASES)
def test_operators_on_the_same_rows_become_one(name: str, rng: np.random.Generator) -> None:
    model, wanted, apart = CASES[name]
    before, after = stitched(graph_of(model, rng), device())
    assert (len(before.operators), len(after.operators)) == (apart, wanted)
    assert {c.name for o in before.operators for c in o.computes} == {c.name for o in after.operators for c in o.computes}


def test_tiles_of_layers_that_are_alike_are_searched_once(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    def searches(layers: int) -> int:
        given = ", ".join(f"{ROWS}{k}, float[128,192] r{k}, float[192] w_g{k}, float[192] w_b{k}" for k in range(layers))
        made = ", ".join(f"float[128,192] y{k}, float[128,192] s{k}" for k in range(layers))
        body = "\n".join(
            f"s{k} = Add(x{k}, r{k})\n y{k} = LayerNormalization<axis=-1>(s{k}, w_g{k}, w_b{k})" for k in range(layers)
        )
        asked = list[str]()

        def counted(operator: ROperator, *others: Any, **named: Any) -> object:
            asked.append(operator.name)
            return ranked_tiles(operator, *others, **named)

        monkeypatch.setattr("rammer.fusion.group_prices.ranked_tiles", counted)
        _, after = stitched(graph_of(SmallModel("layers", f"({given}) => ({made}) {{\n{body}\n}}"), rng), device())
        assert len(after.operators) == layers
        return len(asked)

    assert 0 < searches(1) == searches(5)


@pytest.mark.parametrize("name", [n for n, (_, wanted, apart) in CASES.items() if wanted < apart])
def test_kernels_that_are_slower_for_it_leave_them_apart(name: str, rng: np.random.Generator) -> None:
    """Check that the latency evaluator rejects groups of the delta evaluator; rejected groups are in the log."""
    before, after = stitched(graph_of(CASES[name][0], rng), device(), slow=1e6)
    refused = [d for d in after.decisions if d not in before.decisions]
    assert not any(len(o.outputs) > 1 for o in some(after.operators)), name
    assert any(not d.kept for d in refused if hasattr(d, "kept"))


@pytest.mark.parametrize("seconds", [None, 1e-3, 1.0], ids=["unknown", "faster", "slower"])
def test_plans_are_run_where_the_device_runs_them(seconds: float | None, rng: np.random.Generator) -> None:
    """Check the final choice between ``seconds`` stitched and 0.1 s unfused, whatever is predicted; operators come in order."""
    graph, where = graph_of(CASES["statistics of columns"][0], rng), device()
    before, asked = connect(graph, where), list[int]()

    def together(operators: Sequence[ROperator]) -> float | None:
        made = set[str]()
        for operator in some(operators):
            assert not {n for n in operator.inputs if n in {c.name for c in graph.computes}} - made
            made |= set(operator.outputs)
        asked.append(len(operators))
        return 0.1 if len(operators) == len(before.operators) else seconds

    after = stitch(before, where, evaluator(graph, where, in_one_wave(graph, where), together))
    assert asked[0] == len(before.operators) > min(asked)
    assert (len(after.operators) < len(before.operators)) == (seconds != 1.0)


@pytest.mark.slow
def test_groups_that_do_not_pay_are_undone_one_by_one(seed: int) -> None:
    """Check that undoing one group of a plan saves nothing by the latency evaluator, for any kernel times."""
    random, where, tried = Random(seed), device(), 0
    sampler = Sampler(random, 100_000, ("float32",), ("stitched",))
    while tried < 6:
        case = sampler.next()
        model = model_of(case.kind, case.sizes, case.tags, case.seed)
        graph = lower(Pipeline(default_passes()).run(bind(read_model(model), {}))[0])
        if graph.types[graph.outputs[0]].dtype != "float32":
            continue

        known, salt = in_one_wave(graph, where), random.randrange(1 << 30)

        def seconds(operator: ROperator, known: Seconds = known, salt: int = salt) -> float:
            return known(operator) * Random(f"{salt} {sorted(operator.outputs)}").uniform(0.4, 2.5)

        before, latency = connect(graph, where), evaluator(graph, where, seconds)
        if len({o.anchor.shape for o in before.operators}) > 1:
            continue  # a concurrent longer region may hide the savings of a group
        after = stitch(before, where, latency)
        whole = waves(after.operators, latency)
        for operator in some(after.operators):
            inside = {c.name for c in operator.computes}
            parts = [o for o in before.operators if o.name in inside]
            undone = [*(o for o in after.operators if o is not operator), *parts]
            assert len(parts) == 1 or whole <= waves(undone, latency), str(case)
        tried += len(before.operators) > 1


@pytest.mark.parametrize("doubt", [0.1, 0.4])
def test_what_saves_less_than_predictions_err_by_is_left_apart_unless_it_is_run(doubt: float, rng: np.random.Generator) -> None:
    """Check a group with a predicted saving of a quarter, which a run confirms."""
    graph, where = graph_of(CASES["residual and norm"][0], rng), replace(device(launch=0.0), doubt=doubt)
    before = connect(graph, replace(where, doubt=0.0))

    def seconds(operator: ROperator) -> float:
        return 1.5 if len(operator.outputs) > 1 else 1.0

    def together(operators: Sequence[ROperator]) -> float:
        return sum(map(seconds, operators))

    def found(asked: Any) -> int:
        return len(stitch(before, where, evaluator(graph, where, seconds, asked)).operators)

    assert found(None) == (1 if doubt < 0.25 else 2)
    assert found(together) == 1
    assert found(lambda operators: None) == found(None)  # plans that cannot be run are only predicted


def test_no_group_is_slower_than_its_parts_in_a_run(seed: int) -> None:
    """Check that no group of a plan is slower in a run, for any predicted and measured kernel times."""
    random, where, tried = Random(seed), replace(device(), doubt=0.2), 0
    sampler = Sampler(random, 100_000, ("float32",), ("stitched",))
    while tried < 6:
        case = sampler.next()
        model = model_of(case.kind, case.sizes, case.tags, case.seed)
        graph = lower(Pipeline(default_passes()).run(bind(read_model(model), {}))[0])
        ranked = {o.name: ranked_tiles(o, graph.types, where) for o in connect(graph, where).operators}
        if graph.types[graph.outputs[0]].dtype != "float32" or not all(ranked.values()):
            continue
        salts, known = [random.randrange(1 << 30) for _ in range(2)], in_one_wave(graph, where)

        def seconds(operator: ROperator, salt: int, known: Seconds = known) -> float:
            return known(operator) * Random(f"{salt} {sorted(operator.outputs)}").uniform(0.4, 1.6)

        def run(operators: Sequence[ROperator], salt: int = salts[1]) -> float:
            return sum(seconds(o, salt) for o in operators)

        before = connect(graph, where)
        latency = evaluator(graph, where, lambda o, salt=salts[0]: seconds(o, salt), run)  # type: ignore[misc]
        after = stitch(before, where, latency)
        assert run(after.operators) <= run(before.operators)
        for operator in some(after.operators):
            inside = {c.name for c in operator.computes}
            parts = [o for o in before.operators if o.name in inside]
            assert len(parts) == 1 or run([operator]) <= run(parts), str(case)
        tried += len(before.operators) > 1


def test_no_way_leads_around_a_stitched_operator(rng: np.random.Generator) -> None:
    """Check two readers of one tensor, the second of which also reads a product of the first one's result."""
    model = SmallModel(
        "around",
        """(float[64,64] x, float[64,64] w_a) => (float[64,64] a, float[64,64] y, float[64,64] m) <int64[1] along = {1}> {
        a = Tanh(x)
        m = MatMul(a, w_a)
        s = ReduceMax(m, along)
        y = Mul(x, s)
    }""",
    )
    before, after = stitched(graph_of(model, rng), device())
    assert [sorted(o.outputs) for o in before.operators] == [sorted(o.outputs) for o in after.operators]
    assert len(after.operators) == 3


#: A device whose tasks read their results from where they are written.
REREADS = replace(C99, name="rereads", rereads=True)


@pytest.mark.slow
@pytest.mark.parametrize("target", [C99, THREADED, REREADS], ids=lambda t: t.name)
def test_stitched_operators_are_right_in_every_tile(target: object, seed: int) -> None:
    """Check random graphs and tiles, in the one-threaded and the many-threaded dialect, against float64."""
    random, tried = Random(seed), 0
    sampler = Sampler(random, 8_000, ("float32",), ("stitched",))
    while tried < 4:
        case = sampler.next()
        model = model_of(case.kind, case.sizes, case.tags, case.seed)
        graph = lower(Pipeline(default_passes()).run(bind(read_model(model), {}))[0])
        _, after = stitched(graph, device())
        for operator in (o for o in after.operators if len(o.outputs) > 1 and graph.types[o.name].dtype == "float32"):
            tiles = [tile for _, tile, _ in ranked_tiles(operator, graph.types, device())]
            rng = np.random.default_rng(case.seed)
            values = {n: rng.standard_normal(graph.types[n].shape).astype(np.float32) for n in operator.inputs}
            types = Binding(graph.types, {}).types
            check(HostCase(replace(operator, tile=random.choice(tiles)), types, {}, values), target)  # type: ignore[arg-type]
            tried += 1


@pytest.mark.parametrize("keeps", [False, True])
def test_rows_that_do_not_fit_are_computed_again_unless_the_device_keeps_them(keeps: bool, rng: np.random.Generator) -> None:
    """Check a softmax whose rows exceed a vEU's memory. If ``keeps``, the device's kernels store the rows on chip, as clusters of
    blocks do."""
    graph, where = graph_of(SmallModel("long", "(float[4,500000] x) => (float[4,500000] y) { y = Softmax(x) }"), rng), device()

    def seconds(operator: ROperator) -> float:
        return min(in_one_wave(graph, where)(operator), 1e-9 if keeps else float("inf"))

    before = connect(graph, where)
    (whole,) = stitch(before, where, evaluator(graph, where, seconds)).operators
    assert len(before.operators) > 1
    assert {c.layer for c in whole.connections if c.producer == "y_exp"} == {"veu" if keeps else "thread"}


def test_a_result_that_later_stages_read_has_no_copy_in_scratch_memory(rng: np.random.Generator) -> None:
    """Check that a residual sum that its normalisation reads is written once. Without the copy, 8 rows of it take less scratch
    memory."""
    graph = graph_of(CASES["residual and norm"][0], rng)
    (operator,) = stitched(graph, device())[1].operators
    tiled = operator.tiled((8, 192))
    values = {n: rng.standard_normal(graph.types[n].shape).astype(np.float32) for n in operator.inputs}
    copied, once = (check(HostCase(tiled, graph.types, {}, values), target) for target in (C99, REREADS))
    assert len(operator.outputs) == 2
    assert copied.scratch - once.scratch == 8 * 192 * 4


def test_reductions_over_the_same_elements_share_a_loop(rng: np.random.Generator) -> None:
    """Check that two reductions of one row have as many loops as one of them."""
    graph = graph_of(CASES["two reductions"][0], rng)
    before, after = (tiles.operators for tiles in stitched(graph, device()))
    loops = []
    for operator in (before[0], after[0]):
        values = {n: rng.standard_normal(graph.types[n].shape).astype(np.float32) for n in operator.inputs}
        function = check(HostCase(replace(operator, tile=(8,)), graph.types, {}, values))
        loops.append(function.text.count("for ("))
    assert len(after[0].outputs) == 2
    assert loops[0] == loops[1] > 1


def crossing(random: Random, count: int) -> SmallModel:
    """Return a model of ``count`` operators, each of which reads one of eight inputs. Most of them also read a product of an
    earlier result. The readers of one input are a region, and regions wait for each other."""
    inputs, lines = [f"x{i}" for i in range(8)], list[str]()
    for i in range(count):
        earlier, mine = (random.choice([f"v{k}" for k in range(i)][-12:] or inputs)), random.choice(inputs)
        if random.random() < 1 / 3:
            lines.append(f"v{i} = Tanh({mine})")
        else:
            lines += [f"m{i} = MatMul({earlier}, w_m)", f"s{i} = ReduceMax(m{i}, along)", f"v{i} = Mul({mine}, s{i})"]
    head, results = (", ".join(f"float[64,16] {n}" for n in names) for names in (inputs, [f"v{i}" for i in range(count)]))
    body = "\n            ".join(lines)
    text = f"({head}, float[16,16] w_m) => ({results}) <int64[1] along = {{1}}> {{\n            {body}\n        }}"
    return SmallModel("crossing", text)


@pytest.mark.slow
def test_no_way_leads_around_what_regions_decide_apart(seed: int, rng: np.random.Generator) -> None:
    """Check that stitched operators of different regions do not wait for each other in a cycle."""
    random, joined = Random(seed), 0
    for _ in range(6):
        before, after = stitched(graph_of(crossing(random, 40), rng), device())
        assert {c.name for o in before.operators for c in o.computes} == {c.name for o in after.operators for c in o.computes}
        joined += len(before.operators) - len(after.operators)
    assert joined > 0
