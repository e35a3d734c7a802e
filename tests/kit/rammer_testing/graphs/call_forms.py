"""Call forms: ways to compile and call a random graph, all with the results of a plain run.

A form changes the model (control flow around it, contrib operators in it, a dynamic extent) or the call (bound arrays). The
oracle of the original graph judges every form."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper
from onnx.shape_inference import InferenceError, infer_shapes

from rammer.runtime.executable import Executable

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Inputs: TypeAlias = "Mapping[str, Array]"
#: A function that compiles a model with ranges of its dynamic extents.
Compiler: TypeAlias = "Callable[[ModelProto, dict[str, tuple[int, int]]], Executable]"
CONTRIB: Final = "com.microsoft"
#: Standard operators that are duplicated in ONNX Runtime's contrib domain, with the attributes that both have.
REPEATED: Final[Mapping[str, tuple[str, frozenset[str]]]] = {
    "MatMul": ("FusedMatMul", frozenset()),
    "Gemm": ("FusedGemm", frozenset(("alpha", "beta", "transA", "transB"))),
    "QuantizeLinear": ("QuantizeLinear", frozenset(("axis",))),
    "DequantizeLinear": ("DequantizeLinear", frozenset(("axis",))),
    "Trilu": ("Trilu", frozenset(("upper",))),
    "Gelu": ("Gelu", frozenset()),
}
#: Suffix of the output names of a node with subgraphs.
CHOSEN: Final = "_chosen"
#: Iterations of the loop of form ``loop``.
ITERATIONS: Final = 2


def run_plain(compile_model: Compiler, model: ModelProto, inputs: Inputs) -> dict[str, Array]:
    """Run the compiled model once."""
    return _run(compile_model(model, {}), inputs)


def run_bound(compile_model: Compiler, model: ModelProto, inputs: Inputs) -> dict[str, Array]:
    """Bind arrays with other values, run, write the inputs, and run again."""
    exe = compile_model(model, {})
    try:
        bound = exe.bind({n: np.flip(a).copy() if a.dtype.kind == "f" else a.copy() for n, a in inputs.items()})
        try:
            bound.run()
            bound.write(inputs)
            bound.run()
            return bound.to_host()
        finally:
            bound.close()
    finally:
        exe.close()


def run_ranged(compile_model: Compiler, model: ModelProto, inputs: Inputs) -> dict[str, Array]:
    """Make the first extent of the first input dynamic, with all equal first extents, and run at the drawn extent. Raises
    BadInput if no single program serves the range, as for a graph that fixes the extent."""
    ranged = ModelProto()
    ranged.CopyFrom(model)
    extents = {p.name: p.type.tensor_type.shape.dim for p in ranged.graph.input}
    first = next((dims[0].dim_value for dims in extents.values() if len(dims) and dims[0].dim_value > 1), 0)
    if not first:
        return run_plain(compile_model, model, inputs)
    for dims in extents.values():
        if len(dims) and dims[0].dim_value == first:
            dims[0].dim_param = "rows"
    return _run(compile_model(ranged, {"rows": (max(1, first - 1), first + 2)}), inputs)


def run_branch(compile_model: Compiler, model: ModelProto, inputs: Inputs) -> dict[str, Array]:
    """Run the graph as one branch of an If; the second branch negates the float results."""
    taken = len(inputs) % 2 == 0
    floats = {v.name for v in _outputs(model) if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    same, negated = _branch(model.graph), _branch(model.graph, floats)
    names = [f"{o.name}{CHOSEN}" for o in model.graph.output]
    first, second = (same, negated) if taken else (negated, same)
    node = helper.make_node("If", ["branch_condition"], names, then_branch=first, else_branch=second)
    outer = _around(model, node, "branch_condition", TensorProto.BOOL)
    return _unchosen(_run(compile_model(outer, {}), {**inputs, "branch_condition": np.array(taken)}))


def run_loop(compile_model: Compiler, model: ModelProto, inputs: Inputs) -> dict[str, Array]:
    """Run the graph as the body of a Loop and return the last iteration. Raises ValueError if the iterations differ."""
    body = _branch(model.graph)
    body.input.append(helper.make_tensor_value_info("iteration", TensorProto.INT64, []))
    body.input.append(helper.make_tensor_value_info("continues", TensorProto.BOOL, []))
    body.input.append(helper.make_tensor_value_info("state", TensorProto.INT64, []))  # a Loop of opset 1 needs a state
    results = list(body.output)
    del body.output[:]
    for name, element_type in (("continues", TensorProto.BOOL), ("state", TensorProto.INT64)):
        body.node.append(helper.make_node("Identity", [name], [f"{name}_next"]))
        body.output.append(helper.make_tensor_value_info(f"{name}_next", element_type, []))
    body.output.extend(results)
    names = [f"{o.name}{CHOSEN}" for o in model.graph.output]
    node = helper.make_node("Loop", ["trip_count", "", "trip_count"], ["last_state", *names], body=body)
    outer = _around(model, node, "trip_count", TensorProto.INT64)
    stacked = _unchosen(_run(compile_model(outer, {}), {**inputs, "trip_count": np.array(ITERATIONS, np.int64)}))
    for name, array in stacked.items():
        if len(array) != ITERATIONS or array[0].tobytes() != array[-1].tobytes():
            raise ValueError(f"iterations of {name} differ")
    return {n: a[-1] for n, a in stacked.items()}


def run_contrib(compile_model: Compiler, model: ModelProto, inputs: Inputs) -> dict[str, Array]:
    """Replace standard operators by their com.microsoft duplicates, then run."""
    changed = ModelProto()
    changed.CopyFrom(model)
    for node in changed.graph.node:
        name, attributes = REPEATED.get(node.op_type, ("", frozenset()))
        if name and not node.domain and {a.name for a in node.attribute} <= attributes:
            node.op_type, node.domain = name, CONTRIB
    if all(i.domain != CONTRIB for i in changed.opset_import):
        changed.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    return _run(compile_model(changed, {}), inputs)


#: The forms by name.
FORMS: Final[Mapping[str, Callable[[Compiler, ModelProto, Inputs], dict[str, Array]]]] = {
    "run": run_plain,
    "bind": run_bound,
    "range": run_ranged,
    "if": run_branch,
    "loop": run_loop,
    "contrib": run_contrib,
}


def _run(exe: Executable, inputs: Inputs) -> dict[str, Array]:
    try:
        return exe.run(dict(inputs))
    finally:
        exe.close()


def _outputs(model: ModelProto) -> list[ValueInfoProto]:
    """Return the outputs with inferred types. The types are absent if ONNX's inference fails, as for some sparse initializers."""
    try:
        return list(infer_shapes(model).graph.output)
    except InferenceError:
        return list(model.graph.output)


def _branch(graph: GraphProto, negated: Container[str] = ()) -> GraphProto:
    """Return the nodes of ``graph`` as a subgraph that captures its inputs and initializers from outside."""
    branch = GraphProto(name="branch")
    branch.node.extend(graph.node)
    for value in graph.output:
        result = f"{value.name}_result"
        branch.node.append(helper.make_node("Neg" if value.name in negated else "Identity", [value.name], [result]))
        branch.output.append(helper.make_empty_tensor_value_info(result))
    return branch


def _around(model: ModelProto, node: NodeProto, name: str, element_type: int) -> ModelProto:
    """Return ``model`` with ``node`` in place of its nodes, and an additional scalar input ``name``."""
    outer = ModelProto()
    outer.CopyFrom(model)
    del outer.graph.node[:]
    del outer.graph.output[:]
    outer.graph.node.append(node)
    outer.graph.input.append(helper.make_tensor_value_info(name, element_type, []))
    outer.graph.output.extend(helper.make_empty_tensor_value_info(o) for o in node.output if o.endswith(CHOSEN))
    return outer


def _unchosen(outputs: Mapping[str, Array]) -> dict[str, Array]:
    return {n.removesuffix(CHOSEN): a for n, a in outputs.items()}
