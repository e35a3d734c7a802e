"""Structural verification, without order in time: names, shapes, offsets, bodies, tasks and counters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from rammer.ir.extent import AffineExtent, SkipTasks
from rammer.ir.names import is_identifier
from rammer.ir.operator import ROperator
from rammer.ir.program import ALIGNMENT, RProgram, Task
from rammer.ir.program_text import MOST_ROWS, MOST_TASKS
from rammer.ir.task_arrays import TaskTable
from rammer.ir.types import SHORT, is_float
from rammer.verify.expressions import FARTHEST, MOST_AXES, Bodies, VerifyError
from rammer.verify.in_place_state import check_states

__all__ = ["VerifyError", "check_form"]

#: Maximum size of vector clocks in numbers (``happens_before``): 4 GiB of memory.
MOST_CLOCKS = 1 << 30
#: Maximum number of tasks that all counters together count; planners count each at most once.
MOST_COUNTED = 4 * MOST_TASKS
#: Limit of factors of lengths, so that extents fit 64 bits.
MOST_FACTOR = 1 << 31


def check_form(program: RProgram) -> TaskTable:
    """Check all properties of ``program`` that need no simulation of its rows; return its tasks. Raises VerifyError."""
    _check_names(program)
    _check_places(program)
    _check_ports(program)
    bodies = Bodies(program.types)
    for operator in program.operators:
        _check_operator(program, operator, bodies)
    check_states(program)
    _check_counters(program)
    return _check_tasks(program)


def _check_names(program: RProgram) -> None:
    _check_unique("buffer", (b.name for b in program.buffers))
    _check_unique("storage", (s.tensor for s in program.storages))
    _check_unique("operator", (o.name for o in program.operators))
    _check_unique("counter", (c.name for c in program.counters))
    _check_unique("computed tensor", (c.name for o in program.operators for c in o.computes))
    _check_unique("input", (p.external for p in program.inputs))
    _check_unique("output", (p.external for p in program.outputs))
    for what, names in (
        ("program", [program.name]),
        ("buffer", program.buffer),
        ("tensor", program.storage),
        ("operator", program.operator),
        ("counter", program.counter),
    ):
        for name in names:
            if not is_identifier(name):
                raise VerifyError(f"{what} {name!r} has a name that is not an identifier", program.name)
    if program.form and not is_identifier(program.form):
        raise VerifyError(f"form {program.form!r} is not an identifier", program.name)


def _check_ports(program: RProgram) -> None:
    """Check that inputs and outputs are dense tensors with a buffer each, shared only by the two ports of a state. Their data is
    copied from and to the user's arrays."""
    for port in (*program.inputs, *program.outputs):
        if port.tensor not in program.storage:
            raise VerifyError(f"port {port.external!r} names tensor {port.tensor}, which has no storage", program.name)
    for port in program.inputs:
        kind = program.buffer[program.storage[port.tensor].buffer].kind
        if kind not in ("input", "state"):
            raise VerifyError(f"input {port.external!r} lives in a buffer of kind {kind}", port.tensor)
    for ports in (program.inputs, program.outputs):
        if len({program.storage[p.tensor].buffer for p in ports}) != len(ports):
            raise VerifyError("two inputs or outputs share one buffer", program.name)
    for port in (*program.inputs, *program.outputs):
        storage = program.storage[port.tensor]
        name = storage.buffer
        if storage.offset or not storage.row_major or math.prod(storage.shape) != program.buffer[name].size:
            raise VerifyError(f"port {port.external!r} does not fill its buffer {name} in the order of its axes", port.tensor)


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise VerifyError(f"{what} {name} is defined twice", name)
        seen.add(name)


def _check_places(program: RProgram) -> None:
    """Check that storages are inside their buffers, arena buffers are aligned, and addresses fit 64 bits."""
    for buffer in program.buffers:
        if buffer.dtype not in SHORT or buffer.size < 0 or buffer.offset < 0 or buffer.offset + buffer.nbytes >= FARTHEST:
            raise VerifyError(f"buffer {buffer.name} has an invalid size or an unknown element type", buffer.name)
    for storage in program.storages:
        if storage.buffer not in program.buffer:
            raise VerifyError(f"tensor {storage.tensor} lives in an unknown buffer {storage.buffer}", storage.tensor)
        size = program.buffer[storage.buffer].size
        if len(storage.strides) != len(storage.shape):
            raise VerifyError(
                f"tensor {storage.tensor} has {len(storage.strides)} strides for shape {storage.shape}", storage.tensor
            )
        if len(storage.shape) > MOST_AXES or min(storage.shape, default=0) < 0 or not 0 <= storage.offset <= size:
            raise VerifyError(f"tensor {storage.tensor} has an invalid shape or offset", storage.tensor)
        low, high = storage.span()
        if low < high and not 0 <= low < high <= size:
            raise VerifyError(
                f"tensor {storage.tensor} covers elements {low}..{high} of buffer {storage.buffer}, which has {size}",
                storage.tensor,
            )
    for buffer in program.buffers:
        if buffer.kind == "arena" and buffer.offset % ALIGNMENT:
            raise VerifyError(
                f"buffer {buffer.name} starts at byte {buffer.offset}, which is not a multiple of {ALIGNMENT}", buffer.name
            )


def _check_operator(program: RProgram, operator: ROperator, bodies: Bodies) -> None:
    """Check that operands are stored, outputs match the task grid, Computes are in order, and reads are within tensors."""
    if len(operator.tile) != len(operator.anchor.axes) or any(t < 1 for t in operator.tile):
        raise VerifyError(f"tile {operator.tile} does not cut shape {operator.anchor.shape}", operator.name)
    computes = {c.name: c for c in operator.computes}
    for tensor in (*operator.inputs, *operator.outputs):
        if tensor not in program.storage:
            raise VerifyError(f"{operator.name} uses tensor {tensor}, which has no storage", operator.name)
    for tensor in operator.outputs:
        if tensor not in computes:
            raise VerifyError(f"{operator.name} writes {tensor}, which it does not compute", operator.name)
        compute, storage = computes[tensor], program.storage[tensor]
        if compute.shape != storage.shape:
            raise VerifyError(f"{tensor} has shape {compute.shape}, its storage {storage.shape}", operator.name)
        _check_cut(operator, tensor)
        stored = program.buffer[storage.buffer].dtype
        if compute.dtype != stored:
            raise VerifyError(f"{tensor} is {compute.dtype}, its buffer {stored}", operator.name)
    later = set(computes)
    for c in operator.computes:
        if not later.isdisjoint(c.reads):
            raise VerifyError(f"{c.name} reads its own result or a later one", operator.name)
        later.discard(c.name)
        bodies.check(c, operator.name)
    _check_endings(program, operator)
    for edge in operator.connections:
        if edge.producer not in computes or edge.consumer not in computes:
            raise VerifyError(f"{edge} connects a tensor that {operator.name} does not compute", operator.name)
        if edge.holds_tile and operator.held[edge.producer] != edge.layer:
            raise VerifyError(f"a task holds {edge.producer} at two layers", operator.name)


def _check_cut(operator: ROperator, output: str) -> None:
    """Check that the tasks partition an output: a tile must not cut the grid along an axis that the output lacks."""
    own, anchor = operator.shared[output], operator.anchor
    cut = {d for d, (t, a) in enumerate(zip(operator.tile, anchor.axes, strict=True)) if t < a.extent}
    if cut - {*own}:
        raise VerifyError(
            f"tile {operator.tile} cuts the task grid {anchor.shape} where {output} of another shape has no such axis",
            operator.name,
        )
    if operator.skips and not operator.even:
        raise VerifyError(f"{output} has another shape than {anchor.name}, and the operator has masked tasks", operator.name)


def _check_endings(program: RProgram, operator: ROperator) -> None:
    """Check the masks and early stops of an operator. Lengths are one-element inputs. Masks without a fill come first, and fills
    are floats. Each stop is on a reduction of the operator."""
    axes = {a.name for a in operator.anchor.axes}
    for place, ending in enumerate(operator.skips):
        if ending.axis not in axes or len(ending.fills) != len(operator.outputs):
            raise VerifyError(f"'skip {ending}' does not match the operator's axes or outputs", operator.name)
        if place and operator.skips[place - 1].writes > ending.writes:
            raise VerifyError(f"'skip {ending}' writes nothing, but follows a mask that writes", operator.name)
        if ending.window is not None:
            _check_beside(program, operator, ending)
        written = zip(operator.outputs, ending.fills, strict=True)
        if any(fill is not None and not is_float(program.types[n].dtype) for n, fill in written):
            raise VerifyError(f"'skip {ending}' writes a value that is not a float", operator.name)
    reduced = {(c.name, r.name) for c in operator.computes for r in c.reduce}
    for stop in operator.reduce_bounds:
        if (stop.compute, stop.axis) not in reduced:
            raise VerifyError(f"'reduce_bound {stop}' does not name a reduction of the operator", operator.name)
    said = [(f"skip {e}", e.extent) for e in operator.skips if e.window is None]
    said += [(f"reduce_bound {s}", s.extent) for s in operator.reduce_bounds]
    for what, extent in said:
        check_length(program, what, extent, operator.name)


def _check_beside(program: RProgram, operator: ROperator, ending: SkipTasks) -> None:
    """Check that a row window starts at an input with an element for each index along its other axis."""
    assert ending.window is not None
    extents = {a.name: a.extent for a in operator.anchor.axes}
    terms, by, inputs = ending.extent.terms, ending.window.by, {p.tensor for p in program.inputs}
    storage = program.storage.get(terms[0][0]) if len(terms) == 1 and terms[0][0] in inputs else None
    plain = (
        [f for _, f in terms] == [1] and not ending.extent.offset and not ending.writes and ending.before and by != ending.axis
    )
    fits = storage is not None and storage.row_major and (storage.shape, storage.offset) == ((extents.get(by, -1),), 0)
    kind = program.types[terms[0][0]].dtype if fits else ""
    if not plain or kind != "int64" or ending.window.of not in (0, extents[ending.axis]):
        raise VerifyError(f"'skip {ending}' does not begin at an int64 input along {by}", operator.name)


def check_length(program: RProgram, what: str, extent: AffineExtent, where: str) -> None:
    """Raise VerifyError if the ``extent`` in ``what`` depends on tensors other than one-element inputs (int64)."""
    inputs = {p.tensor for p in program.inputs}
    for tensor, factor in extent.terms:
        storage = program.storage.get(tensor) if tensor in inputs else None
        if (
            storage is None
            or math.prod(storage.shape) != 1
            or (program.buffer[storage.buffer].dtype != "int64" or abs(factor) >= MOST_FACTOR)
        ):
            raise VerifyError(f"'{what}' depends on {tensor}, which is not an input of one int64", where)


def _check_counters(program: RProgram) -> None:
    for counter in program.counters:
        operator = program.operator.get(counter.operator)
        if operator is None:
            raise VerifyError(f"counter {counter.name} counts an unknown operator {counter.operator}", counter.name)
        if not 0 <= counter.first < counter.last <= operator.task_count:
            raise VerifyError(
                f"counter {counter.name} counts tasks {counter.first}..{counter.last} of {operator.task_count}", counter.name
            )


def _check_tasks(program: RProgram) -> TaskTable:
    """Check that every task occurs exactly once and every wait is for a counter's full count."""
    if len(program.rows) > MOST_ROWS or sum(o.task_count for o in program.operators) > MOST_TASKS:
        raise VerifyError(f"a program has at most {MOST_ROWS} rows and {MOST_TASKS} tasks", program.name)
    waiting = [t for row in program.rows for t in row if t.waits]
    if len(program.rows) * (len(program.rows) + len(waiting)) > MOST_CLOCKS:
        raise VerifyError(
            f"{len(waiting)} waiting tasks in {len(program.rows)} rows are too many to be proved in order", program.name
        )
    if sum(c.total for c in program.counters) > MOST_COUNTED:
        raise VerifyError(f"counters count the {MOST_TASKS} tasks of a program many times over", program.name)
    full = {c.name: c.total for c in program.counters}
    legal = all(full.get(w.counter) == w.threshold for waits in {id(t.waits): t.waits for t in waiting}.values() for w in waits)
    try:
        table = TaskTable.of(program)
    except OverflowError:
        raise _wrong_task(program, full) from None
    if not legal or not table.each_once():
        raise _wrong_task(program, full)
    return table


def _wrong_task(program: RProgram, full: Mapping[str, int]) -> VerifyError:
    """Return an error for the first task, row by row, that is unknown, repeated or waits wrongly, or for a missing task."""
    seen: dict[str, set[int]] = {o.name: set() for o in program.operators}
    for veu, row in enumerate(program.rows):
        for place, task in enumerate(row):
            where, marks = f"v{veu} place {place}", seen.get(task.operator)
            if marks is None or not 0 <= task.index < program.operator[task.operator].task_count:
                return VerifyError(f"{task.operator}[{task.index}] is not a task of this program", where)
            if task.index in marks:
                return VerifyError(f"{task.operator}[{task.index}] occurs twice", where)
            marks.add(task.index)
            if problem := _wrong_wait(task, full):
                return VerifyError(problem, f"{where}: {task.operator}[{task.index}]")
    name, missing = next((o.name, i) for o in program.operators for i in range(o.task_count) if i not in seen[o.name])
    return VerifyError(f"{name}[{missing}] is on no row", f"operator {name}")


def _wrong_wait(task: Task, full: Mapping[str, int]) -> str:
    for wait in task.waits:
        if wait.counter not in full:
            return f"waits for an unknown counter {wait.counter}"
        if wait.threshold != full[wait.counter]:
            return f"waits for {wait.threshold} of counter {wait.counter}, whose full count is {full[wait.counter]}"
    return ""
