"""Ranges of a model's open dimensions, and the lengths at which it is bound to find the program for the range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rammer.frontend.bind.bind_state import MetLoops
from rammer.frontend.bind.binder import bind_until
from rammer.frontend.lower.graph_lowering import Lowerings
from rammer.ir.extent import LEAST, NONE, AffineExtent, NoRange, Point
from rammer.ir.graph import Graph
from rammer.ir.port import ModelPort

if TYPE_CHECKING:
    from rammer.frontend.read.reader import Model


def probe_points(spans: Mapping[str, tuple[int, int]]) -> list[Point]:
    """Return the lengths at which a model is bound.

    The first point has the greatest lengths. For each dimension, others vary it at both ends and within. The last one has the
    least lengths of all dimensions.

    Functions of lengths consist of sums, products, quotients, minima, maxima and comparisons. A function that is affine at these
    points is affine throughout, unless it leaves its line and returns between two points."""
    longest = {name: high for name, (_, high) in spans.items()}
    points: list[Point] = [longest]
    for name, (low, high) in spans.items():
        least = max(low, LEAST)
        others = (high - 1, least, least + 1, (least + high) // 2, (2 * least + high) // 3)
        points += [{**longest, name: n} for n in dict.fromkeys(others) if least <= n < high]
    joint = {name: min(max(low, LEAST) + 1, high) for name, (low, high) in spans.items()}
    return [*points, joint] if joint not in points else points


def bound_at(model: Model, shapes: Sequence[Mapping[str, tuple[int, ...]]], lowerings: Lowerings) -> list[Graph]:
    """Bind ``model`` at each of these shapes. Loops and Scans whose trip counts differ between shapes stay operators. Raise
    NoRange if run-time values decide shapes."""
    met = [MetLoops() for _ in shapes]
    found = [_bind_static(model, at, lowerings, loops) for at, loops in zip(shapes, met, strict=True)]
    if len({len(loops.steps) for loops in met}) > 1:
        return found
    each = enumerate(zip(*(loops.steps for loops in met), strict=True))
    stay = frozenset(number for number, steps in each if len({*steps}) > 1 and None not in steps)
    return [_bind_static(model, at, lowerings, MetLoops(stay)) for at in shapes] if stay else found


def _bind_static(model: Model, shapes: Mapping[str, tuple[int, ...]], lowerings: Lowerings, loops: MetLoops) -> Graph:
    graph, rest = bind_until(model, shapes, lowerings, loops)
    if rest is not None:
        raise NoRange(rest.why.what, rest.why.where)
    return graph


def shapes_at(
    model: Model, shapes: Mapping[str, tuple[int, ...]], point: Point, derived: Mapping[str, AffineExtent] = NONE
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input. Open dimensions are those of ``point``, or follow from it by ``derived``; the others are
    those of ``shapes``."""
    point = {**point, **{name: extent.at(point) for name, extent in derived.items()}}
    return {port.name: _shape_at(port, shapes[port.name], point) for port in model.inputs if port.name in shapes}


def _shape_at(port: ModelPort, shape: tuple[int, ...], point: Point) -> tuple[int, ...]:
    return tuple(point.get(d, n) if isinstance(d, str) else n for d, n in zip(port.dims(len(shape)), shape, strict=True))
