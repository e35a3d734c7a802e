"""NASNet-A for CIFAR (Zoph et al., arXiv 1707.07012): 18 normal cells, 2 reduction cells, 32 filters.

The wiring is the published one: five blocks per cell, each adding two operators on earlier states. State 0 is the cell's input,
state 1 the output of the previous cell. Names contain kernel and kind; separable convolutions are applied twice."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import onnx

from zoo.net import Net

#: ((operator, state), (operator, state)) of one block.
Block: TypeAlias = tuple[tuple[str, int], tuple[str, int]]

NORMAL: Final[tuple[Block, ...]] = (
    (("sep5", 0), ("sep3", 1)),
    (("sep5", 1), ("sep3", 1)),
    (("avg", 0), ("none", 1)),
    (("avg", 1), ("avg", 1)),
    (("sep3", 0), ("none", 0)),
)
REDUCTION: Final[tuple[Block, ...]] = (
    (("sep5", 0), ("sep7", 1)),
    (("max", 0), ("sep7", 1)),
    (("avg", 0), ("sep5", 1)),
    (("none", 3), ("avg", 2)),
    (("sep3", 2), ("max", 0)),
)


def _same(extent: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return the padding before and after for ceil(extent / stride) positions."""
    total = max(0, (-(-extent // stride) - 1) * stride + kernel - extent)
    return total // 2, total - total // 2


def _separable(net: Net, x: str, kernel: int, filters: int, stride: int) -> str:
    """Emit (ReLU, depthwise, pointwise, norm) twice; the first is strided."""
    for step in (stride, 1):
        x = net.relu(x)
        x = net.conv(x, net.shape(x)[1], kernel, step, groups=net.shape(x)[1])
        x = net.norm(net.conv(x, filters))
    return x


def _pointwise(net: Net, x: str, filters: int, stride: int = 1) -> str:
    return net.norm(net.conv(net.relu(x), filters, 1, stride, 0))


def _pool(net: Net, x: str, op: str, filters: int, stride: int) -> str:
    top, bottom = _same(net.shape(x)[2], 3, stride)
    y = net.pool(x, op, 3, stride, (top, top, bottom, bottom))
    return y if net.shape(y)[1] == filters else net.norm(net.conv(y, filters))


def _apply(net: Net, kind: str, x: str, filters: int, stride: int) -> str:
    if kind.startswith("sep"):
        return _separable(net, x, int(kind[3:]), filters, stride)
    if kind == "none":
        return x if stride == 1 and net.shape(x)[1] == filters else _pointwise(net, x, filters, stride)
    return _pool(net, x, "MaxPool" if kind == "max" else "AveragePool", filters, stride)


def _factorized(net: Net, x: str, filters: int) -> str:
    """Halve the image by two strided 1x1 convolutions, the second one pixel further on; without a ReLU before."""
    n, c, h, w = net.shape(x)
    whole = net.pool(x, "AveragePool", 1, 2)
    starts, ends, axes, pads = (net.integers(v) for v in ([1, 1], [h + 1, w + 1], [2, 3], [0, 0, 0, 0, 0, 0, 1, 1]))
    zero = net.constant(np.array(0.0, np.float32), "zero")
    padded = net.node("Pad", [x, pads, zero], (n, c, h + 1, w + 1))
    moved = net.pool(net.node("Slice", [padded, starts, ends, axes], (n, c, h, w)), "AveragePool", 1, 2)
    halves = [net.conv(whole, filters // 2), net.conv(moved, filters - filters // 2)]
    return net.norm(net.concat(halves))


def _previous(net: Net, previous: str, current: str, filters: int) -> str:
    """Return state 1: the previous cell in this cell's size and width; the first cell reads its input instead."""
    if not previous:
        return current
    if net.shape(previous)[2] != net.shape(current)[2]:
        return _factorized(net, net.relu(previous), filters)
    return previous if net.shape(previous)[1] == filters else _pointwise(net, previous, filters)


def _cell(
    net: Net, current: str, previous: str, filters: int, blocks: tuple[Block, ...], stride: int, passed: tuple[int, ...] = ()
) -> str:
    """Emit a cell: the concatenation of the states that no block reads and of those in ``passed``. A normal cell passes state 1
    on as well."""
    states = [net.norm(net.conv(net.relu(current), filters)), _previous(net, previous, current, filters)]
    used: set[int] = set()
    for block in blocks:
        used |= {state for _, state in block}
        terms = [_apply(net, kind, states[s], filters, stride if s < 2 else 1) for kind, s in block]
        states.append(net.map("Add", *terms))
    shown = [s for i, s in enumerate(states) if i not in used or i in passed or (i == 1 and stride == 1)]
    return net.concat([s if net.shape(s)[1] == filters else net.norm(net.conv(s, filters)) for s in shown])


def nasnet_cifar(seed: int, batch: int = 1, cells: int = 18, filters: int = 32) -> onnx.ModelProto:
    """Return NASNet-A (6 @ 768), 32x32, 10 classes; logits, without the auxiliary classifier."""
    net = Net("nasnet_a_cifar", seed, epsilon=1e-3)
    stem = net.norm(net.conv(net.input("image", (batch, 3, 32, 32)), 3 * filters, 3))
    outputs = ["", stem]
    width = filters
    for number in range(cells):
        if number in (cells // 3, 2 * cells // 3):
            width *= 2
            outputs.append(_cell(net, outputs[-1], outputs[-2], width, REDUCTION, 2))
        outputs.append(_cell(net, outputs[-1], outputs[-2], width, NORMAL, 1))
    return net.finish(net.classifier(net.relu(outputs[-1]), 10), fit=True)


def nasnet_large(
    seed: int, batch: int = 1, size: int = 331, cells: int = 18, filters: int = 168, classes: int = 1000, stem: int = 96
) -> onnx.ModelProto:
    """Return NASNet-A (6 @ 4032), 331x331, 1,000 classes; logits, without the auxiliary classifier.

    Two reduction cells with a quarter and a half of the filters follow the first convolution. As in the authors' code, reduction
    cells also pass on state 3, which one of their blocks reads. (The CIFAR model here does not; its count is the published one in
    either form.)"""
    net = Net("nasnet_a_large", seed, epsilon=1e-3)
    first = net.norm(net.conv(net.input("image", (batch, 3, size, size)), stem, 3, 2, 0))
    outputs = ["", first]
    for part in (4, 2):
        outputs.append(_cell(net, outputs[-1], outputs[-2], filters // part, REDUCTION, 2, (3,)))
    width = filters
    for number in range(cells):
        if number in (cells // 3, 2 * cells // 3):
            width *= 2
            outputs.append(_cell(net, outputs[-1], outputs[-2], width, REDUCTION, 2, (3,)))
        outputs.append(_cell(net, outputs[-1], outputs[-2], width, NORMAL, 1))
    return net.finish(net.classifier(net.relu(outputs[-1]), classes), fit=True)
