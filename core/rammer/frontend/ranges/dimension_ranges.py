"""Ranges of a model's open dimensions, and the lengths at which it is bound to find the program for the range."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from rammer.errors import BadInput
from rammer.frontend.bind.bind_state import MetLoops
from rammer.frontend.bind.binder import bind_until
from rammer.frontend.lower.graph_lowering import Lowerings
from rammer.frontend.ranges.length_fit import LengthFit, MoreProbes
from rammer.ir.extent import LEAST, NO_STEPS, NONE, AffineExtent, NoRange, Point
from rammer.ir.graph import Graph
from rammer.ir.port import ModelPort

if TYPE_CHECKING:
    from rammer.frontend.read.reader import Model

T = TypeVar("T")


def probe_points(spans: Mapping[str, tuple[int, int]], steps: Mapping[str, int] = NO_STEPS) -> list[Point]:
    """Return the lengths at which a model is bound first; ``LengthFit`` may add others.

    The first point has the greatest lengths. For each dimension, others vary it at both ends and within, in its step. The last
    one has almost the least lengths of all dimensions.

    Functions of lengths consist of sums, products, quotients, minima, maxima and comparisons. A function that fits at these
    points fits throughout, unless it leaves its form and returns between two points."""
    every = {name: range(high, max(low, LEAST) - 1, -steps.get(name, 1)) for name, (low, high) in spans.items()}
    longest = {name: lengths[0] for name, lengths in every.items()}
    points: list[Point] = [longest]
    for name, lengths in every.items():
        last = len(lengths) - 1
        places = dict.fromkeys((min(1, last), last, max(last - 1, 0), (last + 1) // 2, last - last // 3))
        points += [{**longest, name: lengths[place]} for place in places if place]
    joint = {name: lengths[max(len(lengths) - 2, 0)] for name, lengths in every.items()}
    return [*points, joint] if joint not in points else points


@dataclass
class ProbedModel:
    """A model for a range: its graphs at probe lengths, after passes. ``shapes_of`` returns the input shapes at a length,
    ``rewritten`` runs all passes except those with the given names, which are ``without`` at the first attempt, and those of
    ``equals``, too, at the second."""

    model: Model
    lowerings: Lowerings
    spans: Mapping[str, tuple[int, int]]
    steps: Mapping[str, int]
    shapes_of: Callable[[Point], Mapping[str, tuple[int, ...]]]
    rewritten: Callable[[Graph, Collection[str]], Graph]
    without: Sequence[str]
    equals: Sequence[str]
    _bound: dict[object, tuple[Graph, MetLoops]] = field(default_factory=dict)
    _rewritten: dict[object, Graph] = field(default_factory=dict)

    def unified(self, make: Callable[[LengthFit, list[Graph], Collection[str]], T]) -> T:
        """Return the result of ``make``, which unifies the graphs at the points of a fit. Add points while it raises MoreProbes.
        The last argument names the passes that did not run. Raises NoRange if no program serves the range."""
        try:
            return self._unified_without(self.without, make)
        except NoRange:  # a length may equal another extent, and nodes be equal only there
            return self._unified_without((*self.without, *self.equals), make)

    def _unified_without(self, without: Collection[str], make: Callable[[LengthFit, list[Graph], Collection[str]], T]) -> T:
        points = probe_points(self.spans, self.steps)
        while True:
            try:
                return make(LengthFit(points, self.spans, self.steps), self._graphs(points, without), without)
            except MoreProbes as more:
                points = [*points, *more.points]

    def _graphs(self, points: Sequence[Point], without: Collection[str]) -> list[Graph]:
        """Return the model at each of these points. Loops and Scans whose trip counts differ stay operators."""
        shapes = [self.shapes_of(p) for p in points]
        found, stay = [self._bind(at) for at in shapes], frozenset[int]()
        if len({len(loops.steps) for _, loops in found}) == 1:
            each = enumerate(zip(*(loops.steps for _, loops in found), strict=True))
            stay = frozenset(number for number, steps in each if len({*steps}) > 1 and None not in steps)
        graphs = list[Graph]()
        for at in shapes:
            key = (tuple(at.items()), stay, tuple(without))
            if key not in self._rewritten:
                self._rewritten[key] = self.rewritten(self._bind(at, stay)[0], without)
            graphs.append(self._rewritten[key])
        return graphs

    def _bind(self, shapes: Mapping[str, tuple[int, ...]], stay: frozenset[int] = frozenset()) -> tuple[Graph, MetLoops]:
        """Return the model at these shapes. Raises NoRange if it does not accept them, or if run-time values decide shapes."""
        key = (tuple(shapes.items()), stay)
        if key not in self._bound:
            loops = MetLoops(stay)
            try:
                graph, rest = bind_until(self.model, shapes, self.lowerings, loops)
            except BadInput as problem:
                at = ", ".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())
                raise NoRange(f"{problem.what} at {at}", problem.where, "lengths may need a step, as in 32..960/32") from problem
            if rest is not None:
                raise NoRange(rest.why.what, rest.why.where)
            self._bound[key] = graph, loops
        return self._bound[key]


def shapes_at(
    model: Model, shapes: Mapping[str, tuple[int, ...]], point: Point, derived: Mapping[str, AffineExtent] = NONE
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input. Open dimensions are those of ``point``, or follow from it by ``derived``; the others are
    those of ``shapes``."""
    point = {**point, **{name: extent.at(point) for name, extent in derived.items()}}
    return {port.name: _shape_at(port, shapes[port.name], point) for port in model.inputs if port.name in shapes}


def _shape_at(port: ModelPort, shape: tuple[int, ...], point: Point) -> tuple[int, ...]:
    return tuple(point.get(d, n) if isinstance(d, str) else n for d, n in zip(port.dims(len(shape)), shape, strict=True))
