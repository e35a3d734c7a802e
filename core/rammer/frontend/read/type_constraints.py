"""Element type checks: every operand has a type of its schema, and each type variable has one type per node. The check needs no
shapes, so one pass over the model before any upgrade suffices. ONNX's checker and ONNX Runtime reject the same models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    TypeProto,
    defs,
    shape_inference,
)

from rammer.device.custom_operators import CustomOperators
from rammer.errors import BadInput
from rammer.frontend.read import model_checks, schemas
from rammer.frontend.read.node_protos import node_title
from rammer.frontend.read.plugin_operators import NONE, find_custom_operator
from rammer.ir.types import KNOWN

#: ONNX's spelling of an element type in schemas; "" means unknown, or not a tensor.
_SPELLED: Final[Mapping[int, str]] = {
    code: f"tensor({name.lower()})" for name, code in TensorProto.DataType.items() if code != TensorProto.UNDEFINED
}
_CODE: Final = {text: code for code, text in _SPELLED.items()}


@dataclass(frozen=True)
class _Formal:
    """A formal operand of a schema, with the type variable that it shares with others ("" if none)."""

    name: str
    variable: str
    allowed: frozenset[str]


def check_kinds(model: ModelProto, plugins: CustomOperators = NONE) -> None:
    """Raise BadInput for the first node whose operand types violate its schema, or differ although they must be equal.

    Nodes are in topological order; functions are inlined. The outputs of plugin operators have unknown types here;
    ``check_types`` checks their readers once shapes are inferred."""
    _infer_graph_types(model.graph, {}, model_checks.opset_versions(model.opset_import), plugins)


def check_types(node: NodeProto, opset: int, types: Mapping[str, TypeProto]) -> None:
    """Check the operands of one node, which have ``types``, like ``check_kinds``."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    _bind_type_variables(
        node, _formal_operands(node.op_type, opset, domain, False), {n: _element_type(t) for n, t in types.items()}
    )


def _infer_graph_types(
    graph: GraphProto, outer: Mapping[str, str], opsets: Mapping[str, int], plugins: CustomOperators
) -> dict[str, str]:
    kinds = dict(outer)
    kinds |= {v.name: _element_type(v.type) for v in graph.input}
    kinds |= {t.name: _SPELLED.get(t.data_type, "") for t in graph.initializer}
    for node in graph.node:
        if find_custom_operator(node, plugins) is not None:
            kinds.update(dict.fromkeys(node.output, ""))
            continue
        domain = "" if node.domain == "ai.onnx" else node.domain
        bound = _bind_type_variables(node, _formal_operands(node.op_type, opsets[domain], domain, False), kinds)
        bodies = [_body_output_types(a.g, kinds, opsets, plugins) for a in node.attribute if a.type == AttributeProto.GRAPH]
        made = _output_types(node, _formal_operands(node.op_type, opsets[domain], domain, True), bound, bodies)
        if "" in made:
            made = [new or old for new, old in zip(_infer_output_types(node, kinds, opsets), made, strict=True)]
        kinds.update(zip(node.output, made, strict=True))
    return kinds


def _body_output_types(
    body: GraphProto, outer: Mapping[str, str], opsets: Mapping[str, int], plugins: CustomOperators
) -> list[str]:
    inner = _infer_graph_types(body, outer, opsets, plugins)
    return [inner.get(v.name, "") for v in body.output]


def _element_type(proto: TypeProto) -> str:
    return _SPELLED.get(proto.tensor_type.elem_type, "") if proto.WhichOneof("value") == "tensor_type" else ""


@lru_cache(4096)
def _formal_operands(op: str, version: int, domain: str, outputs: bool) -> tuple[tuple[_Formal, ...], bool]:
    """Return the operator's inputs or outputs, and True if the last one is variadic."""
    schema = schemas.get_schema(op, version, domain)
    allowed = {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints}
    formals, variadic = list[_Formal](), False
    for formal in schema.outputs if outputs else schema.inputs:
        variadic = formal.option == defs.OpSchema.FormalParameterOption.Variadic
        shared = formal.type_str in allowed and (not variadic or formal.is_homogeneous)
        formals.append(
            _Formal(formal.name, formal.type_str if shared else "", allowed.get(formal.type_str, frozenset({formal.type_str})))
        )
    return tuple(formals), variadic


def _pair_operands(formals: tuple[tuple[_Formal, ...], bool], names: Sequence[str]) -> Iterator[tuple[_Formal, str]]:
    known, variadic = formals
    for i, name in enumerate(names):
        if i < len(known) or variadic:
            yield known[min(i, len(known) - 1)], name


def _bind_type_variables(node: NodeProto, formals: tuple[tuple[_Formal, ...], bool], kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the element type of each type variable. Raises BadInput if an operand has an unsupported type."""
    bound = dict[str, str]()
    for formal, name in _pair_operands(formals, node.input):
        kind = kinds.get(name, "") if name else ""
        if not kind:
            continue
        if kind not in formal.allowed:
            known = sorted(_CODE[k] for k in formal.allowed if k in _CODE)
            raise BadInput(
                f"{node.op_type} does not take {_spell_dtype(kind)} as its input {formal.name!r}",
                node_title(node),
                f"ONNX allows {', '.join(_spell_dtype(_SPELLED[c]) for c in known)}: put a Cast before it",
            )
        if formal.variable and bound.setdefault(formal.variable, kind) != kind:
            what = (
                f"{node.op_type} has inputs of {_spell_dtype(bound[formal.variable])} and, as its {formal.name!r}, "
                f"{_spell_dtype(kind)}, which must be of one element type"
            )
            raise BadInput(what, node_title(node), "put a Cast before one of them")
    return bound


def _spell_dtype(kind: str) -> str:
    return {"float": "float32", "double": "float64"}.get(kind[7:-1], kind[7:-1])


def _output_types(
    node: NodeProto, formals: tuple[tuple[_Formal, ...], bool], bound: Mapping[str, str], bodies: Sequence[Sequence[str]]
) -> list[str]:
    """Return the element types of the outputs; "" for types that depend on attributes."""
    if bodies:
        # The first output of a Loop's body is the condition to continue.
        made = bodies[0][1:] if node.op_type == "Loop" else bodies[0]
        return [made[i] if i < len(made) else "" for i in range(len(node.output))]
    result = [""] * len(node.output)
    for i, (formal, _) in enumerate(_pair_operands(formals, node.output)):
        alone = next(iter(formal.allowed)) if len(formal.allowed) == 1 else ""
        result[i] = bound.get(formal.variable, alone if alone in _CODE else "")
    return result


def _infer_output_types(node: NodeProto, kinds: Mapping[str, str], opsets: Mapping[str, int]) -> list[str]:
    """Return element types by ONNX's inference, which reads attributes; "" for unknown types and nodes with bodies."""
    known = {n: kinds.get(n, "") for n in node.input if n}
    nothing = [""] * len(node.output)
    if not all(known.values()) or any(True for _ in model_checks.graphs_inside(node)):
        return nothing
    types = {n: TypeProto(tensor_type=TypeProto.Tensor(elem_type=_CODE[k])) for n, k in known.items()}
    imports = [OperatorSetIdProto(domain=d, version=v) for d, v in opsets.items()]
    domain = "" if node.domain == "ai.onnx" else node.domain
    schema = schemas.get_schema(node.op_type, opsets[domain], domain)
    try:
        found = shape_inference.infer_node_outputs(schema, node, types, opset_imports=imports)
    except Exception:  # shape inference reports the error later
        return nothing
    return [_element_type(found[o]) if o in found else "" for o in node.output]


def check_constant(name: str, array: np.ndarray, where: str) -> None:
    """Raise BadInput for a constant of an unsupported type."""
    if str(array.dtype) not in KNOWN:
        raise BadInput(
            f"constant {name!r} has element type {array.dtype}, which is not supported",
            where,
            f"supported are tensors of {', '.join(KNOWN)}",
        )
