"""Hand-built programs for the simulator's tests: explicit Computes, tiles and rows, and simply derived waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import ALIGNMENT, Buffer, BufferKind, Counter, Port, RProgram, Task, Wait, dense
from rammer.ir.types import TensorType

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Number of arena slots that ``make_program(reuse=True)`` uses in rotation.
PLACES = 3


def make_operator(name: str, lines: Sequence[str], tile: Sequence[int], outputs: Sequence[str] = ()) -> ROperator:
    """Return an operator whose Computes are connected in the vEU's memory."""
    computes = tuple(Compute.parse(line) for line in lines)
    inside = {c.name for c in computes}
    links = tuple(Connection(r, c.name, "veu") for c in computes for r in c.reads if r in inside)
    return ROperator(name, computes, links, tuple(outputs) or (computes[-1].name,), tuple(tile))


def make_program(
    operators: Sequence[ROperator],
    inputs: Mapping[str, TensorType],
    constants: Mapping[str, TensorType],
    outputs: Sequence[str],
    veus: int,
    reuse: bool = False,
) -> RProgram:
    """Return a program with tasks round-robin over ``veus`` rows; each operator waits for all tasks of its producers. With
    ``reuse`` the arena has only three slots: right for a chain of operators, wrong for other graphs."""
    stored: dict[str, tuple[TensorType, BufferKind]] = {n: (t, "input") for n, t in inputs.items()}
    stored |= {n: (t, "constant") for n, t in constants.items()}
    made = {c.name: c.type for o in operators for c in o.computes if c.name in o.outputs}
    stored |= {n: (t, "output" if n in outputs else "arena") for n, t in made.items()}
    producer = {n: o.name for o in operators for n in o.outputs}
    rows: list[list[Task]] = [[] for _ in range(veus)]
    start = 0
    for o in operators:
        waits = tuple(
            Wait(f"c_{p}", next(q.task_count for q in operators if q.name == p))
            for p in dict.fromkeys(producer[i] for i in o.inputs if i in producer)
        )
        seen: set[int] = set()
        for index in range(o.task_count):
            row = (start + index) % veus
            rows[row].append(Task(o.name, index, () if row in seen else waits))
            seen.add(row)
        start += o.task_count
    return RProgram(
        "test",
        "hand",
        tuple(Port(n, n) for n in inputs),
        tuple(Port(n, n) for n in outputs),
        tuple(_make_buffers(stored, reuse)),
        tuple(dense(n, f"b_{n}", t.shape) for n, (t, _) in stored.items()),
        tuple(operators),
        tuple(Counter(f"c_{o.name}", o.name, 0, o.task_count) for o in operators),
        tuple(tuple(r) for r in rows),
    )


def _make_buffers(stored: Mapping[str, tuple[TensorType, BufferKind]], reuse: bool) -> list[Buffer]:
    """Return arena buffers in sequence, or with ``reuse`` in three slots in rotation."""
    result: list[Buffer] = []
    widest = max(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t, _ in stored.values())
    turn = 0
    for name, (kind, role) in stored.items():
        offset = 0
        if role == "arena":
            offset = widest * (turn % PLACES if reuse else turn)
            turn += 1
        result.append(Buffer(f"b_{name}", kind.dtype, kind.size, role, offset))
    return result


def reference_values(operators: Sequence[ROperator], values: Mapping[str, Array]) -> dict[str, Array]:
    """Return every tensor in float64."""
    known: dict[str, Array] = dict(values)
    for o in operators:
        for c in o.computes:
            known[c.name] = evaluate_compute(c, known, precise=True)
    return known


def relative_error(got: Array, want: Array) -> float:
    """Return the relative L2 error; NaN if any value is NaN."""
    got64, want64 = got.astype(np.float64), want.astype(np.float64)
    norm = float(np.linalg.norm(want64))
    return float(np.linalg.norm(got64 - want64)) / (norm or 1.0)


def without_waits(p: RProgram, name: str) -> RProgram:
    """Return the program without the waits of one operator's tasks."""
    rows = tuple(tuple(replace(t, waits=()) if t.operator == name else t for t in row) for row in p.rows)
    return replace(p, rows=rows)
