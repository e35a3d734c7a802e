"""Events of a Chrome trace, for Perfetto and chrome://tracing: one per task, with its ONNX nodes, its waits and its share of the
operator's traffic and arithmetic. Times are in microseconds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from rammer.device.manifest import Span
from rammer.ir.names import shorten_name
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram
from rammer.ir.types import TensorType, itemsize

Event: TypeAlias = "dict[str, Any]"
#: ONNX nodes listed per operator.
MOST_NODES: Final = 3


def trace_json(events: Iterable[Event]) -> str:
    """Return a trace as JSON."""
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": list(events)})


def name_event(what: str, name: str, process: int, thread: int = 0) -> Event:
    """Return the event that names a process or a thread; ``what`` is ``process_name`` or ``thread_name``."""
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


@dataclass(frozen=True)
class TaskEvents:
    """The facts about the tasks of a program: those of each operator, and the waits of each task that has some."""

    operators: Mapping[str, Mapping[str, object]]
    waits: Mapping[tuple[str, int], str]

    @staticmethod
    def of(program: RProgram, kinds: Mapping[str, str]) -> TaskEvents:
        """Return the facts about a program. ``kinds`` has the types of ONNX nodes by name."""
        counter = program.counter
        waits = {
            (t.operator, t.index): ", ".join(
                f"{w.threshold} of {counter[w.counter].total} tasks of {counter[w.counter].operator}" for w in t.waits
            )
            for row in program.rows
            for t in row
            if t.waits
        }
        return TaskEvents({o.name: _operator_facts(o, program, kinds) for o in program.operators}, waits)

    def event(self, span: Span, process: int, thread: int) -> Event:
        """Return the event of a task."""
        waits = self.waits.get((span.operator, span.index))
        facts = {"task": span.index, **self.operators.get(span.operator, {}), **({"waits": waits} if waits else {})}
        begin, length = span.start * 1e6, (span.end - span.start) * 1e6
        where = {"pid": process, "tid": thread, "ts": begin, "dur": length}
        return {"name": span.operator, "cat": "task", "ph": "X", **where, "args": facts}


def _operator_facts(operator: ROperator, program: RProgram, kinds: Mapping[str, str]) -> dict[str, object]:
    nodes = [n for n in dict.fromkeys(c.origin for c in operator.computes) if n]
    facts = {"onnx": describe_nodes(nodes, kinds)} if nodes else {}
    tasks = max(operator.task_count, 1)
    return {**facts, "bytes": operator_traffic(operator, program.types) // tasks, "flop": operator.flops // tasks}


def describe_nodes(nodes: list[str], kinds: Mapping[str, str]) -> str:
    """Return the first names of ONNX nodes with their types."""
    named = [f"{shorten_name(n)} ({kinds[n]})" if kinds.get(n) else shorten_name(n) for n in nodes[:MOST_NODES]]
    return ", ".join(named) + (f" and {len(nodes) - MOST_NODES} more" if len(nodes) > MOST_NODES else "")


def operator_traffic(operator: ROperator, types: Mapping[str, TensorType]) -> int:
    """Return the bytes of the outputs, and of the inputs as far as they are read: one element per load and evaluation."""
    read = Counter[str]()
    for c in operator.computes:
        for load in c.loads:
            read[load.tensor] += c.points
    inputs = sum(min(read[t], types[t].size) * itemsize(types[t].dtype) for t in operator.inputs if t in types)
    return inputs + sum(types[t].nbytes for t in operator.outputs if t in types)
