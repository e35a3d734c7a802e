"""Fusion of products with operators between them: decided by price, undone if it does not pay, and correct everywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fused_models import ROWS, WIDTH, attention, mlp

from rammer.codegen.c_target import CTarget
from rammer.codegen.dialects import C99
from rammer.compile_options import FUSION
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.fusion.connect import MOST_CONTRACTIONS, connect
from rammer.fusion.group_prices import CostModel, GroupPrices
from rammer.fusion.tile_traffic import least_task_seconds
from rammer.ir.compute import ComputeGraph
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.operator import ROperator
from rammer_testing.host_c import THREADED, HostCase, check
from rammer_testing.nonempty import some
from rammer_testing.small_models import MODELS, SmallModel


def device(local: int = 1 << 20, launch: float = 1e-6) -> VDevice:
    layers = (
        MemoryLayer("memory", "device", 1 << 40, 1e10),
        MemoryLayer("local", "veu", local, 1e11),
        MemoryLayer("register", "thread", 4096, 1e12),
    )
    return VDevice("test", "for tests", 4, layers, 1e10, launch)


def graph_of(rng: np.random.Generator, model: SmallModel) -> ComputeGraph:
    return lower(bind(read_model(model.build(rng)), {}))


def groups(graph: ComputeGraph, where: VDevice, rate: float = 1.0) -> tuple[ROperator, ...]:
    return connect(graph, where, prices=GroupPrices.of(graph, where, CostModel(rate=lambda operator: rate))).operators


def test_layers_in_a_row_become_one_operator(rng: np.random.Generator) -> None:
    (operator,) = groups(graph_of(rng, mlp(3)), device())
    layers = [(e.layer, e.consumer.startswith("m")) for e in operator.connections]
    assert layers.count(("veu", True)) == 2
    assert all(layer == "thread" for layer, product in some(layers) if not product)


@pytest.mark.parametrize(
    ("where", "rate", "why"),
    [
        (device(), 0.02, "kernels that are bad at it"),
        (device(local=1 << 8), 1.0, "memory that no row's interior fits"),
    ],
    ids=["rate", "memory"],
)
def test_the_price_decides(where: VDevice, rate: float, why: str, rng: np.random.Generator) -> None:
    found = groups(graph_of(rng, mlp(3, width=64)), where, rate)
    assert len(found) == 3, why


def test_wide_layers_stay_apart(rng: np.random.Generator) -> None:
    # A task needs whole rows and all weights: with few rows every vEU would read all weights.
    found = groups(graph_of(rng, mlp(2, rows=4, width=256)), replace(device(), veus=64))
    assert len(found) == 2


def test_chains_end(rng: np.random.Generator) -> None:
    found = groups(graph_of(rng, mlp(MOST_CONTRACTIONS + 2)), device())
    products = [sum(c.kind == "contraction" for c in o.computes) for o in found]
    assert products == [MOST_CONTRACTIONS, 2]


def test_a_value_read_elsewhere_ends_the_chain(rng: np.random.Generator) -> None:
    model = SmallModel(
        "kept",
        f"""(float[{ROWS},8] x, float[8,8] w_1, float[8,8] w_2)
        => (float[{ROWS},8] y, float[{ROWS},8] h) {{
        h = MatMul(x, w_1)
        y = MatMul(h, w_2)
    }}""",
    )
    assert len(groups(graph_of(rng, model), device())) == 2


def test_softmax_joins_its_products(rng: np.random.Generator) -> None:
    (operator,) = groups(graph_of(rng, attention()), device())
    assert [c.kind for c in operator.computes if c.reduce] == ["contraction", "reduction", "reduction", "contraction"]
    assert operator.holds_operand
    assert operator.tile == ()


def test_layers_that_stay_on_chip_leave_maps_before_them_apart(rng: np.random.Generator) -> None:
    """Check that a product with a prologue cannot start an on-chip chain; it has one where the chain does not pay."""
    maps, layers = groups(graph_of(rng, attention(before="Relu")), device())
    assert [c.kind for c in maps.computes] == ["map"]
    assert layers.holds_operand
    found = groups(graph_of(rng, attention(rows=256, keys=256, before="Relu")), device(), 0.02)
    assert [len(o.prologue) for o in found] == [1, 0, 0]


def test_decisions_are_logged_once(rng: np.random.Generator) -> None:
    tiles = connect(graph_of(rng, attention(before="Relu")), device())
    assert len({d.subject for d in tiles.decisions}) == len(tiles.decisions)


@pytest.mark.parametrize("fusion", FUSION)
def test_every_edge_has_an_outcome(fusion: str, rng: np.random.Generator) -> None:
    found = set[str]()
    for model in (mlp(3), attention(), *(MODELS[n] for n in ("branches", "softmax") if n in MODELS)):
        for local in (1 << 8, 1 << 20):
            tile = connect(graph_of(rng, model), device(local), fusion=fusion)
            assert tile.outcomes.keys() == {(e.producer, e.consumer) for e in tile.edges}
            for e in tile.edges:
                tried = tile.outcomes[e.producer, e.consumer]
                assert all(t.why for t in some(tried)) and tried[-1].kept == (e.layer != "device")
                found.update(t.why for t in tried)
                failed = "; ".join(f"{t.layer}: {t.why}" for t in tried if not t.kept)
                assert f"edge {e.producer} <{device(local).layer(e.layer).name}> {e.consumer}" in (
                    text := tile.describe(device(local))
                )
                assert not failed or f"{e.consumer}  ({failed})" in text
    assert ("fusion is off" in found) == (fusion == "none")
    assert ("fusion is element-wise only" in found) == (fusion == "elementwise")


def test_rows_after_a_product_join_it_where_that_pays(rng: np.random.Generator) -> None:
    single = groups(graph_of(rng, attention(kept=True)), device())
    assert [sum(bool(c.reduce) for c in o.computes) for o in single] == [3, 1]
    apart = groups(graph_of(rng, attention(rows=256, keys=256, kept=True)), device(), 0.001)
    assert [sum(bool(c.reduce) for c in o.computes) for o in apart] == [1, 2, 1]


@pytest.mark.parametrize(("layer", "spills"), [("thread", False), ("thread", True), ("veu", False)])
def test_a_layer_that_holds_nothing_is_not_used(layer: str, spills: bool, rng: np.random.Generator) -> None:
    """Check that an edge is tried at the next lower layer, and in device memory if that is full too."""
    small = {"thread": ("thread",), "veu": ("thread", "veu")}[layer]
    layers = tuple(replace(m, capacity=1) if m.scope in small else m for m in device().layers)
    tile = connect(graph_of(rng, mlp(2)), replace(device(), layers=layers, spills=spills))
    assert {e.layer for e in tile.edges} == ({"veu"} if layer == "thread" else {"device"})
    assert all([t.layer for t in tried][:2] == ["thread", "veu"] for tried in some(list(tile.outcomes.values())))


def test_a_value_that_others_read_is_refused_at_every_layer(rng: np.random.Generator) -> None:
    text = "(float[64,96] x) => (float[64,96] b, float[64,96] y) { b = Exp(x) y = Neg(b) }"
    tile = connect(graph_of(rng, SmallModel("kept", text)), device())
    assert [t.layer for t in tile.outcomes["b", "y"]] == ["thread", "veu"]


def test_a_task_is_bounded_by_what_it_loads_of_a_table(rng: np.random.Generator) -> None:
    model = SmallModel("rows", "(float[1000,64] x, int32[3] x_rows) => (float[3,64] y) { y = Gather<axis=0>(x, x_rows) }")
    graph, where = graph_of(rng, model), device()
    (operator,) = groups(graph, where)
    moved = 4 * (3 + 2 * 3 * 64)  # indices, rows and results
    assert least_task_seconds(operator.tiled((3, 64)), graph.types, where) == pytest.approx(moved / (1e11 / where.veus))


def test_a_step_that_does_not_pay_does_not_end_the_search(rng: np.random.Generator) -> None:
    """Check a reader of a group whose other reader, earlier in the graph, cannot join it."""
    model = SmallModel(
        "skipped",
        """(float[8,64] x, float[64,64] w_1, int64[3] w_rows) => (float[8,3] g, float[8,64] y) {
        h = MatMul(x, w_1)
        g = Gather<axis=1>(h, w_rows)
        y = Relu(h)
    }""",
    )
    tile = connect(graph_of(rng, model), device())
    assert [t.kept for t in tile.outcomes["h", "y"]][-1]


def test_kernels_that_are_bad_at_it_keep_softmax_apart(rng: np.random.Generator) -> None:
    found = groups(graph_of(rng, attention(rows=256, keys=256)), device(), 0.02)
    assert [o.main.kind for o in found] == ["contraction", "reduction", "contraction"]


def test_scores_that_do_not_fit_stay_apart(rng: np.random.Generator) -> None:
    found = groups(graph_of(rng, attention(rows=64, keys=600)), device(local=1 << 10))
    assert not any(o.holds_operand for o in some(found)), "a row of scores alone takes 2,400 bytes"


def test_parts_are_priced_as_they_would_be_computed(rng: np.random.Generator) -> None:
    """Check that separate row-wise Computes between products are priced as one operator, by the device's kernels."""
    asked = list[int]()

    def kernel(operator: ROperator) -> None:
        asked.append(len(operator.computes))

    connect(graph := graph_of(rng, attention()), device(), prices=GroupPrices.of(graph, device(), CostModel(kernel)))
    assert {8, 4, 1} <= {*asked}


@pytest.mark.parametrize("tile", [(1, 2, 5, 6), (1, 1, 24, 4), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("target", [C99, THREADED], ids=lambda t: t.name)
@pytest.mark.parametrize("softmax", ["Softmax<axis=-1>(a)", "LpNormalization<axis=-1, p=2>(a)"])
def test_the_generic_emitter_computes_attention(
    tile: tuple[int, ...], target: CTarget, softmax: str, rng: np.random.Generator
) -> None:
    graph = graph_of(rng, attention(softmax=softmax))
    (operator,) = groups(graph, device())
    inputs = {n: rng.standard_normal(graph.types[n].shape).astype(np.float32) for n in operator.inputs}
    check(HostCase(replace(operator, tile=tile), graph.types, {}, inputs), target)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [(5, WIDTH), (ROWS, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("target", [C99, THREADED], ids=lambda t: t.name)
def test_the_generic_emitter_computes_chains(tile: tuple[int, ...], target: CTarget, rng: np.random.Generator) -> None:
    graph = graph_of(rng, mlp(3))
    (operator,) = groups(graph, device())
    inputs = {n: rng.standard_normal(graph.types[n].shape).astype(np.float32) for n in operator.inputs}
    check(HostCase(replace(operator, tile=tile), graph.types, {}, inputs), target)


def random_rows(rng: np.random.Generator) -> SmallModel:
    """Return a random graph of maps, reductions and products, in which values have several readers."""
    lines, values, read = list[str](), {"x": "float[8,64]"}, set[str]()
    for n in range(14):
        wide = [t for t, kind in values.items() if kind == values["x"]]
        a, b = str(rng.choice(wide)), str(rng.choice(list(values)))
        kind = rng.choice(["ReduceMax", "ReduceMin", "Add", "Sub", "MatMul"])
        b = "axes" if kind.startswith("Reduce") else "w_1" if kind == "MatMul" else b
        lines.append(f"t{n} = {kind}({a}, {b})")
        values[f"t{n}"] = "float[1,1]" if kind.startswith("Reduce") else values["x"]
        read |= {a, b}
    results = ", ".join(f"{kind} {t}" for t, kind in values.items() if t not in read)
    inputs = "float[8,64] x, float[64,64] w_1"
    return SmallModel("rows", f"({inputs}) => ({results}) <int64[2] axes = {{0, 1}}> {{" + "\n".join(lines) + "}")


def test_every_priced_operator_computes_only_what_it_writes(rng: np.random.Generator) -> None:
    """Check that all Computes of an operator whose kernel is priced lead to its results."""
    unread, priced = list[str](), list[int]()

    def kernel(operator: ROperator) -> None:
        read = {n for c in operator.computes for n in c.reads} | {*operator.outputs}
        unread.extend(c.name for c in operator.computes if c.name not in read)
        priced.append(len(operator.computes))

    for _ in range(40):
        graph = graph_of(rng, random_rows(rng))
        connect(graph, device(), prices=GroupPrices.of(graph, device(), CostModel(kernel)))
    assert max(priced) > 4 and not unread
