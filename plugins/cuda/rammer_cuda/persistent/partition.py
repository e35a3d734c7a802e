"""A program in three parts: launches, the rows of one persistent kernel, launches.

Operators that hold constants on chip from step to step benefit from one kernel for all steps. Other operators benefit from
launches with a suitable block, clusters and early starts. A persistent kernel's one block shape excludes these, as for
DeepSpeech2's two convolutions before seven recurrent layers. The kernel gets the operators that hold constants and all between
them. All others are launched before or after it, in the same CUDA graph.
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
from rammer.verify import VerifyError, state_pairs

from rammer_cuda.families import family_of
from rammer_cuda.persistent.dataflow import MOST_PRIVATE, with_private_buffers


@dataclass(frozen=True)
class ProgramStorages:
    """The storages of a program's tensors, for building another program of its operators."""

    storages: Mapping[str, Storage]
    buffers: Mapping[str, tuple[str, int]]

    @staticmethod
    def of(program: RProgram) -> ProgramStorages:
        """Return the storages of ``program``."""
        return ProgramStorages(program.storage, {b.name: (b.dtype, b.size) for b in program.buffers})

    def with_others(self, dtypes: Mapping[Storage, str]) -> ProgramStorages:
        """Return the storages with additional ones, here by their element types, that fill separate buffers."""
        buffers = {s.buffer: (dtype, math.prod(s.shape)) for s, dtype in dtypes.items()}
        return ProgramStorages({**self.storages, **{s.tensor: s for s in dtypes}}, {**self.buffers, **buffers})


@dataclass(frozen=True)
class MixedParts:
    """A program with buffers that share no memory (``whole``), and its three parts.

    ``rows`` is the part for one kernel, between the launches of ``before`` and ``after``, which may be None. The parts are
    separate programs, whose tensors have the storages of ``whole``."""

    whole: RProgram
    before: RProgram | None
    rows: RProgram
    after: RProgram | None

    @property
    def launched(self) -> tuple[RProgram, ...]:
        """The parts that are launched."""
        return tuple(p for p in (self.before, self.after) if p is not None)


def cut_around(program: RProgram) -> MixedParts | None:
    """Return the program cut around its constant-holding operators, or None.

    Returns None if these are all or nothing, or if separate buffers would need too much memory. Also returns None for inseparable
    parts (a buffer that two of them write, iterations, states, lengths)."""
    held = {o.name for o in program.operators if family_of(o).persistent}
    separable = (
        program.repeat is None and not program.homes and not state_pairs(program) and not any(o.skips for o in program.operators)
    )
    if not held or not separable:
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
    except VerifyError:  # built by hand, for example with parts of an output unwritten
        return None
    assert parts[1] is not None
    return MixedParts(whole, parts[0], parts[1], parts[2])


def _written_apart(program: RProgram, place: Mapping[str, int]) -> bool:
    """Return True if every buffer is written in one part alone."""
    writer = dict[str, int]()
    written = ((program.storage[t].buffer, place[o.name]) for o in program.operators for t in o.outputs)
    return all(writer.setdefault(buffer, part) == part for buffer, part in written)


def _extract_part(program: RProgram, after: Mapping[str, Collection[str]], names: Set[str]) -> RProgram | None:
    """Return the program of these operators, or None without operators. Tensors exchanged with other operators are its ports."""
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
    raise AssertionError("schedules need no kernel text")
