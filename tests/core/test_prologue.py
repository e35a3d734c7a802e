"""Maps before a contraction: fused by price, padded after the maps, and correct on every device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fused_models import block

from rammer.codegen.c_target import CTarget
from rammer.codegen.dialects import C99
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.fusion.connect import connect
from rammer.fusion.group_prices import CostModel, GroupPrices
from rammer.fusion.tile_search import ranked_tiles
from rammer.fusion.tile_traffic import task_cost
from rammer.ir.compute import ComputeGraph
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.operator import Resources, RKernel, ROperator, Written
from rammer_testing.host_c import THREADED, HostCase, check
from rammer_testing.nonempty import some
from rammer_testing.small_models import SmallModel

LAYERS = (
    MemoryLayer("memory", "device", 1 << 40, 1e10),
    MemoryLayer("local", "veu", 1 << 20, 1e11),
    MemoryLayer("register", "thread", 4096, 1e12),
)
DEVICE = VDevice("test", "for tests", 4, LAYERS, 1e10, 1e-6)


def graph_of(rng: np.random.Generator, model: SmallModel) -> ComputeGraph:
    return lower(bind(read_model(model.build(rng)), {}))


def groups(graph: ComputeGraph, rate: float = 1.0, where: VDevice = DEVICE) -> tuple[ROperator, ...]:
    def kernel(operator: ROperator) -> RKernel | None:
        """Return the core's predicted kernel, slower by the rate if it computes maps first. None holds results on chip."""
        ranked = ranked_tiles(operator, graph.types, where)
        if not ranked or operator.holds_operand:
            return None
        seconds, tile, _ = ranked[0]
        tiled, share = operator.tiled(tile), rate if operator.prologue else 1.0
        task = (seconds - where.launch) / share / -(-tiled.task_count // where.veus)
        return RKernel(tiled, lambda: Written("", Resources()), task, task)

    return connect(graph, where, prices=GroupPrices.of(graph, where, CostModel(kernel))).operators


def contraction_of(found: tuple[ROperator, ...]) -> ROperator:
    return next(o for o in found if o.main.kind == "contraction")


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_contraction_takes_the_maps_before_it(kernel: int, rng: np.random.Generator) -> None:
    first, second = groups(graph_of(rng, block(kernel)))
    assert [c.kind for c in first.prologue] == ["map"] * 3
    assert all(e.layer == "thread" for e in some(first.connections))
    assert second.prologue == (), "the maps between are the first one's epilogue"


def test_the_price_decides(rng: np.random.Generator) -> None:
    """Check kernels that are slow with a prologue, and recomputation where tiles share inputs."""
    assert contraction_of(groups(graph_of(rng, block(3)), 0.01)).prologue == ()
    free = replace(DEVICE, launch=0.0, flops=1e6)
    assert contraction_of(groups(graph_of(rng, block(3)), where=free)).prologue == ()


def test_every_task_computes_what_it_reads(rng: np.random.Generator) -> None:
    graph = graph_of(rng, block(1))
    operator = groups(graph)[0]
    work = [task_cost(replace(operator, tile=tile), graph.types, DEVICE).flops for tile in ((1, 8, 7, 5), (1, 4, 7, 5))]
    bare = replace(operator, computes=operator.computes[3:], connections=())
    own = [task_cost(replace(bare, tile=tile), graph.types, DEVICE).flops for tile in ((1, 8, 7, 5), (1, 4, 7, 5))]
    maps = [a - b for a, b in zip(work, own, strict=True)]
    assert maps[0] == maps[1] == 3 * 6 * 35, "each of the two tasks of 4 rows computes all of its columns"
    assert own[0] == 2 * own[1]


@pytest.mark.parametrize(("more", "out"), [("z = Exp(r)", ", float[1,6,7,5] z"), ("z = Identity(r)", ", float[1,6,7,5] z")])
def test_maps_with_other_readers_stay(more: str, out: str, rng: np.random.Generator) -> None:
    assert contraction_of(groups(graph_of(rng, block(1, more, out)))).prologue == ()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("tile", [(1, 3, 2, 5), (1, 8, 7, 5), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("target", [C99, THREADED], ids=lambda t: t.name)
def test_the_generic_emitter_pads_after_the_maps(
    kernel: int, tile: tuple[int, ...], target: CTarget, rng: np.random.Generator
) -> None:
    graph = graph_of(rng, block(kernel))
    operator = groups(graph)[0]
    inputs = {n: rng.standard_normal(graph.types[n].shape).astype(np.float32) for n in operator.inputs}
    inputs |= {n: np.asarray(v) for n, v in graph.constants.items() if n in inputs}
    check(HostCase(replace(operator, tile=tile), graph.types, {}, inputs), target)


def fused(graph: ComputeGraph, model: CostModel) -> list[tuple[int, str]]:
    """Return the number of Computes and the family of each operator. A family ``matrix`` computes bare products ten times as
    fast as the other kernels."""

    def kernel(operator: ROperator) -> RKernel | None:
        ranked = ranked_tiles(operator, graph.types, DEVICE)
        bare = [c.kind for c in operator.computes] == ["contraction"]
        tiled = replace(operator.tiled(ranked[0][1]), family="matrix" if bare else "")
        task = (ranked[0][0] - DEVICE.launch) * (1 if bare else 10) / -(-tiled.task_count // DEVICE.veus)
        return RKernel(tiled, lambda: Written("", Resources()), task, task)

    prices = GroupPrices.of(graph, DEVICE, replace(model, kernel=kernel))
    found = connect(graph, DEVICE, prices=prices).operators
    return [(len(o.computes), k.operator.family) for o in found if (k := kernel(o)) is not None]


def test_fusion_asks_which_forms_a_family_has(rng: np.random.Generator) -> None:
    """Check that a product keeps its fast family if that does not take the maps, and that no form without a family is tried."""
    size = 256
    model = SmallModel(
        "biased",
        f"(float[{size},{size}] x, float[{size},{size}] w_a) => (float[{size},{size}] y) {{ p = MatMul(x, w_a) y = Relu(p) }}",
    )
    graph = graph_of(rng, model)
    assert fused(graph, CostModel(bare=frozenset({"matrix"}))) == [(1, "matrix"), (1, "")]
    assert fused(graph, CostModel()) == [(2, "")], "the traffic model prices what all families declare"
    assert fused(graph, CostModel(forms=frozenset())) == [(1, "matrix"), (1, "")]
    tile = connect(graph, DEVICE, prices=GroupPrices.of(graph, DEVICE, CostModel(forms=frozenset())))
    assert "no kernel family computes trailing maps" in {t.why for trials in tile.outcomes.values() for t in trials}
