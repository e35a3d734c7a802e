"""Models with sequential steps: LSTM-80 written with products, Seq2Seq, the Transformer, DIEN."""

from __future__ import annotations

import math

import numpy as np
import onnx

from zoo.net import Net
from zoo.tokens import attention, feed_forward, layer_norm, linear


def lstm80(seed: int, batch: int = 1, units: int = 128, steps: int = 80) -> onnx.ModelProto:
    """Return Wolong's benchmark: one LSTM layer, 80 steps, each written with eight products, as frameworks unroll it."""
    net = Net(f"lstm80_{units}", seed)
    x = net.input("sequence", (steps, batch, units))
    gates = [[net.normal((units, units), 1.5 / math.sqrt(units), hint) for hint in "wu"] for _ in range(4)]
    biases = [net.normal((units,), 0.1, "b") for _ in gates]
    h, c = (net.input(name, (batch, units)) for name in ("output", "state"))
    for step in range(steps):
        now = net.node("Gather", [x, net.constant(np.array(step, np.int64), "step")], (batch, units), axis=0)
        sums = []
        for (w, u), b in zip(gates, biases, strict=True):
            products = [net.node("MatMul", [a, m], (batch, units)) for a, m in ((now, w), (h, u))]
            sums.append(net.map("Add", net.map("Add", *products), b))
        i, f, o = (net.map("Sigmoid", s) for s in sums[:3])
        c = net.map("Add", net.map("Mul", f, c), net.map("Mul", i, net.map("Tanh", sums[3])))
        h = net.map("Mul", o, net.map("Tanh", c))
    return net.finish(h, fit=False)


def _layer(net: Net, x: str, weights: list[str], state: tuple[str, str] | None) -> tuple[str, tuple[str, str]]:
    """Emit one LSTM layer over (steps, batch, hidden): its outputs, and the state after the last step."""
    steps, batch, hidden = net.shape(x)
    shapes = [(steps, 1, batch, hidden), (1, batch, hidden), (1, batch, hidden)]
    y, h, c = net.node_of("LSTM", [x, *weights, *(("", *state) if state else ())], shapes, hidden_size=hidden)
    return net.node("Squeeze", [y, net.integers([1], "axis")], (steps, batch, hidden)), (h, c)


def seq2seq(
    seed: int, batch: int = 1, hidden: int = 128, encoder: tuple[int, int] = (8, 100), decoder: tuple[int, int] = (4, 30)
) -> onnx.ModelProto:
    """Return Seq2Seq as Rammer measured it, with all outputs of the decoder. ``encoder`` and ``decoder`` are (layers, steps). The
    decoder starts with the states of the encoder's last layers and reads its previous output in each step."""
    net = Net("seq2seq", seed)

    def drawn() -> list[str]:
        pair = [net.normal((1, 4 * hidden, hidden), 1.5 / math.sqrt(hidden), hint) for hint in ("w", "r")]
        return [*pair, net.normal((1, 8 * hidden), 0.1, "b")]

    x, states = net.input("sequence", (encoder[1], batch, hidden)), []
    for _ in range(encoder[0]):
        x, state = _layer(net, x, drawn(), None)
        states.append(state)
    layers = [drawn() for _ in range(decoder[0])]
    now, states = states[-1][0], states[-decoder[0] :]
    said = []
    for _ in range(decoder[1]):
        for number, weights in enumerate(layers):
            now, states[number] = _layer(net, now, weights, states[number])
        said.append(now)
    return net.finish(net.concat(said, 0), fit=False)


def _embedded(net: Net, table: str, ids: str) -> str:
    """Emit table rows times sqrt(width), plus sinusoids of the positions (float64, so that parameter counts exclude them)."""
    (batch, tokens), width = net.shape(ids), net.shape(table)[1]
    rows = net.node("Gather", [table, ids], (batch, tokens, width))
    rows = net.map("Mul", rows, net.constant(np.array(math.sqrt(width), np.float32), "scale"))
    angles = np.arange(tokens)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
    waves = net.constant(np.concatenate([np.sin(angles), np.cos(angles)], 1)[None], "waves")
    return net.map("Add", rows, net.node("Cast", [waves], net.shape(waves), to=onnx.TensorProto.FLOAT))


def transformer(
    seed: int,
    batch: int = 1,
    source: int = 64,
    target: int = 64,
    layers: int = 6,
    width: int = 512,
    heads: int = 8,
    vocabulary: int = 37000,
) -> onnx.ModelProto:
    """Return the base Transformer: encoder and decoder, one table of words for both and for the logits. All words of the target
    are inputs (one pass with a causal mask). Vaswani et al., arXiv 1706.03762."""
    net = Net("transformer", seed)
    ids = [net.input(n, (batch, t), onnx.TensorProto.INT64) for n, t in (("source", source), ("target", target))]
    table = net.normal((vocabulary, width), 1 / math.sqrt(width), "words")
    x, y = (_embedded(net, table, i) for i in ids)
    for _ in range(layers):
        x = layer_norm(net, net.map("Add", x, attention(net, x, heads)), 1e-6)
        x = layer_norm(net, net.map("Add", x, feed_forward(net, x, 4 * width, "Relu")), 1e-6)
    later = net.constant(np.triu(np.ones((1, 1, target, target), np.bool_), 1), "later")
    for _ in range(layers):
        y = layer_norm(net, net.map("Add", y, attention(net, y, heads, unseen=later)), 1e-6)
        y = layer_norm(net, net.map("Add", y, attention(net, y, heads, memory=x)), 1e-6)
        y = layer_norm(net, net.map("Add", y, feed_forward(net, y, 4 * width, "Relu")), 1e-6)
    rows = net.reshape(y, (batch * target, width))
    return net.finish(net.node("Gemm", [rows, table], (batch * target, vocabulary), transB=1), fit=False)


def _prelu(net: Net, x: str) -> str:
    return net.map("PRelu", x, net.normal((net.shape(x)[-1],), 0.1, "slope", 0.25))


def _interest(net: Net, item: str, facts: str, seen: str) -> str:
    """Emit attention weights of the ``facts`` (batch, steps, width) for ``item``, only where ``seen`` is 1."""
    batch, steps, width = net.shape(facts)
    query = _prelu(net, linear(net, item, width))
    query = net.reshape(query, (batch, 1, width))
    query = net.node("Expand", [query, net.integers([batch, steps, width])], (batch, steps, width))
    x = net.concat([query, facts, net.map("Sub", query, facts), net.map("Mul", query, facts)], 2)
    for columns in (80, 40):
        x = net.map("Sigmoid", linear(net, x, columns))
    scores = net.reshape(linear(net, x, 1, 16.0), (batch, steps))
    there = net.map("Equal", seen, net.constant(np.array(1, np.int64), "one"))
    scores = net.map("Where", there, scores, net.constant(np.array(-1e9, np.float32), "hidden"))
    return net.map("Softmax", scores, axis=-1)


def _evolution(net: Net, facts: str, shares: str) -> str:
    """Emit AUGRU: a GRU whose update gate is scaled by the weight of each step; its last state."""
    batch, steps, width = net.shape(facts)
    gates, candidate = (
        (net.normal((2 * width, n), 1 / math.sqrt(width), "w"), net.normal((n,), 0.1, "b")) for n in (2 * width, width)
    )
    one = net.constant(np.array(1.0, np.float32), "one")
    h = net.node("Cast", [net.constant(np.zeros((batch, width), np.float16), "zero")], (batch, width), to=onnx.TensorProto.FLOAT)
    for step in range(steps):
        place = net.constant(np.array([step], np.int64), "step")
        now = net.reshape(net.node("Gather", [facts, place], (batch, 1, width), axis=1), (batch, width))
        share = net.node("Gather", [shares, place], (batch, 1), axis=1)
        both = net.map("Add", net.node("MatMul", [net.concat([now, h]), gates[0]], (batch, 2 * width)), gates[1])
        r, u = net.node_of("Split", [net.map("Sigmoid", both)], [(batch, width)] * 2, axis=1, num_outputs=2)
        u = net.map("Mul", net.map("Sub", one, share), u)
        inner = net.concat([now, net.map("Mul", r, h)])
        new = net.map("Tanh", net.map("Add", net.node("MatMul", [inner, candidate[0]], (batch, width)), candidate[1]))
        h = net.map("Add", net.map("Mul", u, h), net.map("Mul", net.map("Sub", one, u), new))
    return h


def dien(
    seed: int,
    batch: int = 128,
    steps: int = 100,
    embedding: int = 18,
    users: int = 543060,
    items: int = 367983,
    kinds: int = 1601,
) -> onnx.ModelProto:
    """Return DIEN, the deep interest evolution network; logits of a click. The sizes are those of its authors' code for Amazon's
    books (embeddings of 18, states of 36, 100 steps, batch 128). Zhou et al., arXiv 1809.03672."""
    net, width, whole = Net("dien", seed), 2 * embedding, onnx.TensorProto.INT64
    names = (("user", ()), ("item", ()), ("kind", ()), ("items", (steps,)), ("kinds", (steps,)), ("seen", (steps,)))
    ids = {name: net.input(name, (batch, *shape), whole) for name, shape in names}
    tables = {n: net.normal((rows, embedding), 1.0, n) for n, rows in (("user", users), ("item", items), ("kind", kinds))}

    def look(table: str, name: str) -> str:
        return net.node("Gather", [tables[table], ids[name]], (*net.shape(ids[name]), embedding))

    item = net.concat([look("item", "item"), look("kind", "kind")])
    history = net.concat([look("item", "items"), look("kind", "kinds")], 2)
    total = net.node("ReduceSum", [history, net.integers([1])], (batch, width), keepdims=0)
    weights = [net.normal((1, 3 * width, width), 1 / math.sqrt(width), hint) for hint in ("w", "r")]
    operands = [net.transpose(history, (1, 0, 2)), *weights, net.normal((1, 6 * width), 0.1, "b")]
    (states,) = net.node_of("GRU", operands, [(steps, 1, batch, width)], hidden_size=width)
    states = net.node("Squeeze", [states, net.integers([1], "axis")], (steps, batch, width))
    facts = net.transpose(states, (1, 0, 2))
    final = _evolution(net, facts, _interest(net, item, facts, ids["seen"]))
    x = net.norm(net.concat([look("user", "user"), item, total, net.map("Mul", item, total), final]))
    for columns in (200, 80):
        x = _prelu(net, linear(net, x, columns, 2.0))
    return net.finish(linear(net, x, 2), fit=True)
