"""Propagation of quantisation: operators that only move or compare elements work on codes instead of floats.

DequantizeLinear moves after these operators, and QuantizeLinear moves before them. A pair with equal scales cancels. A quantised
network then moves bytes, and every product reads and writes codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np

from rammer.frontend.op_traits import Trait, has_trait, moved_operands
from rammer.ir.graph import Node
from rammer.ir.graph_rewriter import GraphRewriter, RewritePass, is_operator
from rammer.ir.types import TensorType

#: Code types that every lowering above moves unchanged.
_CODES: Final = frozenset(("uint8", "int8"))
_DEQUANTIZE, _QUANTIZE = "DequantizeLinear", "QuantizeLinear"
#: Codes whose ``float32`` scale is within these bounds survive ``(code * scale) / scale``.
_LEAST, _MOST = 1e-30, 1e30


class _Moving(GraphRewriter):
    def rule(self, node: Node) -> bool:
        return self._try_cancel_pair(node) or self._before(node) or self._try_sink_dequantize(node)

    # --- cancelling pairs ---------------------------------------------------------------------

    def _try_cancel_pair(self, node: Node) -> bool:
        """Remove the QuantizeLinear ``node`` if it undoes an equal DequantizeLinear. Return True on success."""
        if not is_operator(node, _QUANTIZE):
            return False
        source = self.produced(node.inputs[0], _DEQUANTIZE)
        if source is None or not self._has_same_parameters(source, node):
            return False
        if self.types[source.inputs[0]] != self.types[node.outputs[0]]:
            return False
        if node.outputs[0] in self.outputs:
            self.append(Node("Identity", (source.inputs[0],), node.outputs, {}, node.name, "", 19))
        else:
            self.names[node.outputs[0]] = source.inputs[0]
        return True

    def _has_same_parameters(self, one: Node, other: Node) -> bool:
        """Return True if both nodes have equal constant per-tensor parameters with a scale that preserves codes."""
        (s, z), (t, w) = (self._scale_and_zero_point(n) for n in (one, other))
        if s is None or t is None or z is None or w is None or s.size != 1 or t.size != 1 or s.dtype != np.float32:
            return False
        scale = float(s.reshape(()))
        return bool(_LEAST < abs(scale) < _MOST and s.reshape(()) == t.reshape(()) and z.reshape(()) == w.reshape(()))

    def _scale_and_zero_point(self, node: Node) -> tuple[np.ndarray | None, np.ndarray | None]:
        zero = node.inputs[2] if len(node.inputs) > 2 else ""
        return self.graph.constants.get(node.inputs[1]), self.graph.constants.get(zero) if zero else np.zeros((), np.int8)

    # --- QuantizeLinear before movers ---------------------------------------------------------

    def _before(self, node: Node) -> bool:
        """Move the QuantizeLinear ``node`` before the mover that it reads. Return True on success."""
        if not is_operator(node, _QUANTIZE) or not self._whole(node) or self.types[node.outputs[0]].dtype not in _CODES:
            return False
        mover = self.producers.get(node.inputs[0])
        if mover is None or not self._is_mover(mover) or len(mover.outputs) != 1:
            return False
        if mover.op == "Where":  # quantising both operands costs more than quantising the result
            return False
        if self.counts[node.inputs[0]] != 1 or node.inputs[0] in self.outputs:
            return False
        if mover.op == "MaxPool" and not self._is_increasing(node):
            return False
        dtype, moved = self.types[node.outputs[0]].dtype, list(mover.inputs)
        self.replace_node(mover)
        for i in moved_operands(mover) or (0,):
            source = moved[i]
            moved[i] = self.new_value(f"{source}_codes", TensorType(dtype, self.types[source].shape))
            self.append(replace(node, inputs=(source, *node.inputs[1:]), outputs=(moved[i],)))
        self.append(replace(mover, inputs=tuple(moved), outputs=node.outputs))
        return True

    # --- DequantizeLinear after movers --------------------------------------------------------

    def _try_sink_dequantize(self, node: Node) -> bool:
        """Move the mover ``node`` before the DequantizeLinear that it reads. Return True on success."""
        if not self._is_mover(node):
            return False
        moved = moved_operands(node) or (0,)
        found = [s for i in moved if (s := self.produced(node.inputs[i], _DEQUANTIZE)) is not None]
        if len(found) < len(moved):
            return False
        first = found[0]
        kind = self.types[first.inputs[0]].dtype
        if kind not in _CODES or any(self.types[s.inputs[0]].dtype != kind for s in found):
            return False
        if not all(s.inputs[1:] == first.inputs[1:] or self._has_same_parameters(first, s) for s in found):
            return False
        attributes = self._moved_attributes(node, first)
        if attributes is None or (node.op == "MaxPool" and not self._is_increasing(first)):
            return False
        inside = [self.new_value(f"{o}_codes", TensorType(kind, self.types[o].shape)) if o else "" for o in node.outputs]
        if node.op == "MaxPool":
            inside[1:] = node.outputs[1:]
        codes = {i: s.inputs[0] for i, s in zip(moved, found, strict=True)}
        inputs = tuple(codes.get(i, name) for i, name in enumerate(node.inputs))
        self.append(replace(node, inputs=inputs, outputs=tuple(inside)))
        parameters = first.inputs[1:] if not first.attributes.get("block_size", 0) else self._turned(node, first.inputs[1:])
        for inner, result in zip(inside, node.outputs, strict=True):
            if inner != result:
                self.append(replace(first, inputs=(inner, *parameters), outputs=(result,), attributes=attributes))
        return True

    def _moved_attributes(self, node: Node, source: Node) -> Mapping[str, Any] | None:
        """Return the attributes of the DequantizeLinear ``source`` after the mover ``node``, or None if
        its scales cannot follow."""
        if self._whole(source):
            return source.attributes
        if node.op != "Transpose":
            return None
        rank = len(self.types[node.inputs[0]].shape)
        order = tuple(node.attributes.get("perm") or reversed(range(rank)))
        return {**source.attributes, "axis": order.index(int(source.attributes.get("axis", 1)) % rank)}

    def _turned(self, node: Node, names: Sequence[str]) -> list[str]:
        """Return the scales and zero points of blocks after the Transpose ``node``."""
        result = list[str]()
        for name in names:
            kind = self.types[name] if name else None
            if kind is not None:
                order = tuple(node.attributes.get("perm") or reversed(range(len(kind.shape))))
                turned = self.new_value(name, TensorType(kind.dtype, tuple(kind.shape[i] for i in order)))
                self.append(replace(node, inputs=(name,), outputs=(turned,)))
            result.append(turned if kind is not None else "")
        return result

    # --- common predicates --------------------------------------------------------------------

    def _whole(self, node: Node) -> bool:
        """Return True if the whole tensor has one scale."""
        return self.types[node.inputs[1]].shape in ((), (1,)) and not node.attributes.get("block_size", 0)

    def _is_mover(self, node: Node) -> bool:
        if node.op == "Resize" and not node.domain:
            mode = str(node.attributes.get("mode", "nearest"))
            return mode == "nearest" and node.attributes.get("coordinate_transformation_mode") != "tf_crop_and_resize"
        return has_trait(node, Trait.MOVES) or is_operator(node, "MaxPool")

    def _is_increasing(self, node: Node) -> bool:
        """Return True if greater codes decode to greater values."""
        scale = self.graph.constants.get(node.inputs[1])
        return scale is not None and bool(np.all(scale > _LEAST))


class PropagateQuantization(RewritePass):
    """A pass that moves DequantizeLinear after movers and QuantizeLinear before them.

    ``Move(DequantizeLinear(x))`` becomes ``DequantizeLinear(Move(x))``, ``QuantizeLinear(Move(x))`` becomes
    ``Move(QuantizeLinear(x))``, and ``QuantizeLinear(DequantizeLinear(x))`` with equal parameters becomes ``x``. Scales are per
    tensor; along a Transpose, they may be per axis or per block along an axis. Codes have 8 bits."""

    name: ClassVar[str] = "propagate_quantization"
    rewriter = _Moving
