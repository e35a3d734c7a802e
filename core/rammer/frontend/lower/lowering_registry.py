"""The registry of lowerings: one short function per ONNX operator that emits Computes. A lowering receives a ``Lowering`` context
and emits Computes into it. Their names are derived from the node's outputs, so the printed compute graph reads like the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from rammer.errors import BadInput
from rammer.frontend.read.limits import check_taps
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Combiner, Compute
from rammer.ir.expr import Expr, Load
from rammer.ir.graph import Graph, Node
from rammer.ir.names import Names, make_identifier, quote_text
from rammer.ir.types import TensorType

__all__ = ["CannotLower", "Lowering", "LoweringFn", "axes_of_shape"]


class CannotLower(Exception):
    """This node has no tensor expression (the message gives the reason) and runs on the host."""


@dataclass
class Lowering:
    """The context of a lowering function: one node, and the Computes that it emits. If ``ranged``, the node is unified with those
    of other lengths, so the form of its Computes must not depend on extents. With ``any_ratio``, ratios of extents depend on the
    length."""

    graph: Graph
    node: Node
    computes: list[Compute] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    taken: set[str] = field(default_factory=Names)
    ranged: bool = False
    any_ratio: bool = False

    def has(self, index: int) -> bool:
        """Return True if optional input ``index`` is present."""
        return index < len(self.node.inputs) and bool(self.node.inputs[index])

    def input(self, index: int) -> str:
        """Return the name of input ``index``."""
        return self.node.inputs[index]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the static shape of a tensor of the graph or of an emitted one."""
        return self.type(name).shape

    def type(self, name: str) -> TensorType:
        """Return the type of a tensor of the graph or of an emitted one."""
        return self.types[name] if name in self.types else self.graph.types[name]

    def out(self, index: int = 0) -> TensorType:
        """Return the declared type of output ``index``."""
        return self.graph.types[self.node.outputs[index]]

    def wants(self, index: int) -> bool:
        """Return True if output ``index`` is used."""
        return index < len(self.node.outputs) and bool(self.node.outputs[index])

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the node, or ``default``."""
        return self.node.attributes.get(name, default)

    def static(self, index: int, what: str) -> np.ndarray | None:
        """Return the value of optional input ``index``, which must be constant (else CannotLower)."""
        if not self.has(index):
            return None
        value = self.graph.constant(self.input(index))
        if value is None:
            raise CannotLower(f"{what} of {self.node.op} depends on run-time data")
        return value

    def constant(self, value: np.ndarray, hint: str = "k") -> str:
        """Register a new constant tensor and return its name."""
        name = self._fresh_name(hint)
        self.constants[name] = value
        self.types[name] = TensorType(str(value.dtype), value.shape)
        return name

    def emit(
        self,
        axes: Sequence[Axis],
        body: Expr,
        reduce: Sequence[Axis] = (),
        combiner: Combiner | None = None,
        dtype: str | None = None,
        into: int | str = "t",
    ) -> str:
        """Emit a Compute and return its name. ``into`` is an output index of the node, or a hint for an intermediate that is
        named after the node's first output."""
        known = {n: self.type(n).dtype for n in {ld.tensor for ld in ex.loads(body)}}
        kind = dtype or self._result_dtype(ex.dtype_of(body, known), combiner)
        check_taps(math.prod(a.extent for a in reduce), self.node.name or self.node.op)
        name = self._fresh_name(into) if isinstance(into, str) else self.node.outputs[into]
        compute = Compute(name, kind, tuple(axes), body, tuple(reduce), combiner, self.node.name or self.node.op)
        self.computes.append(compute)
        self.types[name] = compute.type
        return name

    def _result_dtype(self, dtype: str, combiner: Combiner | None) -> str:
        """Return the element type of a result: float16 products are summed in float32 if the operator's output is float32."""
        if combiner != "sum" or dtype != "float16":
            return dtype
        return "float32" if {self.graph.types[o].dtype for o in self.node.outputs if o} == {"float32"} else dtype

    def load(self, tensor: str, *indices: Expr | int | str, fill: ex.Number | None = None) -> Load:
        """Return ``tensor[indices]``; strings are axis names, ints literals."""
        return Load(tensor, tuple(ex.as_index(i) for i in indices), fill)

    def axes(self, tensor: str, prefix: str = "i") -> tuple[Axis, ...]:
        """Return fresh axes ``i0, i1, ...`` with the extents of ``tensor``."""
        return axes_of_shape(self.shape(tensor), prefix)

    def broadcast(self, tensor: str, axes: Sequence[Axis]) -> Load:
        """Return a NumPy-broadcast load of ``tensor`` over output ``axes`` (extent-1 axes index 0). Raise BadInput if it does not
        fit."""
        shape = self.shape(tensor)
        tail = axes[len(axes) - len(shape) :] if len(shape) <= len(axes) else ()
        if len(tail) < len(shape) or any(n not in (1, a.extent) for n, a in zip(shape, tail, strict=True)):
            raise self.refused(f"an operand of {list(shape)} does not match the {[a.extent for a in axes]} of its result")
        return self.load(tensor, *[0 if n == 1 and a.extent != 1 else a.name for n, a in zip(shape, tail, strict=True)])

    def refused(self, why: str) -> BadInput:
        """Return the error for contradicting attributes and operands of the node."""
        return BadInput(
            f"{self.node.op}: {why}",
            f"node {quote_text(self.node.name)} ({self.node.op})",
            "check the model with onnx.checker, and the shapes given with --shape",
        )

    def _fresh_name(self, hint: str) -> str:
        return make_identifier(f"{next(o for o in self.node.outputs if o)}_{hint}", self.taken)


def axes_of_shape(shape: Sequence[int], prefix: str = "i") -> tuple[Axis, ...]:
    """Return axes ``i0, i1, ...`` for a shape."""
    return tuple(Axis(f"{prefix}{d}", int(n)) for d, n in enumerate(shape))


LoweringFn: TypeAlias = Callable[[Lowering], None]
#: (domain, operator) -> lowering.
REGISTRY: dict[tuple[str, str], LoweringFn] = {}


def lowering(*ops: str, domain: str = "") -> Callable[[LoweringFn], LoweringFn]:
    """Register the decorated function for these ONNX operators."""

    def register(fn: LoweringFn) -> LoweringFn:
        for op in ops:
            REGISTRY[domain, op] = fn
        return fn

    return register
