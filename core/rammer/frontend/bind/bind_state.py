"""State of the walk that binds a model: scopes of names, visited loops, and the Binder interface of control flow rules."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from onnx import GraphProto, NodeProto

from rammer.ir.graph import Node
from rammer.ir.types import TensorType

#: Maximum number of operators of an unrolled loop, including its inner loops.
MOST_UNROLLED: Final = 1024


class TooManyOperators(Exception):
    """Error for an outermost loop that unrolls to more than ``MOST_UNROLLED`` operators."""


@dataclass
class UnrollBudget:
    """The remaining operators that the outermost loop may be unrolled into; None outside of loops."""

    left: int | None = None

    @contextmanager
    def of_loop(self) -> Iterator[None]:
        """Unroll one loop in this context. Raises TooManyOperators from the outermost one."""
        outermost = self.left is None
        self.left = MOST_UNROLLED if self.left is None else self.left
        try:
            yield
        finally:
            self.left = None if outermost else self.left

    def spend(self, operators: int) -> None:
        """Raise TooManyOperators if the budget has fewer than ``operators`` left."""
        if self.left is not None:
            self.left -= operators
            if self.left < 0:
                raise TooManyOperators


@dataclass
class MetLoops:
    """The outermost Loops and Scans of a model for a range of lengths, in the order of the walk. Loops with the numbers in
    ``stay`` remain operators. ``steps`` are their trip counts, None if unknown."""

    stay: Collection[int] = ()
    steps: list[int | None] = field(default_factory=list)
    _depth: int = 0

    @contextmanager
    def met(self, steps: int | None) -> Iterator[bool]:
        """Visit a loop in this context; yields True if it remains an operator."""
        number = len(self.steps)
        self.steps += [] if self._depth else [steps]
        self._depth += 1
        try:
            yield self._depth == 1 and number in self.stay
        finally:
            self._depth -= 1


@dataclass
class Scope:
    """The scope of a walk over operators: values by ONNX name, opsets, and preferred names of results."""

    values: MutableMapping[str, str]
    opsets: Mapping[str, int]
    #: ONNX name -> the ONNX name by which the result is named instead (the body of a function has separate names).
    titles: Mapping[str, str] = field(default_factory=dict)

    def opset(self, proto: NodeProto) -> int:
        """Return the version of the operator's domain."""
        return self.opsets["" if proto.domain == "ai.onnx" else proto.domain]

    def inner(self) -> Scope:
        """Return a scope for a body, which may read the values of this scope."""
        return Scope(ChainMap({}, self.values), self.opsets)


class BindState(Protocol):
    """The walk as rules for control flow see it (``binder.Binder``): its values and operators, and methods to add more."""

    lowered: Container[tuple[str, str]]
    nodes: list[Node]
    types: MutableMapping[str, TensorType]
    known: MutableMapping[str, np.ndarray]
    ranged: MetLoops | None
    budget: UnrollBudget

    def initializers(self, graph: GraphProto, scope: Scope) -> None:
        """Add the constants of ``graph`` to the scope."""

    def constant(self, onnx_name: str, value: np.ndarray, scope: Scope) -> None:
        """Bind ``onnx_name`` to a constant value."""

    def nodes_of(self, order: Sequence[NodeProto], outputs: Iterable[str], scope: Scope) -> None:
        """Walk over the operators that ``outputs`` need, and add their results to ``scope``."""

    def step(self, proto: NodeProto, scope: Scope) -> None:
        """Fold, inline, expand or keep one operator, whichever is possible first."""
