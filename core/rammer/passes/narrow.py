"""float16 inside: tensors of float32 become float16; inputs and outputs of the model keep their types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

import numpy as np

from rammer.frontend.lower import Lowerings, lower_node
from rammer.frontend.lowering import REGISTRY, CannotLower
from rammer.frontend.nodes import bodies
from rammer.ir.graph import Graph, Node
from rammer.ir.names import identifier
from rammer.ir.types import TensorType
from rammer.passes.pipeline import Pass, PassReport, Pipeline

#: Operators whose result is float32 because the model says so, not because their operands are.
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
        # Scales are no data: rounded, they would move codes.
        "QLinearConv",
        "QLinearMatMul",
        "IntegerConv",
        "IntegerMatMul",
        "StoredMatMul",
    }
)
#: Operands, by position, that steer the operator and are no data: rounding them would change shapes or places.
STEERING: Final[Mapping[str, frozenset[int]]] = {
    "Resize": frozenset((1, 2)),
    "Upsample": frozenset((1,)),
    "OneHot": frozenset((1,)),
}
#: Operators whose constants only limit values: one beyond float16's range is as good as infinity.
LIMITING: Final = frozenset({"Clip"})
#: ONNX' number for float16 (TensorProto.DataType), and for float32.
FLOAT16, FLOAT32 = 10, 1
#: The opset that the added Casts are of: the last one that changed Cast between these two types.
CAST_OPSET = 19


@dataclass(frozen=True, slots=True)
class NarrowFloats:
    """Every operator on float32 computes on float16 tensors, with Casts where the model's own types begin and end.

    An operator stays float32 where its type is part of the model (``TYPED``), where it runs on the host or has bodies,
    and where it reads a constant that float16 cannot hold: beyond 65504, or so small that nothing of it is left.
    """

    lowerings: Lowerings = field(default_factory=lambda: REGISTRY, compare=False, repr=False)
    name: ClassVar[str] = "float16"

    def __str__(self) -> str:
        return self.name

    def __call__(self, graph: Graph) -> Graph:
        narrow = _Narrow(graph, self.lowerings)
        return narrow.rewritten() if any(map(narrow.suits, graph.nodes)) else graph


class _Narrow:
    def __init__(self, graph: Graph, lowerings: Lowerings) -> None:
        self.graph, self.lowerings = graph, lowerings
        self.types, self.constants = dict(graph.types), dict(graph.constants)
        self.taken = {*graph.types, *graph.constants}
        #: float32 value -> its float16 form, and the other way round where one is wanted.
        self.narrowed: dict[str, str] = {}
        self.wide: set[str] = {v.name for v in graph.inputs} | set(graph.constants)
        self.nodes: list[Node] = []

    def rewritten(self) -> Graph:
        """The graph in float16."""
        for node in self.graph.nodes:
            if self.suits(node):
                self._narrow(node)
            else:
                self._keep(node)
        for value in self.graph.outputs:
            self._widen([value.name])
        return replace(self.graph, nodes=tuple(self.nodes), types=self.types, constants=self.constants)

    def suits(self, node: Node) -> bool:
        """Whether ``node`` has float32 operands and computes on the device with float16 ones."""
        data = [n for n in self._data(node) if self._is_wide(n)]
        if not data or node.op in TYPED or bodies(node):
            return False
        known = [self.graph.constants[n] for n in data if n in self.graph.constants]
        if node.op not in LIMITING and not all(map(survives, known)):
            return False
        changed = {*data, *(o for o in node.outputs if o and self._is_wide(o))}
        # What concerns this node: with the types of the whole graph every node would cost as much as all of them.
        types = {n: self.graph.types[n] for n in (*node.inputs, *node.outputs) if n}
        types |= {n: TensorType("float16", types[n].shape) for n in changed}
        constants = {
            n: _half(self.graph.constants[n]) if n in changed else self.graph.constants[n]
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

    def _data(self, node: Node) -> Iterable[str]:
        steering = STEERING.get(node.op, frozenset())
        return (n for i, n in enumerate(node.inputs) if n and i not in steering)

    def _narrow(self, node: Node) -> None:
        steering = STEERING.get(node.op, frozenset())
        inputs = tuple(self._half(n) if n and i not in steering and self._is_wide(n) else n for i, n in enumerate(node.inputs))
        self._widen(n for i, n in enumerate(node.inputs) if n and i in steering)
        outputs = tuple(self._declare(o) if o and self._is_wide(o) else o for o in node.outputs)
        self.nodes.append(replace(node, inputs=inputs, outputs=outputs))

    def _keep(self, node: Node) -> None:
        self._widen(node.inputs)
        self.nodes.append(node)
        self.wide.update(o for o in node.outputs if o)

    def _declare(self, name: str) -> str:
        """The float16 form of ``name``."""
        result = self.narrowed[name] = identifier(f"{name}_half", self.taken)
        self.types[result] = TensorType("float16", self.graph.types[name].shape)
        return result

    def _half(self, name: str) -> str:
        if name not in self.narrowed:
            half = self._declare(name)
            if name in self.constants:
                self.constants[half] = _half(self.constants[name])
            else:
                self.nodes.append(Node("Cast", (name,), (half,), {"to": FLOAT16}, name, "", CAST_OPSET))
        return self.narrowed[name]

    def _widen(self, names: Iterable[str]) -> None:
        """Compute the float32 form of values that so far have only a float16 one."""
        for name in names:
            if name in self.narrowed and name not in self.wide:
                self.nodes.append(Node("Cast", (self.narrowed[name],), (name,), {"to": FLOAT32}, name, "", CAST_OPSET))
                self.wide.add(name)


def narrowed(graph: Graph, passes: Sequence[Pass], lowerings: Lowerings = REGISTRY) -> tuple[Graph, list[PassReport]]:
    """``graph`` with its floats in 16 bits, and the ``passes`` over it. The change comes once: where a pass moves a cast before a
    reshape, it would move it behind again, for ever."""
    reports = list[PassReport]()
    for pipeline in (Pipeline((NarrowFloats(lowerings),)), Pipeline(tuple(passes))):
        graph, more = pipeline.run(graph)
        reports += more
    return graph, reports


def _half(value: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return value.astype(np.float16)


def survives(value: np.ndarray) -> bool:
    """Whether float16 holds ``value``: nothing finite becomes infinite, and not everything becomes zero."""
    half = _half(value)
    lost = bool(np.any(value)) and not bool(np.any(half))
    return not lost and bool(np.array_equal(np.isfinite(half), np.isfinite(value)))
