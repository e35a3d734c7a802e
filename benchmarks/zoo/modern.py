"""EfficientNet-B0 and ConvNeXt-T image classifiers."""

from __future__ import annotations

import math

import onnx

from zoo.net import Net
from zoo.tokens import layer_norm, linear


def swish(net: Net, x: str) -> str:
    """Emit ``x * sigmoid(x)``."""
    return net.map("Mul", x, net.map("Sigmoid", x))


def _excited(net: Net, x: str, squeezed: int) -> str:
    """Emit squeeze and excitation."""
    n, c = net.shape(x)[:2]
    mean = net.node("GlobalAveragePool", [x], (n, c, 1, 1))
    inner = swish(net, net.conv(mean, squeezed, bias=True))
    return net.map("Mul", x, net.map("Sigmoid", net.conv(inner, c, bias=True)))


#: EfficientNet-B0's stages: expansion, kernel, stride, channels, blocks (Tan and Le, table 1).
_STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


def efficientnet_b0(seed: int, batch: int = 1, size: int = 224, part: int = 1, classes: int = 1000) -> onnx.ModelProto:
    """Return EfficientNet-B0, 224x224, 1,000 classes; logits.

    ``part`` divides all channel counts. Tan and Le, arXiv 1905.11946."""
    net = Net("efficientnet_b0", seed, epsilon=1e-3)
    x = swish(net, net.norm(net.conv(net.input("image", (batch, 3, size, size)), 32 // part, 3, 2)))
    for expansion, kernel, first, channels, blocks in _STAGES:
        for block in range(blocks):
            stride, came = first if block == 0 else 1, net.shape(x)[1]
            y = x if expansion == 1 else swish(net, net.norm(net.conv(x, came * expansion)))
            width = came * expansion
            y = swish(net, net.norm(net.conv(y, width, kernel, stride, groups=width)))
            y = net.norm(net.conv(_excited(net, y, max(1, came // 4)), channels // part))
            x = net.map("Add", y, x) if stride == 1 and came == channels // part else y
    return net.finish(net.classifier(swish(net, net.norm(net.conv(x, 1280 // part))), classes), fit=True)


def norm_of_channels(net: Net, x: str) -> str:
    """Emit a layer norm over the channels of an image."""
    return net.transpose(layer_norm(net, net.transpose(x, (0, 2, 3, 1)), 1e-6), (0, 3, 1, 2))


def convnext_t(
    seed: int, batch: int = 1, size: int = 224, width: int = 96, depths: tuple[int, ...] = (3, 3, 9, 3), classes: int = 1000
) -> onnx.ModelProto:
    """Return ConvNeXt-T, 224x224; logits. Liu et al., arXiv 2201.03545."""
    net = Net("convnext_t", seed)
    x = net.conv(net.input("image", (batch, 3, size, size)), width, 4, 4, 0, bias=True)
    x = norm_of_channels(net, x)
    for stage, blocks in enumerate(depths):
        channels = width << stage
        if stage:
            x = net.conv(norm_of_channels(net, x), channels, 2, 2, 0, bias=True)
        for _ in range(blocks):
            y = net.transpose(net.conv(x, channels, 7, groups=channels, bias=True), (0, 2, 3, 1))
            y = net.map("Gelu", linear(net, layer_norm(net, y, 1e-6), 4 * channels, 2.0))
            y = net.map("Mul", linear(net, y, channels), net.normal((channels,), 0.1, "layer_scale", 0.5))
            x = net.map("Add", x, net.transpose(y, (0, 3, 1, 2)))
    n, c = net.shape(x)[:2]
    pooled = layer_norm(net, net.transpose(net.node("GlobalAveragePool", [x], (n, c, 1, 1)), (0, 2, 3, 1)), 1e-6)
    flat = net.node("Flatten", [pooled], (n, c), axis=1)
    weight, bias = net.normal((classes, c), math.sqrt(2 / c), "w"), net.normal((classes,), 0.1, "b")
    return net.finish(net.node("Gemm", [flat, weight, bias], (n, classes), transB=1), fit=False)
