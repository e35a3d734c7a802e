"""Reference outputs for comparisons: ONNX Runtime, ONNX's reference evaluator, or a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from onnx import NodeProto

from rammer.device.custom_operators import CustomOperators
from rammer.errors import BadInput, DeviceUnavailable, RammerError
from rammer.frontend.read.plugin_operators import check_use
from rammer.frontend.read.reader import Model
from rammer.runtime.inputs import load_npz

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def expected_outputs(model: Model, against: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs of ``model`` from ``onnxruntime``, ``reference`` or an .npz file. Raises BadInput for other values."""
    if against == "onnxruntime":
        return run_onnxruntime(model, inputs)
    if against == "reference":
        return run_reference(model, inputs)
    if against.endswith(".npz"):
        return load_npz(Path(against))
    raise BadInput(f"unknown reference {against!r}", hint="use onnxruntime, reference or a file F.npz")


def run_reference(model: Model, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs of ONNX's reference evaluator, with plugins' references for plugins' operators. Raises BadInput if an
    operator lacks a reference, or if the evaluator rejects the model or the inputs."""
    from onnx.reference import ReferenceEvaluator

    for operator in model.custom.values():
        if operator.reference is None:
            raise BadInput(
                f"plugin {operator.plugin} declares no reference of {operator.title}", "--against reference", "give a file F.npz"
            )
    with _convert_refusals("onnx.reference"):
        values = ReferenceEvaluator(model.whole, new_ops=reference_operators(model.custom)).run(None, dict(inputs))
    return dict(zip(model.outputs, map(np.asarray, values), strict=True))


def reference_operators(plugins: CustomOperators) -> list[type[Any]]:
    """Return classes by which ``onnx.reference`` runs plugins' operators with the plugins' references."""
    from onnx.reference.op_run import OpRun

    class Declared(OpRun):  # type: ignore[misc]  # onnx has no types
        def run(self, *args: Any, linked_attributes: Any = None, context: Any = None) -> tuple[Any, ...]:
            """Return the outputs of the plugin's reference, with the node's attributes and defaults."""
            node: NodeProto = self.onnx_node
            operator = plugins[node.domain, node.op_type]
            attributes = check_use(node, operator, self.run_params["opsets"].get(node.domain, 0))
            values = {n: np.asarray(a) for n, a in zip(node.input, args, strict=False) if n}
            results = operator.referred(attributes, node.input, node.output, values)
            return tuple(results.get(o) for o in node.output)

        def _run(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            return self.run(*args)

    return [type(op, (Declared,), {"op_domain": domain}) for domain, op in plugins]


def onnxruntime_session(model: Model, threads: int = 0, optimised: bool = True) -> Any:
    """Return a CPU inference session. ``threads`` 0 keeps ONNX Runtime's default (all cores). Unless ``optimised``, it computes
    the operators unchanged."""
    try:
        import onnxruntime
    except ImportError as problem:
        raise DeviceUnavailable("onnxruntime is not installed", hint="pip install onnxruntime") from problem
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = str(model.path) if model.path else model.whole.SerializeToString()
    with _convert_refusals("ONNX Runtime", model):
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run_onnxruntime(model: Model, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs of ONNX Runtime's CPU provider by name. Its optimisations are disabled, since they could hide or cause a
    difference. Raises BadInput if it rejects the model or the inputs."""
    session = onnxruntime_session(model, optimised=False)
    names = [o.name for o in session.get_outputs()]
    with _convert_refusals("ONNX Runtime"):
        return dict(zip(names, session.run(names, dict(inputs)), strict=True))


@contextmanager
def _convert_refusals(who: str, model: Model | None = None) -> Iterator[None]:
    """Convert errors of a reference into BadInput with a quotation. Its exceptions share no class but Exception. A ``model`` with
    operators that ONNX does not define may be rejected for them."""
    try:
        yield
    except RammerError:
        raise
    except Exception as problem:
        last = (str(problem).strip().splitlines() or [type(problem).__name__])[-1][:300]
        if model is not None and model.custom:
            titles = ", ".join(o.title for o in model.custom.values())
            full = all(o.reference is not None for o in model.custom.values())
            hint = "--against reference computes them by the plugin's own reference" if full else "--against F.npz"
            raise BadInput(f"{who} refuses this model, which has operators of plugins: {titles}", last, hint) from problem
        raise BadInput(f"{who} refuses this model or these inputs", last, "--range bounds random indices") from problem
