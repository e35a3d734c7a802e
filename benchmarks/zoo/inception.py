"""Inception V3 (Szegedy et al., arXiv 1512.00567), as torchvision builds it, without the auxiliary classifier."""

from __future__ import annotations

import onnx

from zoo.net import Net


def _unit(
    net: Net, x: str, channels: int, kernel: int | tuple[int, int] = 1, stride: int = 1, pads: int | tuple[int, int] | None = None
) -> str:
    return net.relu(net.norm(net.conv(x, channels // net.part, kernel, stride, pads)))


def _pooled(net: Net, x: str, channels: int) -> str:
    """Emit a 3x3 average (padding counted) and a 1x1 convolution."""
    return _unit(net, net.pool(x, "AveragePool", 3, 1, 1, count_padding=True), channels)


def _mixed_a(net: Net, x: str, pool: int) -> str:
    five = _unit(net, _unit(net, x, 48), 64, 5)
    double = _unit(net, _unit(net, _unit(net, x, 64), 96, 3), 96, 3)
    return net.concat([_unit(net, x, 64), five, double, _pooled(net, x, pool)])


def _reduce_a(net: Net, x: str) -> str:
    double = _unit(net, _unit(net, _unit(net, x, 64), 96, 3), 96, 3, 2, 0)
    return net.concat([_unit(net, x, 384, 3, 2, 0), double, net.pool(x, "MaxPool", 3, 2)])


def _mixed_b(net: Net, x: str, width: int) -> str:
    seven = _unit(net, _unit(net, _unit(net, x, width), width, (1, 7)), 192, (7, 1))
    double = _unit(net, x, width)
    for channels, kernel in ((width, (7, 1)), (width, (1, 7)), (width, (7, 1)), (192, (1, 7))):
        double = _unit(net, double, channels, kernel)
    return net.concat([_unit(net, x, 192), seven, double, _pooled(net, x, 192)])


def _reduce_b(net: Net, x: str) -> str:
    three = _unit(net, _unit(net, x, 192), 320, 3, 2, 0)
    seven = _unit(net, _unit(net, _unit(net, x, 192), 192, (1, 7)), 192, (7, 1))
    return net.concat([three, _unit(net, seven, 192, 3, 2, 0), net.pool(x, "MaxPool", 3, 2)])


def _mixed_c(net: Net, x: str) -> str:
    three, double = _unit(net, x, 384), _unit(net, _unit(net, x, 448), 384, 3)
    pairs = [net.concat([_unit(net, y, 384, (1, 3)), _unit(net, y, 384, (3, 1))]) for y in (three, double)]
    return net.concat([_unit(net, x, 320), *pairs, _pooled(net, x, 192)])


def inception_v3(seed: int, batch: int = 1, size: int = 299, part: int = 1) -> onnx.ModelProto:
    """Return Inception V3 for 299x299, 1,000 classes; logits. ``part`` divides all channel counts."""
    net = Net("inception_v3", seed, epsilon=1e-3, part=part)
    x = _unit(net, net.input("image", (batch, 3, size, size)), 32, 3, 2, 0)
    x = net.pool(_unit(net, _unit(net, x, 32, 3, 1, 0), 64, 3), "MaxPool", 3, 2)
    x = net.pool(_unit(net, _unit(net, x, 80), 192, 3, 1, 0), "MaxPool", 3, 2)
    for pool in (32, 64, 64):
        x = _mixed_a(net, x, pool)
    x = _reduce_a(net, x)
    for width in (128, 160, 160, 192):
        x = _mixed_b(net, x, width)
    x = _mixed_c(net, _mixed_c(net, _reduce_b(net, x)))
    return net.finish(net.classifier(x, 1000), fit=True)
