"""Convolutional classifiers with plain stages: ResNet-50, ResNeXt-29, MobileNetV2, SqueezeNet, DenseNet-121."""

from __future__ import annotations

import numpy as np
import onnx

from zoo.net import Net


def _unit(net: Net, x: str, channels: int, kernel: int = 1, stride: int = 1, groups: int = 1, relu: str = "Relu") -> str:
    """Emit convolution, batch norm and activation ("" for none, Clip for ReLU6)."""
    y = net.norm(net.conv(x, channels, kernel, stride, groups=groups))
    if relu == "Clip":
        return _relu6(net, y)
    return net.map(relu, y) if relu else y


def _relu6(net: Net, x: str) -> str:
    low, high = (net.constant(np.array(v, np.float32), "limit") for v in (0.0, 6.0))
    return net.node("Clip", [x, low, high], net.shape(x))


def _bottleneck(net: Net, x: str, width: int, out: int, stride: int, groups: int) -> str:
    """Emit 1x1, 3x3 (strided, grouped), 1x1, with a projection where the shape changes (ResNet v1.5)."""
    y = _unit(net, _unit(net, x, width), width, 3, stride, groups)
    y = _unit(net, y, out, relu="")
    if stride != 1 or net.shape(x)[1] != out:
        x = _unit(net, x, out, stride=stride, relu="")
    return net.relu(net.map("Add", y, x))


def resnet50(seed: int, batch: int = 1, size: int = 224, width: int = 64) -> onnx.ModelProto:
    """Return ResNet-50 v1.5 (stride in the 3x3), 224x224, 1,000 classes. He et al., arXiv 1512.03385."""
    net = Net("resnet50", seed)
    x = net.input("image", (batch, 3, size, size))
    x = net.pool(_unit(net, x, width, 7, 2), "MaxPool", 3, 2, 1)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        wide = width << stage
        for block in range(blocks):
            x = _bottleneck(net, x, wide, 4 * wide, 2 if stage and not block else 1, 1)
    return net.finish(net.classifier(x, 1000), fit=True)


def resnext29(seed: int, batch: int = 1, size: int = 32, width: int = 64) -> onnx.ModelProto:
    """Return ResNeXt-29 16x64d for CIFAR, 32x32, 10 classes, grouped convolutions. Xie et al., arXiv 1611.05431, 5.2."""
    net = Net("resnext29_16x64d", seed)
    x = _unit(net, net.input("image", (batch, 3, size, size)), width, 3)
    for stage in range(3):
        for block in range(3):
            x = _bottleneck(net, x, 16 * (width << stage), 4 * width << stage, 2 if stage and not block else 1, 16)
    return net.finish(net.classifier(x, 10), fit=True)


#: MobileNetV2's stages: expansion, channels, blocks, stride of the first (Sandler et al., table 2).
_INVERTED = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def mobilenet_v2(seed: int, batch: int = 1, size: int = 224, part: int = 1) -> onnx.ModelProto:
    """Return MobileNetV2 1.0, 224x224, 1,000 classes. ``part`` divides all channel counts. Sandler et al., arXiv 1801.04381."""
    net = Net("mobilenet_v2", seed)
    x = _unit(net, net.input("image", (batch, 3, size, size)), 32 // part, 3, 2, relu="Clip")
    for expansion, wide, blocks, first in _INVERTED:
        channels = wide // part
        for block in range(blocks):
            stride, width = first if block == 0 else 1, net.shape(x)[1] * expansion
            y = x if expansion == 1 else _unit(net, x, width, relu="Clip")
            y = _unit(net, _unit(net, y, width, 3, stride, width, "Clip"), channels, relu="")
            same = stride == 1 and net.shape(x)[1] == channels
            x = net.map("Add", x, y) if same else y
    return net.finish(net.classifier(_unit(net, x, 1280 // part, relu="Clip"), 1000), fit=True)


def squeezenet(seed: int, batch: int = 1, size: int = 224, part: int = 1) -> onnx.ModelProto:
    """Return SqueezeNet 1.0 without bypass, 224x224, 1,000 classes; logits. Iandola et al., arXiv 1602.07360."""
    net = Net("squeezenet1_0", seed)
    x = net.relu(net.conv(net.input("image", (batch, 3, size, size)), 96 // part, 7, 2, pads=0, bias=True))
    pooled = {0, 3, 7}
    for number, (squeeze, expand) in enumerate(
        [(16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256)]
    ):
        if number in pooled:
            x = net.pool(x, "MaxPool", 3, 2, ceil=True)
        s = net.relu(net.conv(x, squeeze // part, 1, bias=True))
        x = net.concat([net.relu(net.conv(s, expand // part, k, bias=True)) for k in (1, 3)])
    x = net.relu(net.conv(x, 1000, 1, bias=True))
    pooled_all = net.node("GlobalAveragePool", [x], (batch, 1000, 1, 1))
    return net.finish(net.node("Flatten", [pooled_all], (batch, 1000), axis=1), fit=True)


def densenet121(seed: int, batch: int = 1, size: int = 224, growth: int = 32) -> onnx.ModelProto:
    """Return DenseNet-121 (growth 32, compression 0.5), 224x224, 1,000 classes. Huang et al., arXiv 1608.06993."""
    net = Net("densenet121", seed)
    x = net.pool(_unit(net, net.input("image", (batch, 3, size, size)), 2 * growth, 7, 2), "MaxPool", 3, 2, 1)
    for stage, layers in enumerate((6, 12, 24, 16)):
        if stage:
            y = net.conv(net.relu(net.norm(x)), net.shape(x)[1] // 2)
            x = net.pool(y, "AveragePool", 2, 2)
        for _ in range(layers):
            y = net.conv(net.relu(net.norm(x)), 4 * growth)
            x = net.concat([x, net.conv(net.relu(net.norm(y)), growth, 3)])
    return net.finish(net.classifier(net.relu(net.norm(x)), 1000), fit=True)
