"""Conversion of Scan of opset 8 to nested Scans of opset 9.

Operands of opset 8 have a batch axis before the scanned axis. The outer Scan iterates over the batch, the inner one over a
sequence. ONNX's converter drops the batch from the types but not from the values, so these Scans are hidden from it."""

from __future__ import annotations

from typing import Final

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from rammer.errors import BadInput
from rammer.frontend.read import model_checks
from rammer.frontend.read.node_protos import node_title

#: The last opset with a batch axis, and the domain of hidden Scans.
BATCHED: Final = 8
_HIDDEN: Final = "rammer.batched"


def hide_scans(model: ModelProto, opset: int) -> bool:
    """Move the Scans of a model of opset 8 into a domain that the converter ignores. Return True if the model has a Scan. Raises
    BadInput for per-sequence lengths (sequence_lens)."""
    found = (
        [n for g in model_checks.all_graphs(model) for n in g.node if n.op_type == "Scan" and not n.domain]
        if opset <= BATCHED
        else []
    )
    for node in found:
        if node.input[0]:
            raise BadInput(
                "Scan of opset 8 with sequence_lens is not supported", node_title(node), "export the model with opset 9 or newer"
            )
        node.domain = _HIDDEN
    if found:
        model.opset_import.append(helper.make_opsetid(_HIDDEN, 1))
    return bool(found)


def reveal_scans(model: ModelProto) -> None:
    """Replace hidden Scans by their nested form."""
    # Inner Scans first: the replacement of an outer Scan copies its body.
    for graph in [*model_checks.all_graphs(model)][::-1]:
        for node in graph.node:
            if node.domain == _HIDDEN:
                node.CopyFrom(_nest_scan(node))
    kept = [o for o in model.opset_import if o.domain != _HIDDEN]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def _nest_scan(node: NodeProto) -> NodeProto:
    """Return a Scan over the batch whose body is the Scan over the sequence."""
    attributes = {a.name: a for a in node.attribute}
    body, prefix = attributes["body"].g, next(filter(None, node.output), node.name)
    ways = list(attributes["directions"].ints) if "directions" in attributes else []
    given = [f"{prefix}:in{i}" for i in range(len(body.input))]
    made = [f"{prefix}:out{i}" for i in range(len(body.output))]
    inner = helper.make_node("Scan", given, made, f"{node.name}/sequence", num_scan_inputs=attributes["num_scan_inputs"].i)
    inner.attribute.add(name="body", type=attributes["body"].type).g.CopyFrom(body)
    if ways:
        inner.attribute.append(helper.make_attribute("scan_input_directions", ways))
    outer = GraphProto(name=f"{body.name}/batch", node=[inner])
    outer.input.extend(_make_value_infos(given, body.input))
    outer.output.extend(_make_value_infos(made, body.output))
    return helper.make_node("Scan", node.input[1:], node.output, node.name, num_scan_inputs=len(given), body=outer)


def _make_value_infos(names: list[str], like: list[ValueInfoProto]) -> list[ValueInfoProto]:
    """Return values of any shape, with the element types of ``like``."""
    result = [ValueInfoProto(name=n) for n in names]
    for port, known in zip(result, like, strict=True):
        port.type.tensor_type.elem_type = known.type.tensor_type.elem_type
    return result
