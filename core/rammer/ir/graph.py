"""Graph: the model as ONNX operators with static types, after the frontend has bound its shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rammer.ir.names import quote_text
from rammer.ir.types import TensorType

__all__ = ["Graph", "Node", "Value", "verify_graph"]


@dataclass(frozen=True, slots=True)
class Value:
    """A named tensor; ``external`` is its name in the ONNX model. ``outside`` is its element type there if that is one of
    ``ir.formats``; ``type`` is then the carrier."""

    name: str
    type: TensorType
    external: str = ""
    outside: str = ""

    @property
    def port(self) -> TensorType:
        """The type of the arrays that users pass and receive."""
        return TensorType(self.outside or self.type.dtype, self.type.shape)

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


@dataclass(frozen=True, slots=True)
class Node:
    """An ONNX operator. Absent optional inputs are ``""``; ``name`` is the node's ONNX name.

    ``domain`` is "" for the standard operators. Attribute values are Python scalars, tuples, strings or NumPy arrays (tensor
    attributes), never protobufs (sub-graphs stay in ``proto``). For plugin operators, ``op`` is prefixed with the domain
    (``acme.Relu``), to distinguish them from ONNX operators of equal name.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    domain: str = ""
    version: int = 0

    @property
    def declared(self) -> bool:
        """True if a plugin declares the operator and ONNX lacks it."""
        return bool(self.domain) and self.op.startswith(f"{self.domain}.")

    @property
    def bare(self) -> str:
        """The operator's name in the model, without its domain."""
        return self.op.removeprefix(f"{self.domain}.") if self.domain else self.op

    @property
    def attribute_text(self) -> str:
        """The attributes as ``name=value``, in order of names."""
        return ", ".join(f"{k}={_format_attribute(v)}" for k, v in sorted(self.attributes.items()))

    def __str__(self) -> str:
        shown = self.attribute_text
        attributes = f" {{{shown}}}" if shown else ""
        origin = f"  # {quote_text(self.name)}" if self.name else ""
        args = ", ".join(i or "_" for i in self.inputs)
        return f"{', '.join(o or '_' for o in self.outputs)} = {self.op}({args}){attributes}{origin}"


def _format_attribute(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"tensor<{value.dtype}{list(value.shape)}>"
    if isinstance(value, tuple):
        return "[" + ",".join(map(str, value)) + "]"
    return repr(value) if isinstance(value, str) else str(value)


@dataclass(frozen=True)
class Graph:
    """A model of nodes in topological order, with the type of every value and the data of every constant."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)
    opset: int = 0

    def __str__(self) -> str:
        def ports(values: tuple[Value, ...]) -> str:
            return ", ".join(map(str, values))

        lines = [f"graph {self.name}({ports(self.inputs)}) -> ({ports(self.outputs)})"]
        lines += [f"  constant {n}: {self.types[n]}" for n in self.constants]
        for node in self.nodes:
            types = ", ".join(str(self.types.get(o, "?")) for o in node.outputs if o)
            lines.append(f"  {types:<20} {node}")
        return "\n".join(lines)

    def constant(self, name: str) -> np.ndarray | None:
        """Return the constant value of ``name``, or None."""
        return self.constants.get(name)


def verify_graph(graph: Graph) -> None:
    """Check order, single definition and types. Raises ValueError naming the node."""
    defined = {v.name for v in graph.inputs} | set(graph.constants)
    for node in graph.nodes:
        for name in node.inputs:
            if name and name not in defined:
                why = "is the graph in topological order?"
                raise ValueError(f"value {name} is used before it is defined\n  {node}\n{why}")
        for name in node.outputs:
            if name in defined:
                raise ValueError(f"value {name} is defined twice\n  {node}")
            if name and name not in graph.types:
                raise ValueError(f"value {name} has no type\n  {node}")
        defined.update(o for o in node.outputs if o)
    for value in graph.outputs:
        if value.name not in defined:
            raise ValueError(f"output {value.name} of graph {graph.name} is never computed")
