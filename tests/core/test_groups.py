"""Group normalisations in exported form: the fused operator, unsupported forms, and unchanged values."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import NodeProto, helper
from pass_graphs import agree, graph_of, normal, ops

from rammer.passes.graph.fold_affine import FoldAffine
from rammer.passes.graph.fuse_group_norm import FuseGroupNorm
from rammer.passes.pass_pipeline import Pipeline, default_passes


def exported(
    shape: tuple[int, ...], groups: int, back: tuple[int, ...], rng: np.random.Generator, behind: tuple[str, ...] = ()
) -> tuple[list[NodeProto], dict[str, np.ndarray]]:
    """Return ``torch.nn.GroupNorm`` as torch exported it up to opset 20; ``behind`` are maps per channel."""
    channel = (shape[1], *[1] * (len(shape) - 2))
    constants = {"into": np.array([0, groups, -1]), "back": np.array(back)}
    constants |= {"one": normal(rng, groups), "zero": normal(rng, groups)}
    nodes = [
        helper.make_node("Reshape", ["x", "into"], ["r"]),
        helper.make_node("InstanceNormalization", ["r", "one", "zero"], ["n"], epsilon=1e-3),
        helper.make_node("Reshape", ["n", "back"], ["v0" if behind else "y"]),
    ]
    for i, op in enumerate(behind):
        constants[f"k{i}"] = normal(rng, *channel) + np.float32(3)
        nodes.append(helper.make_node(op, [f"v{i}", f"k{i}"], ["y" if i + 1 == len(behind) else f"v{i + 1}"]))
    return nodes, constants


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("shape", [(2, 6, 4, 5), (3, 6, 7), (1, 6, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("behind", [(), ("Mul", "Add"), ("Div", "Sub", "Mul")], ids=str)
def test_an_exported_group_norm_is_one_operator(
    shape: tuple[int, ...], groups: int, behind: tuple[str, ...], rng: np.random.Generator
) -> None:
    nodes, constants = exported(shape, groups, shape, rng, behind)
    before = graph_of(nodes, shape, constants)
    after, _ = Pipeline(default_passes()).run(before)
    assert ops(after) == ["InstanceNormalization" if groups == shape[1] and len(shape) == 3 else "GroupNormalization"]
    agree(rng, before, after)


@pytest.mark.parametrize(
    ("shape", "groups", "back"),
    [((2, 6, 4, 4), 6, (2, 6, 16)), ((2, 6, 4, 4), 4, (2, 6, 4, 4)), ((2, 3, 4, 4), 6, (2, 3, 4, 4)), ((2, 6), 3, (2, 6))],
    ids=["another shape", "groups across channels", "more groups than channels", "no places"],
)
def test_what_only_looks_like_one_stays(
    shape: tuple[int, ...], groups: int, back: tuple[int, ...], rng: np.random.Generator
) -> None:
    nodes, constants = exported(shape, groups, back, rng)
    before = graph_of(nodes, shape, constants)
    assert FuseGroupNorm()(before) is before


def test_a_norm_that_others_read_stays(rng: np.random.Generator) -> None:
    nodes, constants = exported((2, 6, 4, 4), 3, (2, 6, 4, 4), rng)
    before = graph_of([*nodes, helper.make_node("Relu", ["n"], ["z"])], (2, 6, 4, 4), constants, ("y", "z"))
    assert FuseGroupNorm()(before) is before


@pytest.mark.parametrize(("op", "scales"), [("InstanceNormalization", 6), ("GroupNormalization", 6)])
def test_maps_by_channel_fold_into_norms(op: str, scales: int, rng: np.random.Generator) -> None:
    attributes = {"num_groups": 2} if op == "GroupNormalization" else {}
    constants = {"s": normal(rng, scales), "b": normal(rng, scales), "k": normal(rng, 6, 1, 1), "c": normal(rng, 6, 1, 1)}
    nodes = [
        helper.make_node(op, ["x", "s", "b"], ["n"], **attributes),
        helper.make_node("Mul", ["n", "k"], ["m"]),
        helper.make_node("Add", ["m", "c"], ["y"]),
    ]
    before = graph_of(nodes, (2, 6, 4, 5), constants)
    after = FoldAffine()(before)
    assert ops(after) == [op]
    agree(rng, before, after)
