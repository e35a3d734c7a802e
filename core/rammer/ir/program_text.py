"""The text form of an RProgram: deterministic, diffable, and read back to an equal object.

Rows print as runs ``operator[start:count:step]``. Consecutive rows that differ only by a constant shift of every start print
folded, ``row v0..v55`` with ``start+shift``.

Reading is bounded: it rejects rows and tasks beyond those that the head and the operators declare.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from rammer.ir.compute import Compute
from rammer.ir.extent import AffineExtent, ReduceBound, SkipTasks
from rammer.ir.names import quote_text, shorten_name, unquote_text
from rammer.ir.operator import GENERIC, Connection, ROperator
from rammer.ir.parts import PRECISIONS, Buffer, Counter, HomeDevice, Move, Port, ProgramParts, Repeat, Storage, Task, Wait
from rammer.ir.types import LONG, SHORT


@dataclass(frozen=True, slots=True)
class TaskRun:
    """A run of ``count`` tasks of one operator from ``start`` by ``step``; only the first task waits."""

    operator: str
    start: int
    count: int
    step: int
    waits: tuple[Wait, ...]

    def text(self, shift: int = 0) -> str:
        start = f"{self.start}+{shift}" if shift else str(self.start)
        waits = " ".join(f"wait({w.counter}>={w.threshold})" for w in self.waits)
        return f"{waits + ' ' if waits else ''}{self.operator}[{start}:{self.count}:{self.step}]"


def _split_runs(row: tuple[Task, ...]) -> list[TaskRun]:
    runs: list[TaskRun] = []
    for task in row:
        last = runs[-1] if runs else None
        if last is not None and last.operator == task.operator and not task.waits:
            gap = task.index - last.start
            if last.count == 1 or gap == last.count * last.step:
                step = gap if last.count == 1 else last.step
                runs[-1] = TaskRun(last.operator, last.start, last.count + 1, step, last.waits)
                continue
        runs.append(TaskRun(task.operator, task.index, 1, 1, task.waits))
    return runs


def _row_shift(a: list[TaskRun], b: list[TaskRun]) -> tuple[int, ...] | None:
    """Return the shift of each run from row ``a`` to row ``b``, or None if they differ otherwise."""
    if len(a) != len(b):
        return None
    alike = all(
        (p.operator, p.count, p.step, p.waits) == (q.operator, q.count, q.step, q.waits) for p, q in zip(a, b, strict=True)
    )
    return tuple(q.start - p.start for p, q in zip(a, b, strict=True)) if alike else None


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows ``first .. last`` whose runs differ only by constant shifts: row ``first + k`` starts run ``i`` at ``runs[i].start +
    k * shifts[i]``."""

    first: int
    last: int
    runs: tuple[TaskRun, ...]
    shifts: tuple[int, ...]


def group_rows(rows: tuple[tuple[Task, ...], ...]) -> Iterator[RowGroup]:
    """Yield all rows as runs of tasks. Consecutive rows that differ only by a constant shift form one group. Rows without tasks
    are omitted."""
    runs = [_split_runs(row) for row in rows]
    shifts = [_row_shift(a, b) for a, b in pairwise(runs)]
    first = 0
    while first < len(rows):
        last = first
        while last + 1 < len(rows) and shifts[last] is not None and shifts[last] == shifts[first]:
            last += 1
        if runs[first]:
            moves = (shifts[first] if last > first else None) or (0,) * len(runs[first])
            yield RowGroup(first, last, tuple(runs[first]), moves)
        first = last + 1


def _row_lines(rows: tuple[tuple[Task, ...], ...]) -> Iterator[str]:
    for group in group_rows(rows):
        body = " | ".join(r.text(m) for r, m in zip(group.runs, group.shifts, strict=True))
        yield f"  row v{group.first}{f'..v{group.last}' if group.last > group.first else ''}: {body}"


def format_parts(p: ProgramParts) -> str:
    """Return the whole program as text."""
    head = f"program {p.name} policy {quote_text(p.policy)} on {len(p.rows)} vEUs, predicted {p.predicted!r} s"
    lines = [head if p.precision == PRECISIONS[0] else f"{head} in {p.precision}"]
    lines += [f"  form {p.form}"] if p.form else []
    lines += [f"  device {quote_text(h.device)} of {h.rows} rows" for h in p.homes]
    lines += [f"  input {json.dumps(i.external)} -> {i.tensor}" for i in p.inputs]
    lines += [f"  output {json.dumps(o.external)} <- {o.tensor}" for o in p.outputs]
    lines += [
        f"  buffer {b.name}: {SHORT[b.dtype]} {b.size} {b.kind} @{b.offset}{f' in {b.home}' if b.home else ''}" for b in p.buffers
    ]
    lines += [f"  storage {s.tensor}: {s.buffer}+{s.offset} {list(s.shape)} strides {list(s.strides)}" for s in p.storages]
    lines += _repeat_lines(p.repeat) if p.repeat is not None else []
    for o in p.operators:
        lines += [f"  {line}" for line in str(o).splitlines()]
    lines += [f"  counter {c.name}: {c.operator}[{c.first}:{c.last}]" for c in p.counters]
    lines += _row_lines(p.rows)
    return "\n".join(lines) + "\n"


def _repeat_lines(repeat: Repeat) -> list[str]:
    """Return the lines of a loop, such as ``move after y+0 stride 640 <- y_turn+0: 640``. A move shows its offsets in
    iteration 0, and their increments per iteration."""

    def end(name: str, first: int, by: int) -> str:
        return f"{name}+{first} stride {by}" if by else f"{name}+{first}"

    until = f" of {repeat.step} until {repeat.until}" if repeat.until is not None else ""
    lines = [f"  repeat {repeat.count} iterations{until}"]
    for m in repeat.moves:
        target, source = end(m.target, m.target_first, m.target_by), end(m.source, m.source_first, m.source_by)
        lines.append(f"  move {m.when} {target} <- {source}: {m.size}")
    return lines


def parse_parts(text: str) -> ProgramParts:
    """Read the text of ``format_parts``, with or without comment lines (``#``); ValueError names the first invalid line."""
    reader = _Reader()
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.startswith("#"):
            try:
                reader.feed(line.strip())
            except ValueError as problem:
                raise ValueError(f"line {number}: {problem}\n  {shorten_name(line)}") from problem
    return reader.parts()


#: Maximum rows and tasks of a program: far more than any device has, far fewer than memory holds.
MOST_ROWS, MOST_TASKS = 1 << 16, 1 << 22

_NAME, _NUMBER = r"([A-Za-z_]\w*)", r"(\d{1,18})"
_NUMBERS = r"\[((?:-?\d{1,18}(?:, -?\d{1,18})*)?)\]"
_END = rf"{_NAME}\+{_NUMBER}(?: stride (-?\d{{1,18}}))?"
_PATTERNS = {
    word: re.compile(f"{word} {rest}", re.ASCII)
    for word, rest in {
        "program": rf"{_NAME} policy (.+) on {_NUMBER} vEUs, predicted (\S+) s(?: in ({'|'.join(PRECISIONS[1:])}))?",
        "input": rf'(".*") -> {_NAME}',
        "output": rf'(".*") <- {_NAME}',
        "form": _NAME,
        "device": r"(.+) of (\d{1,6}) rows",
        "buffer": rf"{_NAME}: (\w+) {_NUMBER} (input|output|constant|arena|state) @{_NUMBER}(?: in (\d{{1,6}}))?",
        "storage": rf"{_NAME}: {_NAME}\+(-?\d{{1,18}}) {_NUMBERS} strides {_NUMBERS}",
        "repeat": rf"{_NUMBER} iterations(?: of {_NUMBER} until (.+))?",
        "move": rf"(once|first|before|after|last) {_END} <- {_END}: {_NUMBER}",
        "operator": rf"{_NAME} tile\[((?:\w+=\d{{1,18}}(?:, \w+=\d{{1,18}})*)?)\]"
        rf"(?: family {_NAME}((?: [A-Za-z_]\w*=-?\d{{1,18}})*))?",
        "compute": r"(.*)",
        "connect": rf"{_NAME} <([A-Za-z_]\w*)> {_NAME}",
        "writes": r"(.*)",
        "skip": r"(.*)",
        "reduce_bound": r"(.*)",
        "counter": rf"{_NAME}: {_NAME}\[{_NUMBER}:{_NUMBER}\]",
        "row": r"v(\d{1,6})(?:\.\.v(\d{1,6}))?: (.*)",
    }.items()
}
#: A run of tasks up to its bracket, and the rest of it.
_HEAD = re.compile(rf"((?:wait\([A-Za-z_]\w*>=\d{{1,18}}\) )*){_NAME}", re.ASCII)
_TAIL = re.compile(rf"{_NUMBER}(?:\+(-?\d{{1,18}}))?:{_NUMBER}:(-?\d{{1,18}})\]", re.ASCII)
_WAIT = re.compile(r"wait\((\w+)>=(\d+)\)", re.ASCII)


#: A folded run: waits, operator, first task, shift of the start per row, number of tasks, and their step.
_Folded: TypeAlias = "tuple[tuple[Wait, ...], str, int, int, int, int]"


class _Reader:
    """A parser that collects lines into the parts of a program."""

    def __init__(self) -> None:
        self.head: tuple[str, str, int, float] | None = None
        self.precision = PRECISIONS[0]
        self.form = ""
        self.inputs: list[Port] = []
        self.outputs: list[Port] = []
        self.homes: list[HomeDevice] = []
        self.buffers: list[Buffer] = []
        self.storages: list[Storage] = []
        self.turns: Repeat | None = None
        self.moves: list[Move] = []
        self.operators: list[ROperator] = []
        self.tasks: dict[str, int] = {}
        self.room = 0
        self.counters: list[Counter] = []
        self.rows: dict[int, tuple[Task, ...]] = {}
        self.pending: tuple[str, dict[str, int], str, tuple[tuple[str, int], ...]] | None = None
        self.computes: list[Compute] = []
        self.connections: list[Connection] = []
        self.waits: dict[str, tuple[Wait, ...]] = {}
        self.heads: dict[str, tuple[tuple[Wait, ...], str]] = {}
        self.tails: dict[str, tuple[int, ...]] = {}
        self.numbers: dict[str, tuple[int, ...]] = {}
        self.known = {word: (pattern.fullmatch, getattr(self, f"_{word}")) for word, pattern in _PATTERNS.items()}

    def feed(self, line: str) -> None:
        word = line.partition(" ")[0]
        match, read = self.known.get(word, (_match_nothing, _match_nothing))
        found = match(line)
        if found is None or (self.head is None) != (word == "program"):
            raise ValueError("not a line of a program")
        read(*found.groups())

    def _program(self, name: str, policy: str, veus: str, predicted: str, precision: str | None) -> None:
        self.head = (name, unquote_text(policy), int(veus), float(predicted))
        self.precision = precision or PRECISIONS[0]
        if int(veus) > MOST_ROWS or not math.isfinite(self.head[3]):
            raise ValueError(f"a program has at most {MOST_ROWS} rows and a finite time")

    def _input(self, external: str, tensor: str) -> None:
        self.inputs.append(Port(_parse_external(external), tensor))

    def _output(self, external: str, tensor: str) -> None:
        self.outputs.append(Port(_parse_external(external), tensor))

    def _form(self, name: str) -> None:
        if self.form:
            raise ValueError("'form' twice")
        self.form = name

    def _device(self, device: str, rows: str) -> None:
        self.homes.append(HomeDevice(unquote_text(device), int(rows)))

    def _buffer(self, name: str, dtype: str, size: str, kind: str, offset: str, home: str | None) -> None:
        if dtype not in LONG:
            raise ValueError(f"unknown element type {dtype}")
        self.buffers.append(Buffer(name, LONG[dtype], int(size), kind, int(offset), int(home or 0)))  # type: ignore[arg-type]

    def _storage(self, tensor: str, buffer: str, offset: str, shape: str, strides: str) -> None:
        for text in (shape, strides):
            if text not in self.numbers:
                self.numbers[text] = tuple([int(n) for n in text.split(",") if n.strip()])
        self.storages.append(Storage(tensor, buffer, int(offset), self.numbers[shape], self.numbers[strides]))

    def _repeat(self, count: str, step: str | None, until: str | None) -> None:
        if self.turns is not None:
            raise ValueError("'repeat' twice")
        self.turns = Repeat(int(count), (), AffineExtent.parse(until) if until else None, int(step or 1))

    def _move(self, when: str, *ends: str | None) -> None:
        if self.turns is None:
            raise ValueError("'move' in a program without 'repeat'")
        target, first, by, source, begin, step, size = ends
        places = (str(target), int(first or 0), int(by or 0), str(source), int(begin or 0), int(step or 0), int(size or 0))
        self.moves.append(Move(when, *places))  # type: ignore[arg-type]

    def _operator(self, name: str, tile: str, family: str | None, config: str | None) -> None:
        sizes = {axis: int(size) for axis, size in (part.split("=") for part in tile.split(", ") if part)}
        pairs = tuple((k, int(v)) for k, v in (item.split("=") for item in (config or "").split()))
        self.pending = (name, sizes, "" if family is None or family == GENERIC else family, pairs)
        self.computes, self.connections = [], []

    def _compute(self, text: str) -> None:
        self.computes.append(Compute.parse(text))

    def _connect(self, producer: str, layer: str, consumer: str) -> None:
        self.connections.append(Connection(producer, consumer, layer))

    def _writes(self, names: str) -> None:
        if self.pending is None:
            raise ValueError("'writes' outside an operator")
        name, tile, family, config = self.pending
        computes, connections = tuple(self.computes), tuple(self.connections)
        if not computes or [a.name for a in computes[-1].axes] != list(tile) or 0 in tile.values():
            raise ValueError(f"the tile of operator {name} does not match its last compute")
        operator = ROperator(name, computes, connections, tuple(names.split(", ")), tuple(tile.values()), family, config)
        self.operators.append(operator)
        self.tasks[name] = operator.task_count
        self.room = min(self.room + operator.task_count, MOST_TASKS)
        self.pending = None

    def _skip(self, text: str) -> None:
        if self.pending is not None or not self.operators:
            raise ValueError("'skip' must follow an operator")
        last = self.operators[-1]
        self.operators[-1] = replace(last, skips=(*last.skips, SkipTasks.parse(text, len(last.outputs))))

    def _reduce_bound(self, text: str) -> None:
        if self.pending is not None or not self.operators:
            raise ValueError("'reduce_bound' must follow an operator")
        last = self.operators[-1]
        self.operators[-1] = replace(last, reduce_bounds=(*last.reduce_bounds, ReduceBound.parse(text)))

    def _counter(self, name: str, operator: str, first: str, last: str) -> None:
        self.counters.append(Counter(name, operator, int(first), int(last)))

    def _row(self, first: str, last: str | None, body: str) -> None:
        low, high = int(first), int(last or first)
        if self.head is None or high >= self.head[2] or any(veu in self.rows for veu in range(low, high + 1)):
            raise ValueError("a row is out of range or occurs twice")
        runs = [self._run(part, high - low) for part in body.split(" | ")]
        self.room -= sum([run[4] for run in runs]) * (high - low + 1)
        if self.room < 0:
            raise ValueError("more tasks than the operators have")
        for number, veu in enumerate(range(low, high + 1)):
            tasks = list[Task]()
            for waits, operator, start, shift, count, step in runs:
                begin = start + shift * number
                tasks.append(Task(operator, begin, waits))
                if count > 1:
                    tasks += [Task(operator, begin + i * step) for i in range(1, count)]
            self.rows[veu] = tuple(tasks)

    def _run(self, part: str, folded: int) -> _Folded:
        """Parse a run. Raises ValueError unless its tasks, also in the last of ``folded`` rows, belong to its operator."""
        head, _, tail = part.partition("[")  # heads and tails repeat often, so both are cached
        if head not in self.heads:
            self.heads[head] = self._head_of_run(head, part)
        if tail not in self.tails:
            self.tails[tail] = _tail_of_run(tail, part)
        waits, operator = self.heads[head]
        tasks = self.tasks.get(operator, 0)
        start, shift, count, step = self.tails[tail]
        moved, length = shift * folded, step * (count - 1)
        ends = start, start + moved, start + length, start + moved + length
        if count < 1 or min(ends) < 0 or max(ends) >= tasks:
            raise ValueError(f"operator {operator} has {tasks} tasks, so task {max(ends)} does not exist")
        return waits, operator, start, shift, count, step

    def _head_of_run(self, head: str, part: str) -> tuple[tuple[Wait, ...], str]:
        """Parse the waits and the operator of a run."""
        match = _HEAD.fullmatch(head)
        if match is None:
            raise ValueError(f"not a run of tasks: {shorten_name(part)!r}")
        texts, operator = match.groups()
        waits = self.waits.setdefault(texts, tuple([Wait(c, int(n)) for c, n in _WAIT.findall(texts)]))
        return waits, operator

    def parts(self) -> ProgramParts:
        if self.head is None:
            raise ValueError("the text has no 'program' line")
        if self.pending is not None:
            raise ValueError(f"operator {self.pending[0]} is incomplete")
        name, policy, veus, predicted = self.head
        rows = tuple(self.rows.get(v, ()) for v in range(veus))
        return ProgramParts(
            name,
            policy,
            tuple(self.inputs),
            tuple(self.outputs),
            tuple(self.buffers),
            tuple(self.storages),
            tuple(self.operators),
            tuple(self.counters),
            rows,
            predicted,
            self.precision,
            None if self.turns is None else replace(self.turns, moves=tuple(self.moves)),
            tuple(self.homes),
            self.form,
        )


def _parse_external(text: str) -> str:
    """Parse the model's name of a port."""
    name = json.loads(text)
    if not isinstance(name, str):
        raise ValueError(f"not a name: {shorten_name(text)}")
    return name


def _tail_of_run(tail: str, part: str) -> tuple[int, ...]:
    """Parse the first task of a run, its shift per folded row, the number of tasks, and their step."""
    match = _TAIL.fullmatch(tail)
    if match is None:
        raise ValueError(f"not a run of tasks: {shorten_name(part)!r}")
    return tuple([int(n or 0) for n in match.groups()])


def _match_nothing(line: str) -> None:
    """Match no line, and return None."""
