"""A model for a range of lengths as tensor expressions, before it is partitioned."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rammer.compiler.compile_loops import in_common, open_layers
from rammer.compiler.compiler import Compiler
from rammer.distributed.partition.host_steps import lower_whole_graph
from rammer.frontend.ranges.dimension_ranges import shapes_at
from rammer.frontend.ranges.length_fit import LengthFit
from rammer.frontend.ranges.range_bounds import RangeBounds
from rammer.frontend.read.reader import Model
from rammer.ir.compute import ComputeGraph
from rammer.ir.extent import NO_STEPS, NONE, AffineExtent, NoRange, Ranged
from rammer.ir.graph import Graph

__all__ = ["OpenShapes", "RangeGraph", "graph_of_range"]

_HINT = "give a length, or one device"


@dataclass(frozen=True)
class OpenShapes:
    """The shapes of a model's inputs, with the ranges ``spans`` of dynamic dimensions. ``derived`` dimensions follow from those.
    ``states`` map outputs to the inputs of the next run."""

    shapes: Mapping[str, tuple[int, ...]]
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    derived: Mapping[str, AffineExtent] = field(default_factory=lambda: NONE)
    steps: Mapping[str, int] = field(default_factory=lambda: NO_STEPS)
    states: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RangeGraph:
    """All of a model for a range of lengths, how it serves each length, and its masked tensors."""

    graph: ComputeGraph
    ranged: Ranged
    ended: RangeBounds


def graph_of_range(compiler: Compiler, model: Model, at: OpenShapes) -> RangeGraph:
    """Lower a model for a range. Raises NoRange if lengths lack common tensor expressions, or parts of the model have none."""
    probed = compiler.probed(model, at.spans, at.steps, lambda point: shapes_at(model, at.shapes, point, at.derived))

    def make(fit: LengthFit, graphs: Sequence[Graph], without: Collection[str]) -> RangeGraph:
        if open_layers(fit, graphs):
            raise NoRange(
                "recurrent layers with a dynamic number of steps need a single device", f"graph {graphs[0].name}", _HINT
            )
        with compiler.step("lower"):
            _, ranged, ended = found = in_common(fit, [_lower_expressions(compiler, g) for g in graphs], None)
        return RangeGraph(found[0].graph, replace(ranged, spans=dict(at.spans), steps=dict(at.steps)), ended)

    try:
        return probed.unified(make)
    except NoRange as problem:
        raise NoRange(problem.what, problem.where, _HINT) from problem


def _lower_expressions(compiler: Compiler, graph: Graph) -> ComputeGraph:
    found, host_nodes = lower_whole_graph(graph, compiler.lowerings, ranged=True)
    for one in host_nodes.values():
        raise NoRange(f"{one.node.op} has no tensor expression: {one.why}", f"node {one.node.name}", _HINT)
    if not found.computes:
        raise NoRange("the model has no computation to partition", f"model {graph.name}", _HINT)
    return found
