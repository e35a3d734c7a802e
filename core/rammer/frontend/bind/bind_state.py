"""The state of the walk that binds a model: scopes of names, loops that are met, and what control flow rules use of a Binder."""

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

#: Most operators that all steps of a loop may be, those of the loops in it included.
MOST_UNROLLED: Final = 1024


class TooManyOperators(Exception):
    """An outermost loop whose steps are more than ``MOST_UNROLLED`` operators."""


@dataclass
class UnrollBudget:
    """Operators that the outermost loop may still be unrolled into; None outside of loops."""

    left: int | None = None

    @contextmanager
    def of_loop(self) -> Iterator[None]:
        """Unroll one loop meanwhile. Raises TooManyOperators from the outermost one."""
        outermost = self.left is None
        self.left = MOST_UNROLLED if self.left is None else self.left
        try:
            yield
        finally:
            self.left = None if outermost else self.left

    def spend(self, operators: int) -> None:
        """Raise TooManyOperators if the loop has no room for these."""
        if self.left is not None:
            self.left -= operators
            if self.left < 0:
                raise TooManyOperators


@dataclass
class MetLoops:
    """The Loops and Scans of a model for a range of lengths, but for those in others, in the order in which they are met: those
    of these numbers ``stay`` operators. ``steps`` are those of each, None where nobody knows."""

    stay: Collection[int] = ()
    steps: list[int | None] = field(default_factory=list)
    _depth: int = 0

    @contextmanager
    def met(self, steps: int | None) -> Iterator[bool]:
        """One is walked over meanwhile; whether it stays."""
        number = len(self.steps)
        self.steps += [] if self._depth else [steps]
        self._depth += 1
        try:
            yield self._depth == 1 and number in self.stay
        finally:
            self._depth -= 1


@dataclass
class Scope:
    """Where operators are walked: what their names mean, at which opsets, and how results like to be called."""

    values: MutableMapping[str, str]
    opsets: Mapping[str, int]
    #: ONNX name -> the ONNX name after which the result is named instead (a function's body has names of its own).
    titles: Mapping[str, str] = field(default_factory=dict)

    def opset(self, proto: NodeProto) -> int:
        """The version of the operator's domain."""
        return self.opsets["" if proto.domain == "ai.onnx" else proto.domain]

    def inner(self) -> Scope:
        """For a body, which may read what is known here."""
        return Scope(ChainMap({}, self.values), self.opsets)


class BindState(Protocol):
    """The walk as rules for control flow see it (``bind.Binder``): values and operators so far, and ways to add some."""

    lowered: Container[tuple[str, str]]
    nodes: list[Node]
    types: MutableMapping[str, TensorType]
    known: MutableMapping[str, np.ndarray]
    ranged: MetLoops | None
    budget: UnrollBudget

    def initializers(self, graph: GraphProto, scope: Scope) -> None:
        """Make the constants of ``graph`` known."""

    def constant(self, onnx_name: str, value: np.ndarray, scope: Scope) -> None:
        """Bind ``onnx_name`` to a known value."""

    def nodes_of(self, order: Sequence[NodeProto], outputs: Iterable[str], scope: Scope) -> None:
        """Walk over the operators that ``outputs`` need, extending ``scope`` by what they compute."""

    def step(self, proto: NodeProto, scope: Scope) -> None:
        """Fold, inline, expand or keep one operator, whichever is possible first."""
