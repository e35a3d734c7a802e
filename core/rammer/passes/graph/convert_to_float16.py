"""Conversion to float16: tensors of float32 become float16; inputs and outputs of the model keep their types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import ClassVar, Final

import numpy as np

from rammer.frontend.lower.graph_lowering import Lowerings, lower_node
from rammer.frontend.lower.lowering_registry import REGISTRY, CannotLower
from rammer.frontend.op_traits import shape_operands
from rammer.frontend.read.node_protos import body_graphs
from rammer.ir.graph import Graph, Node
from rammer.ir.graph_rewriter import GraphRewriter, rebuild_graph
from rammer.ir.names import quote_text
from rammer.ir.types import TensorType
from rammer.passes.graph.value_bounds import PRODUCTS, Magnitudes
from rammer.passes.pass_pipeline import AnyPass, PassReport, Pipeline

#: Operators whose result is float32 by the model's definition, not because of their operands.
TYPED: Final = frozenset(
    {
        "Cast",
        "CastLike",
        "Range",
        "EyeLike",
        "RandomNormalLike",
        "RandomUniformLike",
        "Bernoulli",
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        # Scales are parameters, not data: rounding them would change codes.
        "QLinearConv",
        "QLinearMatMul",
        "IntegerConv",
        "IntegerMatMul",
        "StoredMatMul",
    }
)
#: Operators whose constants only limit values: a constant beyond float16's range acts like infinity.
LIMITING: Final = frozenset({"Clip"})
#: ONNX' numbers for float16 (TensorProto.DataType) and float32.
FLOAT16, FLOAT32 = 10, 1
#: Reasons to keep an operator in float32: a chain of values that may leave float16's range; no float32 operand.
GROWS: Final = "its values may leave float16's range"
UNCHANGED: Final = "it has no float32 operand"
#: The opset of the added Casts: the last one that changed Cast between these two types.
CAST_OPSET = 19


@dataclass(frozen=True, slots=True)
class ConvertToFloat16:
    """Storage of float32 tensors in float16, with Casts at the model's inputs and outputs.

    An operator stays float32 if its type is part of the model (``TYPED``), it runs on the host or it has bodies. The same applies
    if it reads a constant that float16 cannot hold (beyond 65504, or small enough to become zero). It also stays float32 if a
    pattern of ``keep`` matches its name or type. Finally, a chain of values that may leave float16's range stays float32
    (``value_bounds``).
    """

    lowerings: Lowerings = field(default_factory=lambda: REGISTRY, compare=False, repr=False)
    keep: tuple[str, ...] = ()
    name: ClassVar[str] = "convert_to_float16"

    def __str__(self) -> str:
        return self.name

    def __call__(self, graph: Graph) -> Graph:
        return self.explained(graph)[0]

    def explained(self, graph: Graph) -> tuple[Graph, tuple[str, ...]]:
        """Return the rewritten graph, and a line for each operator that stays float32."""
        narrow = _Narrow(graph, self.lowerings, self.keep)
        return narrow.rewritten(), tuple(narrow.kept)


class _Narrow(GraphRewriter):
    def __init__(self, graph: Graph, lowerings: Lowerings, keep: tuple[str, ...]) -> None:
        super().__init__(graph)
        self.lowerings, self.keep, self.magnitudes = lowerings, keep, Magnitudes(graph)
        #: Values that nodes read unchanged and that are not ports of the graph.
        self.read = {i for n in graph.nodes if not _is_float16_cast(n) for i in n.inputs} - self.outputs
        #: float32 value -> its float16 form, and the reverse where both are needed.
        self.narrowed: dict[str, str] = {}
        self.wide: set[str] = {v.name for v in graph.inputs} | set(graph.constants)
        self.kept: list[str] = []

    def rewritten(self) -> Graph:
        """Return the graph in float16, or the graph itself if every operator stays float32."""
        for node in self.graph.nodes:
            why = self.reason(node)
            if why:
                self._retain_float32(node, why)
            else:
                self._narrow_node(node, self._is_wide_product(node))
        self._widen_values(v.name for v in self.graph.outputs)
        graph = replace(self.graph, types=self.types)
        return rebuild_graph(graph, self.nodes, self.constants) if self.narrowed else self.graph

    def reason(self, node: Node) -> str:
        """Return the reason that ``node`` stays float32, or an empty string."""
        data = [n for n in self._data_operands(node) if self._is_wide(n)]
        if not data:
            return UNCHANGED
        if any(fnmatchcase(text, pattern) for pattern in self.keep for text in (node.name, node.op)):
            return "kept by an option"
        if node.op in TYPED or body_graphs(node):
            return "its type is part of the model"
        known = [self.graph.constants[n] for n in data if n in self.graph.constants]
        if node.op not in LIMITING and not all(map(is_safe_in_float16, known)):
            return "float16 cannot hold a constant operand"
        fits = all(self.magnitudes.of(n).fits for n in data if n not in self.graph.constants)
        if not fits or (node.op not in PRODUCTS and self._is_in_wide_chain(node)):
            return GROWS
        return "" if self._can_lower(node, wide=self._is_wide_product(node)) else "it has no float16 form"

    def _is_in_wide_chain(self, node: Node) -> bool:
        """Return True if results of ``node``, or its operands, are parts of a chain that stays float32."""
        return any(self.magnitudes.of(n).open for n in (*node.inputs, *node.outputs) if n and self._is_wide(n))

    def _is_wide_product(self, node: Node) -> bool:
        """Return True if ``node`` is a product of float16 operands with a float32 result."""
        return node.op in PRODUCTS and self.magnitudes.of(node.outputs[0]).open

    def _can_lower(self, node: Node, wide: bool) -> bool:
        """Return True if ``node`` computes on the device with float16 operands, and a float32 result if ``wide``."""
        data = [n for n in self._narrowed_operands(node, wide) if self._is_wide(n)]
        changed = {*data, *(() if wide else (o for o in node.outputs if o and self._is_wide(o)))}
        # Only the types of this node: with all types of the graph, every node would cost as much as the whole graph.
        types = {n: self.graph.types[n] for n in (*node.inputs, *node.outputs) if n}
        types |= {n: TensorType("float16", types[n].shape) for n in changed}
        constants = {
            n: _to_float16(self.graph.constants[n]) if n in changed else self.graph.constants[n]
            for n in node.inputs
            if n in self.graph.constants
        }
        trial = replace(self.graph, types=types, constants=constants)
        try:
            lower_node(trial, node, set(types), self.lowerings)
        except (CannotLower, ValueError):
            return False
        return True

    def _is_wide(self, name: str) -> bool:
        return self.graph.types[name].dtype == "float32"

    def _data_operands(self, node: Node) -> Iterable[str]:
        steering = shape_operands(node.op)  # rounding them would change shapes or indices
        return (n for i, n in enumerate(node.inputs) if n and i not in steering)

    def _narrowed_operands(self, node: Node, wide: bool) -> Iterable[str]:
        """Return the operands that become float16: of a product with a float32 result, its factors."""
        return node.inputs[:2] if wide and node.op != "Einsum" else self._data_operands(node)

    def _narrow_node(self, node: Node, wide: bool = False) -> None:
        halves = {n for n in self._narrowed_operands(node, wide) if self._is_wide(n)}
        inputs = tuple(self._half(n) if n in halves else n for n in node.inputs)
        self._widen_values(n for n in node.inputs if n and n not in halves)
        if wide:
            self.wide.update(o for o in node.outputs if o)
            self._report_float32(node, "its result may leave float16's range, its operands are float16")
            outputs = node.outputs
        else:
            outputs = tuple(self._declare_float16(o) if o and self._is_wide(o) else o for o in node.outputs)
        self.append(replace(node, inputs=inputs, outputs=outputs))

    def _retain_float32(self, node: Node, why: str) -> None:
        self._widen_values(node.inputs)
        closed = [o for o in node.outputs if why == GROWS and o and self._is_wide(o) and not self.magnitudes.of(o).open]
        # All readers of the end of a chain read float16, so that only one form of it is stored.
        ends = {o: self.new_value(f"{o}_wide", self.graph.types[o]) for o in closed if o in self.read}
        self.append(replace(node, outputs=tuple(ends.get(o, o) for o in node.outputs)))
        self.wide.update(o for o in node.outputs if o and o not in ends)
        for name, wide in ends.items():
            self._add_cast(wide, self._declare_float16(name), FLOAT16)
        if why != UNCHANGED:
            self._report_float32(node, why)

    def _report_float32(self, node: Node, why: str) -> None:
        self.kept.append(f"{node.op} {quote_text(node.name or next(filter(None, node.outputs)))}: {why}")

    def _declare_float16(self, name: str) -> str:
        """Return the float16 form of ``name``."""
        kind = TensorType("float16", self.graph.types[name].shape)
        return self.narrowed.setdefault(name, self.new_value(f"{name}_half", kind))

    def _half(self, name: str) -> str:
        if name not in self.narrowed:
            half = self._declare_float16(name)
            if name in self.constants:
                self.constants[half] = _to_float16(self.constants[name])
            else:
                self._add_cast(name, half, FLOAT16)
        return self.narrowed[name]

    def _add_cast(self, source: str, result: str, to: int) -> None:
        self.append(Node("Cast", (source,), (result,), {"to": to}, source, "", CAST_OPSET))

    def _widen_values(self, names: Iterable[str]) -> None:
        """Compute the float32 form of values that have only a float16 form."""
        for name in names:
            if name in self.narrowed and name not in self.wide:
                self._add_cast(self.narrowed[name], name, FLOAT32)
                self.wide.add(name)


def narrow_graph(
    graph: Graph, passes: Sequence[AnyPass], lowerings: Lowerings = REGISTRY, keep: tuple[str, ...] = ()
) -> tuple[Graph, list[PassReport]]:
    """Return ``graph`` with its floats in 16 bits, after the ``passes``, and the reports of all passes. The conversion runs once.
    If it were repeated, passes that move a cast before a reshape would alternate with it forever."""
    graph, found = Pipeline((ConvertToFloat16(lowerings, keep),)).run(graph)
    graph, more = Pipeline(tuple(passes)).run(graph)
    return graph, [*found, *more]


def _is_float16_cast(node: Node) -> bool:
    return node.op == "Cast" and node.attributes.get("to") == FLOAT16


def _to_float16(value: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return value.astype(np.float16)


def is_safe_in_float16(value: np.ndarray) -> bool:
    """Return True if float16 holds ``value``: finite elements stay finite, and at least one nonzero element stays nonzero."""
    half = _to_float16(value)
    lost = bool(np.any(value)) and not bool(np.any(half))
    return not lost and bool(np.array_equal(np.isfinite(half), np.isfinite(value)))
