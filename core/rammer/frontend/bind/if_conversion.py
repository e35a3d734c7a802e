"""If-conversion: an If with small branches becomes both branches, and a Where selects their results.

The result is part of one program. A separate branch would be a call, which costs as much as some 100,000 elements.

Only total operators, which cannot fail for any input, are speculated.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np
from onnx import NodeProto, helper

from rammer.errors import BadInput
from rammer.frontend.bind.bind_state import BindState, Scope
from rammer.frontend.op_traits import Trait, has_trait
from rammer.frontend.read import model_checks
from rammer.ir.graph import Node
from rammer.ir.types import TensorType, is_float

#: Maximum elements that the operators of both branches read and write; a product's terms count as one eighth each.
MOST_WORK: Final = 1 << 16
_TERMS: Final = 8
#: Maximum operators of both branches: each costs a launch on some devices.
MOST_OPERATORS: Final = 32


def convert_if(walk: BindState, proto: NodeProto, scope: Scope) -> bool:
    """Replace an If by both branches, followed by a Where. Returns False if it must stay an If; ``walk`` is then restored."""
    if proto.op_type != "If" or proto.domain not in ("", "ai.onnx"):
        return False
    condition = scope.values[proto.input[0]]
    if walk.types[condition].size != 1:
        return False
    made = len(walk.nodes)
    try:
        branches = [_walk_branch(walk, proto, which, scope) for which in ("then_branch", "else_branch")]
        done = _is_cheap(walk, walk.nodes[made:]) and all(_has_same_type(walk, *pair) for pair in zip(*branches, strict=True))
    except BadInput:  # a data-dependent shape, or an error that the branch reports better
        done = False
    if not done:
        del walk.nodes[made:]
        return False
    inner = scope.inner()
    name = proto.name or proto.output[0]
    chosen, scalar = f"{name}/condition", f"{name}/scalar"
    walk.constant(scalar, np.array([], np.int64), inner)
    walk.step(helper.make_node("Reshape", [proto.input[0], scalar], [chosen]), inner)
    for place, (one, other, wanted) in enumerate(zip(*branches, proto.output, strict=True)):
        if wanted:
            inner.values.update({f"{name}/then{place}": one, f"{name}/else{place}": other})
            result = f"{name}/chosen{place}"
            inner.titles = {result: scope.titles.get(wanted, wanted)}
            walk.step(helper.make_node("Where", [chosen, f"{name}/then{place}", f"{name}/else{place}"], [result]), inner)
            scope.values[wanted] = inner.values[result]
    return True


def _walk_branch(walk: BindState, proto: NodeProto, which: str, scope: Scope) -> list[str]:
    """Walk over a branch and return the names of its results."""
    branch = next(a.g for a in proto.attribute if a.name == which)
    inner = scope.inner()
    walk.initializers(branch, inner)
    order = model_checks.sorted_nodes(branch, scope.values)
    walk.nodes_of(order, [o.name for o in branch.output], inner)
    return [inner.values[o.name] for o in branch.output]


def _has_same_type(walk: BindState, one: str, other: str) -> bool:
    """Return True if two results have equal types and shapes."""
    return _value_type(walk, one) == _value_type(walk, other)


def _value_type(walk: BindState, name: str) -> TensorType:
    known = walk.known.get(name)
    return walk.types[name] if known is None else TensorType(str(known.dtype), known.shape)


def _is_cheap(walk: BindState, nodes: Sequence[Node]) -> bool:
    """Return True if all operators are total, few, and cheap together."""
    work = 0 if len(nodes) <= MOST_OPERATORS else MOST_WORK + 1
    for node in nodes:
        if not _is_total(walk, node):
            return False
        read = [_value_type(walk, n) for n in node.inputs if n]
        written = [walk.types[n] for n in node.outputs if n]
        work += sum(t.size for t in (*read, *written))
        if has_trait(node, Trait.MATRIX_PRODUCT):
            work += prod(written[0].shape) * read[0].size // max(read[0].shape[-2] if len(read[0].shape) > 1 else 1, 1) // _TERMS
    return work <= MOST_WORK


def _is_total(walk: BindState, node: Node) -> bool:
    """Return True if an operator is defined for all values of its operands."""
    if has_trait(node, Trait.TOTAL):
        return True
    if node.op == "Gather" and not node.domain:  # an index may be out of range
        return node.inputs[1] in walk.known
    return has_trait(node, Trait.TOTAL_OF_FLOATS) and all(is_float(_value_type(walk, n).dtype) for n in node.inputs if n)
