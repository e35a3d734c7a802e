"""Operators without a tensor expression, run on the host by ``frontend.evaluator``; they are listed, never hidden."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, OperatorSetIdProto

from rammer.errors import BadInput
from rammer.frontend import checks
from rammer.frontend import external as external_files
from rammer.frontend.evaluator import Unjudged, evaluate
from rammer.frontend.nodes import SubGraph, attribute_value, bodies, captures, first_line, node_proto
from rammer.ir.data import loads
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

        Raises BadInput where nothing judged implements the operator, where that fails, or computes another
        shape than the one inferred (a result whose shape depends on data).
        """
        where = f"node {self.node.name} ({self.node.op})"
        try:
            values = evaluate(self.node, inputs, self.types, host=True)
        except BadInput as problem:
            raise BadInput(problem.what, where, problem.hint) from problem
        except Unjudged as error:
            raise BadInput(str(error), where, "export the model without it") from error
        except NotImplementedError as error:
            raise BadInput(
                f"no device and no reference implementation runs {self.node.op}", where, "export the model without it"
            ) from error
        except Exception as error:
            raise BadInput(
                f"{self.node.op} fails on the host: {first_line(error)}", where, "check the operator's inputs"
            ) from error
        return {name: self._checked(name, values[name], where) for name in self.types}

    def _checked(self, name: str, value: np.ndarray, where: str) -> np.ndarray:
        declared = self.types[name]
        if value.shape != declared.shape:
            what = f"{self.node.op} gives {name!r} the shape {list(value.shape)} instead of {list(declared.shape)}"
            raise BadInput(what, where, "shapes that depend on data are not supported")
        return np.asarray(value, dtype=declared.dtype, order="C")

    def to_bytes(self) -> bytes:
        """JSON around the operator's protobuf; ``from_bytes`` reads it back."""
        node = self.node
        opsets = next((body.opsets for body in bodies(node)), ())
        return json.dumps(
            {
                "proto": base64.b64encode(node_proto(node).SerializeToString()).decode(),
                "inputs": node.inputs,
                "captures": captures(node),
                "opsets": opsets,
                "version": node.version,
                "types": {name: str(kind) for name, kind in self.types.items()},
            }
        ).encode()

    @staticmethod
    def from_bytes(data: bytes) -> HostNode:
        """Inverse of ``to_bytes``. Raises ValueError, KeyError or TypeError for anything else."""
        head: dict[str, Any] = loads(data)
        try:
            proto = NodeProto.FromString(base64.b64decode(head["proto"]))
        except Exception as error:  # protobuf's DecodeError lives in another module for each of its implementations
            raise ValueError(f"not an operator: {first_line(error)}") from error
        _check_node(proto, int(head["version"]), head["opsets"])
        outer = tuple(map(str, head["captures"]))
        opsets = tuple((str(domain), int(version)) for domain, version in head["opsets"])
        attributes = {a.name: _with_context(attribute_value(a), outer, opsets) for a in proto.attribute}
        node = Node(
            proto.op_type,
            tuple(map(str, head["inputs"])),
            tuple(proto.output),
            attributes,
            proto.name,
            proto.domain,
            int(head["version"]),
        )
        return HostNode(node, {str(n): TensorType.parse(t) for n, t in head["types"].items()})


def _check_node(proto: NodeProto, version: int, opsets: Any) -> None:
    """BadInput for an operator that ONNX does not define, or one that reads other files."""
    graph = GraphProto(node=[proto])
    imports = {proto.domain: version, **{str(domain): int(v) for domain, v in opsets}}
    model = ModelProto(graph=graph, opset_import=[OperatorSetIdProto(domain=d, version=v) for d, v in imports.items()])
    checks.check_operators(model)
    external_files.check_external_data(model, None, "the compiled model")


def _with_context(value: Any, outer: tuple[str, ...], opsets: tuple[tuple[str, int], ...]) -> Any:
    """An attribute; a body with the outer names and operator versions that its protobuf does not hold."""
    return replace(value, captures=outer, opsets=opsets) if isinstance(value, SubGraph) else value
