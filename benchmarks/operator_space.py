"""Seeded models of one operator (or one idiom of an exporter) over typical shapes, which ``operators.py`` times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import onnx

from rammer_testing.net import Net

T = TypeVar("T")
#: Products of the largest case, and elements of all its tensors.
MOST_PRODUCTS, MOST_ELEMENTS = 1.2e9, 8e6


class TooLarge(Exception):
    """Error for a drawn shape whose run is too slow."""


@dataclass(frozen=True)
class Case:
    """A drawn model; ``what`` lists all drawn values."""

    kind: str
    what: str
    model: onnx.ModelProto


@dataclass
class Draw:
    """A source of random choices from lists that records them as words."""

    rng: np.random.Generator
    words: list[str]

    def of(self, name: str, values: Sequence[T]) -> T:
        """Return one of ``values`` and record it."""
        value = values[int(self.rng.integers(len(values)))]
        self.words.append(f"{name}={value}".replace(" ", ""))
        return value


def check_size(products: float, *shapes: Sequence[int]) -> None:
    """Raise TooLarge for too many products or elements."""
    if products > MOST_PRODUCTS or sum(float(np.prod(s)) for s in shapes) > MOST_ELEMENTS:
        raise TooLarge


def _net(d: Draw) -> Net:
    return Net((), d.rng)


def _scaled(net: Net, *shape: int) -> str:
    """Return weights that keep sums of products near one."""
    return net.constant((net.rng.standard_normal(shape) / np.sqrt(max(1, np.prod(shape[1:])))).astype(np.float32))


SPATIAL = (7, 10, 14, 19, 28, 33, 56, 80, 112, 160, 224)
CHANNELS = (3, 8, 16, 24, 32, 48, 64, 96, 128, 144, 192, 256, 384, 512, 960, 1024, 2048)


def conv(d: Draw) -> onnx.ModelProto:
    """Return a Conv in NCHW, or between the Transposes of a channels-last export."""
    size, channels = d.of("hw", SPATIAL), d.of("c", CHANNELS)
    kernel, stride, dilation = d.of("k", (1, 1, 3, 3, 5, 7)), d.of("s", (1, 1, 2)), d.of("d", (1, 1, 2, 6, 12))
    groups = d.of("g", ("one", "one", "some", "depthwise"))
    outputs = channels if groups == "depthwise" else d.of("m", CHANNELS[1:])
    g = {"one": 1, "some": 4 if channels % 4 == 0 else 1, "depthwise": channels}[groups]
    batch, form = d.of("n", (1, 1, 1, 8)), d.of("form", ("nchw", "nchw", "nhwc"))
    dilation = dilation if kernel > 1 else 1
    out = -(-size // stride)
    check_size(
        batch * out**2 * outputs * channels // g * kernel**2, (batch, channels, size, size), (batch, outputs, out, out),
        (outputs, channels // g, kernel, kernel),
    )  # fmt: skip
    net = _net(d)
    x = net.input(batch, size, size, channels) if form == "nhwc" else net.input(batch, channels, size, size)
    x = net.node("Transpose", x, perm=[0, 3, 1, 2]) if form == "nhwc" else x
    pad = dilation * (kernel // 2)
    attributes = {"pads": [pad] * 4, "strides": [stride] * 2, "dilations": [dilation] * 2, "group": g}
    y = net.node("Conv", x, _scaled(net, outputs, channels // g, kernel, kernel), _scaled(net, outputs), **attributes)
    y = net.node(d.of("act", ("Relu", "Sigmoid", "Relu")), y)
    return net.model(net.node("Transpose", y, perm=[0, 2, 3, 1]) if form == "nhwc" else y)


#: Image sizes, channels, windows and strides of the depthwise convolutions of EfficientNet-B0, MobileNetV3 and ConvNeXt-T.
DEPTHWISE = (
    (112, 32, 3, 1), (112, 96, 3, 2), (56, 144, 3, 1), (56, 144, 5, 2), (28, 240, 5, 1), (28, 240, 3, 2), (14, 480, 3, 1),
    (14, 480, 5, 1), (14, 672, 5, 1), (14, 672, 5, 2), (7, 1152, 5, 1), (7, 1152, 3, 1), (112, 16, 3, 1), (112, 64, 3, 2),
    (56, 72, 3, 1), (56, 72, 5, 2), (28, 120, 5, 1), (14, 184, 3, 1), (7, 960, 5, 1), (56, 96, 7, 1), (28, 192, 7, 1),
    (14, 384, 7, 1), (7, 768, 7, 1),
)  # fmt: skip


def depthwise(d: Draw) -> onnx.ModelProto:
    """Return a depthwise convolution of a current image model, followed by its activation."""
    size, channels, kernel, stride = d.of("hw,c,k,s", DEPTHWISE)
    net, batch = _net(d), d.of("n", (1, 1, 1, 4))
    nhwc = d.of("form", ("nchw", "nchw", "nhwc")) == "nhwc"
    x = net.input(batch, size, size, channels) if nhwc else net.input(batch, channels, size, size)
    x = net.node("Transpose", x, perm=[0, 3, 1, 2]) if nhwc else x
    attributes = {"pads": [kernel // 2] * 4, "strides": [stride] * 2, "group": channels}
    y = net.node("Conv", x, _scaled(net, channels, 1, kernel, kernel), _scaled(net, channels), **attributes)
    y = net.node(d.of("act", ("Relu", "HardSwish")), y)
    return net.model(net.node("Transpose", y, perm=[0, 2, 3, 1]) if nhwc else y)


def conv_transpose(d: Draw) -> onnx.ModelProto:
    """Return an upsampling convolution (ConvTranspose)."""
    size, channels, outputs = d.of("hw", SPATIAL[:8]), d.of("c", CHANNELS[2:14]), d.of("m", CHANNELS[:12])
    kernel, stride = d.of("k", (2, 3, 4)), d.of("s", (1, 2, 2))
    check_size(size**2 * channels * outputs * kernel**2, (outputs, (size * stride) ** 2), (channels, size, size))
    net = _net(d)
    weights = _scaled(net, channels, outputs, kernel, kernel)
    return net.model(net.node("ConvTranspose", net.input(1, channels, size, size), weights, strides=[stride] * 2))


def pool(d: Draw) -> onnx.ModelProto:
    """Return a max, average or global pool."""
    op = d.of("op", ("MaxPool", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"))
    size, channels, batch = d.of("hw", SPATIAL), d.of("c", CHANNELS), d.of("n", (1, 1, 8))
    check_size(0, (batch, channels, size, size))
    net = _net(d)
    x = net.input(batch, channels, size, size)
    if op.startswith("Global"):
        return net.model(net.node(op, x))
    kernel, stride, padded = d.of("k", (2, 3, 5)), d.of("s", (1, 2, 2)), d.of("pad", (0, 1, 1))
    dilation = d.of("d", (1, 1, 2))
    attributes = {"pads": [padded * (kernel // 2)] * 4, "strides": [stride] * 2, "kernel_shape": [kernel] * 2}
    return net.model(net.node(op, x, dilations=[dilation] * 2, **attributes))


def matmul(d: Draw) -> onnx.ModelProto:
    """Return a MatMul or Gemm: skinny, tall or batched, with constant or variable weights."""
    op = d.of("op", ("MatMul", "MatMul", "Gemm", "batched"))
    sizes = (1, 2, 8, 16, 49, 64, 100, 197, 384, 512, 768, 1000, 1024, 3072, 4096)
    m, k, n = d.of("m", sizes), d.of("k", sizes[2:]), d.of("n", sizes)
    heads = d.of("b", (4, 12, 96)) if op == "batched" else 1
    check_size(heads * m * k * n, (heads, m, k), (heads, k, n), (heads, m, n))
    net = _net(d)
    if op == "batched":
        swap = d.of("transposed", (False, True))
        b = net.input(1, heads, n, k) if swap else net.input(1, heads, k, n)
        b = net.node("Transpose", b, perm=[0, 1, 3, 2]) if swap else b
        return net.model(net.node("MatMul", net.input(1, heads, m, k), b))
    known = d.of("known", (True, True, False))
    trans = d.of("transB", (0, 1)) if op == "Gemm" else 0
    shape = (n, k) if trans else (k, n)
    b = _scaled(net, *shape) if known else net.input(*shape)
    if op == "Gemm":
        return net.model(net.node("Gemm", net.input(m, k), b, _scaled(net, n), transB=trans))
    return net.model(net.node("MatMul", net.input(1, m, k), b))


def _tensor(d: Draw) -> tuple[int, ...]:
    """Return the shape of an activation."""
    shapes = (
        (1, 128, 768), (1, 384, 1024), (8, 197, 384), (1, 64, 56, 56), (1, 256, 28, 28), (1, 12, 128, 128), (1, 32, 112, 112),
        (1, 3, 224, 224), (64, 1000), (1, 1000), (4096, 64), (8, 64, 56, 56), (1, 2048, 7, 7), (1, 56, 56, 64),
    )  # fmt: skip
    return d.of("shape", shapes)


def reduction(d: Draw) -> onnx.ModelProto:
    """Return a reduction over the last, the first, middle or several axes."""
    op = d.of("op", ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2", "ArgMax", "CumSum", "ReduceProd"))
    shape, net = _tensor(d), _net(d)
    rank = len(shape)
    axes = d.of("axes", ([rank - 1], [rank - 1], [1], [0, rank - 1], list(range(rank))))
    x = net.input(*shape)
    if op == "ArgMax":
        return net.model(net.node(op, x, axis=axes[-1]))
    if op == "CumSum":
        return net.model(net.node(op, x, net.constant(np.array(axes[-1], np.int64))))
    return net.model(net.node(op, x, net.constant(np.array(axes, np.int64)), keepdims=1))


def normalisation(d: Draw) -> onnx.ModelProto:
    """Return a Softmax or a normalisation."""
    op = d.of("op", ("Softmax", "Softmax", "LogSoftmax", "LayerNormalization", "InstanceNormalization", "GroupNorm", "Lp"))
    shape, net = _tensor(d), _net(d)
    x, rank = net.input(*shape), len(shape)
    if op.endswith("Softmax") or op == "Softmax":
        return net.model(net.node(op, x, axis=d.of("axis", (-1, -1, 1))))
    if op == "LayerNormalization":
        axis = d.of("axis", (-1, -1, 1))
        sides = shape[axis:]
        return net.model(net.node(op, x, net.some(*sides), net.some(*sides), axis=axis))
    if op == "Lp" or rank < 3:
        return net.model(net.node("LpNormalization", x, axis=d.of("axis", (-1, 1)), p=2))
    if op == "GroupNorm" and shape[1] % 4 == 0:
        sides = [net.some(shape[1]) for _ in range(2)]
        return net.model(net.node("GroupNormalization", x, *sides, num_groups=4))
    return net.model(net.node("InstanceNormalization", x, net.some(shape[1]), net.some(shape[1])))


def resize(d: Draw) -> onnx.ModelProto:
    """Return nearest, linear or cubic resizing, up or down."""
    mode = d.of("mode", ("nearest", "linear", "linear", "cubic"))
    place = d.of("coords", ("asymmetric", "half_pixel", "align_corners"))
    size, channels, scale = d.of("hw", SPATIAL[:9]), d.of("c", CHANNELS[:12]), d.of("scale", (0.5, 2, 2, 4, 1.7))
    check_size(0, (channels, size, size), (channels, int(size * scale), int(size * scale)))
    net = _net(d)
    scales = net.constant(np.array([1, 1, scale, scale], np.float32))
    more = {"nearest_mode": "floor"} if mode == "nearest" else {}
    x = net.input(1, channels, size, size)
    return net.model(net.node("Resize", x, "", scales, mode=mode, coordinate_transformation_mode=place, **more))


def _transpose(net: Net, d: Draw, x: str, shape: tuple[int, ...]) -> str:
    return net.node("Transpose", x, perm=[int(i) for i in d.of("perm", [tuple(d.rng.permutation(len(shape))) for _ in range(2)])])


def _concat(net: Net, d: Draw, x: str, shape: tuple[int, ...]) -> str:
    axis = d.of("axis", range(len(shape)))
    return net.node("Concat", x, net.input(*shape), net.node("Relu", x), axis=axis)


def _split(net: Net, d: Draw, x: str, shape: tuple[int, ...]) -> str:
    even = [i for i, n in enumerate(shape) if n % 2 == 0]
    axis = d.of("axis", even)
    net.nodes.append(onnx.helper.make_node("Split", [x], ["left", "right"], axis=axis, num_outputs=2))
    net.outputs.append("left")
    return net.node("Neg", "right")


def _pad(net: Net, d: Draw, x: str, shape: tuple[int, ...]) -> str:
    mode = d.of("mode", ("constant", "reflect", "edge"))
    pads = [0] * (len(shape) - 2) + [2, 3]
    return (
        net.node("Pad", x, net.constant(np.array(pads * 2, np.int64)), mode=mode) if min(shape[-2:]) > 3 else net.node("Neg", x)
    )


def _gather(net: Net, d: Draw, x: str, shape: tuple[int, ...]) -> str:
    axis = d.of("axis", range(len(shape)))
    count = d.of("count", (shape[axis], max(1, shape[axis] // 3)))
    return net.node("Gather", x, net.constant(d.rng.integers(0, shape[axis], count)), axis=axis)


def _gather_elements(net: Net, d: Draw, x: str, shape: tuple[int, ...]) -> str:
    axis = d.of("axis", range(len(shape)))
    return net.node("GatherElements", x, net.constant(d.rng.integers(0, shape[axis], shape)), axis=axis)


def _scatter(net: Net, d: Draw, x: str, shape: tuple[int, ...]) -> str:
    places = net.constant(d.rng.permutation(shape[0])[: max(1, shape[0] // 2)].reshape(-1, 1))
    return net.node("ScatterND", x, places, net.input(max(1, shape[0] // 2), *shape[1:]))


def _slice(net: Net, d: Draw, x: str, shape: tuple[int, ...]) -> str:
    axis, step = d.of("axis", range(len(shape))), d.of("step", (1, 2, -1))
    start, end = (0, shape[axis]) if step > 0 else (-1, -shape[axis] - 1)
    one = [net.constant(np.array([v], np.int64)) for v in (start, end, axis, step)]
    return net.node("Slice", x, *one)


def _shuffle(net: Net, d: Draw, x: str, shape: tuple[int, ...]) -> str:
    if len(shape) != 4 or shape[1] % 4:
        return net.node("Expand", net.node("Neg", x), net.constant(np.array((2, *shape), np.int64)))
    return net.node("DepthToSpace", x, blocksize=2, mode=d.of("mode", ("DCR", "CRD")))


def _tile(net: Net, d: Draw, x: str, shape: tuple[int, ...]) -> str:
    return net.node("Tile", x, net.constant(np.array([1] * (len(shape) - 1) + [2], np.int64)))


MOVES: Mapping[str, Callable[[Net, Draw, str, tuple[int, ...]], str]] = {
    "Transpose": _transpose, "Concat": _concat, "Split": _split, "Pad": _pad, "Gather": _gather, "Slice": _slice,
    "GatherElements": _gather_elements, "ScatterND": _scatter, "Shuffle": _shuffle, "Tile": _tile,
}  # fmt: skip


def move(d: Draw) -> onnx.ModelProto:
    """Return an operator that only moves elements."""
    op, shape, net = d.of("op", list(MOVES)), _tensor(d), _net(d)
    return net.model(MOVES[op](net, d, net.input(*shape), shape))


def recurrent(d: Draw) -> onnx.ModelProto:
    """Return an LSTM or a GRU."""
    op, steps, batch = d.of("op", ("LSTM", "GRU", "RNN")), d.of("t", (1, 10, 32, 100)), d.of("n", (1, 1, 8))
    hidden, inputs, ways = d.of("h", (32, 64, 128, 256)), d.of("i", (16, 64, 256)), d.of("ways", (1, 1, 2))
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    check_size(steps * batch * ways * gates * hidden * (hidden + inputs))
    net = _net(d)
    parts = [_scaled(net, ways, gates * hidden, n) for n in (inputs, hidden)]
    more: dict[str, Any] = {"linear_before_reset": 1} if op == "GRU" else {}
    way = "bidirectional" if ways == 2 else "forward"
    return net.model(net.node(op, net.input(steps, batch, inputs), *parts, hidden_size=hidden, direction=way, **more))


UNARY = (
    "Relu",
    "Sigmoid",
    "Tanh",
    "Exp",
    "Erf",
    "Sqrt",
    "Abs",
    "HardSwish",
    "Gelu",
    "LeakyRelu",
    "Clip",
    "Softplus",
    "Floor",
    "Log",
)


def elementwise(d: Draw) -> onnx.ModelProto:
    """Return a chain of maps with broadcast operands."""
    shape, net = _tensor(d), _net(d)
    x, rank = net.input(*shape), len(shape)
    for _ in range(d.of("length", (1, 1, 2, 4))):
        if d.of("binary", (False, True)):
            side = [n if d.rng.integers(2) else 1 for n in shape]
            d.words.append(f"side={side}".replace(" ", ""))
            other = net.input(*side) if d.of("known", (False, True)) is False else net.some(*side)
            x = net.node(d.of("op", ("Add", "Mul", "Sub", "Div", "Max", "Pow")), x, other)
        else:
            x = net.node(d.of("op", UNARY[:12]), x)
    return net.model(x if net.nodes and rank else net.node("Neg", x))


KINDS: Mapping[str, Callable[[Draw], onnx.ModelProto]] = {
    "conv": conv, "conv_transpose": conv_transpose, "pool": pool, "matmul": matmul, "reduction": reduction,
    "normalisation": normalisation, "resize": resize, "move": move, "recurrent": recurrent, "elementwise": elementwise,
    "depthwise": depthwise,
}  # fmt: skip
#: Relative frequency of each kind.
SHARES = {"conv": 8, "matmul": 3, "move": 3, "pool": 2, "elementwise": 2}


def drawn(kind: str, seed: int, number: int) -> Case:
    """Return case ``number`` of a kind, determined by the seed and independent of other draws."""
    for attempt in range(10_000):
        rng = np.random.default_rng([seed, number, attempt, list(KINDS).index(kind)])
        d = Draw(rng, [])
        try:
            model = KINDS[kind](d)
        except TooLarge:
            continue
        return Case(kind, " ".join(d.words), model)
    raise AssertionError(f"{kind}: nothing small enough in 10,000 draws")
