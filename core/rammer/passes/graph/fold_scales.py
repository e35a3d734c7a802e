"""Folding of constant factors after a product into its weights, through rearrangements in between.

Exporters scale queries and keys after the split into heads, and a residual branch after a permutation. As separate operators,
these cost a launch each and prevent the surrounding products from becoming one attention kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final, TypeAlias

import numpy as np

from rammer.frontend.op_traits import Trait, has_trait
from rammer.ir.constants.mapped_files import release_pages
from rammer.ir.constants.recipes import scale_array
from rammer.ir.graph import Graph, Node
from rammer.ir.names import make_identifier
from rammer.ir.types import is_float
from rammer.passes.rewrite import count_readers, find_producers, rebuild_graph, rename_values

Array: TypeAlias = np.ndarray
#: Maximum number of elements of a product's result for which the elements that a factor reaches are computed.
MOST_ELEMENTS: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class FoldScales:
    """A rewrite of ``View(x W + b) * s`` to ``View(x (s W) + s b)``.

    The product is MatMul (and Add) or Gemm with constant weights. ``View`` is any chain of Reshape, Transpose, Split and similar
    operators whose values have no other consumers. The factor may differ between columns of the product, for example if only some
    of them are scaled. Products are rounded once to the weights' type. A factor stays if a weight would overflow or vanish.
    """

    name: ClassVar[str] = "fold_scales"

    def __str__(self) -> str:
        return self.name

    def __call__(self, graph: Graph) -> Graph:
        state = _Factors(graph)
        for node in graph.nodes:
            state.visit(node)
        return state.result() if state.removed else graph


class _Factors:
    """Rewritten nodes by their first result. ``removed`` maps removed multiplications to their operands."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.counts, self.made = graph, count_readers(graph), find_producers(graph)
        self.outputs = {v.name for v in graph.outputs}
        self.constants: dict[str, Array] = dict(graph.constants)
        self.taken = set(graph.types)
        self.changed: dict[str, Node] = {}
        self.removed: dict[str, str] = {}

    def result(self) -> Graph:
        """Return the rewritten graph."""
        nodes = [self.changed.get(n.outputs[0], n) for n in self.graph.nodes if n.outputs[0] not in self.removed]
        return rebuild_graph(self.graph, rename_values(nodes, self.removed), self.constants)

    def visit(self, node: Node) -> None:
        """Fold ``node`` into a product if it multiplies the product's result."""
        found = _match_factor(node, self.constants)
        if found is None or node.outputs[0] in self.outputs:
            return
        source, value = found
        kind = self.graph.types[source]
        if self.graph.types[node.outputs[0]] != kind or not is_float(kind.dtype) or not np.isfinite(value).all():
            return
        chain, root = self._trace_views(source)
        product, size = self._current_producer(root), math.prod(self.graph.types[root].shape)
        if product is None or product.op not in ("Gemm", "MatMul", "Add") or not 0 < size <= MOST_ELEMENTS:
            return
        if not self._has_single_readers([source, *(v.inputs[0] for v, _ in chain)]):
            return
        columns = self._columns(root, chain, np.broadcast_to(value, kind.shape))
        if columns is not None and self._try_absorb(root, columns):
            self.removed[node.outputs[0]] = source

    def _has_single_readers(self, values: list[str]) -> bool:
        """Return True if each value is read once. Multiplications that were already folded do not count as readers."""
        return all(self.counts[v] == 1 for v in values)

    def _trace_views(self, value: str) -> tuple[list[tuple[Node, str]], str]:
        """Return the views between ``value`` and its source, each with the result on the path, and the source."""
        chain = list[tuple[Node, str]]()
        while (node := self.made.get(value)) is not None:
            if node.outputs[0] in self.removed:
                value = self.removed[node.outputs[0]] = self._strip_scales(node.outputs[0])
                continue
            if not (has_trait(node, Trait.RESHAPES) or (node.op in ("Transpose", "Split") and not node.domain)):
                break
            chain.append((node, value))
            value = node.inputs[0]
        return chain, value

    def _strip_scales(self, value: str) -> str:
        """Return the operand that remains of ``value`` after removing folded multiplications."""
        while value in self.removed:
            value = self.removed[value]
        return value

    def _columns(self, root: str, chain: list[tuple[Node, str]], factors: Array) -> Array | None:
        """Return the factor of each column of ``root``, or None if it differs between rows."""
        shape = self.graph.types[root].shape
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
            sizes = [self.graph.types[o].shape[axis] for o in view.outputs[: number + 1]]
            return np.take(places, range(sum(sizes[:-1]), sum(sizes)), axis)
        return places.reshape(self.graph.types[result].shape)

    def _try_absorb(self, value: str, columns: Array) -> bool:
        """Multiply the columns of the product (and its bias) that computes ``value``. Return True on success."""
        node = self._current_producer(value)
        if node is None or node.domain:
            return False
        if node.op == "Gemm":
            return self._absorb_gemm(node, columns)
        if node.op == "MatMul":
            return self._try_replace_operands(node, {1: self._weights(node.inputs[1], columns)})
        if node.op != "Add":
            return False
        for place in (0, 1):
            product, bias = self._current_producer(node.inputs[1 - place]), self._bias(node.inputs[place], columns)
            if product is None or product.op != "MatMul" or product.domain or self.counts[node.inputs[1 - place]] != 1:
                continue
            if self.graph.types[product.outputs[0]] != self.graph.types[value]:
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

    def _current_producer(self, value: str) -> Node | None:
        node = self.made.get(value)
        return None if node is None else self.changed.get(node.outputs[0], node)

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
        inputs = list(node.inputs)
        if any(value is None for value in operands.values()):
            return False
        for place, value in operands.items():
            assert value is not None
            name = make_identifier(node.inputs[place], self.taken)
            self.constants[name] = value
            inputs[place] = name
        self.changed[node.outputs[0]] = replace(node, inputs=tuple(inputs))
        return True


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
