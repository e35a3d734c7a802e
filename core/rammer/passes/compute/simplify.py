"""Removal of Computes that need no kernel: empty tensors, empty sums, unread results, and rearranged constants.

This runs before storages are assigned, so that no later step or device handles them. Every remaining Compute has elements, terms,
a reader and only nonempty operands. A rearranged constant is a separate constant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rammer.ir import expr as ex
from rammer.ir.compute import Compute, ComputeGraph, combiner_identity
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.expr import Const, Expr, Load


def simplify_graph(graph: ComputeGraph) -> ComputeGraph:
    """Return ``graph`` without empty Computes, views of constants and unread Computes."""
    return without_unread(constant_views(without_empty(graph)))


def without_unread(graph: ComputeGraph) -> ComputeGraph:
    """Return ``graph`` without Computes that reach no output. A node's expressions need not read all of its inputs (EyeLike reads
    a shape, IsInf without detection not even that). An unread operator would have an empty box."""
    live, kept = set(graph.outputs), list[Compute]()
    for c in reversed(graph.computes):
        if c.name in live:
            kept.append(c)
            live.update(c.reads)
    if len(kept) == len(graph.computes):
        return graph
    constants = {n: v for n, v in graph.constants.items() if n in live}
    return replace(graph, computes=tuple(reversed(kept)), constants=constants)


def without_empty(graph: ComputeGraph) -> ComputeGraph:
    """Return ``graph`` without Computes that have no elements. A reduction over no terms becomes its combiner's identity, and a
    guarded read of an empty tensor becomes its fill value."""
    if not any(t.size == 0 for t in graph.types.values()) and all(c.points for c in graph.computes):
        return graph
    computes = tuple(_fill_empty(c, graph) for c in graph.computes if 0 not in c.shape)
    used = {n for c in computes for n in c.reads} | set(graph.outputs)
    constants = {n: v for n, v in graph.constants.items() if n in used}
    return replace(graph, computes=computes, constants=constants)


def _fill_empty(c: Compute, graph: ComputeGraph) -> Compute:
    if not c.points:
        assert c.combiner is not None  # without reduction axes the output is empty
        return replace(c, body=combiner_identity(c.combiner, c.dtype), reduce=(), combiner=None)

    def rule(e: Expr) -> Expr | None:
        if not isinstance(e, Load) or graph.types[e.tensor].size:
            return None
        # An unguarded read is in a branch that is never executed.
        return Const(0 if e.fill is None else e.fill, graph.types[e.tensor].dtype)

    return replace(c, body=ex.transform(c.body, rule))


def constant_views(graph: ComputeGraph) -> ComputeGraph:
    """Return ``graph`` with rearranged constants as constants. Kernels can then pack them, and a program reads each constant
    under one name."""
    constants, outputs = dict(graph.constants), set(graph.outputs)
    kept = list[Compute]()
    for c in graph.computes:
        if c.name not in outputs and _is_constant_view(c, constants):
            constants[c.name] = np.ascontiguousarray(evaluate_compute(c, constants))
        else:
            kept.append(c)
    if len(kept) == len(graph.computes):
        return graph
    used = {n for c in kept for n in c.reads} | set(graph.outputs)
    return replace(graph, computes=tuple(kept), constants={n: v for n, v in constants.items() if n in used})


def _is_constant_view(c: Compute, constants: Mapping[str, np.ndarray]) -> bool:
    body = c.body
    return c.combiner is None and isinstance(body, Load) and body.fill is None and c.points > 0 and constants.keys() >= {*c.reads}
