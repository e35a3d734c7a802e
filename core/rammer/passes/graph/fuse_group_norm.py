"""Fusion of group normalisations that exporters wrote before ONNX had an operator for them.

Channels are reshaped into groups, each group is normalised as one channel, and the result is reshaped back. A factor and an
offset per channel follow, which then fold into the operator's scale and bias (``FoldAffine``)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rammer.ir.graph import Graph, Node
from rammer.ir.names import make_identifier
from rammer.passes.rewrite import count_readers, find_producers, rebuild_graph


@dataclass(frozen=True, slots=True)
class FuseGroupNorm:
    """A rewrite of ``Reshape(InstanceNormalization(Reshape(x)))`` to ``GroupNormalization(x)``. The reshape must convert channels
    to groups, and the result must have the shape of ``x``. Scale and bias must be constants."""

    name: ClassVar[str] = "fuse_group_norm"

    def __str__(self) -> str:
        return self.name

    def __call__(self, graph: Graph) -> Graph:
        made, counts, constants = find_producers(graph), count_readers(graph), dict(graph.constants)
        nodes = [_as_groups(node, graph, (made, counts), constants) or node for node in graph.nodes]
        return rebuild_graph(graph, nodes, constants) if len(constants) > len(graph.constants) else graph


def _as_groups(
    node: Node, graph: Graph, known: tuple[Mapping[str, Node], Counter[str]], constants: dict[str, np.ndarray]
) -> Node | None:
    """Return the replacement of ``node``, the last of the three, and add its scale and bias per channel to ``constants``."""
    made, counts = known
    norm = _match_producer(node, "Reshape", "InstanceNormalization", made)
    first = _match_producer(norm, "InstanceNormalization", "Reshape", made)
    if norm is None or first is None or counts[norm.outputs[0]] != 1:
        return None
    source, between, result = (graph.types[n].shape for n in (first.inputs[0], norm.outputs[0], node.outputs[0]))
    operands = [graph.constants.get(n) for n in norm.inputs[1:3]]
    if result != source or len(source) < 3 or len(between) < 3 or between[0] != source[0] or not math.prod(source):
        return None
    if source[1] % between[1] or any(o is None for o in operands):
        return None
    taken, names = {*graph.types, *constants}, list[str]()
    for near, value in zip(norm.inputs[1:3], operands, strict=True):
        assert value is not None
        names.append(make_identifier(f"{near}_channels", taken))
        taken.add(names[-1])
        constants[names[-1]] = np.repeat(value, source[1] // between[1])
    attributes = {"num_groups": between[1], "epsilon": norm.attributes.get("epsilon", 1e-5)}
    return Node("GroupNormalization", (first.inputs[0], *names), node.outputs, attributes, norm.name, version=21)


def _match_producer(node: Node | None, op: str, wanted: str, made: Mapping[str, Node]) -> Node | None:
    """Return the producer of the first operand of ``node`` if their types are ``wanted`` and ``op``."""
    if node is None or node.op != op or node.domain:
        return None
    found = made.get(node.inputs[0])
    return found if found is not None and found.op == wanted and not found.domain else None
