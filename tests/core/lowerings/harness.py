"""A harness that runs ONNX node models through reading, binding, lowering and NumPy evaluation.

``node_cases`` lists the node tests that ship with onnx; ``check_node_case`` runs one with its data and once more with fresh
random floats against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.lower.lowering_registry import CannotLower
from rammer.frontend.op_traits import Trait, operators, shape_operands
from rammer.frontend.read.node_protos import element_type
from rammer.frontend.read.reader import TARGET_OPSET, read_model
from rammer.ir.compute import Compute, ComputeGraph
from rammer.ir.evaluate import run_graph
from rammer.ir.formats import from_carrier, to_carrier, to_readable
from rammer_testing.nonempty import some
from rammer_testing.suite.nodes import node_tests

Array = np.ndarray[Any, np.dtype[Any]]

#: Operands that exported models have as constants, in addition to those that decide shapes. Node tests have graph inputs, which
#: the harness converts to constants.
STATIC_INPUTS: dict[str, tuple[int, ...]] = {"Pad": (2,), "Dropout": (1, 2), **dict.fromkeys(operators(Trait.RECURRENT), (4,))}


def lower_model(model: ModelProto, inputs: Mapping[str, Array]) -> ComputeGraph:
    """Return the model lowered at the shapes of ``inputs``. Raises CannotLower."""
    fixed = with_static_inputs(model, inputs)
    read = read_model(fixed)
    wanted = {p.name for p in read.inputs}
    return lower(bind(read, {n: a.shape for n, a in inputs.items() if n in wanted}))


def run_node_model(model: ModelProto, inputs: Mapping[str, Array], precise: bool = False) -> list[Array]:
    """Return the outputs of ``model`` in its order, by NumPy evaluation of its Computes. Raises CannotLower."""
    graph = reloaded(lower_model(model, inputs))
    return evaluated(graph, model, inputs, precise)


def reloaded(graph: ComputeGraph) -> ComputeGraph:
    """Return ``graph`` with all Computes printed and parsed again."""
    for compute in some(graph.computes):
        assert Compute.parse(str(compute)) == compute, f"does not reload: {compute}"
    return graph


def evaluated(graph: ComputeGraph, model: ModelProto, inputs: Mapping[str, Array], precise: bool) -> list[Array]:
    """Return the outputs of a lowered model in the order of ``model``."""
    internal = {external: name for name, external in graph.aliases.items()}
    known = {n: to_carrier(inputs[graph.aliases[n]]) for n in graph.inputs}
    values = run_graph(graph, known, precise)
    kinds = [element_type(o.type.tensor_type.elem_type) for o in model.graph.output]
    return [from_carrier(np.asarray(values[internal[o.name]]), k) for o, k in zip(model.graph.output, kinds, strict=True)]


def with_static_inputs(model: ModelProto, inputs: Mapping[str, Array]) -> ModelProto:
    """Return ``model`` with the inputs that decide shapes and those in STATIC_INPUTS converted to initialisers."""
    names = {
        node.input[i]
        for node in model.graph.node
        for i in (*shape_operands(node.op_type), *STATIC_INPUTS.get(node.op_type, ()))
        if i < len(node.input) and node.input[i]
    }
    result = ModelProto()
    result.CopyFrom(model)
    kept = [v for v in result.graph.input if v.name not in names]
    result.graph.initializer.extend(numpy_helper.from_array(inputs[v.name], v.name) for v in model.graph.input if v.name in names)
    del result.graph.input[:]
    result.graph.input.extend(kept)
    return result


def node_model(
    op: str, inputs: Mapping[str, Array], outputs: int = 1, opset: int = TARGET_OPSET, **attributes: Any
) -> ModelProto:
    """Make a model of one node. An input named "" is absent; output names are ``y0, y1, ...``."""
    names = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, list(inputs), names, **attributes)
    ports = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in inputs.items() if n]
    results = [helper.make_tensor_value_info(n, TensorProto.UNDEFINED, None) for n in names]
    graph = helper.make_graph([node], op.lower(), ports, results)
    for value in graph.output:
        value.ClearField("type")
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def node_cases(*ops: str) -> list[Any]:
    """Return the node tests of onnx whose model consists of one of ``ops``, as pytest parameters."""
    return [pytest.param(c, id=c.name) for c in node_tests() if _only_operator(c.model) in ops]


def _only_operator(model: ModelProto) -> str:
    """Return the operator of a model of one node, "" for any other model."""
    return model.graph.node[0].op_type if len(model.graph.node) == 1 else ""


Runner = Callable[[ModelProto, Mapping[str, Array]], "list[Array] | None"]


def check_node_case(rng: np.random.Generator, case: Any, reference: Runner | None = None) -> None:
    """Pass, skip (declined, with the reason) or fail: evaluation in both precisions and on fresh data. ``reference`` returns the
    expected outputs of fresh inputs (default: ONNX Runtime), None if it cannot."""
    for given, expected in case.data_sets:
        inputs = {v.name: case_array(a) for v, a in zip(case.model.graph.input, given, strict=True)}
        expected = [case_array(a) for a in expected]
        try:
            graph = reloaded(lower_model(case.model, inputs))
            for precise in (False, True):
                actual = evaluated(graph, case.model, inputs, precise)
                # Where float64 is compared with values rounded to half precision at every step, two roundings differ.
                half = precise and any(e.dtype == np.float16 for e in expected)
                compare(actual, expected, max(case.rtol, 2e-3) if half else case.rtol, case.atol)
        except (CannotLower, BadInput) as reason:
            pytest.skip(f"declined: {reason}")
        _check_fresh(rng, graph, case.model, inputs, reference or ort_outputs)


def case_array(value: Any) -> Array:
    """Return a test's value as an array; skip tests of sequences and optionals."""
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    if not isinstance(value, np.ndarray | np.generic):
        pytest.skip("declined: sequence or optional values")
    return np.asarray(value)


def compare(actual: Sequence[Array], expected: Sequence[Array], rtol: float, atol: float) -> None:
    """Check for equal shapes and close values; NaN only where NaN is expected."""
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == np.shape(e), f"shape {a.shape}, expected {np.shape(e)}"
        # Two units in the last place of bfloat16, the tolerance of onnx's own runner.
        most = max(rtol, 2.0**-6) if str(a.dtype) == "bfloat16" else rtol
        np.testing.assert_allclose(to_readable(a), to_readable(np.asarray(e)), rtol=most, atol=atol)


def _check_fresh(
    rng: np.random.Generator, graph: ComputeGraph, model: ModelProto, inputs: Mapping[str, Array], reference: Runner
) -> None:
    """Check random floats of the same shapes against ``reference`` if it runs ``model``, the source of ``graph``."""
    static = {v.name for v in model.graph.input} - {v.name for v in with_static_inputs(model, inputs).graph.input}
    fresh = {
        n: np.asarray(rng.uniform(0.1, 1.0, a.shape), a.dtype) if a.dtype.kind == "f" and n not in static else a
        for n, a in inputs.items()
    }
    expected = reference(model, fresh)
    if expected is not None:
        loose = any(a.dtype == np.float16 for a in fresh.values())
        compare(evaluated(graph, model, fresh, False), expected, 1e-2 if loose else 1e-4, 1e-3 if loose else 1e-6)


def onnx_outputs(model: ModelProto, inputs: Mapping[str, Array]) -> list[Array]:
    """Return the outputs of ONNX's reference implementation."""
    from onnx.reference import ReferenceEvaluator

    return list(ReferenceEvaluator(model).run(None, dict(inputs)))


def ort_outputs(model: ModelProto, inputs: Mapping[str, Array]) -> list[Array] | None:
    """Return ONNX Runtime's outputs, None if it does not run the model."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(None, dict(inputs)))
    except Exception:  # ORT's exceptions derive from Exception only; it lacks this operator, type or opset
        return None


def check_random(
    op: str,
    inputs: Mapping[str, Array],
    outputs: int = 1,
    opset: int = TARGET_OPSET,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **attributes: Any,
) -> ComputeGraph:
    """Check one node on the given data against ONNX Runtime, in both precisions. Return the lowered graph."""
    model = node_model(op, inputs, outputs, opset, **attributes)
    expected = ort_outputs(onnx.shape_inference.infer_shapes(model), {n: a for n, a in inputs.items() if n})
    assert expected is not None, f"ONNX Runtime does not run {op}"
    graph = reloaded(lower_model(model, inputs))
    for precise in (False, True):
        compare(evaluated(graph, model, inputs, precise), expected, rtol, atol)
    return graph
