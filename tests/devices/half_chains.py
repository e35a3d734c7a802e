"""Random models whose float16 results, or float32 ones in ``precision="float16"``, show where values are rounded or overflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

UNARY = ("Neg", "Abs", "Relu", "Sqrt", "Floor", "Identity")
BINARY = ("Add", "Sub", "Mul", "Mul", "Div", "Max", "Min")


@dataclass
class Drawing:
    """A model of one element type under construction."""

    rng: np.random.Generator
    dtype: type[np.floating[Any]]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    @property
    def kind(self) -> int:
        """ONNX' number of the element type."""
        return int(helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype)))

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return the name of its result."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def constant(self, value: Any, dtype: Any = None) -> str:
        """Add a constant, of the model's element type unless ``dtype`` is given."""
        array = np.asarray(value, dtype or self.dtype)
        self.constants.append(numpy_helper.from_array(array, f"c{len(self.constants)}"))
        return self.constants[-1].name

    def pick(self, *choices: Any) -> Any:
        """Return one of ``choices``."""
        return choices[int(self.rng.integers(len(choices)))]

    def model(self, inputs: dict[str, tuple[int, ...]], outputs: list[str]) -> onnx.ModelProto:
        """Return the model with these results."""
        given = [helper.make_tensor_value_info(n, self.kind, s) for n, s in inputs.items()]
        results = [helper.make_tensor_value_info(n, TensorProto.UNDEFINED, None) for n in outputs]
        for value in results:
            value.ClearField("type")
        graph = helper.make_graph(self.nodes, "chain", given, results, self.constants)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        return onnx.shape_inference.infer_shapes(made)


def draw_exact(rng: np.random.Generator) -> tuple[Callable[[list[str]], onnx.ModelProto], list[str], dict[str, np.ndarray]]:
    """Draw a float16 model whose operators are exact but for the rounding of their results.

    Returns a function of the wanted results, the names of all results, and inputs. Products have small whole numbers as operands,
    so that their sums are exact in every order.
    """
    draw, shape = Drawing(rng, np.float16), (int(rng.integers(1, 6)), int(rng.integers(1, 40)))
    values, inputs = ["x", "w"], {"x": shape, "w": shape}
    feeds = {"x": rng.choice([60000, 300, -300, 7, 2e-4, 3.1, 0.1, -1], shape), "w": rng.choice([1000, 3, -0.3, 1e-3, 11], shape)}
    if rng.random() < 0.5:
        depth = int(rng.integers(1, 70))
        inputs |= {"a": (shape[0], depth)}
        feeds |= {"a": rng.integers(-40, 40, (shape[0], depth))}
        values.append(draw.node("MatMul", "a", draw.constant(rng.integers(-90, 90, (depth, shape[1])))))
    for _ in range(int(rng.integers(2, 9))):
        recent = values[-3:]
        if rng.random() < 0.3:
            values.append(draw.node(draw.pick(*UNARY), draw.pick(*recent)))
        elif rng.random() < 0.15:
            total = draw.node("ReduceMax", draw.pick(*recent), draw.constant([1], np.int64))
            values.append(draw.node(draw.pick(*BINARY), draw.pick(*recent), total))
        else:
            other = draw.constant(draw.pick(3, 0.1, -700)) if rng.random() < 0.2 else draw.pick(*values)
            values.append(draw.node(draw.pick(*BINARY), draw.pick(*recent), other))
    results = [n.output[0] for n in draw.nodes]
    return lambda wanted: draw.model(inputs, wanted), results, {n: v.astype(np.float16) for n, v in feeds.items()}
