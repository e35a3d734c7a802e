"""Models whose independent products are siblings: a cell written with products, attention, branches on one image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import NodeProto, helper
from onnx_models import model, tensor


def _weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def cell(rng: np.random.Generator, steps: int = 8, width: int = 64, biased: bool = False) -> onnx.ModelProto:
    """Make a one-layer LSTM with eight products per step: ``x_t W_g`` and ``h U_g`` of each gate. The bias is added to their sum,
    or to the first if ``biased``."""
    constants: dict[str, np.ndarray] = {"first": np.array([0])}
    for g in "ifoc":
        constants |= {f"w{g}": _weights(rng, width, width), f"u{g}": _weights(rng, width, width), f"b{g}": _weights(rng, width)}
    nodes = [helper.make_node("Split", ["x"], [f"x{t}" for t in range(steps)], axis=0, num_outputs=steps)]
    h, c = "h", "c"
    for t in range(steps):
        nodes.append(helper.make_node("Squeeze", [f"x{t}", "first"], [f"in{t}"]))
        for g in "ifoc":
            nodes += [
                helper.make_node("MatMul", [f"in{t}", f"w{g}"], [f"p{g}{t}"]),
                helper.make_node("MatMul", [h, f"u{g}"], [f"q{g}{t}"]),
                helper.make_node("Add", [f"p{g}{t}", f"b{g}" if biased else f"q{g}{t}"], [f"s{g}{t}"]),
                helper.make_node("Add", [f"s{g}{t}", f"q{g}{t}" if biased else f"b{g}"], [f"a{g}{t}"]),
                helper.make_node("Tanh" if g == "c" else "Sigmoid", [f"a{g}{t}"], [f"g{g}{t}"]),
            ]
        nodes += [
            helper.make_node("Mul", [f"gf{t}", c], [f"k{t}"]),
            helper.make_node("Mul", [f"gi{t}", f"gc{t}"], [f"n{t}"]),
            helper.make_node("Add", [f"k{t}", f"n{t}"], [f"c{t}"]),
            helper.make_node("Tanh", [f"c{t}"], [f"t{t}"]),
            helper.make_node("Mul", [f"go{t}", f"t{t}"], [f"h{t}"]),
        ]
        h, c = f"h{t}", f"c{t}"
    states = [tensor(n, (1, width)) for n in ("h", "c")]
    return model(nodes, [tensor("x", (steps, 1, width)), *states], [h], constants=constants)


def onnx_cell(rng: np.random.Generator, steps: int = 8, width: int = 64) -> onnx.ModelProto:
    """Make the same layer with ONNX's LSTM."""
    constants = {n: _weights(rng, 1, 4 * width, width) for n in "wr"} | {"b": _weights(rng, 1, 8 * width)}
    nodes = [helper.make_node("LSTM", ["x", "w", "r", "b", "", "h", "c"], ["", "y"], hidden_size=width)]
    states = [tensor(n, (1, 1, width)) for n in ("h", "c")]
    return model(nodes, [tensor("x", (steps, 1, width)), *states], ["y"], constants=constants)


def attention(
    rng: np.random.Generator, tokens: int = 16, width: int = 64, heads: int = 4, shared: int = 1, merged: bool = False
) -> onnx.ModelProto:
    """Make self-attention; ``shared`` heads of queries read one head of keys and values, which are then narrower. ``merged`` puts
    the queries of these heads into one matrix, which strides cannot express."""
    wide, narrow, size = heads, heads // shared, width // heads
    constants = {"o": _weights(rng, width, width)}
    nodes = list[NodeProto]()
    for n, count in (("q", wide), ("k", narrow), ("v", narrow)):
        constants |= {f"w{n}": _weights(rng, width, count * size), f"b{n}": _weights(rng, count * size)}
        constants[f"s{n}"] = np.array([tokens, count, size])
        nodes += [
            helper.make_node("MatMul", ["x", f"w{n}"], [f"m{n}"]),
            helper.make_node("Add", [f"m{n}", f"b{n}"], [f"a{n}"]),
            helper.make_node("Reshape", [f"a{n}", f"s{n}"], [f"r{n}"]),
            helper.make_node("Transpose", [f"r{n}"], [f"t{n}"], perm=[1, 2, 0] if n == "k" else [1, 0, 2]),
        ]
    rows = (shared * tokens,) if merged else (shared, tokens)
    constants |= {"back": np.array([tokens, width]), "rows": np.array([narrow, *rows, size])}
    constants |= {"heads": np.array([wide, tokens, size]), "one": np.array([] if merged else [1], np.int64)}
    nodes += [
        helper.make_node("Reshape", ["tq", "rows"], ["queries"]),
        helper.make_node("Unsqueeze", ["tk", "one"], ["keys"]),
        helper.make_node("Unsqueeze", ["tv", "one"], ["values"]),
        helper.make_node("MatMul", ["queries", "keys"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "values"], ["mixed"]),
        helper.make_node("Reshape", ["mixed", "heads"], ["apart"]),
        helper.make_node("Transpose", ["apart"], ["together"], perm=[1, 0, 2]),
        helper.make_node("Reshape", ["together", "back"], ["flat"]),
        helper.make_node("MatMul", ["flat", "o"], ["y"]),
    ]
    return model(nodes, [tensor("x", (tokens, width))], ["y"], constants=constants)


def branches(rng: np.random.Generator, channels: int = 16, size: int = 12) -> onnx.ModelProto:
    """Make a block of Inception: three 1 by 1 convolutions of one image. One ends in the concatenation; two are read by further
    convolutions."""
    constants, nodes = dict[str, np.ndarray](), list[NodeProto]()

    def conv(x: str, into: str, kernel: int, given: int, made: int) -> str:
        constants[f"w{into}"] = _weights(rng, made, given, kernel, kernel)
        constants[f"b{into}"] = _weights(rng, made)
        pads = [kernel // 2] * 4
        inputs = [x, f"w{into}", f"b{into}"]
        nodes.append(helper.make_node("Conv", inputs, [f"n{into}"], kernel_shape=[kernel] * 2, pads=pads))
        nodes.append(helper.make_node("Relu", [f"n{into}"], [into]))
        return into

    wide = conv("x", "one", 1, channels, 8)
    five = conv(conv("x", "two", 1, channels, 6), "five", 5, 6, 8)
    three = conv(conv("x", "four", 1, channels, 10), "three", 3, 10, 12)
    nodes.append(helper.make_node("Concat", [wide, five, three], ["y"], axis=1))
    return model(nodes, [tensor("x", (1, channels, size, size))], ["y"], constants=constants)


def fire(rng: np.random.Generator, channels: int = 4, made: int = 6, size: int = 9) -> onnx.ModelProto:
    """Make SqueezeNet's block: adjacent 1 by 1 and 3 by 3 convolutions of one image."""
    constants, nodes = dict[str, np.ndarray](), list[NodeProto]()
    for k in (1, 3):
        constants |= {f"w{k}": _weights(rng, made, channels, k, k), f"b{k}": _weights(rng, made)}
        nodes.append(helper.make_node("Conv", ["x", f"w{k}", f"b{k}"], [f"n{k}"], pads=[k // 2] * 4))
        nodes.append(helper.make_node("Relu", [f"n{k}"], [f"r{k}"]))
    nodes.append(helper.make_node("Concat", ["r1", "r3"], ["c"], axis=1))
    nodes.append(helper.make_node("MaxPool", ["c"], ["y"], kernel_shape=[2, 2]))
    return model(nodes, [tensor("x", (1, channels, size, size))], ["y"], constants=constants)


def window_siblings(seed: int, odd: bool) -> onnx.ModelProto:
    """Make convolutions of one image with windows of different extent and padding; one has other strides if ``odd``."""
    rng = np.random.default_rng(seed)
    axes, count, channels = int(rng.integers(1, 4)), int(rng.integers(2, 5)), int(rng.integers(2, 4))
    wanted, strides, dilations = (rng.integers(low, high, axes) for low, high in ((2, 6), (1, 3), (1, 4)))
    constants, nodes, ends = dict[str, np.ndarray](), list[NodeProto](), list[str]()
    sizes = (wanted - 1) * strides + 1
    for i in range(count):
        kernel, steps = rng.integers(1, 4, axes), strides + (odd and i == 0)
        begins = np.array([rng.integers(k) for k in kernel]) * dilations
        last = (wanted - 1) * steps + 1 + dilations * (kernel - 1) - sizes - begins
        constants[f"w{i}"] = _weights(rng, int(rng.integers(2, 5)), channels, *map(int, kernel))
        how = {"strides": steps, "dilations": dilations, "pads": [*begins, *last]}
        nodes.append(helper.make_node("Conv", ["x", f"w{i}"], [f"n{i}"], **{k: list(map(int, v)) for k, v in how.items()}))
        nodes.append(helper.make_node("ReduceMax", [f"n{i}"], [f"y{i}"], keepdims=0))
        ends.append(f"y{i}")
    return model(nodes, [tensor("x", (2, channels, *map(int, sizes)))], ends, constants=constants)


def widths(
    rng: np.random.Generator, *widths: int, rows: int = 4, depth: int = 32, last: Sequence[str] = (), plain: str = ""
) -> onnx.ModelProto:
    """Make products of one tensor with weights of these widths; each has a bias except for the one named ``plain``. ``last``
    lists the map after each product."""
    constants, nodes, ends = dict[str, np.ndarray](), list[NodeProto](), list[str]()
    for i, width in enumerate(widths):
        constants |= {f"w{i}": _weights(rng, depth, width), f"b{i}": _weights(rng, width)}
        nodes += [
            helper.make_node("MatMul", ["x", f"w{i}"], [f"m{i}"]),
            *([helper.make_node("Add", [f"m{i}", f"b{i}"], [f"a{i}"])] if plain != f"m{i}" else []),
            helper.make_node(last[i] if last else "Tanh", [f"m{i}" if plain == f"m{i}" else f"a{i}"], [f"t{i}"]),
            helper.make_node("ReduceMax", [f"t{i}"], [f"y{i}"], keepdims=1),
        ]
        if plain == f"m{i}":
            del constants[f"b{i}"]
        ends.append(f"y{i}")
    return model(nodes, [tensor("x", (rows, depth))], ends, constants=constants)
