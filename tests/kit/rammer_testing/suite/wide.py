"""Alternative judges of a result that differs from a test's. The judges are the model in float64 by ``onnx.reference``, and ONNX
Runtime where a decision distrusts the reference, which generated the test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from rammer.errors import RammerError
from rammer.frontend.bind.evaluator import use_of
from rammer.frontend.read.model_checks import all_graphs
from rammer.frontend.read.node_protos import plain_node
from rammer.frontend.read.reader import read_model
from rammer.frontend.spec_rulings.rulings import find_decision
from rammer.reference.outputs import run_onnxruntime

#: Error bound of a test's numbers, in units in the last place of the largest element.
ROUNDINGS: Final = 4
_NARROW: Final = (TensorProto.FLOAT, TensorProto.FLOAT16)


def widened(model: ModelProto) -> ModelProto:
    """Return ``model`` with float64 for float32 and float16 in ports, constants and casts."""
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
    """Return the outputs of ``model`` in float64, in order, or None if the reference fails to run it."""
    names = [v.name for v in model.graph.input]
    given = [a.astype(np.float64) if isinstance(a, np.ndarray) and a.dtype in (np.float16, np.float32) else a for a in inputs]
    try:
        return list(ReferenceEvaluator(widened(model)).run(None, dict(zip(names, given, strict=False))))
    except Exception:  # any error of a reference operator: no judge then
        return None


def nearer(have: Any, want: Any, exact: Any, rtol: float, atol: float) -> bool:
    """Return True if each element of ``have`` outside the tolerances of ``want`` is at least as near to ``exact``. The element of
    ``want`` must equal ``exact`` within ``ROUNDINGS`` units in the last place of the largest element. NaN is near to nothing."""
    arrays = (have, want, exact)
    if not all(isinstance(v, np.ndarray) and v.dtype.kind == "f" and v.shape == want.shape for v in arrays):
        return False
    ours, theirs, exactly_so = (v.astype(np.float64) for v in arrays)
    apart = ~np.isclose(ours, theirs, rtol=rtol, atol=atol)
    rounding = ROUNDINGS * float(np.finfo(want.dtype).eps) * float(np.abs(exactly_so).max(initial=0))
    with np.errstate(invalid="ignore"):
        off = np.abs(theirs - exactly_so)[apart]
        return bool(np.all((off <= rounding) & (np.abs(ours - exactly_so)[apart] <= off)))


def trusted_outputs(model: ModelProto, inputs: Sequence[Any]) -> list[Any] | None:
    """Return ONNX Runtime's outputs if a decision distrusts only the reference for a model of one node, else None."""
    given = {v.name: a for v, a in zip(model.graph.input, inputs, strict=False)}
    if len(model.graph.node) != 1 or not all(isinstance(a, np.ndarray) for a in given.values()):
        return None
    proto, opset = model.graph.node[0], model.opset_import[0].version
    if proto.domain or not {n for n in proto.input if n} <= given.keys():
        return None
    use = use_of(plain_node(proto, opset), given)
    if find_decision("reference", use) is None or find_decision("onnxruntime", use) is not None:
        return None
    try:
        return list(run_onnxruntime(read_model(model), given).values())
    except RammerError:
        return None
