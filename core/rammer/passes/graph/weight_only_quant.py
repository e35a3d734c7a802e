"""Weight-only quantisation: matrix products of floats decode constant codes of weights inside the kernel.

Large models are bound by the bytes of their weights. Codes of 4 bits are packed two per byte and codes of 2 bits four per byte,
along the summed axis. Scales and zero points are per tensor, per column, or per block of rows of a column."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np

from rammer.frontend.bind.evaluator import evaluate_node
from rammer.frontend.lower.operators.stored import DOMAIN
from rammer.frontend.op_traits import Trait, has_trait
from rammer.ir.graph import Graph, Node
from rammer.ir.graph_rewriter import GraphRewriter, RewritePass

#: Minimum number of weights: below it, products of floats have better kernels.
LEAST: Final = 1 << 12
#: Types of the other operand. With float16, decoded values are not rounded before the product, which is more exact.
FLOATS: Final = ("float32", "float16")


@dataclass(frozen=True, slots=True)
class _Weights:
    """Codes ``[columns, depth]``, their scales and zero points ``[columns or 1, blocks]``, and the rows of a block."""

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    block: int


class _Storing(GraphRewriter):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.known: dict[tuple[str, bool], tuple[str, ...]] = {}

    def rule(self, node: Node) -> bool:
        gemm = node.op == "Gemm"
        if not has_trait(node, Trait.MATRIX_PRODUCT):
            return False
        turned = gemm and bool(node.attributes.get("transB", 0))
        fits = self.types[node.inputs[0]].dtype == self.types[node.inputs[1]].dtype and node.inputs[0] not in self.graph.constants
        fits = fits and not (gemm and (node.attributes.get("transA", 0) or not _has_unit_scales(node)))
        weights = self._weights(node.inputs[1], turned) if fits else None
        if weights is None:
            return self._fold_codes(node)
        operands, bits = self._packed_operands(node.inputs[1], turned, weights)
        attributes = {"bits": bits, "signed": int(weights.codes.dtype == np.int8), "block": weights.block}
        result, rest = node.outputs[0], node.inputs[2:] if gemm else ()
        total = self.new_value(result, self.types[result]) if rest else result
        self.append(Node("StoredMatMul", (node.inputs[0], *operands), (total,), attributes, node.name, DOMAIN, 1))
        if rest:
            self.append(Node("Add", (total, rest[0]), (result,), {}, node.name, "", 14))
        return True

    def _fold_codes(self, node: Node) -> bool:
        """Decode codes of ``node`` that cannot stay codes into constants. Return True if there are any."""
        inputs = list(node.inputs)
        for i, name in enumerate(inputs[:2]):
            source = self.produced(name, "DequantizeLinear")
            if source is not None and all(not n or n in self.graph.constants for n in source.inputs):
                inputs[i] = self.add_constant(name, evaluate_node(source, self.graph.constants, self.graph.types)[name])
        if tuple(inputs) == node.inputs:
            return False
        self.append(replace(node, inputs=tuple(inputs)))
        return True

    def _weights(self, name: str, turned: bool) -> _Weights | None:
        """Return the weights that a DequantizeLinear decodes if its scales vary along the sum or the columns, else None."""
        node = self.produced(name, "DequantizeLinear")
        if node is None or self.types[name].dtype not in FLOATS:
            return None
        codes, scale = (self.graph.constants.get(n) for n in node.inputs[:2])
        zero = self.graph.constants.get(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else np.zeros((), np.int8)
        if codes is None or scale is None or zero is None or codes.ndim != 2 or codes.size < LEAST:
            return None
        if codes.dtype not in (np.int8, np.uint8) or str(scale.dtype) not in FLOATS:
            return None
        axis, block = int(node.attributes.get("axis", 1)) % 2, int(node.attributes.get("block_size", 0))
        inner = 1 if turned else 0
        if scale.size == 1:
            grains, block = [v.reshape(1, 1) for v in (scale, zero)], codes.shape[inner]
        elif not block:
            if axis == inner:
                return None
            grains, block = [v.reshape(-1, 1) for v in (scale, np.broadcast_to(zero, scale.shape))], codes.shape[inner]
        elif axis == inner:
            grains = [v if turned else v.T for v in (scale, np.broadcast_to(zero, scale.shape))]
        else:
            return None
        return _Weights(codes if turned else codes.T, grains[0], grains[1], block)

    def _packed_operands(self, name: str, turned: bool, weights: _Weights) -> tuple[tuple[str, ...], int]:
        """Return the names of packed codes, scales and zero points ("" for 0), and the bits per code. Each packed operand is
        created once for all consumers."""
        bits = _code_bits(weights)
        if (name, turned) not in self.known:
            zero = self.add_constant(f"{name}_zero", weights.zero) if np.any(weights.zero) else ""
            codes = self.add_constant(f"{name}_codes", pack_codes(weights.codes, bits))
            self.known[name, turned] = (codes, self.add_constant(f"{name}_scale", weights.scale), zero)
        return self.known[name, turned], bits


class WeightOnlyQuant(RewritePass):
    """A rewrite of ``MatMul(x, DequantizeLinear(codes))`` or Gemm, with constant codes, to ``StoredMatMul(x, codes, scale,
    zero)``. Codes become ``[columns, depth / per byte]``, scales and zero points ``[columns or 1, blocks]``."""

    name: ClassVar[str] = "weight_only_quant"
    rewriter = _Storing


def _has_unit_scales(node: Node) -> bool:
    return float(node.attributes.get("alpha", 1.0)) == 1.0 and float(node.attributes.get("beta", 1.0)) == 1.0


def _code_bits(weights: _Weights) -> int:
    """Return the minimum bits that hold every code."""
    low, high, signed = int(weights.codes.min()), int(weights.codes.max()), weights.codes.dtype == np.int8
    for bits in (2, 4):
        ends = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        if ends[0] <= low and high <= ends[1] and weights.codes.shape[1] % (8 // bits) == 0:
            return bits
    return 8


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return codes packed into bytes along the last axis, the first code in the lowest bits."""
    if bits == 8:
        return codes
    each = 8 // bits
    parts = (codes.astype(np.uint8) & ((1 << bits) - 1)).reshape(*codes.shape[:-1], -1, each)
    return np.asarray((parts << (np.arange(each, dtype=np.uint8) * np.uint8(bits))).sum(-1, dtype=np.uint8))
