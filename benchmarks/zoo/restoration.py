"""Models that restore images, NAFNet, Restormer and BSRN, and MobileViT-S, which combines convolutions with attention.

They are Welder's models (OSDI'23, table 2) whose fusions cross depthwise convolutions, gates and norms of channels."""

from __future__ import annotations

import numpy as np
import onnx

from zoo.modern import norm_of_channels, swish
from zoo.net import Net
from zoo.tokens import attention, layer_norm, linear


def _halves(net: Net, x: str) -> list[str]:
    n, c, h, w = net.shape(x)
    return net.node_of("Split", [x], [(n, c // 2, h, w)] * 2, axis=1, num_outputs=2)


def _gate(net: Net, x: str) -> str:
    return net.map("Mul", *_halves(net, x))


def _larger(net: Net, x: str, factor: int) -> str:
    """Emit a pixel shuffle: ``factor`` squared channels become neighbours."""
    n, c, h, w = net.shape(x)
    return net.node("DepthToSpace", [x], (n, c // factor**2, h * factor, w * factor), blocksize=factor, mode="CRD")


def _smaller(net: Net, x: str, factor: int) -> str:
    """Emit the inverse of a pixel shuffle."""
    n, c, h, w = net.shape(x)
    cut = net.transpose(net.reshape(x, (n, c, h // factor, factor, w // factor, factor)), (0, 1, 3, 5, 2, 4))
    return net.reshape(cut, (n, c * factor**2, h // factor, w // factor))


def _mean(net: Net, x: str) -> str:
    n, c = net.shape(x)[:2]
    return net.node("GlobalAveragePool", [x], (n, c, 1, 1))


def _naf_block(net: Net, x: str) -> str:
    """Emit a block without activations: gated depthwise convolution with channel attention, then a gated feed-forward layer."""
    c = net.shape(x)[1]
    y = _gate(net, net.conv(net.conv(norm_of_channels(net, x), 2 * c, bias=True), 2 * c, 3, groups=2 * c, bias=True))
    y = net.conv(net.map("Mul", y, net.conv(_mean(net, y), c, bias=True)), c, bias=True)
    x = net.map("Add", x, net.map("Mul", y, net.normal((1, c, 1, 1), 0.1, "beta", 0.3)))
    y = net.conv(_gate(net, net.conv(norm_of_channels(net, x), 2 * c, bias=True)), c, bias=True)
    return net.map("Add", x, net.map("Mul", y, net.normal((1, c, 1, 1), 0.1, "gamma", 0.3)))


def nafnet(
    seed: int, batch: int = 1, size: int = 256, width: int = 16, depths: tuple[int, ...] = (2, 2, 4, 8, 12), up: int = 2
) -> onnx.ModelProto:
    """Return NAFNet of ``width`` channels, 256x256, 36 blocks; the restored image. ``depths`` are blocks of the levels down, the
    last one the lowest; ``up`` those of each level up. Chen et al., arXiv 2204.04676."""
    net = Net("nafnet", seed)
    image = net.input("image", (batch, 3, size, size))
    x, skipped = net.conv(image, width, 3, bias=True), list[str]()
    for level, blocks in enumerate(depths):
        if level:
            skipped.append(x)
            x = net.conv(x, 2 * net.shape(x)[1], 2, 2, 0, bias=True)
        for _ in range(blocks):
            x = _naf_block(net, x)
    for skip in reversed(skipped):
        x = net.map("Add", _larger(net, net.conv(x, 2 * net.shape(x)[1]), 2), skip)
        for _ in range(up):
            x = _naf_block(net, x)
    return net.finish(net.map("Add", net.conv(x, 3, 3, bias=True), image), fit=False)


def _channel_attention(net: Net, x: str, heads: int) -> str:
    """Emit attention between channels (Restormer, section 3.1): rows of queries and keys have unit length."""
    n, c, h, w = net.shape(x)
    packed = net.conv(net.conv(x, 3 * c), 3 * c, 3, groups=3 * c)
    rows = (n, heads, c // heads, h * w)
    q, k, v = (net.reshape(t, rows) for t in net.node_of("Split", [packed], [(n, c, h, w)] * 3, axis=1, num_outputs=3))
    small = net.constant(np.array(1e-12, np.float32), "least")
    q, k = (
        net.map("Div", t, net.map("Max", net.node("ReduceL2", [t, net.integers([3])], (*rows[:3], 1), keepdims=1), small))
        for t in (q, k)
    )
    scores = net.node("MatMul", [q, net.transpose(k, (0, 1, 3, 2))], (n, heads, c // heads, c // heads))
    shares = net.map("Softmax", net.map("Mul", scores, net.normal((heads, 1, 1), 0.1, "temperature", 1.0)), axis=-1)
    return net.conv(net.reshape(net.node("MatMul", [shares, v], rows), (n, c, h, w)), c)


def _restormer_block(net: Net, x: str, heads: int) -> str:
    c = net.shape(x)[1]
    x = net.map("Add", x, _channel_attention(net, norm_of_channels(net, x), heads))
    inner = 2 * int(2.66 * c)
    a, b = _halves(net, net.conv(net.conv(norm_of_channels(net, x), inner), inner, 3, groups=inner))
    return net.map("Add", x, net.conv(net.map("Mul", net.map("Gelu", a), b), c))


def restormer(
    seed: int, batch: int = 1, size: int = 256, width: int = 48, depths: tuple[int, ...] = (4, 6, 6, 8), refinement: int = 4
) -> onnx.ModelProto:
    """Return Restormer, 256x256; the restored image. Zamir et al., arXiv 2111.09881."""
    net = Net("restormer", seed)
    image = net.input("image", (batch, 3, size, size))
    x, skipped = net.conv(image, width, 3), list[str]()
    for level, blocks in enumerate(depths):
        for _ in range(blocks):
            x = _restormer_block(net, x, 1 << level)
        if level < len(depths) - 1:
            skipped.append(x)
            x = _smaller(net, net.conv(x, net.shape(x)[1] // 2, 3), 2)
    for level in range(len(depths) - 2, -1, -1):
        x = _larger(net, net.conv(x, 2 * net.shape(x)[1], 3), 2)
        x = net.concat([x, skipped[level]])
        x = net.conv(x, width << level) if level else x
        for _ in range(depths[level]):
            x = _restormer_block(net, x, 1 << level)
    for _ in range(refinement):
        x = _restormer_block(net, x, 1)
    return net.finish(net.map("Add", net.conv(x, 3, 3), image), fit=False)


def _blueprint(net: Net, x: str, channels: int, stride: int = 1, pads: int | None = None) -> str:
    """Emit a blueprint separable convolution: pointwise, then depthwise 3x3."""
    return net.conv(net.conv(x, channels), channels, 3, stride, pads, groups=channels, bias=True)


def _spatial_attention(net: Net, x: str) -> str:
    """Emit enhanced spatial attention: a mask from a coarse image with a large field of view."""
    c, (height, width) = net.shape(x)[1], net.shape(x)[2:]
    f = c // 4
    first = net.conv(x, f, bias=True)
    coarse = net.pool(_blueprint(net, first, f, 2, 0), "MaxPool", 7, 3)
    coarse = net.map("Gelu", _blueprint(net, coarse, f))
    coarse = _blueprint(net, net.map("Gelu", _blueprint(net, coarse, f)), f)
    shape = (net.shape(x)[0], f, height, width)
    full = net.node("Resize", [coarse, "", "", net.integers(shape)], shape, mode="linear")
    return net.map("Mul", x, net.map("Sigmoid", net.conv(net.map("Add", full, net.conv(first, f, bias=True)), c, bias=True)))


def _contrast_attention(net: Net, x: str) -> str:
    """Emit channel attention by the sum of mean and standard deviation."""
    c, mean = net.shape(x)[1], _mean(net, x)
    centred = net.map("Sub", x, mean)
    spread = net.map("Sqrt", _mean(net, net.map("Mul", centred, centred)))
    inner = net.relu(net.conv(net.map("Add", spread, mean), c // 16, bias=True))
    return net.map("Mul", x, net.map("Sigmoid", net.conv(inner, c, bias=True)))


def _distilled_block(net: Net, x: str) -> str:
    c = net.shape(x)[1]
    kept, rest = list[str](), x
    for _ in range(3):
        kept.append(net.map("Gelu", net.conv(rest, c // 2, bias=True)))
        rest = net.map("Gelu", net.map("Add", _blueprint(net, rest, c), rest))
    kept.append(net.map("Gelu", _blueprint(net, rest, c // 2)))
    y = _contrast_attention(net, _spatial_attention(net, net.conv(net.concat(kept), c, bias=True)))
    return net.map("Add", y, x)


def bsrn(seed: int, batch: int = 1, size: int = 256, width: int = 64, blocks: int = 8) -> onnx.ModelProto:
    """Return BSRN, 256x256 to 1024x1024. Li et al., arXiv 2205.05996."""
    net = Net("bsrn", seed)
    image = net.input("image", (batch, 3, size, size))
    first = _blueprint(net, net.concat([image] * 4), width)
    x, found = first, list[str]()
    for _ in range(blocks):
        x = _distilled_block(net, x)
        found.append(x)
    fused = net.map("Gelu", net.conv(net.concat(found), width, bias=True))
    x = net.map("Add", _blueprint(net, fused, width), first)
    return net.finish(_larger(net, net.conv(x, 48, 3, bias=True), 4), fit=False)


def _inverted(net: Net, x: str, channels: int, stride: int = 1) -> str:
    came = net.shape(x)[1]
    y = swish(net, net.norm(net.conv(x, 4 * came)))
    y = swish(net, net.norm(net.conv(y, 4 * came, 3, stride, groups=4 * came)))
    y = net.norm(net.conv(y, channels))
    return net.map("Add", y, x) if stride == 1 and came == channels else y


def _vit_block(net: Net, x: str, width: int, layers: int) -> str:
    """Emit local convolutions, then attention between equal positions of all patches of 2x2 (MobileViT, section 3.1)."""
    n, c, h, w = net.shape(x)
    y = net.conv(swish(net, net.norm(net.conv(x, c, 3))), width)
    cut = net.reshape(y, (n, width, h // 2, 2, w // 2, 2))
    y = net.reshape(net.transpose(cut, (0, 3, 5, 2, 4, 1)), (4 * n, h * w // 4, width))
    for _ in range(layers):
        y = net.map("Add", y, attention(net, layer_norm(net, y, 1e-5), 4))
        inner = swish(net, linear(net, layer_norm(net, y, 1e-5), 2 * width, 2.0))
        y = net.map("Add", y, linear(net, inner, width))
    cut = net.reshape(layer_norm(net, y, 1e-5), (n, 2, 2, h // 2, w // 2, width))
    y = net.reshape(net.transpose(cut, (0, 5, 3, 1, 4, 2)), (n, width, h, w))
    y = swish(net, net.norm(net.conv(y, c)))
    return swish(net, net.norm(net.conv(net.concat([x, y]), c, 3)))


def mobilevit_s(seed: int, batch: int = 1, size: int = 256, part: int = 1, classes: int = 1000) -> onnx.ModelProto:
    """Return MobileViT-S, 256x256; logits. ``part`` divides all channel counts. Mehta and Rastegari, arXiv 2110.02178."""
    net = Net("mobilevit_s", seed)
    x = swish(net, net.norm(net.conv(net.input("image", (batch, 3, size, size)), 16 // part, 3, 2)))
    for channels, stride in ((32, 1), (64, 2), (64, 1), (64, 1)):
        x = _inverted(net, x, channels // part, stride)
    for channels, width, layers in ((96, 144, 2), (128, 192, 4), (160, 240, 3)):
        x = _vit_block(net, _inverted(net, x, channels // part, 2), width // part, layers)
    return net.finish(net.classifier(swish(net, net.norm(net.conv(x, 640 // part))), classes), fit=True)
