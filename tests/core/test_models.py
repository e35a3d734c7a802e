"""Real models: weights that make the output depend on the input, and clear messages for missing ones."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rammer_testing import models
from rammer_testing.models import (
    LIGHT_MODELS,
    WHEEL_MODELS,
    InputSpec,
    ModelUnavailable,
    fetch,
    graph_inputs,
    inputs_for,
    light_model,
    model_path,
    random_inputs,
    reseed,
    runner,
    strip_final_softmax,
    wheel_model,
    with_all_outputs,
)
from rammer_testing.nonempty import some


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.large) if n == "vgg19" else n for n in LIGHT_MODELS])
def test_reseeded_model_tells_two_inputs_apart(name: str) -> None:
    model = strip_final_softmax(reseed(light_model(name), seed=0))
    run = runner(model)
    specs = graph_inputs(model)
    (first,), (second,) = (run(random_inputs(specs, seed)).values() for seed in (1, 2))
    assert np.isfinite(first).all() and np.isfinite(second).all()
    assert first.std() > 0
    difference = float(np.linalg.norm(first - second) / np.linalg.norm(first))
    assert difference >= 1e-2
    assert all(node.op_type not in ("ConstantOfShape", "Softmax") for node in some(model.graph.node))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_reseed_is_repeatable_and_valid(name: str) -> None:
    source = light_model(name)
    before = source.SerializeToString()
    one = reseed(source, seed=3)
    onnx.checker.check_model(one, full_check=True)
    assert source.SerializeToString() == before
    assert one.SerializeToString() == reseed(source, seed=3).SerializeToString()
    assert one.SerializeToString() != reseed(source, seed=4).SerializeToString()


def test_all_outputs_have_types_and_the_values_that_were_inferred() -> None:
    model = with_all_outputs(reseed(light_model("squeezenet"), seed=0))
    onnx.checker.check_model(model, full_check=True)
    # A dropout mask is meaningless at inference and omitted.
    computed = {node.output[0] for node in model.graph.node}
    assert {value.name for value in model.graph.output} == computed
    values = runner(model)(random_inputs(graph_inputs(model), 0))
    for value in some(model.graph.output):
        declared = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        assert values[value.name].shape == declared


def test_strip_final_softmax_leaves_other_outputs_alone() -> None:
    model = light_model("densenet121")
    assert strip_final_softmax(model).graph.output[0].name == model.graph.output[0].name


def test_a_fill_of_unknown_use_is_an_error() -> None:
    model = light_model("squeezenet")
    next(node for node in model.graph.node if node.op_type == "Conv").op_type = "Einsum"
    with pytest.raises(ValueError, match="no operator determines the use of these weights"):
        reseed(model, seed=0)


def test_random_inputs_keep_to_their_ranges() -> None:
    specs = (InputSpec("i", "int32", (500,), 0, 3), InputSpec("f", "float32", (500,), -1.0, 1.0))
    feeds = random_inputs(specs, 0)
    assert feeds["i"].dtype == np.int32 and set(feeds["i"].tolist()) == {0, 1, 2}
    assert feeds["f"].dtype == np.float32 and float(np.abs(feeds["f"]).max()) == 1.0
    assert all(np.array_equal(feeds[name], array) for name, array in some(random_inputs(specs, 0).items()))


@pytest.mark.parametrize("model", WHEEL_MODELS, ids=lambda model: model.key)
def test_every_wheel_model_has_two_different_sets_of_inputs(model: models.WheelModel) -> None:
    first, second = inputs_for(model.key)
    assert [spec.name for spec in first] == [spec.name for spec in second]
    assert first != second


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(ModelUnavailable, match=r"'nothing'.*unknown key; choose one of ppocr_det"):
        fetch("nothing")
    with pytest.raises(ModelUnavailable, match=r"'nothing'.*unknown name; choose one of bvlc_alexnet"):
        light_model("nothing")


def test_a_file_with_another_hash_is_refused(tmp_path: Path) -> None:
    model = wheel_model("ppocr_cls")
    path = model_path(model, tmp_path)
    path.write_bytes(b"not the model")
    with pytest.raises(ModelUnavailable, match=f"instead of {model.sha256}; delete that file") as caught:
        fetch(model.key, tmp_path)
    assert str(path) in str(caught.value)


def test_a_failed_download_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: first\nERROR: no network\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(ModelUnavailable, match=r"rapidocr==3\.10\.0 failed \(ERROR: no network\); check"):
        fetch("ppocr_rec", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_environment_names_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(models.CACHE_VARIABLE, str(tmp_path))
    assert model_path(wheel_model("magika_v3_3")).parent == tmp_path
