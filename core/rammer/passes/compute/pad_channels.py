"""Padding of images with few channels, whose products then read whole groups of channels.

The first convolution of a model reads 3 channels. In channels-last order, no group of them is aligned. A device that copies
groups of ``VDevice.channels`` values of float16 gets images with as many channels: the map that makes the image writes zeros, and
the weights are read with zeros beyond their last channel. The sum has the channels innermost, as they are stored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, ComputeGraph, contraction_operands
from rammer.ir.device import VDevice
from rammer.ir.expr import Cast, Expr, Load, Ref
from rammer.ir.types import TensorType

#: The position of the channels in an image, and the least dimensions of one.
CHANNELS, DIMENSIONS = 1, 4
#: Steps of a window along its rows that are whole groups, so that the image needs no padding.
WHOLE_STEPS: Final = 8


def pad_channels(graph: ComputeGraph, device: VDevice) -> ComputeGraph:
    """Return ``graph`` with images of float16 of fewer than ``device.channels`` channels padded to that number, each read by one
    convolution and made by a map of one tensor."""
    if device.channels == 1:
        return graph
    made, readers = graph.producers, graph.consumers()
    changed = dict[str, Compute]()
    for c in graph.computes:
        image = _image_of(c, graph, device.channels)
        source = made.get(image.tensor) if image is not None else None
        if image is None or source is None or source.name in graph.outputs:
            continue
        if len(readers[source.name]) == 1 and _is_copy(source):
            changed[source.name] = _padded_copy(source, device.channels)
            changed[c.name] = _padded_product(c, image, device.channels)
    if not changed:
        return graph
    computes = tuple(changed.get(c.name, c) for c in graph.computes)
    types = dict(graph.types) | {n: TensorType(c.dtype, c.shape) for n, c in changed.items()}
    return replace(graph, computes=computes, types=types)


def _image_of(c: Compute, graph: ComputeGraph, channels: int) -> Load | None:
    """Return the operand of a convolution that is an image with few channels, or None."""
    operands = contraction_operands(c) if c.combiner == "sum" else None
    over = {r.name: r.extent for r in c.reduce}
    for image, weights in (operands, operands[::-1]) if operands else ():
        kind = graph.types[image.tensor]
        if kind.dtype != "float16" or len(kind.shape) < DIMENSIONS or weights.tensor not in graph.constants:
            continue
        channel, *_, last = image.indices[CHANNELS:]
        whole = any(over[n] % WHOLE_STEPS == 0 for n in ex.axes_of(last) & {*over})
        plain = isinstance(channel, Ref) and over.get(channel.axis) == kind.shape[CHANNELS] < channels
        if plain and not whole and weights.fill is None and ex.axes_of(last) & {*over}:
            return image
    return None


def _is_copy(c: Compute) -> bool:
    """Return True if ``c`` copies elements of one tensor, maybe of another type."""
    body = c.body.arg if isinstance(c.body, Cast) else c.body
    return not c.reduce and isinstance(body, Load) and body.fill is None


def _padded_copy(c: Compute, channels: int) -> Compute:
    """Return ``c`` with zeros in channels that it does not have."""
    axes = (*c.axes[:CHANNELS], Axis(c.axes[CHANNELS].name, channels), *c.axes[CHANNELS + 1 :])
    return replace(c, axes=axes, body=_with_zeros(c.body))


def _padded_product(c: Compute, image: Load, channels: int) -> Compute:
    """Return ``c`` with a sum over all ``channels`` of ``image``, innermost."""
    channel = image.indices[CHANNELS]
    assert isinstance(channel, Ref)
    reduce = (*(r for r in c.reduce if r.name != channel.axis), Axis(channel.axis, channels))
    return replace(c, reduce=reduce, body=_with_zeros(c.body))


def _with_zeros(e: Expr) -> Expr:
    """Return ``e`` with zeros for elements outside of tensors."""
    return ex.transform(e, lambda e: replace(e, fill=0.0) if isinstance(e, Load) else None)
