"""The text form of an RProgram: deterministic, diffable, and read back to an equal object.

Rows print as runs ``operator[start:count:step]``; consecutive rows that differ only by a constant
shift of every start print folded, ``row v0..v55`` with ``start+shift``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from rammer.ir.compute import Compute
from rammer.ir.operator import Connection, ROperator
from rammer.ir.parts import Buffer, Counter, Port, ProgramParts, Storage, Task, Wait
from rammer.ir.types import LONG, SHORT


@dataclass(frozen=True, slots=True)
class _Run:
    """``count`` tasks of one operator from ``start`` by ``step``; only the first one waits."""

    operator: str
    start: int
    count: int
    step: int
    waits: tuple[Wait, ...]

    def text(self, shift: int = 0) -> str:
        start = f"{self.start}+{shift}" if shift else str(self.start)
        waits = " ".join(f"wait({w.counter}>={w.threshold})" for w in self.waits)
        return f"{waits + ' ' if waits else ''}{self.operator}[{start}:{self.count}:{self.step}]"


def _runs(row: tuple[Task, ...]) -> list[_Run]:
    runs: list[_Run] = []
    for task in row:
        last = runs[-1] if runs else None
        if last is not None and last.operator == task.operator and not task.waits:
            gap = task.index - last.start
            if last.count == 1 or gap == last.count * last.step:
                step = gap if last.count == 1 else last.step
                runs[-1] = _Run(last.operator, last.start, last.count + 1, step, last.waits)
                continue
        runs.append(_Run(task.operator, task.index, 1, 1, task.waits))
    return runs


def _shift(a: list[_Run], b: list[_Run]) -> tuple[int, ...] | None:
    """Per-run shift from row ``a`` to row ``b`` when they are otherwise alike."""
    if len(a) != len(b):
        return None
    alike = all((p.operator, p.count, p.step, p.waits) == (q.operator, q.count, q.step, q.waits)
                for p, q in zip(a, b, strict=True))  # fmt: skip
    return tuple(q.start - p.start for p, q in zip(a, b, strict=True)) if alike else None


def _row_lines(rows: tuple[tuple[Task, ...], ...]) -> Iterator[str]:
    runs = [_runs(row) for row in rows]
    shifts = [_shift(a, b) for a, b in pairwise(runs)]
    first = 0
    while first < len(rows):
        last = first
        while last + 1 < len(rows) and shifts[last] is not None and shifts[last] == shifts[first]:
            last += 1
        if runs[first]:
            moves = (shifts[first] if last > first else None) or (0,) * len(runs[first])
            body = " | ".join(r.text(m) for r, m in zip(runs[first], moves, strict=True))
            yield f"  row v{first}{f'..v{last}' if last > first else ''}: {body}"
        first = last + 1


def format_parts(p: ProgramParts) -> str:
    """The whole program as text."""
    lines = [f"program {p.name} policy {p.policy} on {len(p.rows)} vEUs, predicted {p.predicted!r} s"]
    lines += [f"  input {json.dumps(i.external)} -> {i.tensor}" for i in p.inputs]
    lines += [f"  output {json.dumps(o.external)} <- {o.tensor}" for o in p.outputs]
    lines += [f"  buffer {b.name}: {SHORT[b.dtype]} {b.size} {b.kind} @{b.offset}" for b in p.buffers]
    lines += [
        f"  storage {s.tensor}: {s.buffer}+{s.offset} {list(s.shape)} strides {list(s.strides)}" for s in p.storages
    ]
    for o in p.operators:
        lines += [f"  {line}" for line in str(o).splitlines()]
    lines += [f"  counter {c.name}: {c.operator}[{c.first}:{c.last}]" for c in p.counters]
    lines += _row_lines(p.rows)
    return "\n".join(lines) + "\n"


def parse_parts(text: str) -> ProgramParts:
    """Read what ``format_parts`` wrote; ValueError names the first line that is wrong."""
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                reader.feed(line.strip())
            except (ValueError, KeyError, IndexError, SyntaxError) as problem:
                raise ValueError(f"line {number}: {problem}\n  {line}") from problem
    return reader.parts()


_PATTERNS = {
    "program": re.compile(r"program (\S+) policy (\S+) on (\d+) vEUs, predicted (\S+) s"),
    "input": re.compile(r"input (\".*\") -> (\w+)"),
    "output": re.compile(r"output (\".*\") <- (\w+)"),
    "buffer": re.compile(r"buffer (\w+): (\w+) (\d+) (input|output|constant|arena) @(\d+)"),
    "storage": re.compile(r"storage (\w+): (\w+)\+(-?\d+) \[(.*)\] strides \[(.*)\]"),
    "operator": re.compile(r"operator (\S+) tile\[(.*?)\](?: family (\S+)(.*))?"),
    "compute": re.compile(r"compute (.*)"),
    "connect": re.compile(r"connect (\w+) <(\w+)> (\w+)"),
    "writes": re.compile(r"writes (.*)"),
    "counter": re.compile(r"counter (\S+): (\S+)\[(\d+):(\d+)\]"),
    "row": re.compile(r"row v(\d+)(?:\.\.v(\d+))?: (.*)"),
}
_RUN = re.compile(r"((?:wait\([^)]*\) )*)(\S+)\[(\d+)(?:\+(-?\d+))?:(\d+):(-?\d+)\]")
_WAIT = re.compile(r"wait\((\S+)>=(\d+)\)")


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())


class _Reader:
    """Collects lines into the parts of a program."""

    def __init__(self) -> None:
        self.head: tuple[str, str, int, float] | None = None
        self.inputs: list[Port] = []
        self.outputs: list[Port] = []
        self.buffers: list[Buffer] = []
        self.storages: list[Storage] = []
        self.operators: list[ROperator] = []
        self.counters: list[Counter] = []
        self.rows: dict[int, tuple[Task, ...]] = {}
        self.pending: tuple[str, tuple[int, ...], str, tuple[tuple[str, int], ...]] | None = None
        self.computes: list[Compute] = []
        self.connections: list[Connection] = []

    def feed(self, line: str) -> None:
        word = line.split(maxsplit=1)[0]
        match = _PATTERNS[word].fullmatch(line) if word in _PATTERNS else None
        if match is None:
            raise ValueError("not a line of a program")
        getattr(self, f"_{word}")(*match.groups())

    def _program(self, name: str, policy: str, veus: str, predicted: str) -> None:
        self.head = (name, policy, int(veus), float(predicted))

    def _input(self, external: str, tensor: str) -> None:
        self.inputs.append(Port(json.loads(external), tensor))

    def _output(self, external: str, tensor: str) -> None:
        self.outputs.append(Port(json.loads(external), tensor))

    def _buffer(self, name: str, dtype: str, size: str, kind: str, offset: str) -> None:
        self.buffers.append(Buffer(name, LONG[dtype], int(size), kind, int(offset)))  # type: ignore[arg-type]

    def _storage(self, tensor: str, buffer: str, offset: str, shape: str, strides: str) -> None:
        self.storages.append(Storage(tensor, buffer, int(offset), _ints(shape), _ints(strides)))

    def _operator(self, name: str, tile: str, family: str | None, config: str | None) -> None:
        sizes = tuple(int(part.split("=")[1]) for part in tile.split(", ") if part)
        pairs = tuple((k, int(v)) for k, v in (item.split("=") for item in (config or "").split()))
        self.pending = (name, sizes, family or "", pairs)
        self.computes, self.connections = [], []

    def _compute(self, text: str) -> None:
        self.computes.append(Compute.parse(text))

    def _connect(self, producer: str, layer: str, consumer: str) -> None:
        self.connections.append(Connection(producer, consumer, layer))  # type: ignore[arg-type]

    def _writes(self, names: str) -> None:
        if self.pending is None:
            raise ValueError("'writes' outside an operator")
        name, tile, family, config = self.pending
        computes, connections = tuple(self.computes), tuple(self.connections)
        outputs = tuple(names.split(", "))
        self.operators.append(ROperator(name, computes, connections, outputs, tile, family, config))
        self.pending = None

    def _counter(self, name: str, operator: str, first: str, last: str) -> None:
        self.counters.append(Counter(name, operator, int(first), int(last)))

    def _row(self, first: str, last: str | None, body: str) -> None:
        runs = [_folded(part) for part in body.split(" | ")]
        for number, veu in enumerate(range(int(first), int(last or first) + 1)):
            self.rows[veu] = tuple(task for run in runs for task in run.tasks(number))

    def parts(self) -> ProgramParts:
        if self.head is None:
            raise ValueError("the text has no 'program' line")
        name, policy, veus, predicted = self.head
        rows = tuple(self.rows.get(v, ()) for v in range(veus))
        return ProgramParts(name, policy, tuple(self.inputs), tuple(self.outputs), tuple(self.buffers),
                            tuple(self.storages), tuple(self.operators), tuple(self.counters), rows, predicted)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Folded:
    """``count`` tasks from ``start``, ``step`` apart; in each following row of a fold ``shift`` further on."""

    waits: tuple[Wait, ...]
    operator: str
    start: int
    shift: int
    count: int
    step: int

    def tasks(self, number: int) -> list[Task]:
        """Its tasks in row ``number`` of the fold."""
        begin = self.start + self.shift * number
        rest = [Task(self.operator, begin + i * self.step) for i in range(1, self.count)]
        return [Task(self.operator, begin, self.waits), *rest] if self.count else []


def _folded(part: str) -> _Folded:
    match = _RUN.fullmatch(part)
    if match is None:
        raise ValueError(f"not a run of tasks: {part!r}")
    waits, operator, start, shift, count, step = match.groups()
    needed = tuple(Wait(c, int(n)) for c, n in _WAIT.findall(waits))
    return _Folded(needed, operator, int(start), int(shift or 0), int(count), int(step))
