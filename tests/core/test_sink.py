"""Reshapes of a product's result move after element-wise operators, and values stay."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from onnx import NodeProto, helper
from pass_graphs import agree, graph_of, normal, ops

from rammer.passes.graph.sink_reshapes import SinkReshapes
from rammer.passes.pass_pipeline import Pipeline, default_passes

FLAT, FULL = np.array([10, 4]), np.array([2, 5, 6])


def rows(rng: np.random.Generator, after: list[NodeProto], **more: np.ndarray):  # type: ignore[no-untyped-def]
    """Return a product of flattened rows, reshaped to ``r``, and the operators ``after`` it."""
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["f"]),
        helper.make_node("Gemm", ["f", "w", "b"], ["g"]),
        helper.make_node("Reshape", ["g", "full"], ["r"]),
        *after,
    ]
    return graph_of(nodes, (2, 5, 4), {"flat": FLAT, "full": FULL, "w": normal(rng, 4, 6), "b": normal(rng, 6), **more})


def test_an_activation_and_a_residual_come_before_the_reshape(rng: np.random.Generator) -> None:
    """Check the pattern of a GPT-2 block."""
    gelu = [
        helper.make_node("Mul", ["r", "half"], ["a"]),
        helper.make_node("Tanh", ["r"], ["t"]),
        helper.make_node("Add", ["t", "one"], ["u"]),
        helper.make_node("Mul", ["a", "u"], ["v"]),
        helper.make_node("Add", ["v", "late"], ["s"]),
        helper.make_node("Neg", ["s"], ["y"]),
    ]
    more = {"half": np.array(0.5, np.float32), "one": normal(rng, 1, 1, 6), "late": normal(rng, 2, 5, 6)}
    before = rows(rng, gelu, **more)
    after = SinkReshapes()(before)
    position = {n.outputs[0]: i for i, n in enumerate(after.nodes)}
    assert position["y"] == len(after.nodes) - 1 and ops(after)[-2:] == ["Reshape", "Neg"]
    agree(rng, before, after)
    assert ops(Pipeline(default_passes()).run(before)[0]).count("Reshape") == 2


@pytest.mark.parametrize("shape", [(5, 1), (2, 5, 1), (5, 6), (1, 5, 6)])
def test_an_operand_that_varies_along_split_axes_keeps_the_reshape(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    before = rows(rng, [helper.make_node("Add", ["r", "c"], ["s"]), helper.make_node("Neg", ["s"], ["y"])], c=normal(rng, *shape))
    assert SinkReshapes()(before) is before


def test_a_result_of_the_graph_and_what_follows_no_product_stay(rng: np.random.Generator) -> None:
    before = rows(rng, [helper.make_node("Relu", ["r"], ["y"])])
    assert SinkReshapes()(before) is before
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["f"]),
        helper.make_node("Relu", ["f"], ["s"]),
        helper.make_node("Neg", ["s"], ["y"]),
    ]
    before = graph_of(nodes, (2, 5, 4), {"flat": FLAT})
    assert SinkReshapes()(before) is before


@pytest.mark.parametrize("seed", range(25))
def test_random_graphs_keep_their_values(seed: int, rng: np.random.Generator) -> None:
    """Check products, reshapes and element-wise operators with operands of every kind, in any order."""
    random = Random(seed)
    constants: dict[str, np.ndarray] = {}
    nodes: list[NodeProto] = []
    shapes = {"x": (2, 3, 4)}
    for i in range(random.randint(4, 12)):
        value, result, k = random.choice(list(shapes)[-4:]), f"t{i}", f"k{i}"
        shape = shapes[value]
        op = random.choice(("MatMul", "Reshape", "Reshape", "Unary", "Binary", "Binary", "Pair"))
        if op == "MatMul":
            constants[k] = normal(rng, shape[-1], 4)
            nodes.append(helper.make_node(op, [value, k], [result]))
            shape = (*shape[:-1], 4)
        elif op == "Reshape":
            size = int(np.prod(shape))
            shape = random.choice([(size // 4, 4), (1, size // 4, 4), (size // 4, 2, 2), (2, size // 2), (size // 2, 1, 2)])
            constants[k] = np.array(shape, np.int64)
            nodes.append(helper.make_node(op, [value, k], [result]))
        elif op == "Unary":
            nodes.append(helper.make_node(random.choice(("Tanh", "Relu", "Abs")), [value], [result]))
        else:
            equal = [n for n, s in shapes.items() if s == shape]
            wide = [n if random.random() < 0.6 else 1 for n in shape[random.randint(0, len(shape)) :]]
            constants[k] = normal(rng, *wide)
            other = random.choice(equal) if op == "Pair" else k
            nodes.append(helper.make_node(random.choice(("Add", "Mul", "Max")), random.sample([value, other], 2), [result]))
        shapes[result] = shape
    read = {i for n in nodes for i in n.input}
    ends = [n for n in shapes if n not in read]
    nodes += [helper.make_node("Neg", [v], [f"y{i}"]) for i, v in enumerate(ends)]
    before = graph_of(nodes, (2, 3, 4), constants, tuple(f"y{i}" for i in range(len(ends))))
    agree(rng, before, SinkReshapes()(before))
    agree(rng, before, Pipeline(default_passes()).run(before)[0])
