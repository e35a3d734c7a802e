"""A program in three: launches, the rows of one persistent kernel, launches.

What holds constants on chip from step to step is worth one kernel for all steps. What runs once is worth a launch with a block of
its own, clusters and early starts, which a persistent kernel's one block shape does not give it: DeepSpeech2's two
convolutions, say, before seven recurrent layers. So the kernel gets the operators that hold constants and whatever lies between
them; all others are launched before it or behind it, in the same CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass

from rammer.ir.operator import RKernel, Written
from rammer.ir.program import Port, RProgram, Storage, dense
from rammer.plan.program_builder import Interface, build_program
from rammer.plan.waits import find_dependences
from rammer.schedule.policy import Schedule
from rammer.verify.expressions import VerifyError
from rammer.verify.in_place_state import state_pairs

from rammer_cuda.families import family_of
from rammer_cuda.persistent.dataflow import MOST_PRIVATE, with_private_buffers


@dataclass(frozen=True)
class ProgramStorages:
    """Where a program's tensors live, for building another one of its operators."""

    storages: Mapping[str, Storage]
    buffers: Mapping[str, tuple[str, int]]

    @staticmethod
    def of(program: RProgram) -> ProgramStorages:
        """Those of ``program``."""
        return ProgramStorages(program.storage, {b.name: (b.dtype, b.size) for b in program.buffers})

    def with_others(self, dtypes: Mapping[Storage, str]) -> ProgramStorages:
        """With storages, here by their element types, that fill buffers of their own."""
        buffers = {s.buffer: (dtype, math.prod(s.shape)) for s, dtype in dtypes.items()}
        return ProgramStorages({**self.storages, **{s.tensor: s for s in dtypes}}, {**self.buffers, **buffers})


@dataclass(frozen=True)
class MixedParts:
    """``whole`` is the program with buffers that share no memory; ``rows`` has what one kernel runs, between the launches of
    ``before`` and ``after``, which may be None. They are programs of their own, whose tensors lie where those of ``whole`` do."""

    whole: RProgram
    before: RProgram | None
    rows: RProgram
    after: RProgram | None

    @property
    def launched(self) -> tuple[RProgram, ...]:
        """What is launched."""
        return tuple(p for p in (self.before, self.after) if p is not None)


def cut_around(program: RProgram) -> MixedParts | None:
    """The program cut around what holds constants. None where that is all of it or nothing; where the parts cannot be told apart
    (a buffer that two of them write, turns, states, lengths); and where buffers of their own would take too much memory."""
    held = {o.name for o in program.operators if family_of(o).own}
    apart = (
        program.repeat is None
        and not program.homes
        and not state_pairs(program)
        and not any(o.endings for o in program.operators)
    )
    if not held or not apart:
        return None
    after = find_dependences(program.operators, program.storage)
    reached, needed = set[str](), set(held)
    for o in program.operators:
        if o.name in held or not reached.isdisjoint(after[o.name]):
            reached.add(o.name)
    for o in reversed(program.operators):
        if o.name in needed:
            needed.update(after[o.name])
    place = {o.name: 0 if o.name not in reached else 1 if o.name in needed else 2 for o in program.operators}
    whole = with_private_buffers(program)
    if {*place.values()} == {1} or whole.arena_bytes > MOST_PRIVATE or not _written_apart(program, place):
        return None
    try:
        parts = [_extract_part(program, after, {n for n, p in place.items() if p == which}) for which in range(3)]
    except VerifyError:  # made by hand, such as one that leaves parts of an output as they are
        return None
    assert parts[1] is not None
    return MixedParts(whole, parts[0], parts[1], parts[2])


def _written_apart(program: RProgram, place: Mapping[str, int]) -> bool:
    """Whether every buffer is written in one part alone."""
    writer = dict[str, int]()
    written = ((program.storage[t].buffer, place[o.name]) for o in program.operators for t in o.outputs)
    return all(writer.setdefault(buffer, part) == part for buffer, part in written)


def _extract_part(program: RProgram, after: Mapping[str, Collection[str]], names: Set[str]) -> RProgram | None:
    """The program of these operators: what others give it or read of it are its ports. None where there are none."""
    if not names:
        return None
    operators, storage = [o for o in program.operators if o.name in names], program.storage
    touched = {storage[t].buffer for o in operators for t in (*o.inputs, *o.outputs)}
    written = {storage[t].buffer for o in operators for t in o.outputs}
    others = [o for o in program.operators if o.name not in names and not names.isdisjoint(after[o.name])]
    read = {storage[t].buffer for o in others for t in o.inputs}
    inputs = [p for p in program.inputs if storage[p.tensor].buffer in touched]
    outputs = [p for p in program.outputs if storage[p.tensor].buffer in written]
    constants = [s.tensor for s in program.storages if program.buffer[s.buffer].kind == "constant"]
    known = {storage[t].buffer for t in (*constants, *(p.tensor for p in (*inputs, *outputs)))}
    crossing = {b: dense(f"{b}_whole", b, (program.buffer[b].size,)) for b in program.buffer if b not in known}
    inputs += [Port(s.tensor, s.tensor) for b, s in crossing.items() if b in touched - written]
    outputs += [Port(s.tensor, s.tensor) for b, s in crossing.items() if b in written & read]
    kernels = tuple(RKernel(o, _forbid_writing) for o in operators)
    rows = tuple(tuple((t.operator, t.index) for t in row if t.operator in names) for row in program.rows)
    return build_program(
        Interface(program.name, tuple(inputs), tuple(outputs), constants),
        Schedule(kernels, tuple((o.name,) for o in operators), rows, False, program.predicted),
        ProgramStorages({**storage, **{s.tensor: s for s in crossing.values()}}, ProgramStorages.of(program).buffers),
        policy=program.policy,
        precision=program.precision,
    )


def _forbid_writing() -> Written:
    raise AssertionError("schedules ask for no text")
