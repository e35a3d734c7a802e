"""Values that are their own flags: the tensors that travel as words, and the remaining waits.

A cell that needs the previous step's vector must wait for all of it. Producers signal a counter, the reader polls the counter and
then reads the values: three trips to the second-level cache. Words that are empty until written signal their own arrival, in one
trip. That is sound under three conditions, which hold here. A word is written once per run (so buffers never share memory). A
word orders no other read. Every other read has a separate wait, or comes after its writer on the same row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rammer.codegen.writer import kinds_of, tensor_renaming
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator
from rammer.ir.overlap import has_overlap
from rammer.ir.program import Counter, RProgram, Storage, Task, Wait
from rammer.verify import state_pairs

from rammer_cuda.families import family_of
from rammer_cuda.family import Held
from rammer_cuda.kernel_cache import make_cache_entry


@dataclass(frozen=True, slots=True)
class Dataflow:
    """A ``program`` with the remaining waits, and its tensors that travel as words.

    ``words`` lists these tensors by operator that sends or receives them. ``stored`` are outputs of those operators that others
    read normally. ``kinds`` are equal for operators whose kernels have equal texts."""

    program: RProgram
    words: Mapping[str, frozenset[str]]
    stored: frozenset[str]
    kinds: Mapping[str, int]


def plan_words(program: RProgram, binding: Binding) -> Dataflow:
    """Plan words for tensors that a constant-holding family reads only as vectors, from an operator of one. Returns ``program``
    itself without any, or if its buffers share memory."""
    reads = _Writers(program, binding)
    kinds = reads.kinds
    received = {o.name: frozenset(x for x in reads.vectors.get(o.name, ()) if reads.sender(o.name, x)) for o in program.operators}
    if not any(received.values()) or shares_memory(program):
        return Dataflow(program, {}, _all_outputs(program), kinds)
    sent: dict[str, set[str]] = {}
    for name, tensors in received.items():
        for x in tensors:
            sent.setdefault(reads.sender(name, x), set()).add(x)
    stored = {
        x
        for o in program.operators
        for t in reads.inputs[o.name]
        if t not in received[o.name]
        for _, x in reads.writers[o.name, t]
    }
    stored |= {
        t for o in program.operators for t in o.outputs if program.buffer[program.storage[t].buffer].kind in ("output", "state")
    }
    rows, counters = _plan_remaining_waits(program, reads, received)
    words = {o.name: received[o.name] | frozenset(sent.get(o.name, ())) for o in program.operators}
    return Dataflow(replace(program, rows=rows, counters=counters), words, frozenset(stored), kinds)


def as_planned(program: RProgram, binding: Binding) -> Dataflow:
    """Return ``program`` with unchanged waits and without words."""
    return Dataflow(program, {}, _all_outputs(program), kinds_of(program.operators, binding))


def _all_outputs(program: RProgram) -> frozenset[str]:
    return frozenset(t for o in program.operators for t in o.outputs)


def shares_memory(program: RProgram) -> bool:
    """Return True if two arena buffers of ``program`` have bytes in common."""
    spans = sorted((b.offset, b.offset + b.nbytes) for b in program.buffers if b.kind == "arena" and b.nbytes)
    return any(first[1] > second[0] for first, second in pairwise(spans))


class _Writers:
    """The writers of each operator's inputs: ``writers[operator, tensor]`` lists (operator, its output tensor). ``vectors`` are
    the tensors that a constant-holding family reads only as vectors."""

    def __init__(self, program: RProgram, binding: Binding) -> None:
        self.program = program
        by_buffer: dict[str, list[tuple[str, Storage]]] = {}
        for o in program.operators:
            for t in o.outputs:
                by_buffer.setdefault(program.storage[t].buffer, []).append((o.name, program.storage[t]))
        self.writers: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self.inputs = {o.name: o.inputs for o in program.operators}  # ``inputs`` walks the expressions on every access
        past = {*state_pairs(program).values()}  # elements read as the input may be old or new
        for o in program.operators:
            for t in self.inputs[o.name]:
                if t in past:
                    self.writers[o.name, t] = []
                    continue
                mine = program.storage[t]
                meet = [(w, s.tensor) for w, s in by_buffer.get(mine.buffer, ()) if has_overlap(s, mine)]
                self.writers[o.name, t] = meet
        holding = [(o, held) for o in program.operators if (held := family_of(o).persistent)]
        self.holding = {o.name for o, _ in holding}
        self.kinds = kinds_of(program.operators, binding)
        self.vectors = self._vector_inputs(holding, binding)

    def sender(self, reader: str, tensor: str) -> str:
        """Return the constant-holding operator that is the only writer of ``tensor``, as its output, or ""."""
        found = self.writers[reader, tensor]
        return found[0][0] if len(found) == 1 and found[0][1] == tensor and found[0][0] in self.holding else ""

    def _vector_inputs(self, holding: Sequence[tuple[ROperator, Held]], binding: Binding) -> dict[str, frozenset[str]]:
        """Return the tensors that each operator reads only as vectors; equal operators are analysed once."""
        known: dict[int, tuple[ROperator, frozenset[str]]] = {}
        result: dict[str, frozenset[str]] = {}
        for o, held in holding:
            kind = self.kinds[o.name]
            if kind not in known:
                known[kind] = o, held.vectors(o, binding)
            first, found = known[kind]
            names = tensor_renaming(first, o)
            result[o.name] = frozenset(names[t] for t in found)
        return result


def _plan_remaining_waits(
    program: RProgram, reads: _Writers, received: Mapping[str, frozenset[str]]
) -> tuple[tuple[tuple[Task, ...], ...], tuple[Counter, ...]]:
    """Return the rows and counters. Tasks wait for all writers of their normal reads, except earlier work of their row."""
    tasks, own, used = {o.name: o.task_count for o in program.operators}, _Own(program, reads), dict[str, None]()
    plain = {
        n: [(t, w, x) for t in tensors if t not in received[n] for w, x in reads.writers[n, t]]
        for n, tensors in reads.inputs.items()
    }
    rows = list[tuple[Task, ...]]()
    for number, row in enumerate(program.rows):
        known, result = set[str](), list[Task]()
        for task in row:
            needed = dict.fromkeys([w for t, w, x in plain[task.operator] if not own(number, task, t, w, x)])
            missing = [w for w in needed if w not in known and tasks[w]]
            known.update(missing)
            used.update(dict.fromkeys(missing))
            result.append(Task(task.operator, task.index, tuple(Wait(w, tasks[w]) for w in missing)))
            own.done(number, task)
        rows.append(tuple(result))
    return tuple(rows), tuple(Counter(n, n, 0, tasks[n]) for n in used)


class _Own:
    """A predicate: a task reads only the output of another operator's task of equal index, earlier on its row."""

    def __init__(self, program: RProgram, reads: _Writers) -> None:
        self.program, self.inputs, self.before = program, reads.inputs, set[tuple[int, str, int]]()
        self.same: dict[tuple[object, ...], bool] = {}
        self.kind = {o.name: (reads.kinds[o.name], o.grid) for o in program.operators}

    def done(self, row: int, task: Task) -> None:
        """Record that ``row`` has passed ``task``."""
        self.before.add((row, task.operator, task.index))

    def __call__(self, row: int, task: Task, tensor: str, writer: str, written: str) -> bool:
        """Return True if it holds for ``tensor``, read by ``task`` and written by ``writer`` as its output ``written``."""
        if tensor != written or (row, writer, task.index) not in self.before:
            return False
        own = self.program.operator[writer].shared[written]
        key = self.kind[task.operator], self.inputs[task.operator].index(tensor), self.kind[writer][1], own, task.index
        if key not in self.same:
            reader, other = self.program.operator[task.operator], self.program.operator[writer]
            box = reader.boxes(reader.task_box(task.index), self.program.types).get(tensor, ())
            have = other.part(written, other.task_box(task.index)) if other.grid == reader.grid else ()
            inside = len(box) == len(have) and all(h[0] <= b[0] and b[1] <= h[1] for b, h in zip(box, have, strict=True))
            self.same[key] = inside
        return self.same[key]


def cached_words(program: RProgram, binding: Binding) -> Dataflow:
    """Return ``plan_words`` of the program, cached for the next process. Best effort."""
    return make_cache_entry(program, binding, "words").get(
        lambda record: _load_dataflow(record, program), lambda: plan_words(program, binding), _dataflow_record
    )


def _dataflow_record(flow: Dataflow) -> dict[str, Any]:
    return {
        "kinds": flow.kinds,
        "words": {n: sorted(w) for n, w in flow.words.items()},
        "stored": sorted(flow.stored),
        "counters": [[c.name, c.operator, c.first, c.last] for c in flow.program.counters],
        "waits": [
            [[order, [[w.counter, w.threshold] for w in t.waits]] for order, t in enumerate(row) if t.waits]
            for row in flow.program.rows
        ],
    }


def _load_dataflow(record: Any, program: RProgram) -> Dataflow:
    """Load the plan in ``record``; without words the program is unchanged."""
    words = {str(n): frozenset(w) for n, w in record["words"].items()}
    stored, kinds = frozenset(record["stored"]), {o.name: int(record["kinds"][o.name]) for o in program.operators}
    if not words:
        return Dataflow(program, words, stored, kinds)
    rows = list[tuple[Task, ...]]()
    for row, recorded in zip(program.rows, record["waits"], strict=True):
        tasks = [Task(t.operator, t.index) if t.waits else t for t in row]
        for order, waits in recorded:
            tasks[order] = Task(tasks[order].operator, tasks[order].index, tuple([Wait(c, n) for c, n in waits]))
        rows.append(tuple(tasks))
    counters = tuple(Counter(*c) for c in record["counters"])
    return Dataflow(replace(program, rows=tuple(rows), counters=counters), words, stored, kinds)
