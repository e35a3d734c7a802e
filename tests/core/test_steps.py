"""Products of a whole sequence are split into steps only if that shortens the critical path through stacked layers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.fusion.connect import connect
from rammer.fusion.group_prices import CostModel, GroupPrices
from rammer.ir.compute import ComputeGraph, verify_compute_graph
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.evaluate import run_graph
from rammer.passes.compute.slice_time_steps import slice_steps
from rammer.passes.pass_pipeline import Pipeline, default_passes
from rammer_testing.nonempty import some


def recurrent(
    rng: np.random.Generator,
    op: str,
    layers: int,
    steps: int = 4,
    batch: int = 1,
    hidden: int = 8,
    direction: str = "forward",
    first: int | None = None,
) -> ComputeGraph:
    """Return stacked recurrent layers with all their outputs, lowered, with random weights. The ``first`` layer's input may be
    wider."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    nodes, weights, x = [], [], "x"
    directions, first = 2 if direction == "bidirectional" else 1, first or hidden
    weights.append(numpy_helper.from_array(np.array([0, 0, -1]), "shape"))
    for n in range(layers):
        width = first if n == 0 else hidden * directions
        shapes = {
            "w": (directions, gates * hidden, width),
            "r": (directions, gates * hidden, hidden),
            "b": (directions, 2 * gates * hidden),
        }
        weights += [numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), f"{k}{n}") for k, s in shapes.items()]
        nodes.append(helper.make_node(op, [x, f"w{n}", f"r{n}", f"b{n}"], [f"y{n}"], hidden_size=hidden, direction=direction))
        nodes.append(helper.make_node("Transpose", [f"y{n}"], [f"t{n}"], perm=[0, 2, 1, 3]))
        nodes.append(helper.make_node("Reshape", [f"t{n}", "shape"], [f"s{n}"]))
        x = f"s{n}"
    ports = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
        for n, s in (("x", [steps, batch, first]), (x, [steps, batch, hidden * directions]))
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", ports[:1], ports[1:], weights), opset_imports=[helper.make_opsetid("", 21)]
    )
    onnx.checker.check_model(model)
    return lower(Pipeline(default_passes()).run(bind(read_model(model), {}))[0])


def device(veus: int, launch: float = 1e-6, bandwidth: float = 1e12) -> VDevice:
    layers = (MemoryLayer("far", "device", 1 << 33, bandwidth), MemoryLayer("near", "veu", 1 << 20, 1e13))
    return VDevice("d", "test", veus, layers, 1e11, launch)


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("batch", [1, 3])
def test_slices_compute_the_same(op: str, batch: int, rng: np.random.Generator) -> None:
    whole = recurrent(rng, op, layers=3, batch=batch)
    sliced = slice_steps(whole, device(128))
    assert sliced is not whole
    verify_compute_graph(sliced)
    x = {whole.inputs[0]: rng.standard_normal((4, batch, 8))}
    (name,) = whole.outputs
    np.testing.assert_allclose(run_graph(sliced, x)[name], run_graph(whole, x)[name], rtol=1e-10, atol=1e-12)


def test_stacked_layers_overlap_once_sliced(rng: np.random.Generator) -> None:
    def depth(graph: ComputeGraph) -> int:
        depths: dict[str, int] = {}
        for c in graph.computes:
            depths[c.name] = 1 + max((depths.get(r, 0) for r in c.reads), default=0)
        return max(depths.values())

    whole = recurrent(rng, "LSTM", layers=6, steps=8)
    assert depth(slice_steps(whole, device(128))) < depth(whole) / 2


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_one_layer_keeps_its_product(direction: str, rng: np.random.Generator) -> None:
    whole = recurrent(rng, "LSTM", layers=1, direction=direction)
    assert slice_steps(whole, device(128)) is whole


def test_a_device_that_one_step_fills_keeps_whole_products(rng: np.random.Generator) -> None:
    whole = recurrent(rng, "LSTM", layers=3, hidden=64)  # its weights would be read once a step
    assert slice_steps(whole, device(1, launch=0.0, bandwidth=1e9)) is whole


@pytest.mark.slow
def test_a_wide_first_layer_keeps_its_product(rng: np.random.Generator) -> None:
    """Check that its product stays whole. Its input is available as a whole, so splitting gives no earlier overlap. Every step
    would read 512 wide rows of weights."""
    whole = recurrent(rng, "LSTM", layers=4, steps=16, hidden=64, first=4096)
    sliced = slice_steps(whole, device(128, bandwidth=1e11))
    products = [c for c in sliced.computes if any(a.extent == 4096 for a in c.reduce)]
    assert sliced is not whole and [c.axes[0].extent for c in products] == [16]
    narrow = slice_steps(recurrent(rng, "LSTM", layers=4, steps=16, hidden=64), device(128))
    assert not any(c.kind == "contraction" and c.axes[0].extent == 16 for c in some(narrow.computes))
    x = {whole.inputs[0]: rng.standard_normal((16, 1, 4096)) / 64}
    (name,) = whole.outputs
    np.testing.assert_allclose(run_graph(sliced, x)[name], run_graph(whole, x)[name], rtol=1e-10, atol=1e-12)


def test_an_lstm_cell_is_one_operator_with_two_results(rng: np.random.Generator) -> None:
    graph = slice_steps(recurrent(rng, "LSTM", layers=2), device(128))
    tile = connect(graph, device(128))
    cells = [o for o in tile.operators if sum(c.kind == "contraction" for c in o.computes) == 2]
    assert len(cells) == 8
    assert {len(o.outputs) for o in cells} == {1, 2}  # the last step's cell state has no reader
    assert not any(c.kind == "contraction" for o in some(tile.operators) if o not in cells for c in o.computes)


def test_rows_that_share_weights_many_times_stay_apart(rng: np.random.Generator) -> None:
    """Check that a product of 16 rows, which is no longer bound by its weights, stays with its element-wise maps if kernels are
    slow at several products."""
    graph = slice_steps(recurrent(rng, "LSTM", layers=2, batch=16), device(128))
    prices = GroupPrices.of(graph, device(128), CostModel(rate=lambda operator: 1e-4))
    found = connect(graph, device(128), prices=prices).operators
    assert all(sum(c.kind == "contraction" for c in o.computes) <= 1 for o in some(found))
