"""Models of speech and of lines of text: DeepSpeech2, QuartzNet, Conformer, CRNN."""

from __future__ import annotations

import math

import numpy as np
import onnx

from zoo.modern import swish
from zoo.net import Net
from zoo.tokens import heads_of, layer_norm, linear, merged, scaled


def _recurrent(net: Net, x: str, hidden: int, directions: int = 1) -> str:
    """Emit an LSTM layer over (steps, batch, width); outputs of both directions are concatenated."""
    steps, batch, width = net.shape(x)
    weights = [net.normal((directions, 4 * hidden, n), 1.5 / math.sqrt(n), "w") for n in (width, hidden)]
    operands = [x, *weights, net.normal((directions, 8 * hidden), 0.1, "b")]
    way = {"direction": "bidirectional"} if directions == 2 else {}
    (y,) = net.node_of("LSTM", operands, [(steps, directions, batch, hidden)], hidden_size=hidden, **way)
    if directions == 1:
        return net.node("Squeeze", [y, net.integers([1], "axis")], (steps, batch, hidden))
    return net.reshape(net.transpose(y, (0, 2, 1, 3)), (steps, batch, directions * hidden))


def deepspeech2(
    seed: int,
    batch: int = 1,
    frames: int = 300,
    bins: int = 171,
    channels: int = 32,
    hidden: int = 256,
    layers: int = 7,
    kernels: tuple[tuple[int, int], ...] = ((41, 11), (21, 11)),
) -> onnx.ModelProto:
    """Return DeepSpeech2 as Rammer measured it; logits. It has two convolutions, seven unidirectional LSTM layers of 256, 75
    steps, 29 letters. Batch norm and a ReLU clipped at 20 follow each convolution, as in Amodei et al., arXiv 1512.02595."""
    net = Net("deepspeech2", seed)
    x = net.input("spectrogram", (batch, 1, frames, bins))
    for kernel, stride in zip(kernels, ((2, 2), (2, 1)), strict=True):
        x = net.norm(net.conv(x, channels, kernel, stride))
        x = net.map("Clip", x, *(net.constant(np.array(v, np.float32), "limit") for v in (0.0, 20.0)))
    _, c, steps, width = net.shape(x)
    x = net.reshape(net.transpose(x, (2, 0, 1, 3)), (steps, batch, c * width))
    for _ in range(layers):
        x = _recurrent(net, x, hidden)
    return net.finish(linear(net, x, 29), fit=True)


def _separable(net: Net, x: str, channels: int, kernel: int, stride: int = 1, dilation: int = 1) -> str:
    """Emit one filter per channel along time, a 1x1 convolution and batch norm."""
    y = net.conv(x, net.shape(x)[1], (1, kernel), (1, stride), (0, dilation * (kernel // 2)), net.shape(x)[1], dilation=dilation)
    return net.norm(net.conv(y, channels))


def quartznet(
    seed: int, batch: int = 1, frames: int = 800, part: int = 1, repeats: int = 3, inner: int = 5, labels: int = 29
) -> onnx.ModelProto:
    """Return QuartzNet-15x5, an acoustic model of separable convolutions along time, 64 features per frame; logits. ``part``
    divides all channel counts. Kriman et al., arXiv 1910.10261, table 1."""
    # 79 norms in sequence amplify float32's rounding to 1.1e-4 with the usual shift, and to 1e-5 with this one.
    net = Net("quartznet", seed, epsilon=1e-3, shift=1.0)
    x = net.relu(_separable(net, net.input("features", (batch, 64, 1, frames)), 256 // part, 33, 2))
    for channels, kernel in ((256, 33), (256, 39), (512, 51), (512, 63), (512, 75)):
        for _ in range(repeats):
            around = net.norm(net.conv(x, channels // part))
            for number in range(inner):
                x = _separable(net, x, channels // part, kernel)
                x = net.relu(x if number < inner - 1 else net.map("Add", x, around))
    x = net.relu(_separable(net, x, 512 // part, 87, dilation=2))
    x = net.relu(net.norm(net.conv(x, 1024 // part)))
    return net.finish(net.conv(x, labels, bias=True), fit=True)


def _half_step(net: Net, x: str) -> str:
    """Emit x + feed-forward(x) / 2."""
    width = net.shape(x)[-1]
    inner = swish(net, linear(net, layer_norm(net, x, 1e-5), 4 * width, 2.0))
    return net.map("Add", x, net.map("Mul", linear(net, inner, width), net.constant(np.array(0.5, np.float32), "half")))


def _shifted(net: Net, x: str) -> str:
    """Convert scores by distance to scores by position: row i starts ``i`` positions further left. The input is (n, heads,
    tokens, 2 tokens - 1)."""
    n, heads, tokens, wide = net.shape(x)
    pads, zero = net.integers([0, 0, 0, 1, 0, 0, 0, 0], "pads"), net.constant(np.array(0.0, np.float32), "zero")
    x = net.reshape(net.node("Pad", [x, pads, zero], (n, heads, tokens, wide + 1)), (n, heads, wide + 1, tokens))
    x = net.node("Slice", [x, *(net.integers([v]) for v in (1, wide + 1, 2))], (n, heads, wide, tokens))
    x = net.reshape(x, (n, heads, tokens, wide))
    return net.node("Slice", [x, *(net.integers([v]) for v in (0, tokens, 3))], (n, heads, tokens, tokens))


def _distances(net: Net, tokens: int, width: int) -> str:
    """Emit sinusoids of the distances tokens - 1 to 1 - tokens. They are float64, so that parameter counts exclude them."""
    places = np.arange(tokens - 1, -tokens, -1)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
    table = net.constant(np.concatenate([np.sin(places), np.cos(places)], 1)[None], "distances")
    return net.node("Cast", [table], net.shape(table), to=onnx.TensorProto.FLOAT)


def _relative_attention(net: Net, x: str, heads: int) -> str:
    """Emit self-attention with Transformer-XL's relative positions."""
    n, tokens, width = net.shape(x)
    size = width // heads
    q = heads_of(net, linear(net, x, width), heads, (0, 2, 1, 3))
    k = heads_of(net, linear(net, x, width), heads, (0, 2, 3, 1))
    v = heads_of(net, linear(net, x, width), heads, (0, 2, 1, 3))
    distances = linear(net, _distances(net, tokens, width), width, bias=False)
    far = heads_of(net, distances, heads, (0, 2, 3, 1))
    biases = [net.normal((heads, 1, size), 0.1, name) for name in ("content", "position")]
    content = net.node("MatMul", [net.map("Add", q, biases[0]), k], (n, heads, tokens, tokens))
    position = net.node("MatMul", [net.map("Add", q, biases[1]), far], (n, heads, tokens, 2 * tokens - 1))
    scores = scaled(net, net.map("Add", content, _shifted(net, position)), size)
    return merged(net, net.map("Softmax", scores, axis=-1), v)


def _convolution(net: Net, x: str, kernel: int) -> str:
    """Emit pointwise with a gate, convolution along time, batch norm, pointwise."""
    n, tokens, width = net.shape(x)
    y = linear(net, layer_norm(net, x, 1e-5), 2 * width)
    halves = net.node_of("Split", [y], [(n, tokens, width)] * 2, axis=-1, num_outputs=2)
    y = net.map("Mul", halves[0], net.map("Sigmoid", halves[1]))
    y = net.reshape(net.transpose(y, (0, 2, 1)), (n, width, 1, tokens))
    y = swish(net, net.norm(net.conv(y, width, (1, kernel), 1, (0, kernel // 2), width, bias=True)))
    return linear(net, net.transpose(net.reshape(y, (n, width, tokens)), (0, 2, 1)), width)


def conformer(
    seed: int, batch: int = 1, frames: int = 512, layers: int = 12, width: int = 512, heads: int = 8, kernel: int = 31
) -> onnx.ModelProto:
    """Return Conformer blocks over 512 frames. A block is half a feed-forward step, attention with relative positions,
    convolution and the other half. Gulati et al., arXiv 2005.08100; 12 layers of 512, 8 heads, as Welder measured it."""
    net = Net("conformer", seed)
    x = net.input("frames", (batch, frames, width))
    for _ in range(layers):
        x = _half_step(net, x)
        x = net.map("Add", x, _relative_attention(net, layer_norm(net, x, 1e-5), heads))
        x = net.map("Add", x, _convolution(net, x, kernel))
        x = layer_norm(net, _half_step(net, x), 1e-5)
    return net.finish(x, fit=True)


def crnn(seed: int, batch: int = 1, width: int = 100, channels: int = 64, hidden: int = 256, labels: int = 37) -> onnx.ModelProto:
    """Return CRNN: convolutions over a line of text, 32 pixels high, two bidirectional LSTM layers; logits. Shi et al., arXiv
    1507.05717."""
    net = Net("crnn", seed)
    x = net.input("line", (batch, 1, 32, width))
    for number, factor in enumerate((1, 2, 4, 4, 8, 8)):
        x = net.conv(x, factor * channels, 3, bias=True)
        x = net.relu(net.norm(x) if number in (2, 4) else x)
        if number in (0, 1):
            x = net.pool(x, "MaxPool", 2, 2)
        elif number in (3, 5):
            x = net.pool(x, "MaxPool", (2, 2), (2, 1), (0, 1, 0, 1))
    x = net.relu(net.norm(net.conv(x, 8 * channels, 2, 1, 0, bias=True)))
    n, c, _, steps = net.shape(x)
    x = net.transpose(net.reshape(x, (n, c, steps)), (2, 0, 1))
    x = linear(net, _recurrent(net, x, hidden, 2), hidden)
    return net.finish(linear(net, _recurrent(net, x, hidden, 2), labels), fit=True)
