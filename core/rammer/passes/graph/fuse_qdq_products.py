"""Rewriting of products of dequantised operands into scaled products of their codes.

Quantisers write DequantizeLinear before each operand of a product and QuantizeLinear after it. The product of the decoded values
equals the product of the codes times both scales. It needs no floats before the sum. Element-wise operators after it (a residual,
an activation, the next QuantizeLinear) are fused later, as after any product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np

from rammer.frontend.lower.operators.integer import DOMAIN
from rammer.ir.graph import Node
from rammer.ir.graph_rewriter import GraphRewriter, RewritePass, is_operator
from rammer.ir.types import TensorType

_BYTES: Final = ("uint8", "int8")
#: Relative difference below which the scale of a bias equals that of the sum: the float32 rounding error of a product.
_SAME: Final = 2.0**-22
#: Largest signed 32-bit integer.
_MOST: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _CodeOperand:
    """The codes of an operand. ``scale`` and ``zero`` ("" for 0) are tensors, per tensor or (``each``) per channel."""

    tensor: str
    scale: str
    zero: str
    each: bool


class _Fusing(GraphRewriter):
    def rule(self, node: Node) -> bool:
        if not is_operator(node, "Conv", "MatMul", "Gemm") or self.types[node.outputs[0]].dtype != "float32":
            return False
        turned = [bool(node.attributes.get(t, 0)) and node.op == "Gemm" for t in ("transA", "transB")]
        rank = len(self.types[node.inputs[1]].shape)
        along = 0 if node.op == "Conv" else rank - 1 if not turned[1] else rank - 2
        data, weights = self._codes(node.inputs[0], None), self._codes(node.inputs[1], along if rank > 1 else None)
        if data is None or weights is None or not self._can_sum_in_int32(node, data, weights, along):
            return False
        a, b = (self._turned(c.tensor, t) for c, t in zip((data, weights), turned, strict=True))
        scale = self._scale(node, data, weights)
        bias, rest = self._bias(node, scale)
        inputs = (a, b, data.zero, weights.zero, bias, scale)
        attributes = {k: v for k, v in node.attributes.items() if node.op == "Conv"}
        op, result = "IntegerConv" if node.op == "Conv" else "IntegerMatMul", node.outputs[0]
        total = self.new_value(result, self.types[result]) if rest else result
        self.append(Node(op, inputs, (total,), attributes, node.name, DOMAIN, 1))
        if rest:
            self.append(Node("Add", (total, self._align_bias(node, rest)), (result,), {}, node.name, "", 14))
        return True

    def _codes(self, name: str, along: int | None) -> _CodeOperand | None:
        """Return the codes that ``name`` is decoded from, with one scale or one per index of the axis ``along``."""
        node = self.produced(name, "DequantizeLinear")
        if node is None or node.attributes.get("block_size", 0):
            return None
        codes, scale, zero = (*node.inputs, "")[:3]
        each = self.types[scale].size != 1
        axis = int(node.attributes.get("axis", 1))
        rank = len(self.types[name].shape)
        if self.types[codes].dtype not in _BYTES or self.types[scale].dtype != "float32" or len(self.types[scale].shape) > 1:
            return None
        return None if each and (along is None or axis % rank != along) else _CodeOperand(codes, scale, zero, each)

    def _can_sum_in_int32(self, node: Node, data: _CodeOperand, weights: _CodeOperand, along: int) -> bool:
        """Return True if every sum fits into 32 bits, according to constant weights or else the range of codes."""
        known, zero = self.constants.get(weights.tensor), self._known(weights.zero)
        shape = self.types[weights.tensor].shape
        if known is not None and zero is not None and known.size:
            each = [-1 if d == along else 1 for d in range(len(shape))] if zero.size > 1 else ()
            moved = np.abs(known.astype(np.int64) - zero.astype(np.int64).reshape(each))
            largest = int(moved.sum(tuple(d for d in range(len(shape)) if d != along or len(shape) == 1)).max(initial=0))
        else:
            terms = math.prod(shape) // shape[along] if node.op == "Conv" and shape[along] else shape[-2:][0]
            largest = 255 * terms
        point = self._known(data.zero)
        ends = np.iinfo(self.types[data.tensor].dtype)
        reach = 255 if point is None else max(int(ends.max) - int(point.min()), int(point.max()) - int(ends.min))
        return largest * reach <= _MOST

    def _known(self, zero: str) -> np.ndarray | None:
        return self.constants.get(zero) if zero else np.zeros((), np.int32)

    def _turned(self, name: str, turned: bool) -> str:
        if not turned:
            return name
        kind = self.types[name]
        return self._add_node("Transpose", (name,), replace(kind, shape=kind.shape[::-1]), {"perm": (1, 0)}, version=13)

    def _scale(self, node: Node, data: _CodeOperand, weights: _CodeOperand) -> str:
        """Return ``alpha * sa * sb``, per tensor or per channel."""
        alpha = float(node.attributes.get("alpha", 1.0)) if node.op == "Gemm" else 1.0
        known = [self.constants.get(c.scale) for c in (data, weights)]
        one = self.types[data.scale].size
        assert one == 1, "data have one scale"
        if all(v is not None for v in known):
            a, b = (np.asarray(v, np.float32).reshape(-1) for v in known)
            return self.add_constant(f"{node.outputs[0]}_scale", np.float32(alpha) * (a * b))
        size = self.types[weights.scale].size
        flat = [self._flatten_value(c.scale, node) for c in (data, weights)]
        product = self._add_node("Mul", flat, TensorType("float32", (size,)), {}, version=14, near=f"{node.outputs[0]}_scale")
        if alpha == 1.0:
            return product
        factor = self.add_constant(f"{product}_alpha", np.array([alpha], np.float32))
        return self._add_node("Mul", (product, factor), TensorType("float32", (size,)), {}, version=14)

    def _flatten_value(self, name: str, node: Node) -> str:
        kind = self.types[name]
        if len(kind.shape) == 1:
            return name
        target = self.add_constant(f"{name}_shape", np.array([kind.size], np.int64))
        return self._add_node("Reshape", (name, target), TensorType(kind.dtype, (kind.size,)), {}, version=21)

    def _bias(self, node: Node, scale: str) -> tuple[str, str]:
        """Return the bias as int32 for the sum, and as float32 for after it; "" for an absent one."""
        name = node.inputs[2] if len(node.inputs) > 2 else ""
        beta = float(node.attributes.get("beta", 1.0)) if node.op == "Gemm" else 1.0
        if not name:
            return "", ""
        found, sums = self.produced(name, "DequantizeLinear"), self.constants.get(scale)
        if found is not None and sums is not None:
            whole, own = found.inputs[0], self.constants.get(found.inputs[1])
            zero = self._known(found.inputs[2] if len(found.inputs) > 2 else "")
            plain = self.types[whole].dtype == "int32" and len(self.types[whole].shape) == 1 and whole in self.constants
            if plain and own is not None and zero is not None and not zero.any() and self._is_close(own * beta, sums):
                return whole, ""
        if beta == 1.0:
            return "", name
        factor = self.add_constant(f"{name}_beta", np.array(beta, np.float32))
        return "", self._add_node("Mul", (name, factor), self.types[name], {}, version=14)

    def _is_close(self, one: np.ndarray, other: np.ndarray) -> bool:
        one, other = one.astype(np.float64), other.astype(np.float64)
        return one.size in (1, other.size) and bool(np.all(np.abs(one - other) <= _SAME * np.abs(other)))

    def _align_bias(self, node: Node, bias: str) -> str:
        """Return a convolution's bias reshaped to broadcast against the result."""
        if node.op != "Conv":
            return bias
        shape = (self.types[bias].size, *(1,) * (len(self.types[node.outputs[0]].shape) - 2))
        target = self.add_constant(f"{bias}_shape", np.array(shape, np.int64))
        return self._add_node("Reshape", (bias, target), TensorType("float32", shape), {}, version=21)

    def _add_node(
        self, op: str, inputs: Sequence[str], kind: TensorType, attributes: dict[str, object], version: int, near: str = ""
    ) -> str:
        name = self.new_value(near or f"{inputs[0]}_{op.lower()}", kind)
        self.append(Node(op, tuple(inputs), (name,), attributes, name, "", version))
        return name


class FuseQdqProducts(RewritePass):
    """A rewrite of ``Conv``, ``MatMul`` or ``Gemm`` of two DequantizeLinear results to an integer product times ``sa * sb``.

    Codes have 8 bits. Data have one scale, weights have one scale or one per output channel. The sum must fit into 32 bits for
    any data. A bias of int32 with the scale ``sa * sb`` joins the sum; other biases are added after it."""

    name: ClassVar[str] = "fuse_qdq_products"
    rewriter = _Fusing
