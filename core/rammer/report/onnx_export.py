"""A Graph as an ONNX model, for viewers such as Netron and for other runtimes.

Inputs and outputs have their names in the original model. Tensors of storage-only types have their carrier types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from rammer.errors import BadInput
from rammer.frontend.read.node_protos import captured_names, node_proto
from rammer.ir.graph import Graph, Node
from rammer.ir.names import Names, make_identifier
from rammer.ir.types import TensorType

#: Bytes that a protobuf may have, less room for everything but constants.
MOST_BYTES: Final = (1 << 31) - (1 << 24)


def to_onnx(graph: Graph) -> ModelProto:
    """Return ``graph`` as a model of ONNX. Raises BadInput if its constants exceed the size of a protobuf."""
    size = sum(graph.types[n].nbytes for n in graph.constants)
    if size > MOST_BYTES:
        raise BadInput(f"the graph has {size} bytes of constants, and an ONNX file without external data at most {MOST_BYTES}")
    captured = {inner: outer for n in graph.nodes for inner, outer in _captures(n)}
    names = _external_names(graph, captured)
    nodes = list[NodeProto]()
    for node in graph.nodes:
        # The values that its bodies capture are copied once to their names in the bodies.
        found = [(inner, names[captured.pop(inner)]) for inner, _ in _captures(node) if inner in captured]
        nodes += [helper.make_node("Identity", [outer], [inner]) for inner, outer in found if inner != outer]
        nodes.append(node_proto(node))
        for own in (nodes[-1].input, nodes[-1].output):
            own[:] = [names.get(n, n) for n in own]
    named = {names[v.name] for v in graph.outputs}
    nodes += [
        helper.make_node("Identity", [names[v.name]], [v.external])
        for v in graph.outputs
        if v.external and v.external not in named
    ]
    body = helper.make_graph(
        nodes,
        graph.name,
        [_value_info(names[v.name], v.type) for v in graph.inputs],
        [_value_info(v.external or names[v.name], v.type) for v in graph.outputs],
        [numpy_helper.from_array(np.asarray(array), names[n]) for n, array in graph.constants.items()],
        value_info=[_value_info(names[o], graph.types[o]) for n in graph.nodes for o in n.outputs if o in graph.types],
    )
    versions = {"": graph.opset}
    for node in graph.nodes:
        if node.domain:
            versions[node.domain] = max(versions.get(node.domain, 1), node.version)
    imports = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    return helper.make_model(
        body,
        opset_imports=imports,
        ir_version=helper.find_min_ir_version_for(imports, ignore_unknown=True),
        producer_name="rammer",
    )


def _external_names(graph: Graph, captured: Iterable[str]) -> Mapping[str, str]:
    """Return the name of each value in the model: that of a port, or else its own, unless it is a port's or ``captured``."""
    ports = {v.name: v.external for v in (*graph.outputs, *graph.inputs) if v.external}
    taken = Names({*captured, *(v.external for v in (*graph.outputs, *graph.inputs))})
    values = dict.fromkeys([*graph.types, *(o for n in graph.nodes for o in n.outputs if o)])
    return ports | {n: make_identifier(n, taken) for n in values if n not in ports}


def _captures(node: Node) -> list[tuple[str, str]]:
    """Return the names of captured values in the bodies of a node, and in the graph."""
    captures = captured_names(node)
    return list(zip(captures, node.inputs[len(node.inputs) - len(captures) :], strict=True))


def _value_info(name: str, kind: TensorType) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind.dtype)), kind.shape)
