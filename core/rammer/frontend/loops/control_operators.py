"""Execution of If, Loop, Scan and SequenceMap by ONNX's specification: order of bodies, inputs and results.

The executor of bodies is a parameter (``BodyRunner``): ``frontend.bind.evaluator`` interprets them on the host,
``jit.control_flow`` compiles them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from onnx import GraphProto, helper

from rammer.errors import BadInput
from rammer.frontend.read import limits
from rammer.frontend.read import node_protos as nd
from rammer.frontend.read.node_protos import SubGraph
from rammer.ir.graph import Node

#: An array, a list of values (a sequence), or None (an empty optional).
Value: TypeAlias = Any


class OuterValues(dict[str, Value]):
    """The outer values that the bodies of one operator read in one run, by their names in the bodies. ``constants`` are those
    that are equal in every run. ``ready`` caches facts of this run for the body runner."""

    def __init__(self, values: Mapping[str, Value], constants: frozenset[str] = frozenset()) -> None:
        super().__init__(values)
        self.constants, self.ready = constants, dict[Any, Any]()


@dataclass(frozen=True, slots=True)
class TurnsAhead:
    """The remaining iterations of a body: the index of the first, their number (None: until the condition fails), and the states.

    For a Scan also the slices of all of its iterations, along a first axis. ``check`` must be called occasionally with the number
    of completed iterations; it raises BadInput for a loop that exceeds its time limit."""

    first: int
    left: int | None
    state: Sequence[Value]
    slices: Sequence[Value]
    check: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class TurnsDone:
    """Completed iterations: their number, the condition, the states, and the gathered values along a first axis."""

    count: int
    going: bool
    state: list[Value]
    gathered: list[Value]


class BodyRunner(Protocol):
    """An executor of control flow bodies."""

    def __call__(self, body: SubGraph, given: Sequence[Value], outer: OuterValues) -> Sequence[Value]:
        """Return the outputs of a body, in order, given its inputs in order and the outer values that it reads."""
        ...

    def several(self, body: SubGraph, ahead: TurnsAhead, outer: OuterValues) -> TurnsDone | None:
        """Run one or more of the iterations ahead. Returns None if the caller must run each separately."""
        ...


@dataclass
class _Clock:
    """The start of the outermost loop on the host, in seconds of this thread's CPU, and its time limit.

    ``passed`` is its start by the wall clock, which is cheaper to read and advances at least as fast. ``turns`` are the
    iterations of the running loops, outermost first."""

    start: float
    passed: float
    most: float
    turns: list[tuple[str, int]] = field(default_factory=list)


_CLOCK: ContextVar[_Clock | None] = ContextVar("_CLOCK", default=None)


@lru_cache(64)
def graph_of(body: SubGraph) -> GraphProto:
    """Return a body as a protobuf, parsed once."""
    return body.graph


def run_control_flow(node: Node, values: Mapping[str, Value], bodies: BodyRunner, constants: Collection[str] = ()) -> list[Value]:
    """Return all outputs of ``node``, in order, given its inputs by name, including those that its bodies capture. ``constants``
    are the inputs that are equal in every run."""
    captured = nd.captured_names(node)
    formal = node.inputs[: len(node.inputs) - len(captured)]
    named = dict(zip(captured, node.inputs[len(formal) :], strict=True))
    outer = OuterValues({n: values[o] for n, o in named.items()}, frozenset(n for n, o in named.items() if o in constants))
    operands = [values[n] if n else None for n in formal]
    if node.op == "If":  # which needs no time limit
        return _run_if(node, operands, _BodyRun(bodies, outer))
    with _time_loop(node.op):
        return _OPERATORS[node.op](node, operands, _BodyRun(bodies, outer))


@dataclass(frozen=True, slots=True)
class _BodyRun:
    """The bodies of one operator in one run."""

    bodies: BodyRunner
    outer: OuterValues

    def __call__(self, body: SubGraph, given: Sequence[Value]) -> list[Value]:
        return list(self.bodies(body, given, self.outer))

    def several(self, body: SubGraph, ahead: TurnsAhead) -> TurnsDone | None:
        return self.bodies.several(body, ahead, self.outer)


def _run_if(node: Node, operands: Sequence[Value], run: _BodyRun) -> list[Value]:
    """Run "then_branch: Graph to run if condition is true", else "else_branch"."""
    taken = "then_branch" if bool(np.asarray(operands[0]).all()) else "else_branch"
    return run(node.attributes[taken], ())


def _run_loop(node: Node, operands: Sequence[Value], run: _BodyRun) -> list[Value]:
    """Run "for (int i=0; i < max_trip_count && cond; ++i) cond, ... = body(i, cond, ...)". A missing trip count means unlimited,
    a missing condition true. The values of scan outputs are "concatenated" by a new first axis."""
    trips, condition, *state = operands
    most = None if trips is None else int(np.asarray(trips).item())
    going = condition is None or bool(np.asarray(condition).item())
    body = node.attributes["body"]
    scanned = [_Scanned(v) for v in graph_of(body).output[1 + len(state) :]]
    count = 0
    while going and (most is None or count < most):
        _check_time(count)
        done = run.several(body, TurnsAhead(count, None if most is None else most - count, state, (), _check_time))
        if done is None:
            cond, *made = run(body, (np.array(count, np.int64), np.array(True), *state))
            done = _single_iteration(bool(np.asarray(cond).item()), made, len(state))
        going, state, count = done.going, done.state, count + done.count
        for scan, values in zip(scanned, done.gathered, strict=True):
            scan.values.append(values)
    return [*state, *(s.stacked(0, False) for s in scanned)]


def _single_iteration(going: bool, made: Sequence[Value], states: int) -> TurnsDone:
    """Return the results of one iteration."""
    return TurnsDone(1, going, list(made[:states]), [np.asarray(v)[None] for v in made[states:]])


def _run_scan(node: Node, operands: Sequence[Value], run: _BodyRun) -> list[Value]:
    """Run a Scan along the axes and in the directions of its attributes. "Scan can be used to iterate over one or more scan_input
    tensors, constructing zero or more scan_output tensors"."""
    if node.version < 9:
        raise NotImplementedError("Scan of opset 8, with a batch")
    count, body = int(node.attributes["num_scan_inputs"]), node.attributes["body"]
    state, scanning = list(operands[: len(operands) - count]), operands[len(operands) - count :]
    axes = node.attributes.get("scan_input_axes") or (0,) * count
    back = node.attributes.get("scan_input_directions") or (0,) * count
    slices = [np.moveaxis(x, axis, 0)[:: -1 if b else 1] for x, axis, b in zip(scanning, axes, back, strict=True)]
    lengths = {len(x) for x in slices}
    if len(lengths) != 1:
        raise BadInput(
            f"Scan iterates over different extents: {sorted(lengths)}", f"node {node.name} (Scan)", "give equal extents"
        )
    (length,) = lengths
    scanned = [_Scanned(v) for v in graph_of(body).output[len(state) :]]
    step = 0
    while step < length:
        _check_time(step)
        done = run.several(body, TurnsAhead(step, length - step, state, slices, _check_time))
        if done is None:
            done = _single_iteration(True, run(body, (*state, *(np.array(x[step]) for x in slices))), len(state))
        state, step = done.state, step + done.count
        for scan, values in zip(scanned, done.gathered, strict=True):
            scan.values.append(values)
    out_axes = node.attributes.get("scan_output_axes") or (0,) * len(scanned)
    out_back = node.attributes.get("scan_output_directions") or (0,) * len(scanned)
    ends = zip(scanned, out_axes, out_back, strict=True)
    return [*state, *(s.stacked(axis, bool(b)) for s, axis, b in ends)]


def _sequence_map(node: Node, operands: Sequence[Value], run: _BodyRun) -> list[Value]:
    """Run SequenceMap, which "Applies a sub-graph to each sample in the input sequence(s)". Inputs after the first may be
    tensors, "accessed by each sample"."""
    body, first = node.attributes["body"], operands[0]
    made = list[list[Value]]()
    for i in range(len(first)):
        _check_time(i)
        made.append(run(body, [x[i] if isinstance(x, list) else x for x in operands]))
    return [[results[k] for results in made] for k in range(len(graph_of(body).output))]


_OPERATORS: Final[Mapping[str, Callable[[Node, Sequence[Value], _BodyRun], list[Value]]]] = {
    "If": _run_if,
    "Loop": _run_loop,
    "Scan": _run_scan,
    "SequenceMap": _sequence_map,
}
CONTROL: Final = frozenset(_OPERATORS)


@dataclass
class _Scanned:
    """The values of one scan output, each with one or more iterations along a first axis. ``proto`` is its declaration, which
    determines the result of zero iterations."""

    proto: Any

    def __post_init__(self) -> None:
        self.values: list[Value] = []

    def stacked(self, axis: int, back: bool) -> Value:
        """Return the values along a new axis, reversed if ``back``."""
        if self.values:
            whole = np.concatenate(self.values) if len(self.values) > 1 else self.values[0]
            return np.moveaxis(whole[::-1] if back else whole, 0, axis)
        tensor = self.proto.type.tensor_type
        shape = [d.dim_value for d in tensor.shape.dim]
        shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, 0)
        return np.zeros(shape, helper.tensor_dtype_to_np_dtype(tensor.elem_type) if tensor.elem_type else np.float32)


@contextmanager
def _time_loop(op: str) -> Iterator[None]:
    """Time a loop by the outermost loop's clock, which includes inner loops."""
    clock, token = _CLOCK.get(), None
    if clock is None:
        clock = _Clock(time.thread_time(), time.perf_counter(), limits.host_seconds())
        token = _CLOCK.set(clock)
    clock.turns.append((op, 0))
    try:
        yield
    finally:
        clock.turns.pop()
        if token is not None:
            _CLOCK.reset(token)


@contextmanager
def exclude_time() -> Iterator[None]:
    """Exclude the time of this context, such as compilation, from the time of the running loops. Contexts may be nested."""
    clock = _CLOCK.get()
    if clock is None:
        yield
        return
    spent, waited = time.thread_time() - clock.start, time.perf_counter() - clock.passed
    try:
        yield
    finally:
        clock.start, clock.passed = time.thread_time() - spent, time.perf_counter() - waited


def _check_time(iterations: int) -> None:
    """Raise TooLong if the running loops exceed their time limit; ``iterations`` counts those of the innermost loop."""
    clock = _CLOCK.get()
    assert clock is not None
    clock.turns[-1] = clock.turns[-1][0], iterations
    if time.perf_counter() - clock.passed > clock.most:
        limits.check_loop(clock.turns, time.thread_time() - clock.start, clock.most)
