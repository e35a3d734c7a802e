"""The part of verification that needs no notion of time: names, shapes, places, tasks and counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rammer.errors import RammerError
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Interval
from rammer.ir.operator import ROperator
from rammer.ir.program import ALIGNMENT, RProgram, Task


class VerifyError(RammerError):
    """A program breaks a rule that every device relies on: a mistake of the planner or of an edited file."""


def check_form(program: RProgram) -> None:
    """Everything about ``program`` that can be said without running its rows. Raises VerifyError."""
    _check_names(program)
    _check_places(program)
    for operator in program.operators:
        _check_operator(program, operator)
    _check_counters(program)
    _check_tasks(program)


def _check_names(program: RProgram) -> None:
    _unique("buffer", (b.name for b in program.buffers))
    _unique("storage", (s.tensor for s in program.storages))
    _unique("operator", (o.name for o in program.operators))
    _unique("counter", (c.name for c in program.counters))
    _unique("computed tensor", (c.name for o in program.operators for c in o.computes))
    _unique("input", (p.external for p in program.inputs))
    _unique("output", (p.external for p in program.outputs))
    for port in (*program.inputs, *program.outputs):
        if port.tensor not in program.storage:
            raise VerifyError(f"port {port.external!r} names tensor {port.tensor}, which has no storage", program.name)
    for port in program.inputs:
        kind = program.buffer[program.storage[port.tensor].buffer].kind
        if kind != "input":
            raise VerifyError(f"input {port.external!r} lives in a buffer of kind {kind}", port.tensor)


def _unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise VerifyError(f"{what} {name} is defined twice", name)
        seen.add(name)


def _check_places(program: RProgram) -> None:
    """Storages inside their buffers, arena buffers aligned."""
    for storage in program.storages:
        if storage.buffer not in program.buffer:
            raise VerifyError(f"tensor {storage.tensor} lives in an unknown buffer {storage.buffer}", storage.tensor)
        size = program.buffer[storage.buffer].size
        if len(storage.strides) != len(storage.shape):
            raise VerifyError(f"tensor {storage.tensor} has {len(storage.strides)} strides for shape {storage.shape}",
                              storage.tensor)  # fmt: skip
        low, high = storage.span()
        if low < high and not 0 <= low < high <= size:
            raise VerifyError(f"tensor {storage.tensor} covers elements {low}..{high} of buffer {storage.buffer}, "
                              f"which has {size}", storage.tensor)  # fmt: skip
    for buffer in program.buffers:
        if buffer.kind == "arena" and (buffer.offset < 0 or buffer.offset % ALIGNMENT):
            raise VerifyError(f"buffer {buffer.name} starts at byte {buffer.offset}, no multiple of {ALIGNMENT}",
                              buffer.name)  # fmt: skip


def _check_operator(program: RProgram, operator: ROperator) -> None:
    """Operands stored, outputs shaped like the task grid, loads within their tensors."""
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
        if compute.shape != storage.shape or compute.shape != operator.anchor.shape:
            raise VerifyError(f"{tensor} has shape {compute.shape}, its storage {storage.shape}, "
                              f"the task grid {operator.anchor.shape}", operator.name)  # fmt: skip
        stored = program.buffer[storage.buffer].dtype
        if compute.dtype != stored:
            raise VerifyError(f"{tensor} is {compute.dtype}, its buffer {stored}", operator.name)
    shapes = tensor_shapes(program, operator)
    for c in operator.computes:
        _check_loads(c, shapes, operator.name)


def tensor_shapes(program: RProgram, operator: ROperator) -> dict[str, tuple[int, ...]]:
    """Shapes of everything that ``operator`` reads or computes."""
    shapes = {t: program.storage[t].shape for t in operator.inputs}
    return shapes | {c.name: c.shape for c in operator.computes}


def _check_loads(c: Compute, shapes: Mapping[str, tuple[int, ...]], operator: str) -> None:
    bounds: dict[str, Interval] = {a.name: (0, a.extent - 1) for a in (*c.axes, *c.reduce)}
    for load in c.loads if c.points else ():
        shape = shapes[load.tensor]
        if len(load.indices) != len(shape):
            raise VerifyError(f"{load} has {len(load.indices)} indices for shape {shape}", f"{operator}: {c.name}")
        for index, extent in zip(load.indices, shape, strict=True):
            span = None if load.fill is not None else ex.interval(index, bounds)
            if span is not None and not 0 <= span[0] <= span[1] < extent:
                raise VerifyError(f"{load}: index {index} covers {span[0]}..{span[1]}, the axis has {extent}",
                                  f"{operator}: {c.name}")  # fmt: skip


def _check_counters(program: RProgram) -> None:
    for counter in program.counters:
        operator = program.operator.get(counter.operator)
        if operator is None:
            raise VerifyError(f"counter {counter.name} counts an unknown operator {counter.operator}", counter.name)
        if not 0 <= counter.first < counter.last <= operator.task_count:
            raise VerifyError(f"counter {counter.name} counts tasks {counter.first}..{counter.last} of "
                              f"{operator.task_count}", counter.name)  # fmt: skip


def _check_tasks(program: RProgram) -> None:
    """Every task exactly once, every wait on a counter's full count."""
    seen = {o.name: bytearray(o.task_count) for o in program.operators}
    full = {c.name: c.total for c in program.counters}
    for veu, row in enumerate(program.rows):
        for place, task in enumerate(row):
            marks = seen.get(task.operator)
            if marks is None or not 0 <= task.index < len(marks):
                raise VerifyError(f"{task.operator}[{task.index}] is no task of this program", f"v{veu} place {place}")
            if marks[task.index]:
                raise VerifyError(f"{task.operator}[{task.index}] occurs twice", f"v{veu} place {place}")
            marks[task.index] = 1
            if task.waits:
                _check_waits(task, full, f"v{veu} place {place}: {task.operator}[{task.index}]")
    for name, marks in seen.items():
        missing = marks.find(0)
        if missing >= 0:
            raise VerifyError(f"{name}[{missing}] is on no row", f"operator {name}")


def _check_waits(task: Task, full: Mapping[str, int], where: str) -> None:
    for wait in task.waits:
        if wait.counter not in full:
            raise VerifyError(f"waits for an unknown counter {wait.counter}", where)
        if wait.threshold != full[wait.counter]:
            raise VerifyError(f"waits for {wait.threshold} of counter {wait.counter}, whose full count is "
                              f"{full[wait.counter]}", where)  # fmt: skip
