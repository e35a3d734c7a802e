"""What is worked out of a program when it is loaded, kept in the cache folder: kernels, and the plan of words.

To do that again takes longer than all else of a warm start. Only kernels that read packed constants are written again, since how
to pack them cannot be kept; those are quickly written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rammer.codegen.task import Argument
from rammer.device.manifest import Binding
from rammer.ir.program import Counter, RProgram, Task, Wait

from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.persistent.dataflow import Dataflow, plan_words, with_private_buffers
from rammer_cuda.remember import Remembered
from rammer_cuda.source import generator_hash, task_kernel, task_kernels


def kept_kernels(program: RProgram, binding: Binding) -> dict[str, TaskKernel]:
    """``task_kernels`` of the program, remembered for the next process. Best effort."""
    kept = _remembered(program, binding, "kernels")
    try:
        return _restored(kept.read(), program, binding)
    except (TypeError, ValueError, LookupError):  # nothing there, or not what is written below
        made = task_kernels(program.operators, binding)
    kept.write(_record(made))
    return made


def kept_words(program: RProgram, binding: Binding) -> Dataflow:
    """``plan_words`` of the program, remembered for the next process. Best effort."""
    kept = _remembered(program, binding, "words")
    try:
        return _planned(kept.read(), program)
    except (TypeError, ValueError, LookupError):  # as above
        flow = plan_words(program, binding)
    kept.write({
        "kinds": flow.kinds, "words": {n: sorted(w) for n, w in flow.words.items()}, "stored": sorted(flow.stored),
        "counters": [[c.name, c.operator, c.first, c.last] for c in flow.program.counters],
        "waits": [[[order, [[w.counter, w.threshold] for w in t.waits]] for order, t in enumerate(row) if t.waits]
                  for row in flow.program.rows],
    })  # fmt: skip
    return flow


def _remembered(program: RProgram, binding: Binding, what: str) -> Remembered:
    return Remembered(program, what, generator_hash(), " ".join(sorted(binding.constants)))


def _planned(record: Any, program: RProgram) -> Dataflow:
    """The plan in ``record``; without words the program is as it was."""
    words = {str(n): frozenset(w) for n, w in record["words"].items()}
    stored, kinds = frozenset(record["stored"]), {o.name: int(record["kinds"][o.name]) for o in program.operators}
    if not words:
        return Dataflow(program, words, stored, kinds)
    rows = list[tuple[Task, ...]]()
    for row, kept in zip(program.rows, record["waits"], strict=True):
        tasks = [replace(t, waits=()) if t.waits else t for t in row]
        for order, waits in kept:
            tasks[order] = replace(tasks[order], waits=tuple(Wait(c, n) for c, n in waits))
        rows.append(tuple(tasks))
    counters = tuple(Counter(*c) for c in record["counters"])
    return Dataflow(replace(with_private_buffers(program), rows=tuple(rows), counters=counters), words, stored, kinds)


def _record(kernels: Mapping[str, TaskKernel]) -> dict[str, Any]:
    """Distinct kernels, and by operator the number of its kernel and its tensors."""
    numbers: dict[tuple[object, ...], int] = {}
    distinct, users = list[dict[str, Any]](), dict[str, tuple[int, list[str]]]()
    for name, k in kernels.items():
        packings = tuple(a.packing and a.packing.key for a in k.arguments)
        number = numbers.setdefault((k.entry, *packings), len(numbers))
        if number == len(distinct):
            form = {"written": [a.written for a in k.arguments], "threads": k.threads, "shared": k.shared,
                    "dynamic": k.dynamic, "blocks": k.blocks}  # fmt: skip
            distinct.append({"like": name} if any(packings) else {"entry": k.entry, "text": k.text, **form})
        users[name] = number, [a.tensor for a in k.arguments]
    return {"kernels": distinct, "operators": users}


def _restored(record: Any, program: RProgram, binding: Binding) -> dict[str, TaskKernel]:
    """The inverse. TypeError, ValueError or LookupError where ``record`` is none of this program."""
    kernels = [_kernel(k, program, binding) for k in record["kernels"]]
    result: dict[str, TaskKernel] = {}
    for o in program.operators:
        number, tensors = record["operators"][o.name]
        arguments = zip(kernels[number].arguments, tensors, strict=True)
        result[o.name] = replace(kernels[number], arguments=tuple(replace(a, tensor=t) for a, t in arguments))
    return result


def _kernel(k: Mapping[str, Any], program: RProgram, binding: Binding) -> TaskKernel:
    if "like" in k:
        return task_kernel(program.operator[k["like"]], binding)
    arguments = tuple(Argument("", bool(w)) for w in k["written"])
    return TaskKernel(k["entry"], k["text"], arguments, k["threads"], k["shared"], k["dynamic"], k["blocks"])
