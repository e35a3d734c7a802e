"""The zoo compared with published figures, the ONNX checker, ONNX Runtime, and our own float64 evaluation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from zoo import SMALL, ZOO, Entry, find
from zoo.counts import compute_graph, multiply_accumulates, parameters

import rammer
from rammer.errors import BadInput
from rammer.ir.evaluate import run_graph
from rammer_bench.prepare import relative_error
from rammer_testing.nonempty import some
from rammer_testing.weights import Array, runner

#: Models above about 20 million parameters take seconds to build and check: they run with `make test-all`.
LARGE = {
    *("resnext29", "bert_base", "resnet50", "inception_v3", "alexnet", "randwire", "nasnet_large", "transformer", "dien"),
    *("quartznet", "conformer", "vit_b16", "vit_s32", "swin_t", "convnext_t", "lstm80_512", "restormer", "bsrn"),
}
ENTRIES = [pytest.param(e, id=k, marks=[pytest.mark.large] if k in LARGE else []) for k, e in ZOO.items()]


def published(entry: Entry, model: onnx.ModelProto) -> None:
    """Check parameters and MACs against the published figures, to the published digits."""
    count = parameters(model)
    assert abs((count if entry.places is None else round(count, entry.places)) - entry.parameters) <= entry.spread
    macs = multiply_accumulates(compute_graph(model)) / 1e9
    if entry.gmacs:
        assert macs == pytest.approx(entry.gmacs, rel=entry.tolerance)


def difference(first: dict[str, Array], second: dict[str, Array]) -> float:
    """Return the relative L2 distance of the only output."""
    (a,), (b,) = first.values(), second.values()
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b))


@pytest.mark.slow
@pytest.mark.sampled(1)
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


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("key", ZOO)
def test_tensor_expressions_of_small_forms_agree_with_onnxruntime(key: str, rng: np.random.Generator) -> None:
    entry, seed = find(key + SMALL), int(rng.integers(1 << 20))
    made, feeds = entry.build(seed), entry.feeds(seed)
    graph = compute_graph(made)
    want = runner(made)(feeds)
    found, rounded = (
        {n: np.asarray(values[graph.aliases.get(n, n)]) for n in want}
        for values in (run_graph(graph, feeds, precise=True), run_graph(graph, feeds, precise=False))
    )
    # Random weights make some nets ill-conditioned: float32 alone, also in ONNX Runtime, may be off by 1e-5. The error is
    # measured on the expressions, since a wrong expression is wrong in both precisions.
    noise = difference(rounded, found)
    assert noise < 1e-4 and difference(want, found) < max(1e-5, 4 * noise)


@pytest.mark.slow
@pytest.mark.sampled(1, of="device")
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
@pytest.mark.parametrize("policy", ["sequential", "greedy", "wavefront", "wavefront{lean=0}", "ios{seconds=2}"])
@pytest.mark.parametrize("key", ZOO)
def test_small_forms_are_right_by_every_policy(key: str, policy: str, device: str, rng: np.random.Generator) -> None:
    """Run a sample; `python -m benchmarks matrix --small` runs all policies, including `auto`, with complete stage searches."""
    entry, seed = find(key + SMALL), int(rng.integers(1 << 20))
    made, feeds = entry.build(seed), entry.feeds(seed)
    exe = rammer.compile(made, device=device, policy=policy)
    assert relative_error(exe.run(feeds), runner(made)(feeds)) <= 1e-4
    exe.close()


def test_other_batches_have_other_inputs_and_unknown_models_are_named() -> None:
    entry = find("alexnet" + SMALL).of_batch(3)
    assert entry.inputs == {"image": (3, 3, 67, 67)} and runner(entry.build())(entry.feeds(1))
    with pytest.raises(BadInput, match="unknown model 'alexnt'"):
        find("alexnt")


def test_a_count_that_is_off_is_no_published_one() -> None:
    entry = ZOO["squeezenet"]
    model = entry.build()
    published(entry, model)
    for wrong in (replace(entry, parameters=entry.parameters + 1), replace(entry, gmacs=entry.gmacs * 1.02)):
        with pytest.raises(AssertionError):
            published(wrong, model)


@pytest.mark.slow
def test_lstm_tc_is_a_thousand_equal_cells() -> None:
    graph = compute_graph(ZOO["lstm_tc"].build())
    recurrent = [c for c in graph.computes if c.kind == "contraction" and c.axes[0].extent == 1]
    assert len(recurrent) >= 1000
