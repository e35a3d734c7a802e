"""Plugins' operators on their way from the file to the Graph: what is checked, and how they are typed."""

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

#: No plugin's operators.
NONE: CustomOperators = {}


def domain_of(proto: NodeProto) -> str:
    """The operator's domain; "" for ONNX's own, however it is spelled."""
    return "" if proto.domain == "ai.onnx" else str(proto.domain)


def find_custom_operator(proto: NodeProto, custom: CustomOperators) -> CustomOperator | None:
    """What a plugin says of the operator."""
    return custom.get((domain_of(proto), proto.op_type)) if custom else None


def check_use(proto: NodeProto, operator: CustomOperator, version: int, inside: bool = False) -> dict[str, Any]:
    """The attributes of one use. BadInput where it is none; ``inside`` a function's body attributes may refer to the function's,
    and are not looked at. ``version`` is that of the domain, 0 where the model does not import it."""
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
    """Attributes, with defaults, and types of the outputs. BadInput for what ``check_use`` or the plugin refuses."""
    attributes = check_use(proto, operator, version)
    try:
        found = operator.types(Use(operator.title, version, attributes, types, [bool(o) for o in proto.output], values))
    except BadInput as problem:
        raise BadInput(problem.what, problem.where or nd.node_title(proto), problem.hint) from problem
    for kind in found:
        limits.check_shape(kind.shape, nd.node_title(proto))
    return attributes, found


def check_body(proto: NodeProto, inner: Iterable[NodeProto], custom: CustomOperators) -> None:
    """BadInput for a plugin's operator among ``inner``, the operators in the bodies of ``proto``: those run on the host, by
    ONNX's reference, which does not know it."""
    for node in inner:
        if (operator := find_custom_operator(node, custom)) is not None:
            raise BadInput(
                f"{operator.title} stands in a body of {proto.op_type}, which is run on the host by ONNX's reference",
                nd.node_title(node),
                "unroll the loop, or make the condition a constant",
            )


def unknown_domain(proto: NodeProto, custom: CustomOperators) -> str:
    """What to do about an operator of a domain that is not ONNX's."""
    domain = domain_of(proto)
    known = {op: operator for (d, op), operator in custom.items() if d == domain}
    if known:
        plugins = _join_names({o.plugin for o in known.values()})
        close = get_close_matches(proto.op_type, known, 1) or sorted(known)
        return f"plugin {plugins} declares other operators of domain {domain}, such as {close[0]}: is there a newer version?"
    return (
        f"domain {domain} is not part of ONNX, and no plugin here declares operators of it (`rammer plugins list`): install or "
        "write one that does (hook rammer_operators), or export the model with standard operators only"
    )


def _join_names(names: Iterable[str]) -> str:
    return " and ".join(sorted(names))


def used_custom_operators(protos: Iterable[NodeProto], custom: CustomOperators) -> Mapping[tuple[str, str], CustomOperator]:
    """The plugins' operators that a model uses."""
    keys = {(domain_of(p), p.op_type) for p in protos} if custom else set()
    return {key: custom[key] for key in sorted(keys & custom.keys())}
