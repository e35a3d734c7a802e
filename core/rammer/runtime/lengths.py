"""Runs of a program for a range of lengths: which range a run needs, its inputs in arrays of the longest, its outputs cut to
size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.errors import BadInput
from rammer.ir.extent import LEAST, Point, Ranged
from rammer.ir.graph import Graph
from rammer.ir.port import InputPort

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Span: TypeAlias = "tuple[int, int]"

#: Buckets of one range: the longest and its halves, so that a program computes for at most twice the length, and a range
#: takes few programs.
BUCKETS: Final = 5


def bucket(span: Span, value: int) -> Span:
    """The least and greatest length of the programs for ``value``, which lies in ``span``: a range that is halved up to
    BUCKETS - 1
    times."""
    low, high = span
    for _ in range(BUCKETS - 1):
        half = high // 2
        if half <= max(low - 1, LEAST):
            break
        if value > half:
            return half + 1, high
        high = half
    return low, high


def check_spans(ports: tuple[InputPort, ...], spans: Mapping[str, Span]) -> None:
    """BadInput for a range of something else than an open dimension, or of lengths that cannot be."""
    names = list(dict.fromkeys(d for p in ports for d in p.shape if isinstance(d, str)))
    for name, (low, high) in spans.items():
        if name not in names:
            known = f"its open dimensions are {', '.join(names)}" if names else "it has none"
            raise BadInput(f"the model has no open dimension {name!r}", f"range {name}={low}..{high}", known)
        if not 0 <= low < high or high <= LEAST:
            raise BadInput(f"{low}..{high} is no range of lengths", f"range {name}={low}..{high}", "for example 1..512")


@dataclass(frozen=True)
class Lengths:
    """The ranges that a user gave for open dimensions, least and greatest length of each."""

    spans: Mapping[str, Span]

    def buckets(self, ports: tuple[InputPort, ...], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Span]:
        """Dimension -> the range of the program for inputs of these ``shapes``; {} where a length lies in no range."""
        found = {d: n for p in ports for d, n in zip(p.shape, shapes.get(p.name, ()), strict=False) if isinstance(d, str)}
        lengths = {name: found[name] for name in self.spans if name in found}
        if any(not low <= lengths.get(name, low - 1) <= high for name, (low, high) in self.spans.items()):
            return {}
        return {name: bucket(self.spans[name], length) for name, length in lengths.items()}


def longest(
    ports: tuple[InputPort, ...], shapes: Mapping[str, tuple[int, ...]], spans: Mapping[str, Span]
) -> dict[str, tuple[int, ...]]:
    """Input name -> shape with the open dimensions at the greatest length of ``spans``."""
    high = {name: span[1] for name, span in spans.items()}
    by_name = {p.name: p for p in ports}
    return {n: tuple(high.get(str(d), e) for d, e in zip(by_name[n].shape, s, strict=True)) for n, s in shapes.items()}


def widened(ranged: Ranged, graph: Graph, inputs: Mapping[str, Array]) -> tuple[dict[str, Array], Point]:
    """``inputs`` in arrays of the longest program with zeros behind, the lengths among them; and the lengths."""
    point: dict[str, int] = {}
    tensors = {v.external or v.name: v for v in graph.inputs}
    for name, array in inputs.items():
        for dim, extent in zip(ranged.shapes[tensors[name].name], array.shape, strict=True):
            if not isinstance(dim, int):
                ((symbol, _),) = dim.terms  # an input's open dimension is a length itself
                point[symbol] = extent
    wide = {name: _wide(array, tensors[name].type.shape) for name, array in inputs.items()}
    scalars = {tensor: point[symbol] for symbol, tensor in ranged.lengths.items()}
    wide |= {v.external or v.name: np.array(scalars[v.name], np.int64) for v in graph.inputs if v.name in scalars}
    return wide, point


def narrowed(ranged: Ranged, graph: Graph, outputs: Mapping[str, Array], point: Point) -> dict[str, Array]:
    """``outputs`` cut to their sizes at ``point``, arrays of their own."""
    names = {v.external or v.name: v.name for v in graph.outputs}
    shapes = {n: ranged.shape(names[n], point) for n in outputs}
    return {n: np.ascontiguousarray(a[tuple(map(slice, shapes[n]))]).reshape(shapes[n]) for n, a in outputs.items()}


def _wide(array: Array, shape: tuple[int, ...]) -> Array:
    if array.shape == shape:
        return array
    wide = np.zeros(shape, array.dtype)
    wide[tuple(map(slice, array.shape))] = array
    return wide
