"""Fusion of group normalisations that exporters wrote before ONNX had an operator for them.

Channels are reshaped into groups, each group is normalised as one channel, and the result is reshaped back. A factor and an
offset per channel follow, which then fold into the operator's scale and bias (``FoldAffine``)."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from rammer.ir.graph import Node
from rammer.ir.graph_rewriter import GraphRewriter, RewritePass, is_operator


class _Fusing(GraphRewriter):
    def rule(self, node: Node) -> bool:
        norm = self.produced(node.inputs[0], "InstanceNormalization") if is_operator(node, "Reshape") else None
        first = self.produced(norm.inputs[0], "Reshape") if norm is not None else None
        if norm is None or first is None or self.counts[norm.outputs[0]] != 1:
            return False
        source, between, result = (self.types[n].shape for n in (first.inputs[0], norm.outputs[0], node.outputs[0]))
        scale, bias = (self.constants.get(n) for n in norm.inputs[1:3])
        if result != source or len(source) < 3 or len(between) < 3 or between[0] != source[0] or not math.prod(source):
            return False
        if source[1] % between[1] or scale is None or bias is None:
            return False
        each = source[1] // between[1]
        operands = [
            self.add_constant(f"{near}_channels", np.repeat(value, each))
            for near, value in zip(norm.inputs[1:3], (scale, bias), strict=True)
        ]
        attributes = {"num_groups": between[1], "epsilon": norm.attributes.get("epsilon", 1e-5)}
        self.append(Node("GroupNormalization", (first.inputs[0], *operands), node.outputs, attributes, norm.name, version=21))
        return True


class FuseGroupNorm(RewritePass):
    """A rewrite of ``Reshape(InstanceNormalization(Reshape(x)))`` to ``GroupNormalization(x)``. The reshape must convert channels
    to groups, and the result must have the shape of ``x``. Scale and bias must be constants."""

    name: ClassVar[str] = "fuse_group_norm"
    rewriter = _Fusing
