"""Storage orders of constants: values stay, whichever order is faster for each operator."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from cell_forms import WRITTEN, CellForm, cell_form
from sibling_graphs import sibling_model

from rammer.device.manifest import Binding
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.fusion.connect import connect
from rammer.fusion.tile_graph import TileGraph
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.operator import ROperator
from rammer.passes.compute.simplify import simplify_graph
from rammer.passes.pass_pipeline import Pipeline, default_passes
from rammer.plan.constant_layout import order_constants
from rammer.plan.storage import StoragePlan, assign_storage, view_sources
from rammer_testing.nonempty import some

Array = np.ndarray[Any, np.dtype[Any]]
LAYERS = (MemoryLayer("ram", "device", 0, 1e10, 64), MemoryLayer("cache", "veu", 1 << 18, 1e11))
DEVICE = VDevice("test", "for tests", 4, LAYERS, 1e10, 1e-6)


def planned(proto: onnx.ModelProto) -> tuple[StoragePlan, TileGraph, Binding]:
    graph, _ = Pipeline(default_passes()).run(bind(read_model(proto), {}))
    plan = assign_storage(simplify_graph(lower(graph)))
    tile = connect(plan.graph, DEVICE, view_sources(plan.graph, plan.storages))
    return plan, tile, Binding(plan.graph.types, plan.storages, frozenset(plan.graph.constants))


@pytest.mark.parametrize("written", ["random", *WRITTEN])
def test_results_stay_whatever_is_said_to_be_faster(written: str, seed: int, rng: np.random.Generator) -> None:
    form = CellForm(written, 2, int(rng.integers(1, 9)), int(rng.integers(1, 9)), turned=bool(rng.integers(2)))
    proto = sibling_model(seed) if written == "random" else cell_form(rng, form)[0]
    plan, tile, binding = planned(proto)
    draw, said = Random(seed), dict[str, float]()

    def seconds(operator: ROperator, asked: Binding) -> float:
        for name in some(operator.inputs):
            assert asked.storages[name].shape == asked.types[name].shape
        return said.setdefault(str(operator.computes), draw.random())

    ordered, tiles = order_constants(plan, tile, binding, seconds)
    assert [o.name for o in tiles.operators] == [o.name for o in tile.operators] and tiles.edges == tile.edges
    assert {n for o in tiles.operators for n in o.inputs} <= ordered.storages.keys()
    assert {s.buffer for s in ordered.storages.values()} <= ordered.buffers.keys()
    known: dict[str, Array] = {n: rng.standard_normal(t.shape) for n, t in plan.graph.types.items()}
    for mine, theirs in some(zip(ordered.graph.computes, plan.graph.computes, strict=True)):
        have, want = (
            evaluate_compute(c, known | g.constants, precise=True) for c, g in ((mine, ordered.graph), (theirs, plan.graph))
        )
        np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("depth_last", [False, True])
def test_the_order_that_is_faster_is_taken_of_either(depth_last: bool, rng: np.random.Generator) -> None:
    """Check that both forms of a product get the order that is fastest for its operator. Other constants stay unchanged."""
    made = []
    for turned in (False, True):
        plan, tile, binding = planned(cell_form(rng, CellForm("gates", 1, 3, 5, turned=turned))[0])

        def seconds(operator: ROperator, asked: Binding) -> float:
            last = [ld.indices[-1] for c in operator.computes if c.reduce for ld in c.loads if len(ld.indices) == 2]
            return 1.0 + sum((str(i) in {a.name for c in operator.computes for a in c.reduce}) != depth_last for i in last)

        ordered, _ = order_constants(plan, tile, binding, seconds)
        made.append(sorted(v.shape for v in ordered.graph.constants.values()))
        same, unmoved = order_constants(plan, tile, binding, lambda *_: 1.0)
        assert same is plan and unmoved is tile
    assert made[0] == made[1] and {(3, 5) if depth_last else (5, 3)} < {*made[0]}


@pytest.mark.parametrize("turned", [False, True])
def test_an_operator_to_which_order_is_nothing_is_asked_about_once_for_either(turned: bool, rng: np.random.Generator) -> None:
    """Check one timing per operator, however many constants it reads. It uses the unchanged binding, so its cached result serves
    the compilation."""
    plan, tile, binding = planned(cell_form(rng, CellForm("gates", 2, 4, 6, turned=turned))[0])
    asked = dict[str, list[bool]]()

    def seconds(operator: ROperator, given: Binding) -> float:
        asked.setdefault(operator.name, []).append(given is binding)
        return 1.0

    order_constants(plan, tile, binding, seconds)
    read = {o.name: len(binding.constants & {*o.inputs}) for o in tile.operators if o.name in asked}
    assert max(read.values()) > 2
    assert all(sorted(found) == [False, True] for found in some(asked.values()))
