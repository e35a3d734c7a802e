"""Plugin operators between the file and the Graph: checks and type inference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
from onnx import NodeProto

from rammer.device.custom_operators import CustomOperator, CustomOperators
from rammer.errors import BadInput
from rammer.frontend.read import limits
from rammer.frontend.read import node_protos as nd
from rammer.ir.operator_use import Use
from rammer.ir.types import TensorType

#: The empty set of plugin operators.
NONE: CustomOperators = {}


def domain_of(proto: NodeProto) -> str:
    """Return the operator's domain; "" for both spellings of ONNX's domain."""
    return "" if proto.domain == "ai.onnx" else str(proto.domain)


def find_custom_operator(proto: NodeProto, custom: CustomOperators) -> CustomOperator | None:
    """Return a plugin's declaration of the operator, or None."""
    return custom.get((domain_of(proto), proto.op_type)) if custom else None


def check_use(proto: NodeProto, operator: CustomOperator, version: int, inside: bool = False) -> dict[str, Any]:
    """Check one use of a plugin operator and return its attributes. Raises BadInput for an invalid use.

    With ``inside``, the node is in a function body; attributes that refer to the function's are not checked. ``version`` is the
    imported version of the domain, 0 if the model does not import it."""
    where = nd.node_title(proto)
    if version < operator.since:
        has = f"version {version} of domain {operator.domain}" if version else f"no version of domain {operator.domain}"
        hint = f"plugin {operator.plugin} has it since version {operator.since}: export the model again"
        raise BadInput(f"{operator.title} is used, but the model imports {has}", where, hint)
    twice = [n for n, count in Counter(a.name for a in proto.attribute).items() if count > 1]
    if twice:
        raise BadInput(f"{operator.title} has the attribute {twice[0]} more than once", where, "export the model again")
    if inside and any(a.ref_attr_name for a in proto.attribute):
        return {}
    try:
        attributes = {a.name: nd.attribute_value(a) for a in proto.attribute}
    except ValueError as error:
        raise BadInput(str(error), where, "export the model without it") from error
    return operator.check(where, proto.input, len(proto.output), attributes)


def types_of(
    proto: NodeProto,
    operator: CustomOperator,
    version: int,
    types: Sequence[TensorType | None],
    values: Sequence[np.ndarray | None],
) -> tuple[dict[str, Any], tuple[TensorType, ...]]:
    """Return the attributes, with defaults, and the output types.

    Raises BadInput if ``check_use`` or the plugin rejects the use."""
    attributes = check_use(proto, operator, version)
    try:
        found = operator.types(Use(operator.title, version, attributes, types, [bool(o) for o in proto.output], values))
    except BadInput as problem:
        raise BadInput(problem.what, problem.where or nd.node_title(proto), problem.hint) from problem
    for kind in found:
        limits.check_shape(kind.shape, nd.node_title(proto))
    return attributes, found


def check_body(proto: NodeProto, inner: Iterable[NodeProto], custom: CustomOperators) -> None:
    """Raise BadInput for a plugin operator among ``inner``, the operators in the bodies of ``proto``. Bodies run on the host by
    ONNX's reference, which does not support plugin operators."""
    for node in inner:
        if (operator := find_custom_operator(node, custom)) is not None:
            raise BadInput(
                f"{operator.title} is in a body of {proto.op_type}, which is run on the host by ONNX's reference",
                nd.node_title(node),
                "unroll the loop, or make the condition a constant",
            )


def unknown_domain(proto: NodeProto, custom: CustomOperators) -> str:
    """Return a hint for an operator of a domain other than ONNX's."""
    domain = domain_of(proto)
    known = {op: operator for (d, op), operator in custom.items() if d == domain}
    if known:
        plugins = " and ".join(sorted({o.plugin for o in known.values()}))
        close = get_close_matches(proto.op_type, known, 1) or sorted(known)
        return f"plugin {plugins} declares other operators of domain {domain}, such as {close[0]}: look for a newer version"
    return (
        f"domain {domain} is not part of ONNX, and no plugin here declares operators of it (`rammer plugins list`): install or "
        "write one that does (hook rammer_operators), or export the model with standard operators only"
    )


def used_custom_operators(protos: Iterable[NodeProto], custom: CustomOperators) -> Mapping[tuple[str, str], CustomOperator]:
    """Return the plugin operators that a model uses."""
    keys = {(domain_of(p), p.op_type) for p in protos} if custom else set()
    return {key: custom[key] for key in sorted(keys & custom.keys())}
