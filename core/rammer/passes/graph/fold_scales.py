"""Folding of constant factors after a product into its weights, through rearrangements in between.

Exporters scale queries and keys after the split into heads, and a residual branch after a permutation. As separate operators,
these cost a launch each and prevent the surrounding products from becoming one attention kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Final, TypeAlias

import numpy as np

from rammer.frontend.op_traits import Trait, has_trait
from rammer.ir.constants.mapped_files import release_pages
from rammer.ir.constants.recipes import scale_array
from rammer.ir.graph import Node
from rammer.ir.graph_rewriter import GraphRewriter, RewritePass, is_operator
from rammer.ir.types import is_float

Array: TypeAlias = np.ndarray
#: Maximum number of elements of a product's result for which the elements that a factor reaches are computed.
MOST_ELEMENTS: Final = 1 << 24


class _Folding(GraphRewriter):
    def rule(self, node: Node) -> bool:
        """Fold ``node`` into a product if it multiplies the product's result."""
        found = _match_factor(node, self.constants)
        if found is None or node.outputs[0] in self.outputs:
            return False
        source, value = found
        kind = self.types[source]
        if self.types[node.outputs[0]] != kind or not is_float(kind.dtype) or not np.isfinite(value).all():
            return False
        chain, root = self._trace_views(source)
        product, size = self.producers.get(root), math.prod(self.types[root].shape)
        if product is None or product.op not in ("Gemm", "MatMul", "Add") or not 0 < size <= MOST_ELEMENTS:
            return False
        if any(self.counts[v] != 1 for v in (source, *(view.inputs[0] for view, _ in chain))):
            return False
        columns = self._columns(root, chain, np.broadcast_to(value, kind.shape))
        if columns is None or not self._try_absorb(root, columns):
            return False
        self.names[node.outputs[0]], self.counts[source] = source, self.counts[node.outputs[0]]
        return True

    def _trace_views(self, value: str) -> tuple[list[tuple[Node, str]], str]:
        """Return the views between ``value`` and its source, each with the result on the path, and the source."""
        chain = list[tuple[Node, str]]()
        while (node := self.producers.get(value)) is not None:
            if not (has_trait(node, Trait.RESHAPES) or is_operator(node, "Transpose", "Split")):
                break
            chain.append((node, value))
            value = node.inputs[0]
        return chain, value

    def _columns(self, root: str, chain: list[tuple[Node, str]], factors: Array) -> Array | None:
        """Return the factor of each column of ``root``, or None if it differs between rows."""
        shape = self.types[root].shape
        places = np.arange(math.prod(shape)).reshape(shape)
        for view, result in reversed(chain):
            places = self._apply_view(view, result, places)
        whole = np.ones(math.prod(shape))
        whole[places.reshape(-1)] = factors.reshape(-1)
        rows = whole.reshape(-1, shape[-1])
        return rows[0] if bool((rows == rows[0]).all()) else None

    def _apply_view(self, view: Node, result: str, places: Array) -> Array:
        """Return output ``result`` of ``view`` applied to the element numbers ``places``."""
        if view.op == "Transpose":
            return places.transpose(view.attributes.get("perm"))
        if view.op == "Split":
            axis = int(view.attributes.get("axis", 0))
            number = view.outputs.index(result)
            sizes = [self.types[o].shape[axis] for o in view.outputs[: number + 1]]
            return np.take(places, range(sum(sizes[:-1]), sum(sizes)), axis)
        return places.reshape(self.types[result].shape)

    def _try_absorb(self, value: str, columns: Array) -> bool:
        """Multiply the columns of the product (and its bias) that computes ``value``. Return True on success."""
        node = self.producers.get(value)
        if node is None or node.domain:
            return False
        if node.op == "Gemm":
            return self._absorb_gemm(node, columns)
        if node.op == "MatMul":
            return self._try_replace_operands(node, {1: self._weights(node.inputs[1], columns)})
        if node.op != "Add":
            return False
        for place in (0, 1):
            product, bias = self.producers.get(node.inputs[1 - place]), self._bias(node.inputs[place], columns)
            if product is None or product.op != "MatMul" or product.domain or self.counts[node.inputs[1 - place]] != 1:
                continue
            if self.types[product.outputs[0]] != self.types[value]:
                continue
            weights = self._weights(product.inputs[1], columns)
            if weights is not None and bias is not None:
                return self._try_replace_operands(product, {1: weights}) and self._try_replace_operands(node, {place: bias})
        return False

    def _absorb_gemm(self, node: Node, columns: Array) -> bool:
        turned = bool(node.attributes.get("transB", 0))
        new = {1: self._weights(node.inputs[1], columns[:, None] if turned else columns)}
        if len(node.inputs) > 2 and node.inputs[2]:
            new[2] = self._bias(node.inputs[2], columns)
        return self._try_replace_operands(node, new)

    def _bias(self, name: str, columns: Array) -> Array | None:
        """Return a constant that is equal for all rows, times ``columns``."""
        value = self.constants.get(name)
        if value is None or value.size != max(value.shape[-1:], default=1) or value.size not in (1, len(columns)):
            return None
        if not is_float(str(value.dtype)):
            return None
        with np.errstate(over="ignore", under="ignore"):
            return _reject_lossy_scaling(np.asarray(value.astype(np.float64) * columns).astype(value.dtype), value, columns)

    def _weights(self, name: str, columns: Array) -> Array | None:
        """Return a matrix times ``columns``, with one or two axes."""
        value = self.constants.get(name)
        if value is None or value.ndim != 2 or not is_float(str(value.dtype)):
            return None
        factors = columns.reshape(-1, columns.shape[-1])
        return _reject_lossy_scaling(scale_array(value, factors), value, factors)

    def _try_replace_operands(self, node: Node, operands: Mapping[int, Array | None]) -> bool:
        """Replace these operands of ``node`` by new constants. Return True on success."""
        known = {place: value for place, value in operands.items() if value is not None}
        if len(known) < len(operands):
            return False
        inputs = list(node.inputs)
        for place, value in known.items():
            inputs[place] = self.add_constant(node.inputs[place], value)
        self.replace_node(node, replace(node, inputs=tuple(inputs)))
        return True


class FoldScales(RewritePass):
    """A rewrite of ``View(x W + b) * s`` to ``View(x (s W) + s b)``.

    The product is MatMul (and Add) or Gemm with constant weights. ``View`` is any chain of Reshape, Transpose, Split and similar
    operators whose values have no other consumers. The factor may differ between columns of the product, for example if only some
    of them are scaled. Products are rounded once to the weights' type. A factor stays if a weight would overflow or vanish.
    """

    name: ClassVar[str] = "fold_scales"
    rewriter = _Folding


def _reject_lossy_scaling(made: Array, value: Array, factors: Array) -> Array | None:
    """Return ``made``, the scaled ``value``, or None if scaling loses an element."""
    small = (np.abs(made) < np.finfo(value.dtype).tiny) & (np.broadcast_to(value, made.shape) != 0) & (factors != 0)
    release_pages(value)
    return made if np.isfinite(made).all() and not small.any() else None


def _match_factor(node: Node, constants: Mapping[str, Array]) -> tuple[str, Array] | None:
    """Return the varying operand and the constant factor of a multiplication or division."""
    if node.domain or node.op not in ("Mul", "Div"):
        return None
    left, right = node.inputs
    if right in constants and left not in constants:
        value = constants[right].astype(np.float64)
        return (left, value) if node.op == "Mul" else (left, 1.0 / value) if np.all(value != 0.0) else None
    return (right, constants[left].astype(np.float64)) if node.op == "Mul" and left in constants else None
