"""Factors after products: folded into weights through views, unless the product has other readers or a value would be lost."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from onnx import NodeProto, helper
from pass_graphs import agree, graph_of, normal, ops

from rammer.ir.graph import Graph
from rammer.passes.graph.fold_scales import FoldScales
from rammer.passes.pass_pipeline import Pipeline, default_passes

HEADS = {"split": np.array([2, 5, 4, 3]), "sizes": np.array([12, 12, 12])}


def attention(rng: np.random.Generator, biased: bool, shared: bool = False) -> Graph:
    """Make queries, keys and values of one product, scaled as by torch's exporters."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"])]
    nodes += [helper.make_node("Add", ["b", "p"], ["t"])] if biased else [helper.make_node("Identity", ["p"], ["t"])]
    nodes.append(helper.make_node("Split", ["t", "sizes"], ["q", "k", "v"], axis=-1))
    for name, perm in zip("qkv", ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True):
        nodes += [
            helper.make_node("Reshape", [name, "split"], [f"{name}4"]),
            helper.make_node("Transpose", [f"{name}4"], [f"{name}h"], perm=perm),
        ]
    nodes += [helper.make_node("Mul", ["qh", "s"], ["qs"]), helper.make_node("Div", ["kh", "d"], ["ks"])]
    nodes += [helper.make_node("MatMul", ["qs", "ks"], ["scores"]), helper.make_node("MatMul", ["scores", "vh"], ["y"])]
    nodes += [helper.make_node("Neg", ["qh"], ["z"])] if shared else []
    constants = {"w": normal(rng, 7, 36), "s": np.array(0.3, np.float32), "d": np.full((1, 1, 1, 1), 1.7, np.float32), **HEADS}
    constants |= {"b": normal(rng, 36)} if biased else {}
    return graph_of(nodes, (2, 5, 7), constants, ("y", "z") if shared else ("y",))


@pytest.mark.parametrize("biased", [False, True])
def test_scaled_queries_and_keys_scale_columns_of_the_weights(biased: bool, rng: np.random.Generator) -> None:
    before = attention(rng, biased)
    after = FoldScales()(before)
    assert not {"Mul", "Div"} & set(ops(after))
    agree(rng, before, after)


def test_a_value_that_somebody_else_reads_stays(rng: np.random.Generator) -> None:
    before = attention(rng, True, shared=True)
    after = FoldScales()(before)
    assert ops(after).count("Mul") == 1 and "Div" not in ops(after)
    agree(rng, before, after)


def test_a_scale_of_channels_behind_a_permutation(rng: np.random.Generator) -> None:
    """Check the end of a ConvNeXt block."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["t"]),
        helper.make_node("Transpose", ["t"], ["c"], perm=[0, 3, 1, 2]),
        helper.make_node("Mul", ["s", "c"], ["m"]),
        helper.make_node("Relu", ["m"], ["y"]),
    ]
    before = graph_of(nodes, (1, 4, 4, 5), {"w": normal(rng, 5, 6), "b": normal(rng, 6), "s": normal(rng, 6, 1, 1)})
    after = FoldScales()(before)
    assert ops(after) == ["MatMul", "Add", "Transpose", "Relu"]
    agree(rng, before, after)


@pytest.mark.parametrize("factor", [np.inf, np.nan, 1e-30, 1e38])
def test_a_factor_that_weights_cannot_take_stays(factor: float) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Mul", ["p", "s"], ["m"]),
        helper.make_node("Neg", ["m"], ["y"]),
    ]
    weights = np.float32([[1e-20, 1.0], [30.0, 0.0]])
    before = graph_of(nodes, (3, 2), {"w": weights, "s": np.array(factor, np.float32)})
    assert FoldScales()(before) is before


@pytest.mark.parametrize("shape", [(5, 1), (2, 5, 3), (3,)])
def test_a_factor_that_differs_between_rows_or_widens_stays(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Mul", ["p", "s"], ["m"]),
        helper.make_node("Neg", ["m"], ["y"]),
    ]
    columns = 1 if shape == (3,) else 3
    before = graph_of(nodes, (1, 5, 4), {"w": normal(rng, 4, columns), "s": normal(rng, *shape)})
    assert FoldScales()(before) is before


@pytest.mark.parametrize("seed", range(25))
def test_random_chains_keep_their_values(seed: int, rng: np.random.Generator) -> None:
    """Check products, views and factors in any order, with some values read twice."""
    random = Random(seed)
    constants: dict[str, np.ndarray] = {}
    nodes: list[NodeProto] = []
    first = (random.choice((1, 2)), 3, 4)
    shape, value, ends = list(first), "x", list[str]()
    for i in range(random.randint(3, 9)):
        result, kind = f"t{i}", random.choice(("MatMul", "Gemm", "Mul", "Mul", "Div", "Add", "Transpose", "Reshape", "Split"))
        k = f"k{i}"
        if kind == "Gemm" and len(shape) != 2:
            kind = "Reshape"
        if kind == "MatMul" or kind == "Gemm":
            columns, turned = random.choice((2, 4, 6)), int(kind == "Gemm" and random.random() < 0.5)
            constants[k] = normal(rng, columns, shape[-1]) if turned else normal(rng, shape[-1], columns)
            constants[f"c{i}"] = normal(rng, columns)
            inputs = [value, k, f"c{i}"] if kind == "Gemm" else [value, k]
            nodes.append(helper.make_node(kind, inputs, [result], **({"transB": turned} if kind == "Gemm" else {})))
            shape = [*shape[:-1], columns]
        elif kind in ("Mul", "Div", "Add"):
            wide = [n if random.random() < 0.5 else 1 for n in shape[random.randint(0, len(shape)) :]]
            constants[k] = np.abs(normal(rng, *wide)) + np.float32(0.5)
            nodes.append(helper.make_node(kind, [value, k], [result]))
        elif kind == "Transpose":
            perm = random.sample(range(len(shape)), len(shape))
            nodes.append(helper.make_node(kind, [value], [result], perm=perm))
            shape = [shape[p] for p in perm]
        elif kind == "Split" and shape[-1] % 2 == 0:
            other = f"o{i}"
            nodes.append(helper.make_node(kind, [value], [result, other], axis=-1, num_outputs=2))
            shape = [*shape[:-1], shape[-1] // 2]
            ends.append(other)
        else:
            shape = [int(np.prod(shape[:-1])), shape[-1]] if len(shape) > 2 else [1, *shape]
            constants[k] = np.array(shape, np.int64)
            nodes.append(helper.make_node("Reshape", [value, k], [result]))
        if random.random() < 0.15:
            ends.append(result)
        value = result
    nodes += [helper.make_node("Neg", [v], [f"y{i}"]) for i, v in enumerate([value, *ends])]
    before = graph_of(nodes, first, constants, tuple(f"y{i}" for i in range(len(ends) + 1)))
    agree(rng, before, FoldScales()(before))
    agree(rng, before, Pipeline(default_passes()).run(before)[0])
