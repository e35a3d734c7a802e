"""Helpers of the tests of stitching: a device, the costs of its operators, and graphs stitched for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.fusion.connect import connect
from rammer.fusion.stitch import stitch
from rammer.fusion.stitch_latency import Evaluator
from rammer.fusion.tile_graph import TileGraph
from rammer.fusion.tile_search import ranked_tiles
from rammer.ir.compute import ComputeGraph
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.operator import Resources, RKernel, ROperator, Written
from rammer.passes.pass_pipeline import Pipeline, default_passes
from rammer.schedule.stage_clock import in_waves
from rammer_testing.small_models import SmallModel


def device(launch: float = 1e-6) -> VDevice:
    layers = (
        MemoryLayer("memory", "device", 1 << 40, 1e10),
        MemoryLayer("local", "veu", 1 << 20, 1e11),
        MemoryLayer("register", "thread", 4096, 1e12),
    )
    return VDevice("test", "for tests", 4, layers, 1e10, launch)


def graph_of(model: SmallModel, rng: np.random.Generator) -> ComputeGraph:
    return lower(Pipeline(default_passes()).run(bind(read_model(model.build(rng)), {}))[0])


#: Seconds of an operator's tasks, without its launch; infinite if no kernel fits.
Seconds: TypeAlias = Callable[[ROperator], float]


def in_one_wave(graph: ComputeGraph, where: VDevice) -> Seconds:
    """Return the core's predictions of seconds."""

    def seconds(operator: ROperator) -> float:
        ranked = ranked_tiles(operator, graph.types, where)
        return ranked[0][0] - where.launch if ranked else float("inf")

    return seconds


def evaluator(graph: ComputeGraph, where: VDevice, seconds: Seconds, together: Any = None) -> Evaluator:
    """Make the evaluator of a device with these times of separate operators. Concurrent operators are timed by a schedule in
    waves."""

    def kernels(operator: ROperator) -> tuple[RKernel, ...]:
        ranked, whole = ranked_tiles(operator, graph.types, where), seconds(operator)
        tiled = operator.tiled(ranked[0][1] if ranked else operator.anchor.shape)
        task = whole / -(-tiled.task_count // where.veus)
        return (RKernel(tiled, lambda: Written("", Resources()), task, task),) if whole < float("inf") else ()

    return Evaluator(kernels, lambda found, after: in_waves(found, after, where), together)


def stitched(graph: ComputeGraph, where: VDevice, slow: float = 1.0) -> tuple[TileGraph, TileGraph]:
    """Return the graph before and after stitching; kernels of several results take ``slow`` times the predicted time."""
    known = in_one_wave(graph, where)

    def seconds(operator: ROperator) -> float:
        return known(operator) * (slow if len(operator.outputs) > 1 else 1.0)

    before = connect(graph, where)
    return before, stitch(before, where, evaluator(graph, where, seconds))
