"""Guards against inputs that abort the process inside ONNX's inference.

ONNX infers the bounds of a Slice by ``std::clamp``, whose assertion fails for a negative extent. For GatherND it reads the extent
that the last extent of the indices selects, even if that is negative. Negative extents may be declared: old exporters write -1
for any extent. They may also be inferred before our checks: a window may be larger than its image. This happens in the version
converter, which reads the whole model (``hide_indices``), and in the bodies of If, Loop and Scan (``check_bodies``).

The inference of some operators (such as EyeLike) reads an operand's type without a check. The type is missing if the producer's
inference is missing or stops. It stops on a sparse initialiser, or on a body with inconsistent types. ``declare_types`` therefore
gives every value a type, at least that of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper, shape_inference

from rammer.frontend.read import limits, model_checks, schemas
from rammer.frontend.read import node_protos as nd

#: Prefix of the inputs that replace the starts of a Slice and the indices of a GatherND.
_VEIL: Final = "rammer.starts"
#: Operators with a replaced input, with the shape of the replacement.
_VEILED: Final[Mapping[str, list[None] | None]] = {"Slice": [None], "GatherND": None}
#: Maximum elements of a value that inference reads: shapes, axes and bounds are shorter.
_SHORT: Final = 1024


def open_extents(model: ModelProto) -> ModelProto:
    """Return the model with all negative declared extents cleared, or the model itself without them."""
    if not any(d.dim_value < 0 for graph in model_checks.all_graphs(model) for d in _iter_extents(graph)):
        return model
    result = ModelProto()
    result.CopyFrom(model)
    for graph in model_checks.all_graphs(result):
        for extent in _iter_extents(graph):
            if extent.dim_value < 0:
                extent.Clear()
    return result


def _iter_extents(graph: GraphProto) -> Iterator[Any]:
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield from _extents_in_type(value.type)


def _extents_in_type(kind: TypeProto) -> Iterator[Any]:
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        yield from getattr(kind, which).shape.dim
    elif which in ("sequence_type", "optional_type"):
        yield from _extents_in_type(getattr(kind, which).elem_type)


def declare_types(graphs: Iterable[GraphProto]) -> None:
    """Declare a tensor type of unknown elements and shape for every value of ``graphs`` without a type. Inference completes these
    types and thus never reads a missing type."""
    for graph in graphs:
        made = dict.fromkeys(o for node in graph.node for o in node.output if o)
        for value in (*graph.input, *graph.value_info, *(v for v in graph.output if v.name in made)):
            if value.type.WhichOneof("value") is None:
                value.type.tensor_type.SetInParent()
        known = {v.name for v in (*graph.input, *graph.output, *graph.value_info)}
        for name in (n for n in made if n not in known):
            graph.value_info.add(name=name).type.tensor_type.SetInParent()


def undeclare_types(graphs: Iterable[GraphProto]) -> None:
    """Remove the types of ``declare_types`` that inference has not completed."""
    for graph in graphs:
        for value in (*graph.input, *graph.output):
            if value.type.HasField("tensor_type") and not value.type.tensor_type.elem_type:
                value.ClearField("type")
        del graph.value_info[:]  # they have no readers


def with_declared_types(node: NodeProto) -> NodeProto:
    """Return the operator with declared types for all values in its bodies, or ``node`` itself if it has no bodies."""
    if not any(True for _ in model_checks.graphs_inside(node)):
        return node
    result = NodeProto.FromString(node.SerializeToString())
    declare_types(model_checks.graphs_inside(result))
    return result


def hide_indices(model: ModelProto) -> dict[str, str]:
    """Make Slice starts (since opset 10) and variable GatherND indices model inputs, hidden from inference. ``model`` is modified
    in place. Returns each new name with the name that it replaces, for ``restore_indices``."""
    graphs = list(model_checks.all_graphs(model))
    constant = {t.name for g in graphs for t in g.initializer}
    constant |= {o for g in graphs for n in g.node if n.op_type == "Constant" and n.domain in ("", "ai.onnx") for o in n.output}
    found = [n for n in _find_hideable_nodes(graphs) if n.input[1] and (n.op_type != "GatherND" or n.input[1] not in constant)]
    if not found:
        return {}
    prefix, taken = _VEIL, {name for g in graphs for name in _defined_names(g)}
    while any(name.startswith(prefix) for name in taken):
        prefix += "_"
    result = dict[str, str]()
    for number, node in enumerate(found):
        name = f"{prefix}{number}"
        result[name], node.input[1] = node.input[1], name
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, _VEILED[node.op_type]))
    return result


def restore_indices(model: ModelProto, names: dict[str, str]) -> None:
    """Undo ``hide_indices`` in the converted model."""
    if not names:
        return
    kept = [v for v in model.graph.input if v.name not in names]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for node in _find_hideable_nodes(model_checks.all_graphs(model)):
        node.input[1] = names.get(node.input[1], node.input[1])


def _find_hideable_nodes(graphs: Iterable[GraphProto]) -> Iterator[NodeProto]:
    """Yield the operators with a replaceable input: Slice since opset 10 (at least three inputs) and GatherND (two)."""
    for node in (n for g in graphs for n in g.node if n.op_type in _VEILED and n.domain in ("", "ai.onnx")):
        if len(node.input) > (2 if node.op_type == "Slice" else 1):
            yield node


def check_bodies(node: NodeProto, types: Mapping[str, TypeProto], opsets: Mapping[str, int]) -> None:
    """Raise BadInput for a negative extent in the bodies of ``node``, operator by operator before ONNX infers whole bodies.
    ``types`` holds the types of all values that the node reads, captured values included."""
    for attribute in node.attribute:
        for body in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            inner = {**types, **_body_input_types(node, body, types)}
            known = {t.name: t for t in body.initializer if math.prod(t.dims) <= _SHORT}
            inner |= {t.name: helper.make_tensor_type_proto(t.data_type, t.dims) for t in body.initializer}
            for step in body.node:
                check_bodies(step, inner, opsets)
                _check_step(step, inner, known, opsets)


def steady_types(node: NodeProto, types: Mapping[str, TypeProto], opsets: Mapping[str, int]) -> dict[str, TypeProto]:
    """Return the final types of a Loop's state if the body preserves the shape of every state, else {}. ONNX's inference does not
    infer these types. ``types`` is as in ``check_bodies``."""
    body = next((a.g for a in node.attribute if a.name == "body"), GraphProto())
    state = [types.get(n, TypeProto()) for n in node.input[2:]]
    if len(body.input) != len(state) + 2 or len(body.output) <= len(state) or not all(nd.tensor_type(t) for t in state):
        return {}
    inner = {**types, **{v.name: v.type for v in body.input[:2]}}
    inner |= {v.name: kind for v, kind in zip(body.input[2:], state, strict=True)}
    known = {t.name: t for t in body.initializer if math.prod(t.dims) <= _SHORT}
    inner |= {t.name: helper.make_tensor_type_proto(t.data_type, t.dims) for t in body.initializer}
    for step in body.node:
        _check_step(step, inner, known, opsets)
    after = [inner.get(v.name, TypeProto()) for v in body.output[1:]]
    if any(nd.tensor_type(a) != nd.tensor_type(b) for a, b in zip(state, after, strict=False)):
        return {}
    return {o: kind for o, kind in zip(node.output, state, strict=False) if o}


def _check_step(step: NodeProto, types: dict[str, TypeProto], known: dict[str, TensorProto], opsets: Mapping[str, int]) -> None:
    """Infer the result types of ``step`` into ``types``, and store the value of a Constant in ``known``."""
    reads = model_checks.node_reads(step)
    if not all(n in types for n in reads):
        return
    imports = [helper.make_opsetid(d, v) for d, v in opsets.items()]
    domain = "" if step.domain == "ai.onnx" else step.domain
    try:
        schema = schemas.get_schema(step.op_type, opsets[domain], domain)
        given, values = {n: types[n] for n in reads}, {n: known[n] for n in reads if n in known}
        found = shape_inference.infer_node_outputs(schema, step, given, values, opset_imports=imports)
    except Exception:  # ONNX fails here as well, and reports the error
        return
    for kind in found.values():
        limits.check_shape((d.dim_value for d in kind.tensor_type.shape.dim), nd.node_title(step))
    types.update({o: found[o] for o in step.output if o in found})
    if step.op_type == "Constant" and not domain:
        held = {a.name: a for a in step.attribute}
        value = held["value"].t if "value" in held else None
        if "value_int" in held or "value_ints" in held:
            numbers = held["value_ints"].ints if "value_ints" in held else held["value_int"].i
            value = numpy_helper.from_array(np.array(numbers, np.int64))
        if value is not None and math.prod(value.dims) <= _SHORT:
            known[step.output[0]] = value


def _body_input_types(node: NodeProto, body: GraphProto, types: Mapping[str, TypeProto]) -> dict[str, TypeProto]:
    """Return the types that ONNX's inference assigns to body inputs. A Loop's state may change its shape, a Scan's may not."""
    result = {v.name: v.type for v in body.input if v.type.WhichOneof("value")}
    scanned = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
    axes = next((list(a.ints) for a in node.attribute if a.name == "scan_input_axes"), [])
    state = len(node.input) - scanned
    for place, formal in enumerate(body.input):
        if node.op_type != "Scan" or place >= len(node.input) or node.input[place] not in types:
            continue
        made = TypeProto.FromString(types[node.input[place]].SerializeToString())
        dims = made.tensor_type.shape.dim
        if place >= state and dims:
            axis = axes[place - state] if place - state < len(axes) else 0
            if -len(dims) <= axis < len(dims):
                del dims[axis]
        result[formal.name] = made
    return result


def _defined_names(graph: GraphProto) -> Iterable[str]:
    yield from (v.name for v in (*graph.input, *graph.initializer))
    for node in graph.node:
        yield from node.output
