"""A program in three parts: launches, the rows of one persistent kernel, launches.

Operators that hold constants on chip from step to step benefit from one kernel for all steps. Other operators benefit from
launches with a suitable block, clusters and early starts. A persistent kernel's one block shape excludes these, as for
DeepSpeech2's two convolutions before seven recurrent layers. The kernel gets the operators that hold constants and all between
them. All others are launched before or after it, in the same CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rammer.errors import DeviceFailure
from rammer.ir.program import RProgram, Task

from rammer_cuda.families import family_of


@dataclass(frozen=True)
class MixedParts:
    """The three parts of a program. ``rows`` is the part for one kernel, between the launches of ``before`` and ``after``, which
    may be None. A part has the program's buffers; those that later parts read are outputs."""

    before: RProgram | None
    rows: RProgram
    after: RProgram | None

    @property
    def launched(self) -> tuple[RProgram, ...]:
        """The parts that are launched."""
        return tuple(p for p in (self.before, self.after) if p is not None)


def split_parts(program: RProgram) -> MixedParts:
    """Return the parts of ``program``, whose operators and rows are in their order. The kernel's part begins with the first
    operator that holds constants and ends with the last one. Raises DeviceFailure if an order differs."""
    held = [i for i, o in enumerate(program.operators) if family_of(o).persistent]
    if not held:
        raise DeviceFailure(f"no operator of program {program.name} holds constants", hint="--option executor=graph")
    part = {o.name: 0 if i < held[0] else 1 if i <= held[-1] else 2 for i, o in enumerate(program.operators)}
    for row in program.rows:
        order = [part[t.operator] for t in row]
        early = any(part[program.counter[w.counter].operator] > part[t.operator] for t in row for w in t.waits)
        if early or order != sorted(order):
            raise DeviceFailure(
                f"rows of program {program.name} are not in the order of its parts", hint="compile the model again"
            )
    made = [_extract_part(program, part, which) for which in range(3)]
    assert made[1] is not None
    return MixedParts(made[0], made[1], made[2])


def _extract_part(program: RProgram, part: dict[str, int], which: int) -> RProgram | None:
    """Return the operators of one part with their tasks, and waits for each other; None without operators."""
    operators = tuple(o for o in program.operators if part[o.name] == which)
    if not operators:
        return None
    counters = tuple(c for c in program.counters if part[c.operator] == which)
    own, storage = {c.name for c in counters}, program.storage
    later = {storage[t].buffer for o in program.operators if part[o.name] > which for t in o.inputs}
    crossing = later & {storage[t].buffer for o in operators for t in o.outputs}
    rows = tuple(
        tuple(Task(t.operator, t.index, tuple(w for w in t.waits if w.counter in own)) for t in row if part[t.operator] == which)
        for row in program.rows
    )
    buffers = tuple(replace(b, kind="output") if b.name in crossing and b.kind == "arena" else b for b in program.buffers)
    return replace(program, operators=operators, counters=counters, rows=rows, buffers=buffers)
