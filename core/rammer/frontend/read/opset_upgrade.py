"""Upgrade of old opsets to the opset of the lowerings, by ONNX's version converter and corrections to it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import lru_cache
from typing import Final

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, defs, helper, numpy_helper, version_converter

from rammer.errors import BadInput
from rammer.frontend.read import model_checks
from rammer.frontend.read.node_protos import first_line, node_title
from rammer.frontend.read.onnx_inference_guards import declare_types, hide_indices, restore_indices, undeclare_types
from rammer.frontend.read.strip_weights import attach_tensors, detach_tensors

#: The opset of the lowerings; older models are upgraded to it.
TARGET_OPSET: Final = 21
#: The largest finite float32 number.
_FLOAT_MAX: Final = 3.4028234663852886e38
#: The opset since which Reshape has the attribute ``allowzero``.
_ALLOWZERO: Final = 14
#: The first IR version in which an initializer need not be an input (ONNX's IR.md).
_FREE_INITIALIZERS: Final = 4
#: Fallback opsets, tried in this order if the upgrade to the target fails.
FALLBACK_OPSETS: Final = (20, 18, 17, 13)


def upgrade_opset(model: ModelProto) -> tuple[ModelProto, tuple[str, ...]]:
    """Return the model at the highest opset that the converter reaches, and the reason if that is not the target."""
    opset = model_checks.opset_versions(model.opset_import).get("", TARGET_OPSET)
    if opset >= TARGET_OPSET:
        return model, ()
    # The converter makes several copies of its model; copying weights would need seconds and gigabytes.
    outline, weights = detach_tensors(model)
    if _means_the_same(outline, opset):
        _declare_opset(outline, TARGET_OPSET)
        attach_tensors(outline, weights)
        return outline, ()
    # The converter first infers the types of all values. Upgrades need only ranks after a Slice of opset 10.
    hidden = hide_indices(outline)
    batched = hide_scans(outline, opset)
    reason = ""
    for target in (TARGET_OPSET, *FALLBACK_OPSETS):
        if opset >= target:
            break
        try:
            converted = _restore_metadata(_convert_model(_prepare_model(outline, opset), target), outline, target)
        except BadInput:
            raise
        except Exception as error:  # the converter raises any C++ exception; all mean "not to this opset"
            # Its assertions begin with a source file and a condition, which do not help the user.
            reason = reason or first_line(error).rpartition("failed: ")[2]
            continue
        restore_indices(converted, hidden)
        if batched:
            reveal_scans(converted)
        attach_tensors(converted, weights)
        return converted, (_upgrade_failure(opset, target, reason),) if reason else ()
    return model, (_upgrade_failure(opset, opset, reason),) if reason else ()


def _means_the_same(model: ModelProto, opset: int) -> bool:
    """Return True if all operators of ``model`` are unchanged since ``opset``, so the converter (10 ms to start) is skipped."""
    operators = {(n.op_type, n.domain) for graph in model_checks.all_graphs(model) for n in graph.node}
    return all(_is_unchanged(op, opset) for op, domain in operators if domain in ("", "ai.onnx"))


@lru_cache(maxsize=4096)
def _is_unchanged(op: str, opset: int) -> bool:
    newest = defs.get_schema(op, TARGET_OPSET) if defs.has(op, TARGET_OPSET, "") else None
    return newest is not None and not newest.deprecated and newest.since_version <= opset


def _declare_opset(model: ModelProto, opset: int) -> None:
    for known in model.opset_import:
        if known.domain in ("", "ai.onnx"):
            known.version = opset


def _convert_model(model: ModelProto, opset: int) -> ModelProto:
    """Run ONNX's converter on ``model`` with declared types. Raises any exception of the C++ code."""
    typed = ModelProto()
    typed.CopyFrom(model)
    # Older versions require initializers as inputs. Exporters omitted them, and the converter then fails.
    typed.ir_version = max(typed.ir_version, _FREE_INITIALIZERS)
    declare_types(model_checks.all_graphs(typed))
    result = version_converter.convert_version(typed, opset)
    undeclare_types(model_checks.all_graphs(result))
    return result


def _upgrade_failure(opset: int, reached: int, reason: str) -> str:
    return f"opset {opset} could not be upgraded to {TARGET_OPSET}, only to {reached}: {reason}"


def _restore_metadata(converted: ModelProto, original: ModelProto, opset: int) -> ModelProto:
    """Restore ports and metadata that the converter drops from ``original``. Shapes that the converter restores after a Softmax
    get ``allowzero``, so that they may contain extents of 0."""
    if opset >= _ALLOWZERO:
        said = {o: node.op_type for graph in model_checks.all_graphs(original) for node in graph.node for o in node.output}
        for node in (n for graph in model_checks.all_graphs(converted) for n in graph.node if n.op_type == "Reshape"):
            # Only a Reshape of the original model interprets an extent of 0 as "copy the extent".
            if said.get(node.output[0], "Reshape") != "Reshape":
                node.attribute.append(helper.make_attribute("allowzero", 1))
    _check_flattened(converted, original)
    for kept, given in ((converted.graph.input, original.graph.input), (converted.graph.output, original.graph.output)):
        declared = {v.name: v for v in given}
        for value in kept:
            if value.name in declared:
                value.CopyFrom(declared[value.name])
    if not converted.metadata_props:
        converted.metadata_props.extend(original.metadata_props)
    return converted


def _check_flattened(converted: ModelProto, original: ModelProto) -> None:
    """Raise BadInput if the axis of a Softmax is out of range. The converter adds the rank once to a negative axis and flattens
    there, without a check."""
    known = {o for graph in model_checks.all_graphs(original) for node in graph.node for o in node.output}
    below = [
        n for g in model_checks.all_graphs(original) for n in g.node if any(a.name == "axis" and a.i < 0 for a in n.attribute)
    ]
    made = {o: n for g in model_checks.all_graphs(converted) for n in g.node for o in n.output}
    for node in (n for n in below if n.op_type in ("Softmax", "LogSoftmax")):
        restored = made.get(node.output[0])
        flat = made.get(made[restored.input[0]].input[0]) if restored is not None and restored.op_type == "Reshape" else None
        if flat is not None and flat.op_type == "Flatten" and flat.output[0] not in known and flat.attribute[0].i < 0:
            (axis,) = (a.i for a in node.attribute if a.name == "axis")
            rank = flat.attribute[0].i - axis
            raise BadInput(
                f"attribute axis of {node.op_type} is {axis}, where input 0 has {rank} axes",
                node_title(node),
                f"axes of it are {-rank} to {rank - 1}",
            )


def _prepare_model(model: ModelProto, opset: int) -> ModelProto:
    """Return a copy with explicit attributes for operators that the converter would change, or ``model`` itself.

    Resize up to opset 10, and Upsample, map pixel i to the source i / scale. Since opset 11 the default is half_pixel, and the
    converter sets no attribute. Hardmax up to opset 12 flattens the trailing axes, as Softmax does; the converter rewrites only
    Softmax. Pad up to opset 10 may have a value that its mode does not use, which the converter leaves. Clip up to opset 10
    clamps to the float32 range if an attribute is missing. GroupNormalization has one scale per group up to opset 20, later one
    per channel. PRelu has one slope per channel up to opset 6, later a broadcast slope.
    """
    names = {node.op_type for graph in model_checks.all_graphs(model) for node in graph.node if not node.domain}
    stale = {op for op, last in _CHANGED_AFTER.items() if opset <= last}
    if not names & (stale | {"Upsample"}):
        return model
    result = ModelProto()
    larger = {o for graph in model_checks.all_graphs(model) for n in graph.node if n.op_type == "Upsample" for o in n.output}
    # The converter drops the attributes of Upsample, but not for opset 10, where it becomes a Resize.
    result.CopyFrom(_convert_model(model, 10) if "Upsample" in names and opset < 10 else model)
    for graph in model_checks.all_graphs(result):
        constants = [(n.output[0], a.t) for n in graph.node if n.op_type == "Constant" and not n.domain for a in n.attribute]
        known = {**{t.name: t for t in graph.initializer}, **dict(constants)}
        nodes = list[NodeProto]()
        for node in graph.node:
            nodes += _replace_changed_node(node, known, larger) if node.op_type in stale and not node.domain else [node]
        copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)
    return result


#: Operator -> the last opset at which its meaning differs from the target.
_CHANGED_AFTER: Final = {"Resize": 10, "Hardmax": 12, "GroupNormalization": 20, "Clip": 10, "Pad": 10, "PRelu": 6}


def _replace_changed_node(node: NodeProto, known: Mapping[str, TensorProto], larger: Set[str]) -> list[NodeProto]:
    """Return the replacement of a node in _CHANGED_AFTER; ``larger`` names the results of former Upsamples."""
    if node.op_type == "Resize":
        return [_asymmetric_resize(node, known, larger)]
    if node.op_type == "PRelu":
        return _by_channel(node)
    if node.op_type == "Clip":
        return [_bounded_clip(node)]
    if node.op_type == "Pad":
        return [_plain_pad(node)]
    source, result, name = node.input[0], node.output[0], node.name or node.op_type
    shape, flat, wide = (f"{result}:{part}" for part in ("shape", "flat", "wide"))
    given = {a.name: a for a in node.attribute}
    if node.op_type == "Hardmax":
        axis = given["axis"].i if "axis" in given else 1
        inner = [
            helper.make_node("Flatten", [source], [flat], f"{name}/flatten", axis=axis),
            helper.make_node("Hardmax", [flat], [wide], name, axis=1),
        ]
    else:
        epsilon = given["epsilon"].f if "epsilon" in given else 1e-5
        groups = [0, given["num_groups"].i, -1]
        inner = [
            helper.make_node("Constant", [], [f"{flat}_shape"], f"{name}/groups", value_ints=groups),
            helper.make_node("Reshape", [source, f"{flat}_shape"], [flat], f"{name}/flatten"),
            helper.make_node("InstanceNormalization", [flat, *node.input[1:]], [wide], name, epsilon=epsilon),
        ]
    return [
        helper.make_node("Shape", [source], [shape], f"{name}/shape"),
        *inner,
        helper.make_node("Reshape", [wide, shape], [result], f"{name}/reshape"),
    ]


def _by_channel(node: NodeProto) -> list[NodeProto]:
    """Return PRelu with its slope reshaped to an extent of 1 for each axis after the channels."""
    source, slope, result = node.input[0], node.input[1], node.output[0]
    parts = ("shape", "trailing", "ones", "each", "wide", "slope")
    shape, spatial, ones, each, wide, spread = (f"{result}:{part}" for part in parts)
    moved = NodeProto()
    moved.CopyFrom(node)
    moved.input[1] = spread
    return [
        helper.make_node("Shape", [source], [shape]),
        helper.make_node("Slice", [shape], [spatial], starts=[2], ends=[(1 << 31) - 1]),
        helper.make_node("Div", [spatial, spatial], [ones]),
        helper.make_node("Constant", [], [each], value=helper.make_tensor("each", TensorProto.INT64, [1], [-1])),
        helper.make_node("Concat", [each, ones], [wide], axis=0),
        helper.make_node("Reshape", [slope, wide], [spread]),
        moved,
    ]


def _bounded_clip(node: NodeProto) -> NodeProto:
    """Return Clip of opset 10 with explicit default bounds, which limit infinities to finite values."""
    result = NodeProto()
    result.CopyFrom(node)
    given = {a.name for a in node.attribute}
    for name, value in (("min", -_FLOAT_MAX), ("max", _FLOAT_MAX)):
        if name not in given:
            result.attribute.append(helper.make_attribute(name, value))
    return result


def _plain_pad(node: NodeProto) -> NodeProto:
    """Return Pad of opset 10 without a value if its mode does not read it."""
    result = NodeProto()
    result.CopyFrom(node)
    if any(a.name == "mode" and a.s not in (b"", b"constant") for a in node.attribute):
        kept = [a for a in node.attribute if a.name != "value"]
        del result.attribute[:]
        result.attribute.extend(kept)
    return result


def _asymmetric_resize(node: NodeProto, known: Mapping[str, TensorProto], larger: Set[str]) -> NodeProto:
    """Return Resize of opset 10 with the attributes of opset 11, which the converter passes through. Nearest rounds down to
    enlarge and up to shrink (the examples of Resize-10, ONNX Runtime too). Opset 11 has one rounding mode for all axes."""
    result = NodeProto()
    result.CopyFrom(node)
    scales = known.get(node.input[1])
    shrinks = enlarges = scales is None
    if scales is not None:
        values = numpy_helper.to_array(scales)
        shrinks, enlarges = bool((values < 1).any()), bool((values > 1).any())
    elif node.output[0] in larger:  # Upsample: 'values greater than or equal to 1'
        shrinks = False
    nearest = not any(a.name == "mode" and a.s != b"nearest" for a in node.attribute)
    if nearest and shrinks and enlarges:
        what = "Resize of opset 10 to the nearest pixel needs constant scales, all at least 1 or all at most 1"
        raise BadInput(what, node_title(node), "export the model with opset 11 or newer")
    result.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
    result.attribute.append(helper.make_attribute("nearest_mode", "ceil" if shrinks else "floor"))
    return result


# --- Scans of opset 8 as nested Scans of opset 9 -------------------------------------------------------------
# Operands of opset 8 have a batch axis before the scanned axis. The outer Scan iterates over the batch, the inner one over a
# sequence. ONNX's converter drops the batch from the types but not from the values, so these Scans are hidden from it.

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
