"""The zoo against published figures, the ONNX checker, ONNX Runtime, and our own float64 evaluation."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from zoo import ZOO, Entry
from zoo.counts import compute_graph, multiply_accumulates, parameters
from zoo.nasnet import nasnet_cifar
from zoo.sequence import bert_base, lstm_tc, nerf_mlp

from rammer.ir.evaluate import run_graph
from rammer.testing.some import some
from rammer.testing.weights import Array, runner

#: Above about 20 million parameters building and checking takes seconds: those run with `make test-all`.
LARGE = {"resnext29", "bert_base", "resnet50", "inception_v3"}
ENTRIES = [pytest.param(e, id=k, marks=[pytest.mark.large] if k in LARGE else []) for k, e in ZOO.items()]


def published(entry: Entry, model: onnx.ModelProto) -> None:
    """Parameters and MACs are the published ones, to the digits published."""
    count = parameters(model)
    assert (count if entry.places is None else round(count, entry.places)) == entry.parameters
    macs = multiply_accumulates(compute_graph(model)) / 1e9
    if entry.gmacs:
        assert macs == pytest.approx(entry.gmacs, rel=entry.tolerance)


def difference(first: dict[str, Array], second: dict[str, Array]) -> float:
    """Relative L2 distance of the only output."""
    (a,), (b,) = first.values(), second.values()
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("entry", ENTRIES)
def test_model_is_what_was_published_and_depends_on_its_input(entry: Entry, rng: np.random.Generator) -> None:
    model = entry.build(int(rng.integers(1 << 20)))
    onnx.checker.check_model(model, full_check=True)
    assert {i.name: tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in model.graph.input} == entry.inputs
    published(entry, model)
    run = runner(model)
    first, second = run(entry.feeds(1)), run(entry.feeds(2))
    assert all(np.isfinite(a).all() and a.std() > 1e-3 for a in some(first.values()))
    assert difference(first, second) >= 1e-2


def test_weights_depend_on_the_seed_alone() -> None:
    build = ZOO["squeezenet"].build
    one = build(3).SerializeToString()
    assert one == build(3).SerializeToString() != build(4).SerializeToString()


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda s: lstm_tc(s, batch=2, layers=3, hidden=16, steps=7), id="lstm"),
        pytest.param(lambda s: bert_base(s, tokens=9, layers=2, width=24, heads=3, vocabulary=50), id="bert"),
        pytest.param(lambda s: nerf_mlp(s, rows=33), id="nerf"),
        pytest.param(lambda s: nasnet_cifar(s, cells=3, filters=4), id="nasnet"),
    ],
)
def test_tensor_expressions_of_small_forms_agree_with_onnxruntime(model: object, rng: np.random.Generator) -> None:
    assert callable(model)
    made: onnx.ModelProto = model(int(rng.integers(1 << 20)))
    feeds: dict[str, Array] = {}
    for port in made.graph.input:
        shape = tuple(d.dim_value for d in port.type.tensor_type.shape.dim)
        whole = port.type.tensor_type.elem_type == onnx.TensorProto.INT64
        feeds[port.name] = rng.integers(0, 2, shape) if whole else rng.standard_normal(shape, np.float32)
    graph = compute_graph(made)
    found = run_graph(graph, feeds, precise=True)
    want = runner(made)(feeds)
    assert difference(want, {n: np.asarray(found[n]) for n in want}) < 1e-5


def test_lstm_tc_is_a_thousand_equal_cells() -> None:
    graph = compute_graph(ZOO["lstm_tc"].build())
    recurrent = [c for c in graph.computes if c.kind == "contraction" and c.axes[0].extent == 1]
    assert len(recurrent) >= 1000
