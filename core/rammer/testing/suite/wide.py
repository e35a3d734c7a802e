"""What a test's model gives in float64, by ``onnx.reference``: the judge where a result is not the test's own rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from rammer.frontend.checks import all_graphs

#: Units in the last place of the largest element that a test's own number may be off.
ROUNDINGS: Final = 4
_NARROW: Final = (TensorProto.FLOAT, TensorProto.FLOAT16)


def widened(model: ModelProto) -> ModelProto:
    """``model`` with float64 for float32 and float16: ports, constants, and what it casts to."""
    result = ModelProto()
    result.CopyFrom(model)
    for graph in all_graphs(result):
        for port in (*graph.input, *graph.output, *graph.value_info):
            if port.type.tensor_type.elem_type in _NARROW:
                port.type.tensor_type.elem_type = TensorProto.DOUBLE
        for tensor in graph.initializer:
            _widen(tensor)
        for attribute in (a for node in graph.node for a in node.attribute):
            if attribute.HasField("t"):
                _widen(attribute.t)
            elif attribute.name == "to" and attribute.i in _NARROW:
                attribute.i = TensorProto.DOUBLE
    return result


def _widen(tensor: TensorProto) -> None:
    if tensor.data_type in _NARROW:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


def exactly(model: ModelProto, inputs: Sequence[Any]) -> list[Any] | None:
    """The outputs of ``model`` in float64, in order; None where the reference does not run it so."""
    names = [v.name for v in model.graph.input]
    given = [a.astype(np.float64) if isinstance(a, np.ndarray) and a.dtype in (np.float16, np.float32) else a for a in inputs]
    try:
        return list(ReferenceEvaluator(widened(model)).run(None, dict(zip(names, given, strict=False))))
    except Exception:  # whatever an operator of the reference raises: there is no judge then
        return None


def nearer(have: Any, want: Any, exact: Any, rtol: float, atol: float) -> bool:
    """Whether each element of ``have`` that is farther from that of ``want`` than the tolerances is at least as near to ``exact``
    as that is, which must be ``exact`` but for roundings, a few in the largest element's last place. NaN is near to nothing."""
    arrays = (have, want, exact)
    if not all(isinstance(v, np.ndarray) and v.dtype.kind == "f" and v.shape == want.shape for v in arrays):
        return False
    ours, theirs, exactly_so = (v.astype(np.float64) for v in arrays)
    apart = ~np.isclose(ours, theirs, rtol=rtol, atol=atol)
    rounding = ROUNDINGS * float(np.finfo(want.dtype).eps) * float(np.abs(exactly_so).max(initial=0))
    with np.errstate(invalid="ignore"):
        off = np.abs(theirs - exactly_so)[apart]
        return bool(np.all((off <= rounding) & (np.abs(ours - exactly_so)[apart] <= off)))
