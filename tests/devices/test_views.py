"""Views of views, of constants and of expanded tensors: agreement of whole programs with ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from onnx_models import model, tensor
from view_graphs import failure, opened

#: Models per test run. ``python tests/devices/view_graphs.py DEVICE SECONDS`` tries more.
COUNT = {"toy": 20, "ipu_sim": 12, "rocm": 6}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", COUNT)
def test_random_models_of_views_agree_with_onnxruntime(device: str, seed: int) -> None:
    backend = opened(device)
    for each in range(seed, seed + COUNT[device]):
        assert not failure(backend, device, each), f"seed {each}"


@pytest.mark.slow
@pytest.mark.parametrize("device", COUNT)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_start_from_an_expanded_constant(device: str, kind: str, rng: np.random.Generator, seed: int) -> None:
    """Check recurrent layers as torch exports them: only a view reads the constant of the initial states."""
    gates, states = {"LSTM": (4, 2), "GRU": (3, 1)}[kind]
    sizes = {"w": (1, gates * 4, 5), "r": (1, gates * 4, 4), "zero": (1, 1, 1)}
    constants = {n: rng.standard_normal(s).astype(np.float32) for n, s in sizes.items()} | {"size": np.array([1, 2, 4])}
    nodes = [
        helper.make_node("Expand", ["zero", "size"], ["h"]),
        helper.make_node(kind, ["x", "w", "r", "", "", *["h"] * states], ["y", "last"], hidden_size=4),
    ]
    proto = model(nodes, [tensor("x", (3, 2, 5))], ["y", "last"], constants=constants)
    assert not failure(opened(device), device, seed, proto)


@pytest.mark.parametrize("device", COUNT)
def test_a_constant_is_read_whole_and_as_a_view(device: str, rng: np.random.Generator, seed: int) -> None:
    """Check a view of a constant, which has no separate values to upload or to pack."""
    sizes = {"w": (1, 16, 5), "r": (1, 16, 4), "h": (1, 2, 4)}
    constants = {n: rng.standard_normal(s).astype(np.float32) for n, s in sizes.items()}
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r", "", "", "h", "h"], ["", "last"], hidden_size=4),
        helper.make_node("Add", ["last", "h"], ["y"]),
    ]
    assert not failure(opened(device), device, seed, model(nodes, [tensor("x", (3, 2, 5))], ["y"], constants=constants))
