"""Attribution of differences in a quantised model's outputs to rounding ties.

A sum in another order changes the last bit. At a rounding tie, the code then becomes its neighbour, and later layers start from
other codes.

Every tensor of codes is therefore judged separately. The device runs the model with all of them as outputs; ONNX Runtime
recomputes each one from the device's codes before it. The two may differ by one code, and only if the value before rounding is
within ``NEAR`` codes of a tie. Each layer is then equal for equal codes, except for ties, whatever their later effect. A tensor
whose values before rounding are unknown must be equal in every code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper

from rammer.errors import BadInput, DeviceUnavailable
from rammer.report.output_errors import compare_outputs

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Maximum distance from a tie, in codes, at which a neighbour is accepted: float32 sums of up to 255 codes differ by some 1e-5.
NEAR: Final = 1e-3
_QUANTISES: Final = ("QuantizeLinear", "DynamicQuantizeLinear")
#: Operators on codes -> the operator on floats, and the position of each operand's codes, followed by its scale and zero point.
_ON_CODES: Final[Mapping[str, tuple[str, tuple[int, ...]]]] = {
    "QLinearConv": ("Conv", (0, 3)),
    "QLinearMatMul": ("MatMul", (0, 3)),
    "QLinearAdd": ("Add", (0, 3)),
    "QLinearMul": ("Mul", (0, 3)),
    "QLinearSigmoid": ("Sigmoid", (0,)),
    "QLinearLeakyRelu": ("LeakyRelu", (0,)),
    "QLinearGlobalAveragePool": ("GlobalAveragePool", (0,)),
}
_GIVEN, _NUMBER, _STEP = ":given", ":number", ":step"


@dataclass(frozen=True)
class Ties:
    """Result for ``tensors`` tensors with ``codes`` codes. It holds the number of codes that differ by one at a tie and their
    ``farthest`` distance from a tie. ``faults`` are the differences without a tie."""

    tensors: int
    codes: int
    differing: int
    farthest: float
    faults: tuple[str, ...]

    @property
    def good(self) -> bool:
        """True if ties explain all differences."""
        return not self.faults

    def __str__(self) -> str:
        found = (
            f"{self.codes} codes in {self.tensors} tensors, each made from the device's own codes before it: "
            f"{self.differing} differ by one, at most {self.farthest:.2g} codes from a tie ({NEAR:g} is allowed)"
        )
        return "; ".join([found, *(f"no tie: {fault}" for fault in self.faults[:3])])


def find_coded_tensors(proto: ModelProto) -> dict[str, NodeProto]:
    """Return the tensors of codes that a model computes from its inputs, with their producers."""
    live, found = {i.name for i in proto.graph.input} - {t.name for t in proto.graph.initializer}, dict[str, NodeProto]()
    for node in proto.graph.node:  # in topological order, as ONNX requires
        if live.isdisjoint(node.input) and not any(a.HasField("g") for a in node.attribute):
            continue
        live.update(node.output)
        if node.op_type in _QUANTISES or node.op_type.startswith("QLinear"):
            found[node.output[0]] = node
    return found


def expose_codes(proto: ModelProto) -> ModelProto:
    """Return the model with its tensors of codes as additional outputs."""
    result = ModelProto.FromString(proto.SerializeToString())
    known = {o.name for o in proto.graph.output}
    result.graph.output.extend(onnx.ValueInfoProto(name=n) for n in find_coded_tensors(proto) if n not in known)
    return result


def cut_at_codes(proto: ModelProto, made: Mapping[str, Array]) -> ModelProto:
    """Return the model with an input in place of every read tensor of codes. The values before rounding and the scales are
    additional outputs."""
    result = ModelProto.FromString(proto.SerializeToString())
    graph, found = result.graph, find_coded_tensors(proto)
    steps = list[NodeProto]()
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name in found:
                node.input[place] = name + _GIVEN
        steps += [node, *(_to_float_nodes(node) if node.output and node.output[0] in found else ())]
    copies = [NodeProto.FromString(s.SerializeToString()) for s in steps]
    del graph.node[:]
    graph.node.extend(copies)
    for name in found:
        kind = helper.np_dtype_to_tensor_dtype(made[name].dtype)
        graph.input.append(helper.make_tensor_value_info(name + _GIVEN, kind, made[name].shape))
    known = {o.name for o in graph.output} | {t.name for t in graph.initializer} | {i.name for i in graph.input}
    wanted = [v for name, node in found.items() for v in (name, *_rounded_operands(node)) if v]
    graph.output.extend(onnx.ValueInfoProto(name=n) for n in dict.fromkeys(wanted) if n not in known)
    return result


def _rounded_operands(node: NodeProto) -> tuple[str, str]:
    """Return the names of the values that a node rounds and of their divisor; "" if unknown."""
    name = node.output[0]
    if node.op_type == "QuantizeLinear":
        return node.input[0], node.input[1]
    if node.op_type == "DynamicQuantizeLinear":
        return node.input[0], node.output[1]
    if node.op_type not in _ON_CODES:
        return "", ""
    last = _ON_CODES[node.op_type][1][-1]
    return name + _NUMBER, node.input[last + 3]


def _to_float_nodes(node: NodeProto) -> list[NodeProto]:
    """Return nodes that compute an operator on codes in floats."""
    if node.op_type not in _ON_CODES:
        return []
    op, places = _ON_CODES[node.op_type]
    name, steps, operands = node.output[0], list[NodeProto](), list[str]()
    for place in places:
        whole = [n for n in node.input[place : place + 3] if n]
        axis = 0 if op == "Conv" else 1
        operands.append(f"{name}{_STEP}{place}")
        steps.append(helper.make_node("DequantizeLinear", whole, operands[-1:], axis=axis))
    if op == "Conv" and len(node.input) > 8 and node.input[8]:
        scale, bias, zero = (f"{name}{_STEP}_{part}" for part in ("scale", "bias", "whole"))
        steps.append(helper.make_node("Mul", [node.input[1], node.input[4]], [scale]))
        steps.append(helper.make_node("Cast", [node.input[8]], [zero], to=onnx.TensorProto.FLOAT))
        steps.append(helper.make_node("Mul", [zero, scale], [bias]))
        operands.append(bias)
    plain = helper.make_node(op, operands, [name + _NUMBER])
    plain.attribute.extend(a for a in node.attribute if a.name != "channels_last")
    return [*steps, plain]


def judge_ties(
    proto: ModelProto,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
    run: Callable[[ModelProto], Mapping[str, Array]],
    tolerance: tuple[float, float],
) -> Ties | None:
    """Return the ties in ``outputs``, the device's results for ``inputs``; ``run`` runs a model on the device. Returns None for a
    model without codes, or if ONNX Runtime cannot run it in parts."""
    found = find_coded_tensors(proto)
    if not found or any(n.attribute and "channels_last" in {a.name for a in n.attribute if a.i} for n in found.values()):
        return None
    made = run(expose_codes(proto))
    faults = [f"{d.name} differs if codes are also outputs" for d in compare_outputs(made, outputs, *tolerance) if not d.good]
    reference = _run_reference(cut_at_codes(proto, made), {**inputs, **{n + _GIVEN: made[n] for n in found}})
    if reference is None:
        return None
    plain = {n: reference[n] for n in outputs if n in reference and n not in found}
    faults += [f"{d.name} {d.why} from the same codes" for d in compare_outputs(made, plain, *tolerance) if not d.good]
    differing, farthest, codes = 0, 0.0, 0
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    values: dict[str, Array] = {**constants, **inputs, **reference}
    for name, node in found.items():
        have, want = made[name].astype(np.int64), reference[name].astype(np.int64)
        codes += have.size
        away = _from_ties(node, values, have != want)
        count = int((have != want).sum())
        if count and (away is None or np.abs(have - want).max() > 1 or not away.max() <= NEAR):
            most = "unknown" if away is None else f"{away.max():.2g}"
            faults.append(f"{count} of {name!r} ({node.op_type}), by {np.abs(have - want).max()}, {most} codes from a tie")
        elif count and away is not None:
            differing, farthest = differing + count, max(farthest, float(away.max()))
    return Ties(len(found), codes, differing, farthest, tuple(faults))


def _from_ties(node: NodeProto, values: Mapping[str, Array], where: Array) -> Array | None:
    """Return the distance of the values at ``where`` from a rounding tie, in codes, or None if unknown."""
    number, scale = (values.get(n) if n else None for n in _rounded_operands(node))
    if number is None or scale is None or number.shape != where.shape:
        return None
    attributes = {a.name: a.i for a in node.attribute}
    if scale.size > 1:
        axis = attributes.get("axis", 1) % number.ndim
        if scale.ndim != 1 or attributes.get("block_size", 0) or number.shape[axis] != scale.size:
            return None
        scale = scale.reshape([-1 if d == axis else 1 for d in range(number.ndim)])
    quotient = np.broadcast_to(number.astype(np.float64) / scale.astype(np.float64).reshape(scale.shape or ()), where.shape)[
        where
    ]
    found: Array = np.abs(quotient - np.floor(quotient) - 0.5)
    return found


def _run_reference(proto: ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
    """Return the outputs of ONNX Runtime, or None if it rejects the model."""
    from rammer.frontend.read.reader import read_model
    from rammer.reference.outputs import run_onnxruntime

    try:
        return run_onnxruntime(read_model(proto), feeds)
    except (BadInput, DeviceUnavailable):
        return None
