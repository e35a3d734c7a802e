"""What codes stand for is computed where it is read: as a tensor of its own it would be four times the bytes.

A residual that was quantised is one more operand of the map behind a product, and a mean over codes a reduction of them. The
operands of products stay tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rammer.ir import expr as ex
from rammer.ir.compute import Compute, ComputeGraph, computed_at, identity_load
from rammer.ir.expr import Expr, Load
from rammer.ir.types import TensorType, itemsize


def inline_decodings(graph: ComputeGraph) -> ComputeGraph:
    """``graph`` with every map from codes to wider numbers inside the maps and reductions that read it."""
    outputs, found = set(graph.outputs), dict[str, Compute]()
    result = list[Compute]()
    for c in graph.computes:
        made = _with(c, found)
        if _decoding(made, graph.types):
            found[c.name] = made
        result.append(made)
    if not found:
        return graph
    read = {name for c in result for name in c.reads} | outputs
    return replace(graph, computes=tuple(c for c in result if c.name not in found or c.name in read))


def _decoding(c: Compute, types: Mapping[str, TensorType]) -> bool:
    """Whether ``c`` makes wider numbers of one tensor's elements, each in its place, and of parameters."""
    if c.combiner is not None or isinstance(c.body, Load) or not c.axes:
        return False
    whole = [ld for ld in c.loads if types[ld.tensor].size == types[c.name].size > 1]
    rest = [ld for ld in c.loads if types[ld.tensor].size != types[c.name].size]
    if len(whole) != 1 or not identity_load(whole[0], c) or any(ld.fill is not None for ld in rest):
        return False
    plain = all(isinstance(i, ex.Ref | ex.Const) for ld in rest for i in ld.indices) and all(len(ld.indices) <= 1 for ld in rest)
    return plain and itemsize(types[whole[0].tensor].dtype) < itemsize(c.dtype)


def _with(c: Compute, found: dict[str, Compute]) -> Compute:
    """``c`` with the decodings that it reads computed in place, unless it is a product or only rearranges."""
    if (isinstance(c.body, Load) and c.combiner is None) or c.kind == "contraction" or not any(r in found for r in c.reads):
        return c

    def rule(e: Expr) -> Expr | None:
        if not isinstance(e, Load) or e.tensor not in found or e.fill is not None:
            return None
        return computed_at(found[e.tensor], e.indices)

    body = ex.transform(c.body, rule)
    return c if body is c.body else replace(c, body=body, used=None)
