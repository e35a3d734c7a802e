"""The latency evaluator of stitching: waits of groups in a region, and prices of concurrent operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.fusion.connect import connect
from rammer.fusion.fusion_rules import apply_rule, join_operators, list_siblings
from rammer.fusion.group_prices import CostModel, GroupPrices
from rammer.fusion.stitch import stitch
from rammer.fusion.stitch_latency import Evaluator, RegionTimes
from rammer.fusion.tile_graph import TileGraph
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.operator import Resources, RKernel, ROperator, Written
from rammer.passes.pass_pipeline import Pipeline, default_passes
from rammer.schedule.stage_clock import in_waves
from rammer_testing.nonempty import some
from rammer_testing.small_models import SmallModel

LAYERS = (MemoryLayer("memory", "device", 1 << 40, 1e10), MemoryLayer("local", "veu", 1 << 20, 1e11))
WHERE = VDevice("test", "for tests", 4, LAYERS, 1e10, 1e-6)
TWO = SmallModel(
    "two",
    """(float[128,192] x) => (float[128] p, float[128] q) <int64[1] along = {1}> {
    p = ReduceSum<keepdims=0>(x, along)
    q = ReduceMax<keepdims=0>(x, along)
}""",
)


def tiles_of(model: SmallModel, rng: np.random.Generator) -> TileGraph:
    return connect(lower(Pipeline(default_passes()).run(bind(read_model(model.build(rng)), {}))[0]), WHERE)


def priced(tasks: int, seconds: Mapping[int, float], where: VDevice = WHERE) -> Evaluator:
    """Return an evaluator of operators with ``tasks`` tasks. Each task takes ``seconds`` by the operator's number of results."""

    def kernels(operator: ROperator) -> tuple[RKernel, ...]:
        tiled, task = operator.tiled((-(-operator.anchor.shape[0] // tasks),)), seconds[len(operator.outputs)]
        return (RKernel(tiled, lambda: Written("", Resources()), task, task),)

    return Evaluator(kernels, lambda found, after: in_waves(found, after, where))


@pytest.mark.parametrize(("start", "merged"), [(0.0, True), (0.5e-3, True), (1.5e-3, False), (9e-3, False)])
def test_what_starts_together_shares_its_start(start: float, merged: bool, rng: np.random.Generator) -> None:
    """Check two concurrent reductions of eight tasks each on four vEUs. Unfused they take 4 ms and fused 3 ms, less the start-up
    time that they share. They never take less than the longer one alone, 2 ms."""
    where = replace(WHERE, start=start)
    wave = priced(8, {1: 1e-3, 2: 1.5e-3}, where)
    after = stitch(tiles_of(TWO, rng), where, wave)
    assert len(after.operators) == (1 if merged else 2)
    alone = {o.name: wave.kernels(o) for o in some(tiles_of(TWO, rng).operators)}
    assert in_waves(alone, {}, where) == pytest.approx(where.launch + max(4e-3 - where.start, 2e-3))


@pytest.mark.parametrize("tasks", [1, 2, 4, 8])
def test_parts_that_run_side_by_side_are_priced_so(tasks: int, rng: np.random.Generator) -> None:
    """Check two reductions of one tensor, with ``tasks`` tasks each, on four vEUs. Fused they save a quarter of their sequential
    time, and nothing if both run concurrently."""
    before = tiles_of(TWO, rng)
    after = stitch(before, WHERE, priced(tasks, {1: 1e-3, 2: 1.5e-3}))
    assert (len(before.operators), len(after.operators)) == (2, 1 if tasks >= 4 else 2)


@pytest.mark.parametrize("seed_of", range(4))
def test_a_group_waits_for_what_any_of_it_waits_for(seed_of: int, seed: int, rng: np.random.Generator) -> None:
    """Check that a group waits for the producers of all its members, also through operators outside the region."""
    random, count = Random(seed + seed_of), 12
    lines = "\n".join(
        f"v{i} = {'Tanh' if i % 2 else 'Exp'}({f'm{i - 1}' if i else 'x'})\n m{i} = MatMul(v{i}, w_m)" for i in range(count)
    )
    names = ", ".join(f"float[16,16] v{i}" for i in range(count))
    made = tiles_of(SmallModel("chain", f"(float[16,16] x, float[16,16] w_m) => ({names}) {{\n{lines}\n}}"), rng).operators
    after = [{i + 1} for i in range(len(made) - 1)] + [set[int]()]
    region = frozenset(random.sample(range(len(made)), 6))
    asked = list[Mapping[str, tuple[str, ...]]]()

    def seconds(found: Mapping[str, tuple[RKernel, ...]], waits: Mapping[str, tuple[str, ...]]) -> float:
        asked.append(waits)
        return float(len(found))

    def kernels(operator: ROperator) -> tuple[RKernel, ...]:
        return (RKernel(operator.tiled(operator.anchor.shape), lambda: Written("", Resources())),)

    times = RegionTimes(Evaluator(kernels, seconds), lambda g: made[max(g)], after, lambda o: o)
    assert times.predicted((), region) == len(region)
    order = sorted(region)
    assert asked[-1] == {
        made[j].name: (made[i].name,) if i is not None else () for i, j in zip([None, *order], order, strict=False)
    }
    pair = frozenset(order[2:4])  # neighbours of the chain as one
    assert times.predicted([pair], region) == len(region) - 1
    assert asked[-1][made[order[3]].name] == (made[order[1]].name,)
    assert asked[-1][made[order[4]].name] == (made[order[3]].name,)
    assert times.predicted([pair], region) == len(region) - 1
    assert len(asked) == 2  # repeated questions are answered from the cache


def test_what_has_no_kernel_takes_for_ever(rng: np.random.Generator) -> None:
    made = tiles_of(TWO, rng).operators
    none = Evaluator(lambda operator: (), lambda found, after: 0.0)
    times = RegionTimes(none, lambda g: made[min(g)] if len(g) == 1 else None, [set(), set()], lambda o: o)
    assert times.predicted((), frozenset({0, 1})) == times.run((), frozenset({0, 1})) == none.alone(made[0]) == float("inf")


@pytest.mark.parametrize(("together", "count"), [(3.9, 2), (4.1, 4)])
def test_proposals_that_pay_alone_must_pay_together(together: float, count: int, rng: np.random.Generator) -> None:
    """Check two pairs of readers. A pair takes 1 s as one operator and 2 s as two; both pairs take ``together`` seconds joined,
    and 4 s otherwise."""
    text = "(float[8] x_0, float[8] x_1) => (float[8] a, float[8] b, float[8] c, float[8] d) {"
    tile = tiles_of(SmallModel("pairs", f"{text} a = Exp(x_0) b = Neg(x_0) c = Exp(x_1) d = Neg(x_1) }}"), rng)

    class Pairs:
        name = "pairs"

        def __call__(self, tile: TileGraph, device: VDevice) -> list[ROperator]:
            return [join for _, readers in list_siblings(tile) if (join := join_operators(tile, readers)) is not None]

    def seconds(found: Mapping[str, tuple[RKernel, ...]], after: Mapping[str, tuple[str, ...]]) -> float:
        return together if [len(k.operator.outputs) for (k,) in found.values()] == [2, 2] else float(len(found))

    model = CostModel(lambda operator: RKernel(operator, lambda: Written("", Resources()), 1.0, 1.0))
    latency = Evaluator(lambda operator: (), seconds)
    found = apply_rule(Pairs(), tile, WHERE, GroupPrices.of(tile.graph, WHERE, model), latency)
    assert len(found.operators) == count
