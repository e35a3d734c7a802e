"""Convolutional classifiers: AlexNet, ResNeXt-29 as branches, SqueezeNet with bypass, RandWire."""

from __future__ import annotations

import math

import numpy as np
import onnx

from zoo.net import Net


def _dense(net: Net, x: str, columns: int) -> str:
    rows = net.shape(x)[1]
    weight, bias = net.normal((columns, rows), math.sqrt(2 / rows), "w"), net.normal((columns,), 0.1, "b")
    return net.node("Gemm", [x, weight, bias], (net.shape(x)[0], columns), transB=1)


def alexnet(seed: int, batch: int = 1, size: int = 227, width: int = 32, classes: int = 1000) -> onnx.ModelProto:
    """Return the published AlexNet: 227x227, groups of two, local response norms; logits. Krizhevsky et al., NeurIPS 2012."""
    net = Net("alexnet", seed)
    x = net.input("image", (batch, 3, size, size))
    layers = (
        (3, 11, 4, 0, 1, True),
        (8, 5, 1, 2, 2, True),
        (12, 3, 1, 1, 1, False),
        (12, 3, 1, 1, 2, False),
        (8, 3, 1, 1, 2, False),
    )
    for number, (channels, kernel, stride, pads, groups, norm) in enumerate(layers):
        x = net.relu(net.conv(x, channels * width, kernel, stride, pads, groups, bias=True))
        if norm:
            x = net.node("LRN", [x], net.shape(x), size=5, alpha=1e-4, beta=0.75, bias=2.0)
        if norm or number == len(layers) - 1:
            x = net.pool(x, "MaxPool", 3, 2)
    x = net.node("Flatten", [x], (batch, math.prod(net.shape(x)[1:])), axis=1)
    for _ in range(2):
        x = net.relu(_dense(net, x, 128 * width))
    return net.finish(_dense(net, x, classes), fit=True)


def _unit(net: Net, x: str, channels: int, kernel: int = 1, stride: int = 1, relu: bool = True) -> str:
    y = net.norm(net.conv(x, channels, kernel, stride))
    return net.relu(y) if relu else y


def _widened(net: Net, x: str, channels: int) -> str:
    """Halve the image by averages and pad the missing channels with zeros, half of them on either side."""
    x = net.pool(x, "AveragePool", 2, 2)
    n, c, h, w = net.shape(x)
    side = (channels - c) // 2
    pads, zero = net.integers([0, side, 0, 0] * 2, "pads"), net.constant(np.array(0.0, np.float32), "zero")
    return net.node("Pad", [x, pads, zero], (n, channels, h, w))


def resnext29_branches(
    seed: int, batch: int = 1, width: int = 64, cardinality: int = 16, blocks: int = 3, size: int = 32
) -> onnx.ModelProto:
    """Return ResNeXt-29 in the form that Rammer measured: two convolutions per branch, stages of 64, 128 and 256 channels.
    Shortcuts have no parameters. Grouped convolutions are separate operators, as in the original TensorFlow model."""
    net = Net("resnext29_branches", seed)
    x = _unit(net, net.input("image", (batch, 3, size, size)), width, 3)
    for stage in range(3):
        for block in range(blocks):
            stride, out = 2 if stage and not block else 1, width << stage
            branches = [_unit(net, _unit(net, x, width), width, 3, stride) for _ in range(cardinality)]
            y = _unit(net, net.concat(branches), out, relu=False)
            x = net.relu(net.map("Add", y, _widened(net, x, out) if stride > 1 else x))
    return net.finish(net.classifier(x, 10), fit=True)


def squeezenet_bypass(seed: int, batch: int = 1, size: int = 224, width: int = 16, classes: int = 1000) -> onnx.ModelProto:
    """Return SqueezeNet 1.0 with complex bypass, 224x224; logits. Fire modules that change the number of channels have a 1x1
    convolution around them, the others the identity. Iandola et al., arXiv 1602.07360, figure 2."""
    net = Net("squeezenet_bypass", seed)
    x = net.relu(net.conv(net.input("image", (batch, 3, size, size)), 6 * width, 7, 2, pads=0, bias=True))
    for number, narrow in enumerate((1, 1, 2, 2, 3, 3, 4, 4)):
        if number in (0, 3, 7):
            x = net.pool(x, "MaxPool", 3, 2, ceil=True)
        s = net.relu(net.conv(x, narrow * width, 1, bias=True))
        y = net.concat([net.relu(net.conv(s, 4 * narrow * width, k, bias=True)) for k in (1, 3)])
        around = x if net.shape(x)[1] == net.shape(y)[1] else net.conv(x, net.shape(y)[1], 1, bias=True)
        x = net.map("Add", y, around)
    x = net.relu(net.conv(x, classes, 1, bias=True))
    pooled = net.node("GlobalAveragePool", [x], (batch, classes, 1, 1))
    return net.finish(net.node("Flatten", [pooled], (batch, classes), axis=1), fit=True)


#: The seed of RandWire's graphs. They define the model, so they are independent of the seed of weights.
WIRING = 5


def wired(nodes: int, degree: int, chance: float, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Return the edges of a graph by Watts and Strogatz, in order, from lower to higher numbers. It is a ring of ``nodes``, each
    joined to its ``degree`` nearest. With probability ``chance`` the far end of an edge moves to another node."""
    joined = {frozenset((i, (i + step) % nodes)) for i in range(nodes) for step in range(1, degree // 2 + 1)}
    for step in range(1, degree // 2 + 1):
        for i in range(nodes):
            edge = frozenset((i, (i + step) % nodes))
            if edge in joined and rng.random() < chance:
                free = [j for j in range(nodes) if j != i and frozenset((i, j)) not in joined]
                if free:
                    joined = joined - {edge} | {frozenset((i, free[int(rng.integers(len(free)))]))}
    return sorted((min(e), max(e)) for e in joined)


def _node(net: Net, x: str, channels: int, stride: int) -> str:
    """Emit ReLU, a separable 3x3 convolution and batch norm."""
    y = net.conv(net.relu(x), net.shape(x)[1], 3, stride, groups=net.shape(x)[1])
    return net.norm(net.conv(y, channels))


def _random_stage(net: Net, x: str, channels: int, edges: list[tuple[int, int]], nodes: int) -> str:
    """Emit a random stage and return the mean of the nodes without a successor. Nodes without a predecessor read ``x`` with
    stride 2."""
    made: list[str] = []
    for number in range(nodes):
        terms = []
        for source in [made[a] for a, b in edges if b == number]:
            weight = net.constant(np.float32(net.rng.standard_normal()).reshape(()), "edge")
            terms.append(net.map("Mul", source, net.map("Sigmoid", weight)))
        total = terms[0] if terms else x
        for term in terms[1:]:
            total = net.map("Add", total, term)
        made.append(_node(net, total, channels, 1 if terms else 2))
    last = [made[i] for i in range(nodes) if i not in {a for a, _ in edges}]
    total = last[0]
    for other in last[1:]:
        total = net.map("Add", total, other)
    return net.map("Mul", total, net.constant(np.array(1 / len(last), np.float32), "mean"))


def randwire(
    seed: int, batch: int = 1, size: int = 224, width: int = 154, nodes: int = 32, classes: int = 1000
) -> onnx.ModelProto:
    """Return RandWire-WS(4, 0.75), regular, C = 154; logits. The stages have 16 and three times 32 nodes. Xie et al., arXiv
    1904.01569."""
    net, rng = Net("randwire", seed), np.random.default_rng(WIRING)
    x = net.norm(net.conv(net.input("image", (batch, 3, size, size)), width // 2, 3, 2))
    for stage in range(4):
        count = nodes // 2 if stage == 0 else nodes
        x = _random_stage(net, x, width << stage, wired(count, 4, 0.75, rng), count)
    x = net.relu(net.norm(net.conv(net.relu(x), 1280 * width // 154)))
    return net.finish(net.classifier(x, classes), fit=True)
