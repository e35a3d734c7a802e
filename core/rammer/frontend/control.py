"""If, Loop, Scan and SequenceMap by ONNX's words: which body runs when and on what, and what becomes of its results.

Who runs bodies is given (``Bodies``): ``frontend.evaluator`` interprets them on the host, ``runtime.bodies`` compiles them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
from onnx import GraphProto, helper

from rammer.errors import BadInput
from rammer.frontend import limits
from rammer.frontend import nodes as nd
from rammer.frontend.nodes import SubGraph
from rammer.ir.graph import Node

#: An array, a list of values (a sequence), or None (an optional that is empty).
Value: TypeAlias = Any
#: Runs a body: its inputs in order, the outer values that it reads by their ONNX names; its outputs in order.
Bodies: TypeAlias = Callable[[SubGraph, Sequence[Value], Mapping[str, Value]], Sequence[Value]]

#: When the outermost operator on the host began, in seconds of this thread's CPU, and how many it may take.
_CLOCK: ContextVar[tuple[float, float] | None] = ContextVar("_CLOCK", default=None)


@lru_cache(64)
def graph_of(body: SubGraph) -> GraphProto:
    """A body as a protobuf, parsed once."""
    return body.graph


def controlled(node: Node, values: Mapping[str, Value], run: Bodies) -> list[Value]:
    """All outputs of ``node``, in order, of its inputs by name (those that its bodies capture included)."""
    captured = nd.captures(node)
    formal = node.inputs[: len(node.inputs) - len(captured)]
    outer = {name: values[n] for name, n in zip(captured, node.inputs[len(formal) :], strict=True)}
    operands = [values[n] if n else None for n in formal]
    with _timed():
        return _OPERATORS[node.op](node, operands, lambda body, given: list(run(body, given, outer)))


_Run: TypeAlias = Callable[[SubGraph, Sequence[Value]], list[Value]]


def _if(node: Node, operands: Sequence[Value], run: _Run) -> list[Value]:
    """ "then_branch: Graph to run if condition is true", else "else_branch"."""
    taken = "then_branch" if bool(np.asarray(operands[0]).all()) else "else_branch"
    return run(node.attributes[taken], ())


def _loop(node: Node, operands: Sequence[Value], run: _Run) -> list[Value]:
    """ "for (int i=0; i < max_trip_count && cond; ++i) cond, ... = body(i, cond, ...)": a missing trip count is no limit, a
    missing condition true. The values of scan outputs are "concatenated" by a new first axis."""
    trips, condition, *state = operands
    most = None if trips is None else int(np.asarray(trips).item())
    going = condition is None or bool(np.asarray(condition).item())
    body = node.attributes["body"]
    scanned = [_Scanned(v) for v in graph_of(body).output[1 + len(state) :]]
    count = 0
    while going and (most is None or count < most):
        _check(node.op, count)
        cond, *made = run(body, (np.array(count, np.int64), np.array(True), *state))
        going, state = bool(np.asarray(cond).item()), made[: len(state)]
        for scan, value in zip(scanned, made[len(state) :], strict=True):
            scan.values.append(value)
        count += 1
    return [*state, *(s.stacked(0, False) for s in scanned)]


def _scan(node: Node, operands: Sequence[Value], run: _Run) -> list[Value]:
    """ "Scan can be used to iterate over one or more scan_input tensors, constructing zero or more scan_output tensors", along
    the axes and in the directions that attributes give."""
    if node.version < 9:
        raise NotImplementedError("Scan of opset 8, with a batch")
    count, body = int(node.attributes["num_scan_inputs"]), node.attributes["body"]
    state, scanning = list(operands[: len(operands) - count]), operands[len(operands) - count :]
    axes = node.attributes.get("scan_input_axes") or (0,) * count
    back = node.attributes.get("scan_input_directions") or (0,) * count
    lengths = {x.shape[axis] for x, axis in zip(scanning, axes, strict=True)}
    if len(lengths) != 1:
        raise BadInput(f"Scan goes over extents of {sorted(lengths)} at a time", f"node {node.name} (Scan)", "give equal ones")
    (length,) = lengths
    scanned = [_Scanned(v) for v in graph_of(body).output[len(state) :]]
    for step in range(length):
        _check(node.op, step)
        at = [length - 1 - step if b else step for b in back]
        made = run(body, (*state, *(np.take(x, i, axis) for x, i, axis in zip(scanning, at, axes, strict=True))))
        state = made[: len(state)]
        for scan, value in zip(scanned, made[len(state) :], strict=True):
            scan.values.append(value)
    out_axes = node.attributes.get("scan_output_axes") or (0,) * len(scanned)
    out_back = node.attributes.get("scan_output_directions") or (0,) * len(scanned)
    ends = zip(scanned, out_axes, out_back, strict=True)
    return [*state, *(s.stacked(axis, bool(b)) for s, axis, b in ends)]


def _sequence_map(node: Node, operands: Sequence[Value], run: _Run) -> list[Value]:
    """ "Applies a sub-graph to each sample in the input sequence(s)"; inputs beside the first may be tensors, "accessed by each
    sample"."""
    body, first = node.attributes["body"], operands[0]
    made = list[list[Value]]()
    for i in range(len(first)):
        _check(node.op, i)
        made.append(run(body, [x[i] if isinstance(x, list) else x for x in operands]))
    return [[results[k] for results in made] for k in range(len(graph_of(body).output))]


_OPERATORS: Final[Mapping[str, Callable[[Node, Sequence[Value], _Run], list[Value]]]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
    "SequenceMap": _sequence_map,
}
CONTROL: Final = frozenset(_OPERATORS)


@dataclass
class _Scanned:
    """What one output of a body gave, step by step; ``proto`` is its declaration, by which there is a result of no steps."""

    proto: Any

    def __post_init__(self) -> None:
        self.values: list[Value] = []

    def stacked(self, axis: int, back: bool) -> Value:
        """Along a new axis, backwards where asked for."""
        values = self.values[::-1] if back else self.values
        if values:
            return np.stack([np.asarray(v) for v in values], axis)
        tensor = self.proto.type.tensor_type
        shape = [d.dim_value for d in tensor.shape.dim]
        shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, 0)
        return np.zeros(shape, helper.tensor_dtype_to_np_dtype(tensor.elem_type) if tensor.elem_type else np.float32)


@contextmanager
def _timed() -> Iterator[None]:
    """The outermost operator's clock: what it contains takes of its seconds."""
    token = _CLOCK.set((time.thread_time(), limits.host_seconds())) if _CLOCK.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _CLOCK.reset(token)


def _check(op: str, iterations: int) -> None:
    clock = _CLOCK.get()
    assert clock is not None
    limits.check_loop(op, iterations, time.thread_time() - clock[0], clock[1])
