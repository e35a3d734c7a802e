"""Peer runtimes: their fusions, and torch and JAX (if installed) compared with ONNX Runtime."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from zoo import ZOO, find
from zoo.sequence import bert_base, lstm_tc

from rammer.errors import BadInput
from rammer_bench.graph import peer_graph
from rammer_bench.prepare import open_peer, relative_error
from rammer_testing.weights import runner

#: Models for every installed peer.
SMALL = (
    *("squeezenet", "mobilenet_v2", "nasnet_cifar", "lstm_tc_bs4", "nerf_mlp"),
    *("transformer:small", "alexnet:small", "swin_t:small", "conformer:small"),
)


def has(package: str) -> pytest.MarkDecorator:
    """Return a mark that skips the test if ``package`` is missing."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def operators(key: str) -> dict[str, int]:
    """Map each operator to its number of nodes in the zoo model as prepared for peers."""
    found: dict[str, int] = {}
    for node in peer_graph(ZOO[key].build()).nodes:
        found[node.op] = found.get(node.op, 0) + 1
    return found


def test_ten_recurrent_layers_are_one_node() -> None:
    (lstm,) = [n for n in peer_graph(lstm_tc(1, layers=4, hidden=8, steps=3)).nodes if n.op == "LSTM"]
    assert len(lstm.inputs) == 1 + 3 * 4
    assert lstm.outputs[0] == "" and lstm.outputs[1]


@pytest.mark.slow
def test_norms_fold_only_after_convolutions() -> None:
    assert "BatchNormalization" not in operators("mobilenet_v2")
    assert operators("densenet121")["BatchNormalization"] == 58 + 3 + 1  # layers, transitions, the last one


def test_attention_and_linear_layers_are_single_nodes() -> None:
    nodes = [n.op for n in peer_graph(bert_base(1, tokens=5, layers=2, width=12, heads=3, vocabulary=9)).nodes]
    assert nodes.count("Attention") == 2 and nodes.count("Linear") == 12
    assert "MatMul" not in nodes and "Softmax" not in nodes


@pytest.mark.parametrize("name", [pytest.param("torch", marks=has("torch")), pytest.param("jax", marks=has("jax"))])
@pytest.mark.parametrize("key", SMALL)
def test_peer_agrees_with_onnxruntime(name: str, key: str, rng: np.random.Generator) -> None:
    entry = find(key)
    model, feeds = entry.build(), entry.feeds(int(rng.integers(1 << 20)))
    made = open_peer(name, model, feeds, "cpu")
    assert relative_error(made.outputs(), runner(model)(feeds)) < 5e-5


@has("torch")
def test_an_unknown_operator_is_named() -> None:
    model = ZOO["squeezenet"].build()
    model.graph.node[1].op_type = "Softsign"
    with pytest.raises(BadInput, match="no translation of Softsign"):
        open_peer("torch", model, ZOO["squeezenet"].feeds(1), "cpu")
