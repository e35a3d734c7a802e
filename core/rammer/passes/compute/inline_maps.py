"""Inlining of comparisons and of decoded codes into their consumers.

A comparison as a separate tensor has a type that the kernel families for products do not support. The guard that exporters emit
after an attention's softmax (``where(isnan(p), 0, p)``) would split the attention in two. Decoded values need four times the
bytes of their codes. An inlined quantised residual is an operand of the map after a product. A mean over codes is a reduction of
them. Operands of products stay tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from rammer.ir import expr as ex
from rammer.ir.compute import Compute, ComputeGraph, computed_at, identity_load
from rammer.ir.expr import Expr, Load, Ref
from rammer.ir.types import TensorType, itemsize

#: Maximum conditions per merged map: bodies are walked recursively, and longer maps do not improve kernels.
MOST_CONDITIONS: Final = 24


def inline_conditions(graph: ComputeGraph) -> ComputeGraph:
    """Return ``graph`` with every boolean map inlined into its consumer, if that is one map that reads it element by element."""
    readers, outputs = graph.consumers(), set(graph.outputs)
    inside: dict[str, Compute] = {}
    result, made_of = list[Compute](), dict[str, int]()
    for c in graph.computes:
        made = _with_conditions(c, inside)
        made_of[c.name] = 1 + sum(made_of[r] for r in c.reads if r in inside)
        few = made_of[c.name] < MOST_CONDITIONS
        if few and c.name not in outputs and _is_condition(c) and _asked_once(c, readers[c.name]):
            inside[c.name] = made
        else:
            result.append(made)
    return replace(graph, computes=tuple(result)) if inside else graph


def _is_condition(c: Compute) -> bool:
    """Return True if ``c`` computes booleans. A rearrangement is excluded, since it may be a view."""
    return c.dtype == "bool" and c.combiner is None and not isinstance(c.body, Load)


def _asked_once(c: Compute, readers: list[Compute]) -> bool:
    """Return True if exactly one map reads ``c``, element by element."""
    if len(readers) != 1 or readers[0].combiner is not None or readers[0].shape != c.shape:
        return False
    return all(identity_load(ld, readers[0]) for ld in readers[0].loads if ld.tensor == c.name)


def _with_conditions(c: Compute, inside: dict[str, Compute]) -> Compute:
    """Return ``c`` with the conditions that it reads inlined."""
    if not any(r in inside for r in c.reads):
        return c

    def rule(e: Expr) -> Expr | None:
        if not isinstance(e, Load) or e.tensor not in inside:
            return None
        asked = inside[e.tensor]
        places: dict[str, Expr] = {old.name: Ref(new.name) for old, new in zip(asked.axes, c.axes, strict=True)}
        return ex.substitute(asked.body, places)

    return replace(c, body=ex.transform(c.body, rule), used=None)


def inline_decodings(graph: ComputeGraph) -> ComputeGraph:
    """Return ``graph`` with every map from codes to wider values inlined into the maps and reductions that read it."""
    outputs, found = set(graph.outputs), dict[str, Compute]()
    result = list[Compute]()
    for c in graph.computes:
        made = _with_decodings(c, found)
        if _is_decoding(made, graph.types):
            found[c.name] = made
        result.append(made)
    if not found:
        return graph
    read = {name for c in result for name in c.reads} | outputs
    return replace(graph, computes=tuple(c for c in result if c.name not in found or c.name in read))


def _is_decoding(c: Compute, types: Mapping[str, TensorType]) -> bool:
    """Return True if ``c`` widens the elements of one tensor in place, with parameters as its only other operands."""
    if c.combiner is not None or isinstance(c.body, Load) or not c.axes:
        return False
    whole = [ld for ld in c.loads if types[ld.tensor].size == types[c.name].size > 1]
    rest = [ld for ld in c.loads if types[ld.tensor].size != types[c.name].size]
    if len(whole) != 1 or not identity_load(whole[0], c) or any(ld.fill is not None for ld in rest):
        return False
    plain = all(isinstance(i, ex.Ref | ex.Const) for ld in rest for i in ld.indices) and all(len(ld.indices) <= 1 for ld in rest)
    return plain and itemsize(types[whole[0].tensor].dtype) < itemsize(c.dtype)


def _with_decodings(c: Compute, found: dict[str, Compute]) -> Compute:
    """Return ``c`` with the decodings that it reads inlined, unless it is a product or a rearrangement."""
    if (isinstance(c.body, Load) and c.combiner is None) or c.kind == "contraction" or not any(r in found for r in c.reads):
        return c

    def rule(e: Expr) -> Expr | None:
        if not isinstance(e, Load) or e.tensor not in found or e.fill is not None:
            return None
        return computed_at(found[e.tensor], e.indices)

    body = ex.transform(c.body, rule)
    return c if body is c.body else replace(c, body=body, used=None)
