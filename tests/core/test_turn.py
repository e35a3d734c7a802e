"""Transpositions around operators that are independent of axis order cancel, and values stay."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from onnx import NodeProto, helper
from pass_graphs import agree, graph_of, normal, ops

from rammer.ir.graph import Graph
from rammer.passes.graph.cancel_transposes import CancelTransposes
from rammer.passes.pass_pipeline import Pipeline, default_passes

IN, OUT = [0, 3, 1, 2], [0, 2, 3, 1]


def keras(rng: np.random.Generator, classes: int = 10) -> Graph:
    """Return a channels-last block of EfficientNet as tf2onnx writes it. A Transpose is on either side of each convolution."""
    nodes: list[NodeProto] = []
    constants = {"pads": np.array([0, 0, 0, 0, 0, 1, 1, 0]), "axes": np.array([1, 2]), "spread": np.array([1, 1, 1, 6])}
    constants |= {"scale": normal(rng, 6), "dense": normal(rng, 4, classes)}

    def put(op: str, *inputs: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op, list(inputs), [f"t{len(nodes)}"], **attributes))
        return f"t{len(nodes) - 1}"

    def conv(x: str, *weight: int, **attributes: object) -> str:
        name = f"w{len(nodes)}"
        constants[name] = normal(rng, *weight)
        return put("Transpose", put("Conv", put("Transpose", x, perm=IN), name, **attributes), perm=OUT)

    def swish(x: str) -> str:
        return put("Mul", x, put("Sigmoid", x))

    x = swish(conv("x", 6, 3, 1, 1))
    y = swish(put("Mul", conv(put("Pad", x, "pads"), 6, 1, 3, 3, group=6, strides=[2, 2]), "scale"))
    squeezed = put("Reshape", put("ReduceMean", y, "axes", keepdims=0), "spread")
    y = put("Mul", y, put("Sigmoid", conv(swish(conv(squeezed, 2, 6, 1, 1)), 6, 2, 1, 1)))
    y = conv(y, 4, 6, 1, 1)
    y = put("Add", conv(swish(y), 4, 4, 1, 1), y)
    nodes.append(helper.make_node("MatMul", [put("ReduceMean", y, "axes", keepdims=0), "dense"], ["y"]))
    return graph_of(nodes, (1, 9, 9, 3), constants)


def test_a_model_with_channels_last_keeps_one_transposition(rng: np.random.Generator) -> None:
    """Check that the only one is that of its input: all operators between convolutions use the convolutions' order."""
    before = keras(rng)
    after = Pipeline(default_passes()).run(before)[0]
    long = [n for n in after.nodes if n.op == "Transpose" and sum(d > 1 for d in after.types[n.outputs[0]].shape) > 1]
    assert [n.inputs[0] for n in long] == ["x"]
    agree(rng, before, after)


def test_what_is_left_in_the_other_order_stays_there(rng: np.random.Generator) -> None:
    """Check ConvNeXt: a convolution, then a normalisation and a product over the last axis, the channels."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Transpose", ["c"], ["t"], perm=OUT),
        helper.make_node("ReduceMean", ["t", "last"], ["m"]),
        helper.make_node("Sub", ["t", "m"], ["d"]),
        helper.make_node("MatMul", ["d", "v"], ["y"]),
    ]
    before = graph_of(nodes, (1, 4, 5, 5), {"w": normal(rng, 4, 4, 1, 1), "last": np.array([-1]), "v": normal(rng, 4, 6)})
    assert CancelTransposes()(before) is before


def test_a_result_of_the_graph_keeps_its_order(rng: np.random.Generator) -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=OUT),
        helper.make_node("Relu", ["t"], ["r"]),
        helper.make_node("Transpose", ["r"], ["y"], perm=IN),
    ]
    before = graph_of(nodes, (1, 4, 5, 6), outputs=("y", "r"))
    after = Pipeline(default_passes()).run(before)[0]
    agree(rng, before, after)
    alone = Pipeline(default_passes()).run(graph_of(nodes, (1, 4, 5, 6)))[0]
    assert "Transpose" not in ops(alone)
    agree(rng, graph_of(nodes, (1, 4, 5, 6)), alone)


def drawn(random: Random, rng: np.random.Generator) -> Graph:
    """Return transpositions, order-independent operators and others, with operands of every kind."""
    nodes, constants, shapes = list[NodeProto](), dict[str, np.ndarray](), {"x": (2, 3, 4, 5)}
    orders = [tuple(random.sample(range(4), 4)) for _ in range(2)]
    orders += [tuple(o.index(i) for i in range(4)) for o in orders]
    for i in range(random.randint(5, 16)):
        value, result, k = random.choice(list(shapes)[-5:]), f"t{i}", f"k{i}"
        shape = shapes[value]
        op = random.choice(("Transpose", "Transpose", "Unary", "Binary", "Pair", "Concat", "Pad", "Reduce", "Softmax"))
        inputs, attributes = [value], dict[str, object]()
        if op == "Transpose" and len(shape) == 4:
            order = random.choice(orders)
            attributes, shape = {"perm": order}, tuple(shape[d] for d in order)
        elif op == "Binary":
            wide = [n if random.random() < 0.6 else 1 for n in shape[random.randint(0, len(shape)) :]]
            constants[k] = normal(rng, *wide)
            op, inputs = random.choice(("Add", "Mul", "Max")), random.sample([value, k], 2)
        elif op in ("Pair", "Concat") and math_size(shape) < 4000:
            other = random.choice([n for n, s in shapes.items() if s == shape])
            axis = random.randrange(len(shape))
            inputs, attributes = [value, other], {"axis": axis - random.choice((0, len(shape)))} if op == "Concat" else {}
            shape = (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :]) if op == "Concat" else shape
            op = "Add" if op == "Pair" else op
        elif op == "Pad" and math_size(shape) < 4000:
            pads = [random.choice((0, 0, 1, 2)) for _ in range(2 * len(shape))]
            constants[k], inputs = np.array(pads), [value, k]
            shape = tuple(n + a + b for n, a, b in zip(shape, pads[: len(shape)], pads[len(shape) :], strict=True))
        elif op == "Reduce" and len(shape) == 4:
            axes = random.sample(range(4), random.choice((1, 2)))
            keep = random.choice((0, 1, 1))
            constants[k], inputs, attributes = np.array(axes) - random.choice((0, 4)), [value, k], {"keepdims": keep}
            shape = tuple(1 if d in axes else n for d, n in enumerate(shape) if keep or d not in axes)
            op = random.choice(("ReduceMean", "ReduceMax"))
        elif op == "Softmax":
            attributes = {"axis": random.randrange(len(shape))}
        else:
            op = random.choice(("Tanh", "Relu", "Sigmoid"))
        nodes.append(helper.make_node(op, inputs, [result], **attributes))
        shapes[result] = shape
    read = {i for n in nodes for i in n.input}
    ends = [n for n in shapes if n not in read] + random.sample(list(shapes)[1:], 1)
    nodes += [helper.make_node("Identity", [v], [f"y{i}"]) for i, v in enumerate(ends)]
    return graph_of(nodes, (2, 3, 4, 5), constants, tuple(f"y{i}" for i in range(len(ends))))


def math_size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))


@pytest.mark.slow
def test_random_graphs_keep_their_values(seed: int, rng: np.random.Generator) -> None:
    random, changed = Random(seed), 0
    for _ in range(400):
        before = drawn(random, rng)
        after = CancelTransposes()(before)
        changed += after is not before
        agree(rng, before, after)
        assert CancelTransposes()(after) is after, "a second time there is nothing to do"
        if changed > 10:
            break
    assert changed > 10
    agree(rng, before, Pipeline(default_passes()).run(before)[0])
