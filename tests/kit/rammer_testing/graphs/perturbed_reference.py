"""Rammer's reference: the lowered expressions in float64, with error bounds for a correct device.

The graph is bound and lowered node by node without any pass. Some trajectories run with the exact values. They disturb every
result and every intermediate step by the rounding of its type (``steps``), and sums by the rounding of all their terms. If
trajectories differ, an element is ill-conditioned: a cancellation, a step, a near tie. ``doubtful`` finds further ones. A device
may differ in these elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.frontend.bind.binder import bind
from rammer.frontend.host.host_node import HostNode
from rammer.frontend.lower.graph_lowering import lower_node
from rammer.frontend.lower.lowering_registry import CannotLower
from rammer.frontend.read.reader import Model
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.expr import Op
from rammer.ir.graph import Graph, Node
from rammer.ir.types import is_float
from rammer_testing.graphs.steps import EXACT, TINY, UNIT, Steps
from rammer_testing.graphs.uncertain_elements import doubtful

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: Disturbance of the trajectories in roundings, for other summation orders and math libraries.
AMPLIFIED: Final = 8.0
#: Approximated functions, and their error before amplification: ONNX Runtime's Sigmoid(-12) is 5e-8 off.
CURVED: Final = frozenset(
    {
        "exp",
        "log",
        "tanh",
        "erf",
        "sin",
        "cos",
        "tan",
        "sinh",
        "cosh",
        "asin",
        "acos",
        "atan",
        "pow",
        "expm1",
        "log1p",
        "asinh",
        "acosh",
        "atanh",
    }
)
COARSE: Final = 1e-8


@dataclass(frozen=True)
class Expected:
    """An expected value with an error bound per element; ``loose`` marks undecidable elements."""

    value: Array
    slack: Array
    loose: Array

    def differs(self, have: Array) -> str:
        """Return the difference of ``have``, or "" if it agrees."""
        if have.shape != self.value.shape:
            return f"shape {have.shape}, expected {self.value.shape}"
        if not self.value.size:
            return ""
        if self.value.dtype.kind != "f":
            wrong = ~self.loose & (have != self.value)
        else:
            with np.errstate(all="ignore"):
                apart = np.abs(have.astype(np.float64) - self.value)
                close = (apart <= self.slack) | (have == self.value) | (np.isnan(have) & np.isnan(self.value))
            wrong = ~self.loose & ~close
        if not wrong.any():
            return ""
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        share = f"{int(wrong.sum())} of {wrong.size} elements"
        return f"{share}, at {list(at)} {have[at]} for {self.value[at]} +- {self.slack[at]:.2g}"

    def widened(self) -> Expected:
        """Return the value with wider bounds for other libraries, which approximate some functions more
        coarsely than a rounding."""
        return replace(self, slack=2 * self.slack + 4e-6 + 1e-5 * np.abs(self.value)) if self.value.dtype.kind == "f" else self

    @property
    def told(self) -> float:
        """The share of elements that are compared."""
        return float(1 - self.loose.mean()) if self.loose.size else 1.0


@dataclass
class Tracker:
    """An evaluator of one bound graph. ``narrow`` uses float16 for float32: the device may store any of it in 16 bits. ``coarse``
    allows functions in float32 and float16 the absolute error of polynomial approximations."""

    graph: Graph
    rng: np.random.Generator
    trajectories: int = 3
    narrow: bool = False
    amplified: float = AMPLIFIED
    coarse: bool = False
    doubts: dict[str, Array] = field(default_factory=dict)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Expected]:
        """Return every output by its ONNX name."""
        graph = self.graph
        given = {v.name: inputs[v.external or v.name] for v in graph.inputs} | dict(graph.constants)
        exact = {n: _wide(a) for n, a in given.items()}
        native = dict(given)
        others = [
            {n: self._disturbed(a, self._rounding(native[n].dtype.name, a)) for n, a in exact.items()}
            for _ in range(self.trajectories)
        ]
        if not self.narrow:
            others = [{n: a if n in given else o[n] for n, a in exact.items()} for o in others]
        self.doubts.clear()
        taken = set(graph.types)
        for node in graph.nodes:
            with self._reread([n for n in node.inputs if n and n not in given], exact, others):
                self._node(node, taken, exact, native, others)
        return {v.external or v.name: self._expected(v.name, graph.types[v.name].dtype, exact, others) for v in graph.outputs}

    @contextmanager
    def _reread(self, names: Sequence[str], exact: Mapping[str, Array], others: Sequence[dict[str, Array]]) -> Iterator[None]:
        """Disturb float32 values that a device may store in 16 bits for some readers only."""
        kept = []
        for name in dict.fromkeys(n for n in names if n in exact and self._kind(self._dtype(n)) != self._dtype(n)):
            value = exact[name]
            with np.errstate(all="ignore"):
                rounded = np.where(value == value.astype(np.float16), 0, self._rounding("float16", value))
            for table in others:
                kept.append((table, name, table[name]))
                table[name] = self._disturbed(table[name], rounded)
        yield
        for table, name, whole in kept:
            table[name] = whole

    def _node(
        self, node: Node, taken: set[str], exact: dict[str, Array], native: dict[str, Array], others: Sequence[dict[str, Array]]
    ) -> None:
        try:
            lowered = lower_node(self.graph, node, taken)
        except CannotLower:
            self._host(node, exact, native, others)
            return
        for name, value in lowered.constants.items():
            native[name] = value
            for table in (exact, *others):
                table[name] = _wide(value)
        for compute in lowered.computes:
            self._compute(compute, exact, native, others)

    def _compute(
        self, compute: Compute, exact: dict[str, Array], native: dict[str, Array], others: Sequence[dict[str, Array]]
    ) -> None:
        name = compute.name
        steps = Steps({n: a.dtype.name for n, a in native.items()}, self.rng, self.amplified)
        with np.errstate(all="ignore"):
            exact[name] = np.asarray(evaluate_compute(compute, exact, True, steps.exact))
            native[name] = np.asarray(evaluate_compute(compute, native))
            for table in others:
                table[name] = np.asarray(evaluate_compute(compute, table, True, steps.disturbed))
            doubts = doubtful(compute, exact, self.doubts, steps.decisions.undecided())
            if doubts is not None:
                self.doubts[name] = doubts
            if not is_float(compute.dtype):
                others[0][name] = _saturated(compute, others[0])
                return
            if _exact(compute):  # an extreme equals one of the elements in every trajectory: argument searches find it
                for table in (exact, *others):
                    table[name] = _ranged(table[name], compute.dtype)
                return
            exact[name] = _ranged(exact[name], compute.dtype)
            noise = self._rounding(compute.dtype, exact[name]) * (2 + ex.count_flops(compute.body))
            own = np.abs(exact[name] - native[name])
            noise = noise + np.where(np.isfinite(own), own, 0)
            noise = noise + self._terms(compute, exact)
            if self.coarse and compute.dtype != "float64":
                noise = noise + COARSE * any(isinstance(e, Op) and e.fn in CURVED for e in ex.walk(compute.body))
            for table in others:
                table[name] = _ranged(self._disturbed(table[name], noise), compute.dtype)

    def _terms(self, compute: Compute, exact: Mapping[str, Array]) -> Array | float:
        """Return the rounding of a sum: that of every partial sum, each bounded by the terms' magnitudes."""
        if compute.combiner not in ("sum", "prod") or not compute.points:
            return 0.0
        count = compute.points // max(int(np.prod(compute.shape, dtype=np.int64)), 1)
        unit = UNIT["float32" if compute.dtype == "float16" else compute.dtype]
        if compute.combiner == "prod":
            return np.asarray(count * unit * np.abs(exact[compute.name]))
        magnitudes = replace(compute, body=Op("abs", (compute.body,)))
        return np.asarray(min(count, 64) * unit * np.abs(evaluate_compute(magnitudes, exact, precise=True)))

    def _rounding(self, dtype: str, value: Array) -> Array:
        if not is_float(dtype):
            return np.zeros(value.shape)
        kind = self._kind(dtype)
        with np.errstate(all="ignore"):
            return np.asarray(UNIT[kind] * np.abs(value) + TINY[kind])

    def _kind(self, dtype: str) -> str:
        """Return the type in which a device may store ``dtype``."""
        return "float16" if self.narrow and dtype == "float32" else dtype

    def _disturbed(self, value: Array, noise: Array) -> Array:
        if value.dtype.kind != "f":
            return value
        with np.errstate(all="ignore"):
            moved = value + self.amplified * noise * self.rng.uniform(-1, 1, value.shape)
        return np.where(np.isfinite(moved), moved, value)

    def _host(self, node: Node, exact: dict[str, Array], native: dict[str, Array], others: Sequence[dict[str, Array]]) -> None:
        host = HostNode.of(self.graph, node)
        for table in (exact, native, *others):
            given = {n: table[n] for n in host.inputs}
            if table is not native and table is not exact:  # a tie of quantisation may round either way
                given = {n: self._disturbed(a, self._rounding(self._dtype(n), a)) for n, a in given.items()}
            feeds = {n: a.astype(self._dtype(n)) for n, a in given.items()}
            made = host.run(feeds)
            for name, value in made.items():
                kept = np.asarray(value, host.types[name].dtype)
                wide = kept if table is native else _wide(kept)
                steady = table is native or table is exact
                table[name] = wide if steady else self._disturbed(wide, self._rounding(host.types[name].dtype, wide))
                if any(n in self.doubts for n in host.inputs):
                    self.doubts[name] = np.ones(wide.shape, bool)

    def _dtype(self, name: str) -> str:
        return self.graph.types[name].dtype if name in self.graph.types else str(self.graph.constants[name].dtype)

    def _expected(self, name: str, dtype: str, exact: Mapping[str, Array], others: Sequence[Mapping[str, Array]]) -> Expected:
        value = np.asarray(exact[name])
        loose = np.zeros(value.shape, bool) | self.doubts.get(name, False)
        if value.dtype.kind != "f":
            for table in others:
                loose |= table[name] != value
            return Expected(value, np.zeros(value.shape), loose)
        spread = np.zeros(value.shape)
        kind = self._kind(dtype)
        # A float64 output may be the Cast of a value that the device stored in 16 bits.
        limit = np.finfo("float16" if self.narrow else dtype).max
        with np.errstate(all="ignore"):
            for table in others:
                apart = np.abs(table[name] - value)
                same = (table[name] == value) | (np.isnan(table[name]) & np.isnan(value))
                loose |= ~same & ~np.isfinite(apart)
                spread = np.maximum(spread, np.where(np.isfinite(apart), apart, 0))
            slack = 4 * spread + 4 * UNIT[kind] * np.abs(value) + 4 * TINY[kind]
            loose |= np.isfinite(value) & (np.abs(value) > limit / 8)
        return Expected(value, slack, loose)


def _saturated(compute: Compute, table: Mapping[str, Array]) -> Array:
    """Return the value of an integer sum or product as libraries with saturating float64 arithmetic compute it. ONNX leaves
    integer overflow undefined. Devices and NumPy wrap."""
    kept = table[compute.name]
    if compute.combiner not in ("sum", "prod") or not compute.points or np.dtype(compute.dtype).kind not in "iu":
        return kept
    places = {inner.tensor for load in compute.loads for i in load.indices for inner in ex.loads(i)}
    wide = {n: table[n] if n in places else np.asarray(table[n]).astype(np.float64) for n in compute.reads}
    value, ends = np.asarray(evaluate_compute(replace(compute, dtype="float64"), wide)), np.iinfo(compute.dtype)
    left = (value < ends.min) | (value > ends.max) | (np.abs(value) > 2.0**53)
    return np.where(left, np.where(value < 0, kept.dtype.type(ends.min), kept.dtype.type(ends.max)), kept)


def _exact(compute: Compute) -> bool:
    """Return True if the compute only moves, compares and selects elements, without rounding."""
    rest = [compute.body]
    while rest:
        part = rest.pop()
        if isinstance(part, ex.Cast) or (isinstance(part, Op) and part.fn not in EXACT):
            return False
        rest += () if isinstance(part, ex.Load) else ex.children(part)
    return compute.combiner in (None, "max", "min")


def tracker(model: Model, inputs: Mapping[str, Array], rng: np.random.Generator, **settings: Any) -> Tracker:
    """Return a Tracker of ``model`` at the shapes of ``inputs``."""
    return Tracker(bind(model, {n: a.shape for n, a in inputs.items()}), rng, **settings)


def _wide(value: Array) -> Array:
    return value.astype(np.float64) if value.dtype.kind == "f" else value


def _ranged(value: Array, dtype: str) -> Array:
    """Return ``value`` with infinity for elements beyond the range of ``dtype``."""
    limit = float(np.finfo(dtype).max)
    with np.errstate(all="ignore"):
        return np.where(np.abs(value) > limit * (1 + 1e-7), np.copysign(np.inf, value), value)
