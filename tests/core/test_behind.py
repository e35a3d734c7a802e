"""Maps after a view of a normalisation: computed in its rows, equal in value, and unchanged if the rows do not match."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from onnx import NodeProto, helper
from onnx_models import model, tensor

from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import Axis, ComputeGraph, verify_compute_graph
from rammer.ir.evaluate import run_graph
from rammer.ir.expr import interval
from rammer.passes.compute.batch_candidates import is_rearrangement
from rammer.passes.compute.group_norm_epilogue import in_rows, split_indices


def normalised(shape: tuple[int, ...], groups: int, behind: Sequence[NodeProto], rng: np.random.Generator) -> ComputeGraph:
    """Make a group normalisation followed by ``behind``: an activation, a factor per channel, a residual or other maps."""
    channel = (shape[1], *[1] * (len(shape) - 2))
    constants = {n: rng.standard_normal(shape[1]).astype(np.float32) for n in "sb"}
    constants |= {"k": rng.standard_normal(channel).astype(np.float32)}
    nodes = [helper.make_node("GroupNormalization", ["x", "s", "b"], ["n"], num_groups=groups), *behind]
    made = model(nodes, [tensor(n, shape) for n in "xr"], ["y"], constants=constants)
    return lower(bind(read_model(made), {}))


CHAIN = (
    helper.make_node("Sigmoid", ["n"], ["q"]),
    helper.make_node("Mul", ["n", "q"], ["a"]),
    helper.make_node("Mul", ["k", "a"], ["c"]),
    helper.make_node("Add", ["r", "c"], ["y"]),
)


def maps(graph: ComputeGraph) -> list[int]:
    """Return the number of axes of each map, in order, that is not a rearrangement and reads a computed tensor."""
    made = graph.producers
    kept = [c for c in graph.computes if c.combiner is None and not is_rearrangement(c) and any(r in made for r in c.reads)]
    return [len(c.axes) for c in kept]


def equal(before: ComputeGraph, after: ComputeGraph, rng: np.random.Generator) -> bool:
    verify_compute_graph(after)
    feeds = {n: rng.standard_normal(before.types[n].shape) for n in before.inputs}
    want, have = (run_graph(g, feeds) for g in (before, after))
    return all(np.allclose(want[o], have[o], rtol=1e-9, atol=1e-9) for o in before.outputs)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("shape", [(2, 6, 3, 5), (1, 6, 4), (3, 6, 1, 2, 2)], ids=str)
def test_what_follows_a_normalisation_of_groups_follows_its_rows(
    shape: tuple[int, ...], groups: int, rng: np.random.Generator
) -> None:
    before = normalised(shape, groups, CHAIN, rng)
    after = in_rows(before)
    assert maps(after)[-4:] == [len(shape) + 1] * 4 and maps(before)[-4:] == [len(shape)] * 4
    assert after.outputs == before.outputs and equal(before, after, rng)


@pytest.mark.parametrize(
    "behind",
    [
        (helper.make_node("Transpose", ["n"], ["t"], perm=[0, 1, 3, 2]), helper.make_node("Exp", ["t"], ["y"])),
        (helper.make_node("MaxPool", ["n"], ["t"], kernel_shape=[1, 1]), helper.make_node("Exp", ["t"], ["y"])),
        (helper.make_node("ReduceMax", ["n"], ["y"], keepdims=0),),
    ],
    ids=["transposed", "pooled", "reduced"],
)
def test_what_does_not_read_its_elements_one_by_one_stays(behind: tuple[NodeProto, ...], rng: np.random.Generator) -> None:
    before = normalised((2, 6, 3, 5), 3, behind, rng)
    assert equal(before, in_rows(before), rng)
    assert in_rows(before) is before


def test_a_reshape_of_maps_alone_stays(rng: np.random.Generator) -> None:
    """Check a reshape of maps without rows that a following map could keep."""
    nodes = [
        helper.make_node("Exp", ["x"], ["e"]),
        helper.make_node("Flatten", ["e"], ["f"]),
        helper.make_node("Tanh", ["f"], ["y"]),
    ]
    before = lower(bind(read_model(model(nodes, [tensor("x", (2, 3, 4))], ["y"])), {}))
    assert in_rows(before) is before


@pytest.mark.parametrize(
    ("coarse", "fine", "places"),
    [
        ((2, 6), (2, 3, 2), "a0 a1//2 a1%2"),
        ((24,), (2, 3, 4), "a0//12 (a0//4)%3 a0%4"),
        ((2, 6), (2, 1, 6), "a0 0 a1"),
        ((6, 1), (6, 1, 1), "a0 0 0"),
        ((2, 6), (3, 4), ""),
        ((4, 3), (2, 6), ""),
        ((4,), (2, 3), ""),
    ],
)
def test_where_axes_are_cut(coarse: tuple[int, ...], fine: tuple[int, ...], places: str) -> None:
    ours, theirs = ([Axis(f"{n}{i}", e) for i, e in enumerate(extents)] for n, extents in (("a", coarse), ("f", fine)))
    found = split_indices(ours, theirs)
    assert (found is None) == (not places)
    if found is not None:
        assert [str(f).replace(" ", "") for f in found] == places.split()
        box = {a.name: (0, a.extent - 1) for a in ours}
        assert [interval(f, box) for f in found] == [(0, e - 1) for e in fine]
