"""Lowering of quantised groups to products of codes: exact codes, no floats between codes, nothing on the host."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from quantised_groups import MAKERS, Group

from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler, split_segments
from rammer.device.loader import Registry
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import Compute, ComputeGraph
from rammer.ir.evaluate import run_graph
from rammer.ir.graph import Graph
from rammer.passes.compute.inline_maps import inline_conditions, inline_decodings
from rammer.passes.pass_pipeline import Pipeline, default_passes
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some

#: Groups of each kind in a run.
COUNT = 60


def rewritten(group: Group) -> Graph:
    """Return the graph of the group after all passes."""
    return Pipeline(default_passes())(bind(read_model(group.model()), {}))


def expressions(graph: Graph) -> ComputeGraph:
    """Return the compute graph that tiling receives."""
    assert not any(why for _, why in some(split_segments(graph))), graph
    return inline_decodings(inline_conditions(lower(graph)))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_codes_are_those_of_the_floats(kind: str, seed: int) -> None:
    products = 0
    for number in range(COUNT):
        group = MAKERS[kind](Group(Random(f"{seed} {number}")))
        computes = expressions(rewritten(group))
        names = {computes.aliases[n]: n for n in (*computes.inputs, *computes.outputs)}
        feeds = {names[n]: a for n, a in group.inputs.items() if n in names}
        values = run_graph(computes, feeds, precise=False)
        problem = group.problem({result: values[names[result]] for result in group.results})
        assert not problem, f"{kind} {seed} {number}: {problem}"
        found = [c for c in computes.computes if c.kind == "contraction"]
        assert all(c.dtype == "int32" for c in found) != (group.floats and bool(found)), computes
        products += len(found)
    assert products > COUNT // 2 or kind == "moved"


def block(kind: str) -> Group:
    """Return a residual block with its surroundings, as a quantiser writes it. It has three convolutions (one is the shortcut), a
    pooling, a mean and a dense layer."""
    g = Group(Random(5))
    x = g.data((1, 4, 8, 8), kind)[1]
    scale, zero = np.float32(0.05), g.constant(np.array(3, kind))

    def codes(y: str) -> str:
        return g.node("DequantizeLinear", g.node("QuantizeLinear", y, g.constant(scale), zero), g.constant(scale), zero)

    def weights(*shape: int) -> str:
        values = g.constant(g.rng.integers(-127, 128, shape).astype(np.int8))
        return g.node("DequantizeLinear", values, g.constant(np.full(shape[0], 0.002, np.float32)), axis=0)

    x = codes(g.node("MaxPool", codes(x), kernel_shape=[2, 2], strides=[2, 2]))
    y = codes(g.node("Relu", g.node("Conv", x, weights(6, 4, 3, 3), pads=[1, 1, 1, 1])))
    y = codes(g.node("Conv", y, weights(6, 6, 3, 3), pads=[1, 1, 1, 1]))
    y = codes(g.node("Relu", g.node("Add", y, codes(g.node("Conv", x, weights(6, 4, 1, 1))))))
    y = codes(g.node("Flatten", codes(g.node("GlobalAveragePool", y))))
    g.result(g.node("Gemm", y, weights(5, 6), transB=1), 1.0, kind)
    return g


@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_a_block_is_an_operator_for_each_product(kind: str) -> None:
    graph = expressions(rewritten(block(kind)))
    products = [c for c in graph.computes if c.kind == "contraction"]
    assert len(products) == 4 and all(c.dtype == "int32" for c in products)
    maps = [c for c in some(graph.computes) if c.kind == "map" and c.dtype == "float32"]
    assert all(_behind(c, graph) for c in some(maps))
    model = read_model(block(kind).model())
    (segment,) = Compiler(Registry().open("toy"), store=KernelStore(None)).compile_model(model, {}).segments
    assert isinstance(segment, ProgramSegment)
    # A change of scale, a pooling, four products and a mean: nothing else is written.
    assert len(segment.program.operators) <= 7, [str(o) for o in segment.program.operators]
    written = {segment.program.types[n].dtype for o in segment.program.operators for n in o.outputs}
    assert written == {kind}


def _behind(c: Compute, graph: ComputeGraph) -> bool:
    """Return True if a map reads a sum of products or of a window, directly or through maps."""
    made = graph.producers
    return any(n in made and (made[n].combiner == "sum" or _behind(made[n], graph)) for n in c.reads)
