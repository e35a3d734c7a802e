"""Models of sequences and rows: LSTM-TC, BERT-base, NeRF's MLP."""

from __future__ import annotations

import math

import numpy as np
import onnx

from zoo.net import Net
from zoo.tokens import attention, layer_norm, linear


def lstm_tc(seed: int, batch: int = 1, layers: int = 10, hidden: int = 256, steps: int = 100) -> onnx.ModelProto:
    """Return Rammer's LSTM-TC: stacked unidirectional layers of equal input and hidden size; the last layer's final state.

    Gate weights have deviation 1.5 / sqrt(hidden). With 1.0 ten layers forget their input: outputs for two inputs differ by 0.006
    (with 1.5 by 0.45). With 2.0 the recurrence is chaotic and multiplies rounding errors by ten."""
    net = Net(f"lstm_tc_bs{batch}", seed)
    x = net.input("sequence", (steps, batch, hidden))
    axis, last = net.integers([1], "axis"), net.integers([0], "axis")
    for layer in range(layers):
        deviation = 1.5 / math.sqrt(hidden)
        weights = [net.normal((1, 4 * hidden, hidden), deviation, hint) for hint in ("w", "r")]
        bias = net.normal((1, 8 * hidden), 0.1, "b")
        operands = [x, *weights, bias]
        if layer < layers - 1:
            (y,) = net.node_of("LSTM", operands, [(steps, 1, batch, hidden)], hidden_size=hidden)
            x = net.node("Squeeze", [y, axis], (steps, batch, hidden))
        else:
            _, state = net.node_of("LSTM", operands, [None, (1, batch, hidden)], hidden_size=hidden)
            x = net.node("Squeeze", [state, last], (batch, hidden))
    return net.finish(x, fit=False)


def bert_base(
    seed: int, batch: int = 1, tokens: int = 128, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 30522
) -> onnx.ModelProto:
    """Return BERT-base uncased: embeddings, 12 layers, no pooler; the last hidden state. Devlin et al., arXiv 1810.04805."""
    net = Net("bert_base", seed)
    ids = net.input("input_ids", (batch, tokens), onnx.TensorProto.INT64)
    kinds = net.input("token_type_ids", (batch, tokens), onnx.TensorProto.INT64)
    places = net.constant(np.arange(tokens, dtype=np.int64), "places")
    words = net.node("Gather", [net.normal((vocabulary, width), 1.0, "words"), ids], (batch, tokens, width))
    types = net.node("Gather", [net.normal((2, width), 0.5, "types"), kinds], (batch, tokens, width))
    positions = net.node("Gather", [net.normal((512, width), 0.5, "positions"), places], (tokens, width))
    x = layer_norm(net, net.map("Add", net.map("Add", words, types), positions))
    for _ in range(layers):
        x = layer_norm(net, net.map("Add", attention(net, x, heads), x))
        inner = net.map("Gelu", linear(net, x, 4 * width, 2.0))
        x = layer_norm(net, net.map("Add", linear(net, inner, width), x))
    return net.finish(x, fit=False)


def nerf_mlp(seed: int, rows: int = 65536, layers: int = 8, width: int = 64) -> onnx.ModelProto:
    """Return a plain radiance-field MLP: 60 encoded coordinates, 8 hidden layers of 64 with ReLU, colour and density."""
    net = Net("nerf_mlp", seed)
    x = net.input("samples", (rows, 60))
    for _ in range(layers):
        x = net.relu(linear(net, x, width, 2.0))
    return net.finish(linear(net, x, 4), fit=False)
