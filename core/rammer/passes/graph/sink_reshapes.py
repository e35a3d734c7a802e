"""Sinking of reshapes after a product past the element-wise operators that follow.

Exporters flatten the rows of a sequence, multiply, and restore the axes. Operators after the product (a bias, an activation, a
residual) then read it through a reshape. They cannot be fused into the product's kernel."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import numpy as np

from rammer.frontend.op_traits import Trait, has_trait
from rammer.ir.graph import Graph, Node
from rammer.ir.graph_rewriter import GraphRewriter, RewritePass
from rammer.ir.types import TensorType


class _Sinking(GraphRewriter):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.after_product = {o for n in graph.nodes if has_trait(n, Trait.MATRIX_PRODUCT) for o in n.outputs}

    def rule(self, node: Node) -> bool:
        if self._try_sink(node):
            return True
        if self._is_elementwise(node) and any(i in self.after_product for i in node.inputs):
            self.after_product.update(node.outputs)
        return False

    def _is_elementwise(self, node: Node) -> bool:
        return has_trait(node, Trait.ELEMENTWISE) and not has_trait(node, Trait.RESHAPES)

    def _try_sink(self, node: Node) -> bool:
        """Move ``node`` before the reshape that it reads. Return True on success."""
        if not self._is_elementwise(node) or node.outputs[0] in self.outputs:
            return False
        result = self.types[node.outputs[0]]
        source = next((s for i in node.inputs if (s := self._reshape_source(i)) and self.types[i].shape == result.shape), "")
        direct = any(i in self.after_product and self.types[i].shape == result.shape for i in node.inputs)
        if not source or direct or math.prod(result.shape) == 0:
            return False
        shape = self.types[source].shape
        operands = [self._reshape_operand(i, result.shape, shape) for i in node.inputs]
        if any(o is None for o in operands):
            return False
        inner = self.new_value(node.outputs[0], TensorType(result.dtype, shape))
        self.append(replace(node, inputs=tuple(map(str, operands)), outputs=(inner,)))
        self.after_product.add(inner)
        self._add_unnamed(inner, result.shape, node.outputs[0])
        return True

    def _reshape_source(self, value: str) -> str:
        """Return the source of the reshape ``value`` if it follows a product, else ""."""
        node = self.producers.get(value)
        if node is None or not has_trait(node, Trait.RESHAPES):
            return ""
        return node.inputs[0] if node.inputs[0] in self.after_product else ""

    def _reshape_operand(self, value: str, old: tuple[int, ...], new: tuple[int, ...]) -> str | None:
        """Return ``value``, broadcast to ``old``, in a form that broadcasts to ``new``, or None if a reshape is not enough."""
        if not value:
            return value
        shape = self.types[value].shape
        if shape == old:
            source = self._reshape_source(value)
            if source and self.types[source].shape == new:
                return source
            # A comparison is inlined into its consumer (``passes.compute.inline_maps``), but not through a reshape.
            return None if self.types[value].dtype == "bool" else self._reshape_to(value, new)
        size = math.prod(shape)
        if size != 1 and not (shape[-1:] == old[-1:] == new[-1:] == (size,)):
            return None
        return value if len(shape) <= len(new) else self._reshape_to(value, shape[-1:])

    def _reshape_to(self, value: str, shape: tuple[int, ...]) -> str:
        return self._add_unnamed(value, shape, self.new_value(value, TensorType(self.types[value].dtype, shape)))

    def _add_unnamed(self, value: str, shape: tuple[int, ...], result: str) -> str:
        """Add a Reshape, which is free and thus has no name in reports."""
        size = self.add_constant(f"{result}_shape", np.array(shape, np.int64))
        self.append(Node("Reshape", (value, size), (result,), {}, version=self.version))
        return result


class SinkReshapes(RewritePass):
    """A rewrite of ``Op(Reshape(x), y)`` to ``Reshape(Op(x, Reshape(y)))`` if ``x`` is a product or element-wise operators after
    one.

    ``Op`` is element-wise. Other operands of full size are also reshaped, which is free or cancels a reshape. Operands that vary
    only along the last axis stay unchanged if that axis does.
    """

    name: ClassVar[str] = "sink_reshapes"
    rewriter = _Sinking
