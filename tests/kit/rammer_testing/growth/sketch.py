"""An ONNX graph under construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

#: Element-wise operators that no pass removes.
MAPS: Final = ("Relu", "Sigmoid", "Tanh", "Softplus", "Neg")


@dataclass
class Sketch:
    """An ONNX graph under construction, with inputs and constants of float32."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    functions: list[onnx.FunctionProto] = field(default_factory=list)
    prefix: str = "v"

    def node(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Append a node and return its first output."""
        names = [f"{self.prefix}{len(self.nodes)}{'' if i == 0 else f'_{i}'}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, **attributes))
        return names[0]

    def input(self, *shape: int, dtype: int = TensorProto.FLOAT) -> str:
        """Add an input of the model."""
        self.inputs.append(helper.make_tensor_value_info(f"x{len(self.inputs)}", dtype, shape))
        return f"x{len(self.inputs) - 1}"

    def constant(self, values: Any) -> str:
        """Add an initializer with these values."""
        name = f"c{self.prefix}{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def weight(self, *shape: int) -> str:
        """Add an initializer of this shape with unique values."""
        number = len(self.constants) + 1
        return self.constant((np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) % 7 - 3) / 8 + 1 / number)

    def graph(self, outputs: Sequence[str], name: str = "growth") -> onnx.GraphProto:
        """Return the finished graph; output types are inferred."""
        return helper.make_graph(self.nodes, name, self.inputs, [onnx.ValueInfoProto(name=o) for o in outputs], self.constants)

    def model(self, *outputs: str) -> onnx.ModelProto:
        """Return the finished model."""
        imports = [helper.make_opsetid("", 21), *(helper.make_opsetid(d, 1) for d in {f.domain for f in self.functions})]
        return helper.make_model(self.graph(outputs), opset_imports=imports, ir_version=10, functions=self.functions)
