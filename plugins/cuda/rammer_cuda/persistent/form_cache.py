"""A cache of the persistent executor's results for a program, for the next process: its form for rows, and the plan of words."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from rammer.compiled.program_values import of_generators
from rammer.device.manifest import Binding
from rammer.errors import RammerError
from rammer.ir.program import Counter, RProgram, Task, Wait
from rammer.verify import verify

from rammer_cuda.families import family_of
from rammer_cuda.gpu import Gpu
from rammer_cuda.kernel_cache import Cached, make_cache_entry
from rammer_cuda.persistent.dataflow import Dataflow, plan_words, with_private_buffers
from rammer_cuda.persistent.fit_to_block import Fitted, fit_program


def cached_fit(program: RProgram, binding: Binding, gpu: Gpu) -> Fitted:
    """Return ``fit_program`` of the program, cached for the next process if kernels are compared for it. Best effort."""
    if program.repeat is not None or any(family_of(o).persistent for o in program.operators):
        return fit_program(program, binding, gpu)
    place = Cached(program, "fitted", *of_generators("rammer_cuda", binding), repr(gpu))
    found: Fitted = place.get(
        lambda record: _load_fitted(record, program), lambda: fit_program(program, binding, gpu), partial(_fit_record, program)
    )
    return found


def _fit_record(program: RProgram, found: Fitted) -> dict[str, Any]:
    text = "" if found.program is program else str(found.program)
    return {"program": text, "threads": found.threads, "blocks": found.blocks}


def _load_fitted(record: Any, program: RProgram) -> Fitted:
    """Load the form in ``record``, verified like any cached program; without a text the program is unchanged."""
    made = program
    if text := record["program"]:
        try:
            made = RProgram.parse(text)
            verify(made)
        except RammerError as problem:
            raise ValueError(problem.what) from problem
        if (made.inputs, made.outputs) != (program.inputs, program.outputs):
            raise ValueError("inputs or outputs differ from the program's")
    return Fitted(made, int(record["threads"]), int(record["blocks"]))


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
    return Dataflow(replace(with_private_buffers(program), rows=tuple(rows), counters=counters), words, stored, kinds)
