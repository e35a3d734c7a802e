"""The ONNX graph of a case under construction, with optional context around its operator."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


@dataclass
class Net:
    """An ONNX graph under construction. Weights are constants unless ``free``; the last value is the output."""

    tags: Collection[str]
    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Append a node and return its output."""
        self.nodes.append(helper.make_node(op, list(inputs), [f"v{len(self.nodes)}"], **attributes))
        return f"v{len(self.nodes) - 1}"

    def input(self, *shape: int) -> str:
        """Add a float32 input of the model."""
        name = f"x{len(self.inputs)}"
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    def codes(self, kind: str, *shape: int, free: bool = True) -> str:
        """Add an input of 8-bit codes, "uint8" or "int8", or a constant unless they are ``free``."""
        if not free:
            ends = np.iinfo(kind)
            return self.constant(self.rng.integers(ends.min, ends.max, shape, kind, endpoint=True))
        name = f"x{len(self.inputs)}"
        self.inputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), shape))
        return name

    def weight(self, *shape: int) -> str:
        """Add a constant, or an input if the case has free weights."""
        return self.input(*shape) if "free" in self.tags else self.constant(self.rng.standard_normal(shape).astype(np.float32))

    def constant(self, values: Any) -> str:
        """Add a constant with these values."""
        array = np.asarray(values)
        self.constants.append(numpy_helper.from_array(array, f"c{len(self.constants)}"))
        return f"c{len(self.constants) - 1}"

    def model(self, last: str) -> onnx.ModelProto:
        """Return the finished model."""
        results = [helper.make_tensor_value_info(n, TensorProto.UNDEFINED, None) for n in (*self.outputs, last)]
        graph = helper.make_graph(self.nodes, "case", self.inputs, results, self.constants)
        for value in graph.output:
            value.ClearField("type")
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=9)
        return onnx.shape_inference.infer_shapes(model)

    # --- context of an operator -------------------------------------------------------------------

    def source(self, shape: tuple[int, ...], off: int, axis: int = 1) -> str:
        """Add the first operand: an input or a slice of an input, followed by maps if the case has them."""
        if "slice" in self.tags and off:
            big = list(shape)
            big[axis] += off
            ends, starts = (self.constant(np.array([v], np.int64)) for v in (big[axis], off))
            x = self.node("Slice", self.node("Relu", self.input(*big)), starts, ends, self.constant(np.array([axis], np.int64)))
        else:
            x = self.input(*shape)
        if "bn" in self.tags:
            side = [1] * len(shape)
            side[axis] = shape[axis]
            x = self.node("Relu", self.node("Add", self.node("Mul", x, self.some(*side)), self.some(*side)))
        return x

    def some(self, *shape: int) -> str:
        """Add a constant that is not folded into weights."""
        return self.constant(self.rng.standard_normal(shape).astype(np.float32))

    def finish(self, y: str, shape: tuple[int, ...], off: int, axis: int = 1) -> onnx.ModelProto:
        """Add maps after the operator, another reader of its result, and a concatenation."""
        if "add" in self.tags:
            y = self.node("Add", y, self.input(*shape))
        for tag, op in (("relu", "Relu"), ("sigmoid", "Sigmoid"), ("swish", "HardSwish")):
            y = self.node(op, y) if tag in self.tags else y
        if "mul" in self.tags:
            y = self.node("Mul", y, self.constant(np.float32(0.5)))
        if "twice" in self.tags:
            self.outputs.append(self.node("Neg", y))
        if "concat" in self.tags and off:
            side = list(shape)
            side[axis] = off
            y = self.node("Concat", self.node("Neg", self.input(*side)), y, axis=axis)
        return self.model(self.node("Abs", y) if "concat" in self.tags else y)
