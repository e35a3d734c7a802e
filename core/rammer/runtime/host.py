"""Operators without a tensor expression, run on the host by ``onnx.reference``; they are listed, never hidden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rammer.errors import BadInput
from rammer.frontend.nodes import evaluate_node, first_line
from rammer.ir.graph import Graph, Node
from rammer.ir.types import TensorType


@dataclass(frozen=True)
class HostNode:
    """One operator and the static types of its outputs, by name."""

    node: Node
    types: Mapping[str, TensorType]

    @staticmethod
    def of(graph: Graph, node: Node) -> HostNode:
        """``node`` of ``graph``."""
        return HostNode(node, {o: graph.types[o] for o in node.outputs if o})

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads (those that its sub-graphs capture included), each once."""
        return tuple(dict.fromkeys(n for n in self.node.inputs if n))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values it computes."""
        return tuple(self.types)

    def __str__(self) -> str:
        types = ", ".join(map(str, self.types.values()))
        return f"host {types} {self.node}"

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Its outputs by name.

        Raises BadInput where ``onnx.reference`` has no implementation, fails, or computes another
        shape than the one inferred (a result whose shape depends on data).
        """
        where = f"node {self.node.name} ({self.node.op})"
        try:
            values = evaluate_node(self.node, inputs)
        except NotImplementedError as error:
            raise BadInput(f"no device and no reference implementation runs {self.node.op}", where,
                           "export the model without it") from error  # fmt: skip
        except Exception as error:
            raise BadInput(f"{self.node.op} fails on the host: {first_line(error)}", where,
                           "check the operator's inputs") from error  # fmt: skip
        return {name: self._checked(name, values[name], where) for name in self.types}

    def _checked(self, name: str, value: np.ndarray, where: str) -> np.ndarray:
        declared = self.types[name]
        if value.shape != declared.shape:
            what = f"{self.node.op} gives {name!r} the shape {list(value.shape)} instead of {list(declared.shape)}"
            raise BadInput(what, where, "shapes that depend on data are not supported")
        return np.asarray(value, dtype=declared.dtype, order="C")
