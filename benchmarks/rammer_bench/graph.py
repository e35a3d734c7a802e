"""An ONNX graph in the form for peers: plain nodes with the fusions that users of those frameworks write by hand.

Batch norms fold into convolutions, a matrix product with its bias is one linear layer, scaled dot-product attention is one node,
stacked LSTMs are one node. A peer is thus timed at its best, independent of the export's form. The module is independent of the
compiler's frontend and passes: the benchmarks' float64 reference is computed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

from rammer.frontend.bind.evaluator import evaluate_proto

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True)
class PeerNode:
    """One operator of a peer graph. Fused ones are ``Linear`` (x, weight [in, out], bias), ``Attention`` (q, transposed k, v;
    attribute scale), and ``LSTM`` with (x, then W, R, B of each layer) and outputs Y, Y_h, Y_c of the last layer."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute or ``default``."""
        return self.attributes.get(name, default)


@dataclass
class PeerGraph:
    """The nodes in topological order, constants by name, ports by name in the model's order."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: list[PeerNode]
    constants: dict[str, Array]
    opset: int = 21

    def readers(self) -> dict[str, list[PeerNode]]:
        """Return the nodes that read each value; an output of the graph counts as one more reader."""
        found: dict[str, list[PeerNode]] = {}
        for node in self.nodes:
            for name in node.inputs:
                found.setdefault(name, []).append(node)
        for name in self.outputs:
            found.setdefault(name, []).append(PeerNode("Output", (name,), ()))
        return found

    def producers(self) -> dict[str, PeerNode]:
        """Return the producer node of each value."""
        return {o: n for n in self.nodes for o in n.outputs if o}


def peer_graph(model: onnx.ModelProto) -> PeerGraph:
    """Return ``model`` with every fusion applied."""
    constants = {t.name: np.array(numpy_helper.to_array(t)) for t in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        op = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
        if op == "Constant":
            constants.update(evaluated(PeerNode(op, (), tuple(node.output), attributes), {}, 21))
        else:
            nodes.append(PeerNode(op, tuple(node.input), tuple(node.output), attributes))
    inputs = tuple(i.name for i in model.graph.input if i.name not in constants)
    opset = next(i.version for i in model.opset_import if not i.domain)
    graph = PeerGraph(model.graph.name, inputs, tuple(o.name for o in model.graph.output), nodes, constants, opset)
    fusions: tuple[Callable[[PeerGraph], None], ...] = (fold_constants, fold_norms, fuse_linear, fuse_attention, stack_lstms)
    for fuse in fusions:
        fuse(graph)
    return graph


def _only_reader(readers: Mapping[str, list[PeerNode]], value: str, op: str) -> PeerNode | None:
    found = readers.get(value, [])
    return found[0] if len(found) == 1 and found[0].op == op else None


def _drop(graph: PeerGraph, gone: list[PeerNode], new: Mapping[int, PeerNode]) -> None:
    """Remove the nodes in ``gone`` and insert those in ``new`` in place of the nodes with these ids."""
    ids = {id(n) for n in gone}
    graph.nodes = [new.get(id(n), n) for n in graph.nodes if id(n) not in ids]


def evaluated(node: PeerNode, constants: Mapping[str, Array], opset: int) -> dict[str, Array]:
    """Return outputs by name of an operator with constant operands, by ONNX's reference implementation."""
    proto = helper.make_node(node.op, node.inputs, node.outputs, **node.attributes)
    return evaluate_proto(proto, {n: constants[n] for n in node.inputs if n}, {"": opset})


def fold_constants(graph: PeerGraph) -> None:
    """Replace operators on constants by constants: exporters pass weights through Identity."""
    kept = []
    for node in graph.nodes:
        if node.inputs and all(n in graph.constants for n in node.inputs if n):
            graph.constants.update(evaluated(node, graph.constants, graph.opset))
        else:
            kept.append(node)
    graph.nodes = kept


def fold_norms(graph: PeerGraph) -> None:
    """Fold BatchNormalization into the preceding Conv, as one Conv with a bias, computed in float64."""
    readers = graph.readers()
    gone, new = list[PeerNode](), dict[int, PeerNode]()
    for conv in graph.nodes:
        norm = _only_reader(readers, conv.outputs[0], "BatchNormalization") if conv.op == "Conv" else None
        if norm is None or norm.inputs[0] != conv.outputs[0]:
            continue
        scale, shift, mean, variance = (graph.constants[n].astype(np.float64) for n in norm.inputs[1:5])
        weight = graph.constants[conv.inputs[1]]
        factor = scale / np.sqrt(variance + norm.attr("epsilon", 1e-5))
        bias = graph.constants[conv.inputs[2]] if len(conv.inputs) > 2 else 0.0
        names = (f"{conv.outputs[0]}.weight", f"{conv.outputs[0]}.bias")
        shaped = factor.reshape(-1, *[1] * (weight.ndim - 1))
        graph.constants[names[0]] = (weight * shaped).astype(weight.dtype)
        graph.constants[names[1]] = ((bias - mean) * factor + shift).astype(weight.dtype)
        gone.append(norm)
        new[id(conv)] = replace(conv, inputs=(conv.inputs[0], *names), outputs=norm.outputs)
    _drop(graph, gone, new)


def fuse_linear(graph: PeerGraph) -> None:
    """Fuse MatMul with a constant matrix and Add of a constant vector."""
    readers = graph.readers()
    gone, new = list[PeerNode](), dict[int, PeerNode]()
    for product in graph.nodes:
        add = _only_reader(readers, product.outputs[0], "Add") if product.op == "MatMul" else None
        matrix = graph.constants.get(product.inputs[1]) if add is not None else None
        if add is None or matrix is None or matrix.ndim != 2:
            continue
        bias = next(n for n in add.inputs if n != product.outputs[0])
        if bias in graph.constants and graph.constants[bias].ndim == 1:
            gone.append(product)
            new[id(add)] = PeerNode("Linear", (*product.inputs, bias), add.outputs)
    _drop(graph, gone, new)


def fuse_attention(graph: PeerGraph) -> None:
    """Fuse softmax(scale * (q @ k)) @ v over the last axis."""
    readers, producers = graph.readers(), graph.producers()
    gone, new = list[PeerNode](), dict[int, PeerNode]()
    for softmax in graph.nodes:
        if softmax.op != "Softmax" or softmax.attr("axis", -1) != -1:
            continue
        context = _only_reader(readers, softmax.outputs[0], "MatMul")
        mul = producers.get(softmax.inputs[0])
        if context is None or mul is None or mul.op != "Mul" or mul.inputs[1] not in graph.constants:
            continue
        scale, scores = graph.constants[mul.inputs[1]], producers.get(mul.inputs[0])
        chain = [scores, mul, softmax]
        if scores is None or scores.op != "MatMul" or scale.ndim or context.inputs[0] != softmax.outputs[0]:
            continue
        if any(n is None or len(readers[n.outputs[0]]) != 1 for n in chain):
            continue
        gone += [scores, mul, softmax]
        operands = (*scores.inputs, context.inputs[1])
        new[id(context)] = PeerNode("Attention", operands, context.outputs, {"scale": float(scale)})
    _drop(graph, gone, new)


def plain_lstm(node: PeerNode) -> bool:
    """Return True for a forward LSTM with default activations, without sequence lengths, initial states or peepholes."""
    return (
        node.op == "LSTM"
        and not any(node.inputs[4:])
        and node.attr("direction", b"forward") in (b"forward", "forward")
        and not set(node.attributes) & {"activations", "clip", "input_forget", "layout"}
    )


def stack_lstms(graph: PeerGraph) -> None:
    """Fuse LSTM - Squeeze - LSTM chains of equal hidden size into one multi-layer LSTM."""
    readers, producers = graph.readers(), graph.producers()
    merged: dict[int, PeerNode] = {}
    gone: list[PeerNode] = []
    for node in graph.nodes:
        if not plain_lstm(node):
            continue
        squeeze = producers.get(node.inputs[0])
        below = producers.get(squeeze.inputs[0]) if squeeze is not None and squeeze.op == "Squeeze" else None
        mine = node.inputs[1:4]
        if squeeze is None or below is None or id(below) not in merged:
            merged[id(node)] = replace(node, inputs=(node.inputs[0], *mine))
            continue
        first = merged[id(below)]
        inner = ((below.outputs[0], "Squeeze"), (squeeze.outputs[0], "LSTM"))
        private = all(_only_reader(readers, value, op) for value, op in inner)
        states = any(o in readers for o in below.outputs[1:] if o)
        if not private or states or first.attr("hidden_size") != node.attr("hidden_size"):
            merged[id(node)] = replace(node, inputs=(node.inputs[0], *mine))
            continue
        gone += [below, squeeze]
        merged[id(node)] = replace(node, inputs=(*first.inputs, *mine))
    _drop(graph, gone, merged)
