"""A brute-force oracle of legal programs (every task, every element), and edits that may make them illegal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

from rammer.ir import expr as ex
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram, Storage, Task
from rammer.verify.verifier import VerifyError, verify

# --- the oracle: every task, every element ------------------------------------------------------


def closure(program: RProgram) -> dict[tuple[str, int], set[tuple[str, int]]] | None:
    """Return all tasks that happen before each task, or None for a cycle."""
    before: dict[tuple[str, int], set[tuple[str, int]]] = {}
    direct: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for row in program.rows:
        last = None
        for task in row:
            mine = direct.setdefault((task.operator, task.index), set())
            if last is not None:
                mine.add(last)
            for wait in task.waits:
                counter = program.counter[wait.counter]
                mine |= {(counter.operator, i) for i in range(counter.first, counter.last)}
            last = (task.operator, task.index)
    pending = dict(direct)
    while pending:
        ready = [t for t, needs in pending.items() if all(n in before for n in needs)]
        if not ready:
            return None
        for name in ready:
            before[name] = set().union(pending[name], *(before[n] for n in pending[name]))
            del pending[name]
    return before


def address(program: RProgram, storage: Storage, index: tuple[int, ...]) -> tuple[str, int]:
    buffer = program.buffer[storage.buffer]
    element = storage.offset + sum(i * s for i, s in zip(index, storage.strides, strict=True))
    return ("arena", buffer.offset // 4 + element) if buffer.kind == "arena" else (buffer.name, element)


def indices(operator: ROperator, task: int, output: str = "") -> Iterator[tuple[int, ...]]:
    """Yield the elements of an output (default: the anchor's) that a task writes. The task's box limits the axes shared with the
    anchor: position by position, or the leading ones if the ranks differ."""
    box, anchor = operator.task_box(task), operator.anchor.shape
    (shape,) = {c.shape for c in operator.computes if c.name == (output or operator.anchor.name)}
    spans, leading = [], True
    for d, n in enumerate(shape):
        same = d < len(anchor) and anchor[d] == n
        leading = leading and same
        spans.append(range(*box[d]) if (same if len(shape) == len(anchor) else leading) else range(n))
    yield from product(*spans)


def reads(program: RProgram, operator: ROperator, task: int) -> set[tuple[str, tuple[str, int]]]:
    """Return the (tensor, address) of every element that a task loads from outside."""
    computes, found = {c.name: c for c in operator.computes}, set()
    ahead = [(output, point) for output in operator.outputs for point in indices(operator, task, output)]
    seen = set(ahead)
    while ahead:
        name, point = ahead.pop()
        compute = computes[name]
        for inner in product(*(range(r.extent) for r in compute.reduce)):
            axes = dict(zip([a.name for a in (*compute.axes, *compute.reduce)], (*point, *inner), strict=True))
            for load in compute.loads:
                span = [ex.interval(i, {a: (v, v) for a, v in axes.items()}) for i in load.indices]
                index = tuple(s[0] for s in span if s is not None)
                if load.tensor in computes:
                    if (load.tensor, index) not in seen:
                        seen.add((load.tensor, index))
                        ahead.append((load.tensor, index))
                    continue
                storage = program.storage[load.tensor]
                if all(0 <= i < n for i, n in zip(index, storage.shape, strict=True)):
                    found.add((load.tensor, address(program, storage, index)))
    return found


def rejected(program: RProgram) -> bool:
    """Return True if the verifier refuses a program; the oracle below should, too."""
    try:
        verify(program)
    except VerifyError:
        return True
    return False


def is_legal(program: RProgram) -> bool:
    """Return True if every task occurs once and every read gets its producer's value. This must hold under every order that rows
    and waits allow."""
    placed = sorted((t.operator, t.index) for row in program.rows for t in row)
    if placed != sorted((o.name, i) for o in program.operators for i in range(o.task_count)):
        return False
    before = closure(program)
    if before is None:
        return False
    writers: dict[tuple[str, int], list[tuple[str, int]]] = {}
    wrote: dict[tuple[tuple[str, int], tuple[str, int]], str] = {}  # the tensor that a task writes at an address
    for operator in program.operators:
        for task, output in product(range(operator.task_count), operator.outputs):
            for point in indices(operator, task, output):
                spot = address(program, program.storage[output], point)
                writers.setdefault(spot, []).append((operator.name, task))
                wrote[spot, (operator.name, task)] = output
    for tasks in writers.values():
        if any(a not in before[b] and b not in before[a] for a, b in combinations(tasks, 2)):
            return False
    produced = {t for o in program.operators for t in o.outputs}
    for operator in program.operators:
        for index in range(operator.task_count):
            me = (operator.name, index)
            for tensor, spot in reads(program, operator, index):
                right = [w for w in writers.get(spot, ()) if wrote[spot, w] == tensor]
                if tensor in produced and (not right or right[0] not in before[me]):
                    return False
                for other in writers.get(spot, ()):
                    safe = (right and other in before[right[0]]) or me in before[other] or other in right
                    if not safe:
                        return False
    return True


# --- edits ----------------------------------------------------------------------------------------


def with_task(program: RProgram, veu: int, place: int, *tasks: Task) -> RProgram:
    """Replace the task at a position by ``tasks``."""
    rows = [list(row) for row in program.rows]
    rows[veu][place : place + 1] = tasks
    return replace(program, rows=tuple(map(tuple, rows)))


def dropped_waits(program: RProgram) -> Iterator[RProgram]:
    for veu, row in enumerate(program.rows):
        for place, task in enumerate(row):
            for wait in task.waits:
                left = tuple(w for w in task.waits if w != wait)
                yield with_task(program, veu, place, replace(task, waits=left))


def swapped_neighbours(program: RProgram) -> Iterator[RProgram]:
    for veu, row in enumerate(program.rows):
        for place in range(len(row) - 1):
            rows = [list(r) for r in program.rows]
            rows[veu][place : place + 2] = [row[place + 1], row[place]]
            yield replace(program, rows=tuple(map(tuple, rows)))


def moved_buffers(program: RProgram) -> Iterator[RProgram]:
    for i, buffer in enumerate(program.buffers):
        for step in (-128, -64, 64, 128) if buffer.kind == "arena" else ():
            if buffer.offset + step >= 0:
                moved = replace(buffer, offset=buffer.offset + step)
                yield replace(program, buffers=(*program.buffers[:i], moved, *program.buffers[i + 1 :]))


def lost_and_doubled(program: RProgram) -> Iterator[RProgram]:
    for veu, row in enumerate(program.rows):
        for place, task in enumerate(row):
            yield with_task(program, veu, place)
            yield with_task(program, veu, place, task, task)


def narrowed_counters(program: RProgram) -> Iterator[RProgram]:
    """Yield programs with a counter that omits a task, and waits for it lowered by one."""
    for i, counter in enumerate(program.counters):
        if counter.last - counter.first < 2:
            continue
        for first, last in ((counter.first + 1, counter.last), (counter.first, counter.last - 1)):
            counters = (*program.counters[:i], replace(counter, first=first, last=last), *program.counters[i + 1 :])
            less = {counter.name: 1}
            rows = tuple(
                tuple(
                    replace(t, waits=tuple(replace(w, threshold=w.threshold - less.get(w.counter, 0)) for w in t.waits))
                    for t in r
                )
                for r in program.rows
            )
            yield replace(program, counters=counters, rows=rows)
