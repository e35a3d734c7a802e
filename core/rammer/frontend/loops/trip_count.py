"""Trip counts of loops that are constant before the run, although the loops stay operators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, TypeProto, numpy_helper

#: Largest trip count for which memory for gathered values is reserved; the host stops longer loops.
MOST_GATHERED: Final = 1 << 24
#: An empty set of constants.
NOTHING: Final[Mapping[str, np.ndarray]] = MappingProxyType({})


def always_goes(body: GraphProto, outer: Mapping[str, np.ndarray] = NOTHING) -> bool:
    """Return True if a Loop's condition stays true: it is the incoming condition or a true constant (of
    the body or ``outer``)."""
    makers, name = {o: n for n in body.node for o in n.output}, body.output[0].name
    known = {**outer, **{t.name: numpy_helper.to_array(t) for t in body.initializer}}
    while name in makers and makers[name].op_type == "Identity" and not makers[name].domain:
        name = makers[name].input[0]
    if name in makers and makers[name].op_type == "Constant":
        value = next((a.t for a in makers[name].attribute if a.name == "value"), None)
        return value is not None and bool(numpy_helper.to_array(value).all())
    return name == body.input[1].name or (name in known and bool(known[name].all()))


def loop_trips(
    body: GraphProto, trips: np.ndarray | None, going: np.ndarray | None, always: bool, outer: Mapping[str, np.ndarray]
) -> int | None:
    """Return the constant trip count of a Loop, or None. ``trips`` and ``going`` are its operands if they are constant;
    ``always`` is True if it has no condition."""
    starts = always or (going is not None and bool(going.all()))
    counted = trips is not None and trips.size == 1 and starts and always_goes(body, outer)
    return max(int(trips.item()), 0) if counted and trips is not None else None


def counted_types(
    proto: NodeProto, inferred: Mapping[str, TypeProto], operands: Mapping[str, np.ndarray]
) -> dict[str, TypeProto]:
    """Return types of a Loop's gathered outputs if its trip count is constant, as far as ONNX infers the other extents."""
    names, body = [*proto.input, "", ""], next(a.g for a in proto.attribute if a.name == "body")
    count = loop_trips(body, operands.get(names[0]), operands.get(names[1]), not names[1], operands) or 0
    found = dict[str, TypeProto]()
    for name in proto.output[len(body.input) - 2 :] if 0 < count <= MOST_GATHERED else ():
        kind = inferred.get(name)
        if name and kind is not None and kind.tensor_type.HasField("shape") and kind.tensor_type.shape.dim:
            found[name] = TypeProto()
            found[name].CopyFrom(kind)
            found[name].tensor_type.shape.dim[0].dim_value = count
    return found


def unrolled_size(body: GraphProto, outer: Mapping[str, np.ndarray] = NOTHING) -> int:
    """Return the operator count of ``body`` with its loops of constant trip count unrolled, by arithmetic alone. ``outer`` holds
    the constants around it. Loops with other trip counts, and loops that a condition may end, count once."""
    total, known = 0, {**outer, **_scalar_values(body.initializer)}
    for node in body.node:
        total += 1
        for inner in (g for a in node.attribute for g in (a.g, *a.graphs)):
            counted = node.op_type == "Loop" and node.input
            trips = loop_trips(inner, known.get(node.input[0]), None, True, known) if counted else None
            total += (1 if trips is None else trips) * unrolled_size(inner, known)
        if node.op_type == "Constant" and not node.domain:
            value = _scalar_values(a.t for a in node.attribute if a.name == "value")
            known |= dict(zip(node.output, value.values(), strict=False))
    return total


def _scalar_values(tensors: Iterable[TensorProto]) -> dict[str, np.ndarray]:
    """Return the values of the one-element tensors by name."""
    return {t.name: numpy_helper.to_array(t) for t in tensors if math.prod(t.dims) == 1}
