"""The models of the cases of ``rammer_testing.cases``, as ONNX graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx
from onnx import TensorProto

from rammer.ir.formats import numpy_type
from rammer.passes.graph.weight_only_quant import LEAST
from rammer_testing.net import Net

Sizes = Mapping[str, int]


def _out(size: int, s: Sizes) -> int:
    reach = s.get("d", 1) * (s["k"] - 1) + 1
    return int((size + _end(s) + s["p"] - reach) // s["s"] + 1)


def _end(s: Sizes) -> int:
    """Return the padding after the image: equal to that before it unless ``q`` overrides it."""
    return s["p"] if s.get("q", -1) < 0 else s["q"]


def _conv(net: Net, s: Sizes) -> onnx.ModelProto:
    c, m = s["c"] * s["g"], s["m"] * s["g"]
    x = net.source((s["n"], c, s["h"], s["w"]), s["off"])
    wide = s["k"] if "square" not in net.tags else 1
    operands = [x, net.weight(m, s["c"], s["k"], wide), *([net.some(m)] if "bias" in net.tags else [])]
    across = s["p"] if wide > 1 else 0
    end = _end(s) if wide > 1 else 0
    attributes = {"strides": [s["s"]] * 2, "dilations": [s["d"]] * 2, "group": s["g"], "pads": [s["p"], across, _end(s), end]}
    y = net.node("Conv", *operands, **attributes)
    flat = {**s, "k": wide, "p": across, "q": end}
    shape = (s["n"], m, _out(s["h"], s), _out(s["w"], flat))
    if "reader" in net.tags:
        net.outputs.append(net.node("Conv", net.node("Neg", x), *operands[1:], **attributes))
    return net.finish(y, shape, s["off"])


def _transposed(net: Net, s: Sizes) -> onnx.ModelProto:
    x = net.source((s["n"], s["c"], s["h"], s["w"]), s["off"])
    operands = [x, net.weight(s["c"], s["m"], s["k"], s["k"]), *([net.some(s["m"])] if "bias" in net.tags else [])]
    y = net.node("ConvTranspose", *operands, strides=[s["s"]] * 2, pads=[s["p"]] * 4)
    return net.finish(y, (s["n"], s["m"], *(_back(s[n], s) for n in "hw")), s["off"])


def _back(size: int, s: Sizes) -> int:
    """Return the result extent of a transposed convolution along a dimension."""
    return (size - 1) * s["s"] + s["k"] - 2 * s["p"]


def _depthwise(net: Net, s: Sizes) -> onnx.ModelProto:
    x = net.source((s["n"], s["c"], s["h"], s["w"]), s["off"])
    operands = [x, net.weight(s["c"], 1, s["k"], s["k"]), *([net.some(s["c"])] if "bias" in net.tags else [])]
    pads = [s["p"], s["p"], _end(s), _end(s)]
    y = net.node("Conv", *operands, group=s["c"], strides=[s["s"]] * 2, dilations=[s["d"]] * 2, pads=pads)
    return net.finish(y, (s["n"], s["c"], _out(s["h"], s), _out(s["w"], s)), s["off"])


def _pool(net: Net, s: Sizes) -> onnx.ModelProto:
    x = net.source((s["n"], s["c"], s["h"], s["w"]), s["off"])
    pads = [min(p, s["k"] - 1) for p in (s["p"], s["p"], _end(s), _end(s))]
    op, more = ("AveragePool", {"count_include_pad": 1}) if "average" in net.tags else ("MaxPool", {})
    y = net.node(op, x, kernel_shape=[s["k"]] * 2, strides=[s["s"]] * 2, pads=pads, **more)
    high, wide = ((n + pads[0] + pads[2] - s["k"]) // s["s"] + 1 for n in (s["h"], s["w"]))
    return net.finish(y, (s["n"], s["c"], high, wide), s["off"])


def _matmul(net: Net, s: Sizes) -> onnx.ModelProto:
    b, m, k, n = (s[x] for x in ("b", "m", "depth", "width"))
    batch = (b,) if b > 1 else ()
    turned = "turn" in net.tags
    x = net.source((*batch, k, m) if turned else (*batch, m, k), s["off"], len(batch) + 1)
    order = [*range(len(batch)), len(batch) + 1, len(batch)]
    x = net.node("Transpose", x, perm=order) if turned else x
    own = batch if "free" in net.tags or "own" in net.tags else ()
    w = net.weight(*own, n, k) if "turnb" in net.tags else net.weight(*own, k, n)
    if "turnb" in net.tags:
        w = net.node("Transpose", w, perm=[*range(len(own)), len(own) + 1, len(own)])
    operands = [w, x] if "left" in net.tags and n == m == k else [x, w]
    y = net.node("MatMul", *operands)
    y = net.node("Add", y, net.some(n)) if "bias" in net.tags else y
    if "reader" in net.tags:
        net.outputs.append(net.node("MatMul", net.node("Neg", operands[0]), operands[1]))
    return net.finish(y, (*batch, m, n), s["off"], len(batch) + 1)


def _integer_matmul(net: Net, s: Sizes) -> onnx.ModelProto:
    b, m, k, n = (s[x] for x in ("b", "m", "depth", "width"))
    batch, kinds = (b,) if b > 1 else (), _kinds_of_codes(net)
    x = _codes(net, kinds[0], *batch, m, k)
    w = net.codes(kinds[1], k, n, free="free" in net.tags)
    total = net.node("MatMulInteger", x, w, *([net.constant(np.array(17, kinds[0]))] if "moved" in net.tags else []))
    return _requantised(net, total, (*batch, m, n), s["off"], len(batch) + 1)


def _integer_conv(net: Net, s: Sizes) -> onnx.ModelProto:
    c, m, kinds = s["c"] * s["g"], s["m"] * s["g"], _kinds_of_codes(net)
    x = _codes(net, kinds[0], s["n"], c, s["h"], s["w"])
    w = net.codes(kinds[1], m, s["c"], s["k"], s["k"], free="free" in net.tags)
    zero = [net.constant(np.array(17, kinds[0]))] if "moved" in net.tags else []
    pads = [s["p"], s["p"], _end(s), _end(s)]
    attributes = {"strides": [s["s"]] * 2, "dilations": [s["d"]] * 2, "group": s["g"], "pads": pads}
    total = net.node("ConvInteger", x, w, *zero, **attributes)
    return _requantised(net, total, (s["n"], m, _out(s["h"], s), _out(s["w"], s)), s["off"])


def _stored(net: Net, s: Sizes) -> onnx.ModelProto:
    """Build a product with quantised weights: in blocks, or (``column``) with a scale per column; in float16 if ``half``."""
    b, m, k, n = (s[x] for x in ("b", "m", "depth", "width"))
    signed, half, turned = (tag in net.tags for tag in ("signed", "half", "turnb"))
    ends = (-(1 << s["bits"] - 1), (1 << s["bits"] - 1) - 1) if signed else (0, (1 << s["bits"]) - 1)
    kind = np.dtype(numpy_type(f"{'' if signed else 'u'}int{8 if s['bits'] == 8 else 4}"))
    codes = net.rng.integers(*ends, (n, k), endpoint=True)
    grain = (n,) if "column" in net.tags else (n, -(-k // s["block"]))
    scale = net.rng.uniform(0.01, 0.1, grain).astype(np.float16 if half else np.float32)
    zero = [net.rng.integers(*ends, grain, endpoint=True).astype(kind)] if "moved" in net.tags else []
    given = [v if turned or v.ndim == 1 else v.T for v in (codes.astype(kind), scale, *zero)]
    inner = 1 if turned else 0
    blocks = {"axis": 1 - inner} if "column" in net.tags else {"axis": inner, "block_size": s["block"]}
    w = net.node("DequantizeLinear", *(net.constant(np.ascontiguousarray(v)) for v in given), **blocks)
    w = net.node("Transpose", w, perm=[1, 0]) if turned else w
    x = net.source((*((b,) if b > 1 else ()), m, k), s["off"], 1 + (b > 1))
    y = net.node("MatMul", net.node("Cast", x, to=TensorProto.FLOAT16) if half else x, w)
    y = net.node("Cast", y, to=TensorProto.FLOAT) if half else y
    y = net.node("Add", y, net.some(n)) if "bias" in net.tags else y
    return net.finish(y, (*((b,) if b > 1 else ()), m, n), s["off"], 1 + (b > 1))


def _codes(net: Net, kind: str, *shape: int) -> str:
    """Add an input of codes, or (``made``) quantised floats, whose layout is arbitrary."""
    if "made" not in net.tags:
        return net.codes(kind, *shape)
    grain = net.constant(np.float32(2**-5)), net.constant(np.array(100 if kind == "uint8" else -3, kind))
    return net.node("QuantizeLinear", net.input(*shape), *grain)


def _kinds_of_codes(net: Net) -> tuple[str, str]:
    return ("int8" if "signed" in net.tags else "uint8"), ("uint8" if "unsigned" in net.tags else "int8")


def _requantised(net: Net, total: str, shape: tuple[int, ...], off: int, axis: int = 1) -> onnx.ModelProto:
    """Convert an int32 sum to floats, or to codes (``codes``), which end the model if no operator follows them."""
    if "bare" in net.tags:
        return net.model(total)
    y = net.node("Mul", net.node("Cast", total, to=TensorProto.FLOAT), net.constant(np.float32(2**-6)))
    if "codes" in net.tags:
        grain = net.constant(np.float32(0.5)), net.constant(np.uint8(100))
        y = net.node("QuantizeLinear", y, *grain)
        if not set(net.tags) & set(AFTER):
            return net.model(y)
        y = net.node("DequantizeLinear", y, *grain)
    return net.finish(y, shape, off, axis)


def _heads(net: Net, x: str, heads: int, depth: int, tokens: int) -> list[str]:
    """Return queries, keys and values as views of one tensor [n, tokens, 3 * heads * depth], as in ViT."""
    shape = net.constant(np.array([0, tokens, 3, heads, depth], np.int64))
    turned = net.node("Transpose", net.node("Reshape", x, shape), perm=[2, 0, 3, 1, 4])
    return [net.node("Gather", turned, net.constant(np.int64(i)), axis=0) for i in range(3)]


def _attention(net: Net, s: Sizes) -> onnx.ModelProto:
    n, heads, m, k, d = (s[x] for x in ("n", "heads", "m", "keys", "depth"))
    if "packed" in net.tags:
        x = net.node("Relu", net.input(n, m, 3 * heads * d))
        q, key, v = _heads(net, x, heads, d, m)
        k = m
    else:
        q, key, v = (net.node("Relu", net.input(n, heads, rows, d)) for rows in (m, k, k))
    scores = net.node("MatMul", q, net.node("Transpose", key, perm=[0, 1, 3, 2]))
    scores = net.node("Mul", scores, net.constant(np.float32(0.25)))
    scores = net.node("Add", scores, net.input(n, 1, m, k)) if "mask" in net.tags else scores
    y = net.node("MatMul", net.node("Softmax", scores, axis=-1), v)
    if "merge" in net.tags:
        y = net.node("Transpose", y, perm=[0, 2, 1, 3])
        y = net.node("Reshape", y, net.constant(np.array([n, m, heads * d], np.int64)))
        return net.model(net.node("MatMul", y, net.weight(heads * d, s["width"])))
    return net.finish(y, (n, heads, m, d), s["off"])


def _rows(net: Net, s: Sizes) -> onnx.ModelProto:
    x = net.source((s["b"], s["m"], s["depth"]), s["off"], 2)
    x = net.node("Add", x, net.input(s["b"], s["m"], s["depth"])) if "add" in net.tags else x
    width = s["depth"]
    if "norm" in net.tags:
        y = net.node("LayerNormalization", x, net.some(width), net.some(width), axis=-1)
    elif "arg" in net.tags:
        return net.model(net.node("ArgMax", x, axis=-1))
    elif "mean" in net.tags:
        return net.model(net.node("Sigmoid", net.node("ReduceMean", x, net.constant(np.array([1 + s["t"] % 2], np.int64)))))
    else:
        y = net.node("LogSoftmax" if "log" in net.tags else "Softmax", x, axis=1 if "across" in net.tags else -1)
    if "reader" in net.tags:
        net.outputs.append(net.node("ReduceMax", y, net.constant(np.array([2], np.int64))))
    return net.model(net.node("Mul", y, net.constant(np.float32(2.0))))


def _stitched(net: Net, s: Sizes) -> onnx.ModelProto:
    """Build several results of the same rows: statistics, normalisations and maps of one tensor, optionally an output, too."""
    shape, axis = (s["b"], s["m"], s["depth"]), s["t"] % 3
    x = net.source(shape, s["off"], 2)
    x = net.node("Add", x, net.input(*shape)) if "add" in net.tags else x
    x = net.node("Tanh", x) if "tanh" in net.tags else x
    if "keep" in net.tags:
        net.outputs.append(net.node("Relu", x) if x == "x0" else x)
    if "norm" in net.tags:
        net.outputs.append(net.node("LayerNormalization", x, net.some(s["depth"]), net.some(s["depth"]), axis=-1))
    along, keepdims = net.constant(np.array([axis], np.int64)), int("dims" in net.tags)
    mean = net.node("ReduceMean", x, along)
    if "var" in net.tags:
        apart = net.node("Sub", x, mean)
        net.outputs.append(net.node("ReduceMean", net.node("Mul", apart, apart), along, keepdims=keepdims))
    for tag, op in (("max", "ReduceMax"), ("min", "ReduceMin"), ("sum", "ReduceSum"), ("square", "ReduceSumSquare")):
        net.outputs += [net.node(op, x, along, keepdims=keepdims)] if tag in net.tags else []
    return net.model(net.node("Sub", x, mean) if "less" in net.tags else net.node("Neg", mean))


def _chain(net: Net, s: Sizes) -> onnx.ModelProto:
    """Build consecutive layers, a form that a device may store on chip."""
    widths = [s["first"], *[s["wide"]] * (s["layers"] - 1), s["last"]]
    y = net.input(s["rows"], widths[0])
    for a, b in pairwise(widths):
        y = net.node("Relu", net.node("Add", net.node("MatMul", y, net.weight(a, b)), net.some(b)))
    return net.finish(y, (s["rows"], widths[-1]), s["off"])


def _recurrent(net: Net, s: Sizes) -> onnx.ModelProto:
    gates, op = (3, "GRU") if "gru" in net.tags else (4, "LSTM")
    hidden, depth = s["width"], s["depth"]
    shapes = ((1, gates * hidden, depth), (1, gates * hidden, hidden), (1, 2 * gates * hidden))
    x = net.input(s["t"], s["b"], depth)
    return net.model(net.node(op, x, *(net.some(*shape) for shape in shapes), hidden_size=hidden))


def _maps(net: Net, s: Sizes) -> onnx.ModelProto:
    shape = (s["n"], s["c"], s["h"], s["w"])
    x = net.source(shape, s["off"])
    if "turn" in net.tags:
        x, shape = net.node("Transpose", x, perm=[0, 2, 3, 1]), (s["n"], s["h"], s["w"], s["c"])
    if "take" in net.tags:
        places = net.rng.integers(0, shape[1], s["off"])
        x, shape = net.node("Gather", x, net.constant(places), axis=1), (shape[0], s["off"], *shape[2:])
    if "resize" in net.tags:
        scales = net.constant(np.array([1, 1, 2, 2], np.float32))
        x, shape = net.node("Resize", x, "", scales, mode="nearest"), (*shape[:2], 2 * shape[2], 2 * shape[3])
    if "padded" in net.tags:
        x = net.node("Pad", x, net.constant(np.array([0, 1, 0, 0, 0, 0, 2, 1], np.int64)))
        shape = (shape[0], shape[1] + 1, shape[2] + 2, shape[3] + 1)
    if "flat" in net.tags:
        x = net.node("Add", x, net.some(shape[1], 1, 1))
    return net.finish(net.node("Tanh", x), shape, s["off"])


@dataclass(frozen=True)
class NetKind:
    """A kind of case: its builder, its tags, its legal sizes, and its work."""

    build: Callable[[Net, Sizes], onnx.ModelProto]
    tags: tuple[str, ...]
    legal: Callable[[Sizes], bool]
    work: Callable[[Sizes], int]


AFTER = ("relu", "add", "sigmoid", "swish", "mul", "twice", "concat")
IMAGE = ("slice", "bn")
CODED = ("made", "free", "signed", "unsigned", "moved", "codes", "bare")
SIZES: Mapping[str, tuple[str, ...]] = {
    "conv": ("n", "c", "m", "h", "w", "k", "s", "d", "p", "q", "g", "off"),
    "depthwise": ("n", "c", "h", "w", "k", "s", "d", "p", "q", "off"),
    "transposed": ("n", "c", "m", "h", "w", "k", "s", "p", "off"),
    "pool": ("n", "c", "h", "w", "k", "s", "p", "q", "off"),
    "matmul": ("b", "m", "depth", "width", "off"),
    "iconv": ("n", "c", "m", "h", "w", "k", "s", "d", "p", "q", "g", "off"),
    "imatmul": ("b", "m", "depth", "width", "off"),
    "stored": ("b", "m", "depth", "width", "bits", "block", "off"),
    "gemv": ("t", "depth", "width", "off"),
    "attention": ("n", "heads", "m", "keys", "depth", "width", "off"),
    "rows": ("b", "m", "depth", "t", "off"),
    "stitched": ("b", "m", "depth", "t", "off"),
    "chain": ("rows", "first", "wide", "last", "layers", "off"),
    "recurrent": ("t", "b", "depth", "width"),
    "maps": ("n", "c", "h", "w", "off"),
}


def _fits(s: Sizes) -> bool:
    least = min(_out(s["h"], s), _out(s["w"], s), _out(s["w"], {**s, "k": 1, "p": 0, "q": 0}))
    return s["p"] < s["k"] + (s["k"] == 1) and least > 0


def _area(s: Sizes) -> int:
    return s["n"] * _out(s["h"], s) * _out(s["w"], s) * s["k"] ** 2


def _always(s: Sizes) -> bool:
    return True


def _gemv(net: Net, s: Sizes) -> onnx.ModelProto:
    return _matmul(net, {**s, "b": 1, "m": s["t"]})


def _volume(*names: str) -> Callable[[Sizes], int]:
    return lambda s: math.prod(s[n] for n in names)


KINDS: Mapping[str, NetKind] = {
    "conv": NetKind(
        _conv,
        (*AFTER, *IMAGE, "bias", "free", "square", "reader"),
        _fits,
        lambda s: max(_area(s) * s["c"] * s["m"] * s["g"], 50 * s["n"] * s["c"] * s["g"] * s["h"] * s["w"]),
    ),
    "depthwise": NetKind(_depthwise, (*AFTER, *IMAGE, "bias", "free"), _fits, lambda s: 40 * _area(s) * s["c"]),
    "transposed": NetKind(
        _transposed,
        (*AFTER, *IMAGE, "bias", "free"),
        lambda s: s["p"] < s["k"] and min(_back(s["h"], s), _back(s["w"], s)) > 0,
        lambda s: _volume("n", "c", "m")(s) * _back(s["h"], s) * _back(s["w"], s) * max(1, s["k"] // s["s"]) ** 2,
    ),
    "pool": NetKind(
        _pool,
        (*AFTER, *IMAGE, "average"),
        lambda s: _fits({**s, "d": 1}) and s["p"] < s["k"] and s["q"] < s["k"],
        lambda s: 40 * _area({**s, "d": 1}) * s["c"],
    ),
    "matmul": NetKind(
        _matmul,
        (*AFTER, *IMAGE, "bias", "free", "own", "turn", "turnb", "reader", "left"),
        _always,
        _volume("b", "m", "depth", "width"),
    ),
    "iconv": NetKind(
        _integer_conv, (*AFTER, *CODED), _fits, lambda s: max(_area(s) * s["c"] * s["m"] * s["g"], 50 * s["n"] * s["c"] * s["g"])
    ),
    "imatmul": NetKind(_integer_matmul, (*AFTER, *CODED), _always, _volume("b", "m", "depth", "width")),
    "stored": NetKind(
        _stored,
        (*AFTER, *IMAGE, "bias", "signed", "moved", "column", "turnb", "half"),
        lambda s: s["depth"] * s["width"] >= LEAST,
        _volume("b", "m", "depth", "width"),
    ),
    "gemv": NetKind(_gemv, (*AFTER, "slice", "bias", "free", "turnb", "reader"), _always, _volume("t", "depth", "width")),
    "attention": NetKind(
        _attention,
        (*AFTER, "packed", "mask", "merge"),
        _always,
        lambda s: 2 * s["n"] * s["heads"] * s["m"] * max(s["keys"], s["m"]) * s["depth"],
    ),
    "rows": NetKind(
        _rows,
        ("add", "slice", "norm", "log", "across", "arg", "mean", "reader", "bn"),
        _always,
        lambda s: 40 * s["b"] * s["m"] * s["depth"],
    ),
    "stitched": NetKind(
        _stitched,
        ("add", "slice", "tanh", "keep", "norm", "dims", "var", "max", "min", "sum", "square", "less"),
        _always,
        lambda s: 40 * s["b"] * s["m"] * s["depth"],
    ),
    "chain": NetKind(_chain, AFTER, _always, lambda s: s["rows"] * max(s["first"], s["wide"], s["last"]) * s["layers"]),
    "recurrent": NetKind(_recurrent, ("gru",), _always, lambda s: 40 * s["t"] * s["b"] * s["width"] * (s["depth"] + s["width"])),
    "maps": NetKind(
        _maps,
        (*AFTER, "slice", "turn", "take", "resize", "padded", "flat"),
        _always,
        lambda s: 120 * _volume("n", "c", "h", "w")(s),
    ),
}


def model_of(kind: str, sizes: Sizes, tags: Collection[str], seed: int) -> onnx.ModelProto:
    """Return the model of a case; constants depend on ``seed``."""
    return KINDS[kind].build(Net(tags, np.random.default_rng(seed)), sizes)
