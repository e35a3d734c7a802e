"""Classical models (``ai.onnx.ml``): forests on the device, strings and maps on the host, and unsupported models."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper

import rammer
from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.contrib import FUNCTIONS
from rammer.frontend.lower.graph_lowering import can_lower
from rammer.frontend.read.reader import read_model
from rammer_testing.nonempty import some
from rammer_testing.operators import DESCRIBED, drawn
from rammer_testing.operators.oracles import onnxruntime, ours

ML = "ai.onnx.ml"


def forest(trees: int, depth: int, features: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return the nodes of full trees, with one weight per leaf."""
    inner, count = 2**depth - 1, 2 ** (depth + 1) - 1
    below = [2 * np.arange(inner) + side for side in (1, 2)]
    ends = [np.concatenate([b, np.zeros(count - inner, np.int64)]) for b in below]
    modes = ["BRANCH_LEQ"] * inner + ["LEAF"] * (count - inner)
    nodes = {
        "nodes_treeids": np.repeat(np.arange(trees), count).tolist(),
        "nodes_nodeids": np.tile(np.arange(count), trees).tolist(),
        "nodes_featureids": rng.integers(0, features, trees * count).tolist(),
        "nodes_values": rng.normal(size=trees * count).tolist(),
        "nodes_modes": modes * trees,
        "nodes_truenodeids": np.tile(ends[0], trees).tolist(),
        "nodes_falsenodeids": np.tile(ends[1], trees).tolist(),
    }
    leaves = {"treeids": np.repeat(np.arange(trees), count - inner), "nodeids": np.tile(np.arange(inner, count), trees)}
    return {"nodes": nodes, "leaves": {n: a.tolist() for n, a in leaves.items()}}


def model_of(op: str, outputs: dict[str, int], features: int, **attributes: Any) -> ModelProto:
    """Make a model of one operator over rows of features."""
    node = helper.make_node(op, ["x"], list(outputs), "node", domain=ML, **attributes)
    ports = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", features])]
    results = [helper.make_tensor_value_info(n, kind, None) for n, kind in outputs.items()]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(ML, 3)]
    return helper.make_model(helper.make_graph([node], "g", ports, results), opset_imports=imports, ir_version=8)


def regressor(trees: int, depth: int, features: int, rng: np.random.Generator) -> ModelProto:
    """Make a forest with one target."""
    made = forest(trees, depth, features, rng)
    leaves = {f"target_{n}": a for n, a in made["leaves"].items()}
    count = len(leaves["target_nodeids"])
    leaves |= {"target_ids": [0] * count, "target_weights": rng.normal(size=count).tolist()}
    return model_of("TreeEnsembleRegressor", {"y": TensorProto.FLOAT}, features, n_targets=1, **made["nodes"], **leaves)


def classifier(words: list[str], rng: np.random.Generator, zipped: bool = False) -> ModelProto:
    """Make a forest that distinguishes three named classes."""
    made = forest(4, 3, 5, rng)
    leaves = {f"class_{n}": np.repeat(a, 3).tolist() for n, a in made["leaves"].items()}
    count = len(leaves["class_nodeids"])
    leaves |= {"class_ids": [0, 1, 2] * (count // 3), "class_weights": rng.uniform(size=count).tolist()}
    outputs = {"label": TensorProto.STRING, "scores": TensorProto.FLOAT}
    model = model_of("TreeEnsembleClassifier", outputs, 5, classlabels_strings=words, **made["nodes"], **leaves)
    if zipped:
        model.graph.node.append(helper.make_node("ZipMap", ["scores"], ["maps"], domain=ML, classlabels_strings=words))
        inner = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
        model.graph.output[1].CopyFrom(helper.make_value_info("maps", helper.make_sequence_type_proto(inner)))
    return model


def said(model: ModelProto, x: np.ndarray) -> list[Any]:
    """Return ONNX Runtime's results."""
    return list(ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x}))


def test_every_function_is_searched_against_onnx_runtime() -> None:
    names = {op for domain, op in FUNCTIONS if domain == ML}
    assert len(names) > 10
    assert names == {op.rpartition(".")[2] for op in DESCRIBED if op.startswith(ML)}


@pytest.mark.parametrize("op", sorted(op for op in DESCRIBED if op.startswith(ML)))
def test_no_operator_of_a_drawn_case_runs_on_the_host(op: str, seed: int) -> None:
    judged = 0
    for number in range(8):
        case = drawn(op, seed, number)
        mine = ours(case)
        # Loop bodies run on the device.
        assert mine.values is not None and not {*mine.host} - {"Loop"}, f"{case}: {mine.why} {mine.host}"
        judged += onnxruntime(case).values is not None
    assert judged >= 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("trees", "depth"), [(1, 1), (5, 3), (2, 14)])
def test_forests_padded_and_linked(rows: int, trees: int, depth: int, rng: np.random.Generator) -> None:
    """Check that deep trees are not padded to one depth and that both forms have static result shapes."""
    model = regressor(trees, depth, 4, rng)
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    graph = bind(read_model(model), {"x": x.shape})
    assert [n.op for n in some(graph.nodes) if can_lower(graph, n)] == []
    assert next(n for n in graph.nodes if n.bare == "Walk").attributes["padded"] == (depth < 14)
    have = rammer.compile(model, device="toy").run({"x": x})["y"]
    np.testing.assert_allclose(have, said(model, x)[0], rtol=1e-4, atol=1e-5)


def test_labels_that_are_words_are_made_on_the_host_of_places_from_the_device(rng: np.random.Generator) -> None:
    words = ["no", "perhaps", "yes"]
    model, x = classifier(words, rng), rng.normal(size=(6, 5)).astype(np.float32)
    have, want = rammer.compile(model, device="toy").run({"x": x}), said(model, x)
    assert have["label"].tolist() == want[0].tolist()
    np.testing.assert_allclose(have["scores"], want[1], rtol=1e-4)


def test_maps_of_scores(rng: np.random.Generator) -> None:
    words = ["no", "perhaps", "yes"]
    model, x = classifier(words, rng, zipped=True), rng.normal(size=(4, 5)).astype(np.float32)
    have, want = rammer.compile(model, device="toy").run({"x": x})["maps"], said(model, x)[1]
    assert len(want) == 4 and [list(row) for row in have] == [words] * 4
    for mine, theirs in zip(have, want, strict=True):
        np.testing.assert_allclose(list(mine.values()), list(theirs.values()), rtol=1e-4)


def test_a_machine_without_numbers_is_declined() -> None:
    model = model_of("SVMClassifier", {"y": TensorProto.INT64, "z": TensorProto.FLOAT}, 2, classlabels_ints=[0, 1])
    with pytest.raises(BadInput, match="SVMClassifier: 0 coefficients and 0 rho for 2 classes of 2 features") as caught:
        bind(read_model(model), {"x": (1, 2)})
    assert "node" in caught.value.where


def test_probabilities_of_classes_on_a_device(rng: np.random.Generator) -> None:
    """Check rows of one batch with different numbers of sweeps, and string labels."""
    words, counts = ["no", "perhaps", "yes", "never"], [3, 1, 4, 2]
    numbers = {"rho": 6, "prob_b": 6, "support_vectors": 50, "coefficients": 30}
    attributes = {n: rng.normal(size=count).tolist() for n, count in numbers.items()}
    attributes |= {"prob_a": rng.uniform(-9, -1, 6).tolist(), "kernel_params": [0.4, 0.0, 3.0], "kernel_type": "RBF"}
    outputs = {"label": TensorProto.STRING, "scores": TensorProto.FLOAT}
    model = model_of("SVMClassifier", outputs, 5, classlabels_strings=words, vectors_per_class=counts, **attributes)
    x = rng.normal(size=(7, 5)).astype(np.float32)
    have, want = rammer.compile(model, device="toy").run({"x": x}), said(model, x)
    assert have["label"].tolist() == want[0].tolist()
    np.testing.assert_allclose(have["scores"], want[1], rtol=1e-3, atol=1e-5)
