"""Transformers of images: ViT-B/16 and Swin-T."""

from __future__ import annotations

import math

import numpy as np
import onnx

from zoo.net import Net
from zoo.tokens import attention, feed_forward, layer_norm, linear


def _windows(net: Net, x: str, window: int) -> str:
    n, h, w, c = net.shape(x)
    cut = net.reshape(x, (n, h // window, window, w // window, window, c))
    return net.reshape(net.transpose(cut, (0, 1, 3, 2, 4, 5)), (n * h * w // window**2, window**2, c))


def _rolled(net: Net, x: str, by: int) -> str:
    """Roll rows and columns by ``by`` positions towards the front (towards the back if negative)."""
    for axis in (1, 2):
        shape, extent = net.shape(x), net.shape(x)[axis]
        cut = by % extent
        parts = []
        for first, last in ((cut, extent), (0, cut)):
            size = (*shape[:axis], last - first, *shape[axis + 1 :])
            parts.append(net.node("Slice", [x, *(net.integers([v]) for v in (first, last, axis))], size))
        x = net.concat(parts, axis)
    return x


def _unseen(extent: int, window: int, shift: int) -> np.ndarray:
    """Return a mask (windows, places, places): True if two positions of a window come from distant regions after rolling."""
    line = np.repeat([0, 1, 2], [extent - window, window - shift, shift])
    regions = (line[:, None] * 3 + line).reshape(extent // window, window, extent // window, window)
    flat = regions.transpose(0, 2, 1, 3).reshape(-1, window**2)
    return np.asarray(flat[:, None, :] != flat[:, :, None])


def _relative(window: int) -> np.ndarray:
    """Return the row of the bias table for every two positions of a window."""
    places = np.stack(np.meshgrid(np.arange(window), np.arange(window), indexing="ij")).reshape(2, -1)
    rows, columns = places[:, :, None] - places[:, None, :] + window - 1
    return np.asarray(rows * (2 * window - 1) + columns).reshape(-1)


def _window_attention(net: Net, x: str, heads: int, window: int, unseen: np.ndarray | None) -> str:
    """Emit attention within windows (count, places, channels), with a bias by relative position."""
    count, places, width = net.shape(x)
    size = width // heads
    packed = net.reshape(linear(net, x, 3 * width), (count, places, 3, heads, size))
    q, k, v = (
        net.node("Gather", [packed, net.constant(np.array(i, np.int64), "which")], (count, places, heads, size), axis=2)
        for i in range(3)
    )
    q, v = (net.transpose(t, (0, 2, 1, 3)) for t in (q, v))
    q = net.map("Mul", q, net.constant(np.array(1 / math.sqrt(size), np.float32), "scale"))
    scores = net.node("MatMul", [q, net.transpose(k, (0, 2, 3, 1))], (count, heads, places, places))
    table = net.normal(((2 * window - 1) ** 2, heads), 0.2, "table")
    rows = net.node("Gather", [table, net.constant(_relative(window), "relative")], (places**2, heads))
    bias = net.transpose(net.reshape(rows, (places, places, heads)), (2, 0, 1))
    scores = net.map("Add", scores, bias)
    if unseen is not None:
        far = net.constant(unseen[:, None], "unseen")
        scores = net.map("Where", far, net.constant(np.array(-100.0, np.float32), "hidden"), scores)
    context = net.node("MatMul", [net.map("Softmax", scores, axis=-1), v], (count, heads, places, size))
    return linear(net, net.reshape(net.transpose(context, (0, 2, 1, 3)), (count, places, width)), width)


def _swin_block(net: Net, x: str, heads: int, window: int, shift: int) -> str:
    n, h, w, c = net.shape(x)
    y = layer_norm(net, x, 1e-5)
    y = _windows(net, _rolled(net, y, shift) if shift else y, window)
    y = _window_attention(net, y, heads, window, _unseen(h, window, shift) if shift else None)
    cut = net.reshape(y, (n, h // window, w // window, window, window, c))
    y = net.reshape(net.transpose(cut, (0, 1, 3, 2, 4, 5)), (n, h, w, c))
    x = net.map("Add", x, _rolled(net, y, -shift) if shift else y)
    inner = net.map("Gelu", linear(net, layer_norm(net, x, 1e-5), 4 * c, 2.0))
    return net.map("Add", x, linear(net, inner, c))


def _quartered(net: Net, x: str) -> str:
    """Concatenate four neighbours and reduce the channels to half."""
    n, h, w, c = net.shape(x)
    parts = []
    for column in (0, 1):
        for row in (0, 1):
            marks = ([row, column], [h, w], [1, 2], [2, 2])
            parts.append(net.node("Slice", [x, *(net.integers(m) for m in marks)], (n, h // 2, w // 2, c)))
    return linear(net, layer_norm(net, net.concat(parts, 3), 1e-5), 2 * c, bias=False)


def swin_t(
    seed: int,
    batch: int = 1,
    size: int = 224,
    width: int = 96,
    depths: tuple[int, ...] = (2, 2, 6, 2),
    window: int = 7,
    classes: int = 1000,
) -> onnx.ModelProto:
    """Return Swin-T, 224x224, shifted windows of 7x7, three heads in the first stage; logits. Liu et al., arXiv 2103.14030."""
    if batch != 1:
        raise ValueError("masks of windows are for one image")
    net = Net("swin_t", seed)
    x = net.conv(net.input("image", (batch, 3, size, size)), width, 4, 4, 0, bias=True)
    x = layer_norm(net, net.transpose(x, (0, 2, 3, 1)), 1e-5)
    for stage, blocks in enumerate(depths):
        if stage:
            x = _quartered(net, x)
        for block in range(blocks):
            shift = window // 2 if block % 2 and net.shape(x)[1] > window else 0
            x = _swin_block(net, x, 3 << stage, window, shift)
    x = layer_norm(net, x, 1e-5)
    n, c = net.shape(x)[0], net.shape(x)[3]
    mean = net.node("ReduceMean", [x, net.integers([1, 2])], (n, c), keepdims=0)
    return net.finish(linear(net, mean, classes), fit=False)


def vit(
    seed: int,
    batch: int = 1,
    size: int = 224,
    patch: int = 16,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    classes: int = 1000,
) -> onnx.ModelProto:
    """Return a ViT, by default B/16, 224x224; logits. Dosovitskiy et al., arXiv 2010.11929."""
    net = Net(f"vit_{width}_{patch}", seed)
    x = net.conv(net.input("image", (batch, 3, size, size)), width, patch, patch, 0, bias=True)
    patches = (size // patch) ** 2
    x = net.transpose(net.reshape(x, (batch, width, patches)), (0, 2, 1))
    token = net.normal((1, 1, width), 0.5, "token")
    if batch > 1:
        token = net.node("Expand", [token, net.integers([batch, 1, width])], (batch, 1, width))
    x = net.map("Add", net.concat([token, x]), net.normal((1, patches + 1, width), 0.5, "positions"))
    for _ in range(layers):
        x = net.map("Add", x, attention(net, layer_norm(net, x, 1e-6), heads))
        x = net.map("Add", x, feed_forward(net, layer_norm(net, x, 1e-6), 4 * width, "Gelu"))
    x = layer_norm(net, x, 1e-6)
    first = net.node("Gather", [x, net.constant(np.array(0, np.int64), "first")], (batch, width), axis=1)
    return net.finish(linear(net, first, classes), fit=False)
