"""Models as tensor expressions, and the invariants of their rewrites."""

from __future__ import annotations

import numpy as np
import onnx

from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import ComputeGraph, verify_compute_graph
from rammer.ir.evaluate import run_graph
from rammer.passes.pass_pipeline import Pipeline, default_passes


def lowered(proto: onnx.ModelProto) -> ComputeGraph:
    """Lower a model after the default passes."""
    return lower(Pipeline(default_passes()).run(bind(read_model(proto), {}))[0])


def unlike(graph: ComputeGraph, after: ComputeGraph, rng: np.random.Generator) -> str:
    """Return the reason why ``after`` is not a rewrite of ``graph``, "" if it is one. A rewrite is well formed and gives equal
    results for random inputs."""
    try:
        verify_compute_graph(after)
    except ValueError as fault:
        return str(fault)
    feeds = {n: rng.standard_normal(graph.types[n].shape) for n in graph.inputs}
    want, have = (run_graph(g, feeds) for g in (graph, after))
    wrong = [o for o in graph.outputs if not np.allclose(want[o], have[o], rtol=1e-9, atol=1e-9)]
    return f"{wrong} differ" if wrong else ""
