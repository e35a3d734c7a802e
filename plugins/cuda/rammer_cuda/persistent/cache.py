"""The plan of words of a program, cached for the next process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rammer.device.manifest import Binding
from rammer.ir.program import Counter, RProgram, Task, Wait

from rammer_cuda.cache import cached
from rammer_cuda.persistent.dataflow import Dataflow, plan_words, with_private_buffers


def cached_words(program: RProgram, binding: Binding) -> Dataflow:
    """``plan_words`` of the program, cached for the next process. Best effort."""
    return cached(program, binding, "words").get(
        lambda record: _planned(record, program), lambda: plan_words(program, binding), _record
    )


def _record(flow: Dataflow) -> dict[str, Any]:
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


def _planned(record: Any, program: RProgram) -> Dataflow:
    """The plan in ``record``; without words the program is as it was."""
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
    return Dataflow(replace(with_private_buffers(program), rows=tuple(rows), counters=counters), words, stored, kinds)
