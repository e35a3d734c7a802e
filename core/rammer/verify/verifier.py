"""Proof that an RProgram is legal, from its text alone: addresses, rows and waits, not the planner's tables.

Vector clocks give the finished tasks at each task's start. They prove these facts: every read follows the writes that produce its
elements. Every reuse of arena bytes follows all uses of the old value. Each element is written once. Outputs are written
completely. Rows never wait for each other in a circle.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rammer.ir.device import VDevice
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import Buffer, RProgram
from rammer.ir.task_arrays import distinct_values
from rammer.verify.happens_before import Clocks, Deadlock, compute_clocks
from rammer.verify.loop_moves import check_seam
from rammer.verify.multi_device import check_homes
from rammer.verify.structure import VerifyError, check_form
from rammer.verify.writers import Owners, Write, WrittenTwice, strided_view

__all__ = ["VerifyError", "VerifyReport", "verify"]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The statistics of a proof: sizes of the program, operator pairs ordered as wholes, reads checked by single tasks, and
    neighbouring arena buffers in order."""

    tasks: int
    waits: int
    operator_pairs: int
    task_reads: int
    arena_pairs: int
    arena_bytes: int

    def __str__(self) -> str:
        return (
            f"verified: {self.tasks} tasks, {self.waits} waits, {self.operator_pairs} operator pairs ordered, "
            f"{self.task_reads} single reads, {self.arena_pairs} reuses in {self.arena_bytes} arena bytes"
        )


def verify(
    program: RProgram,
    vdevice: VDevice | None = None,
    *,
    spinning: bool = False,
    local_bytes: Callable[[ROperator], int] | None = None,
) -> VerifyReport:
    """Prove ``program`` legal, or raise VerifyError with the problem and its location.

    ``local_bytes`` returns the bytes that one task of an operator needs in the device's vEU layer. With ``spinning``, waiting
    rows must never block the rows that they wait for."""
    tasks = check_form(program)
    check_homes(program)
    try:
        clocks = compute_clocks(program, tasks)
    except Deadlock as stuck:
        task = program.rows[stuck.veu][stuck.place]
        where = f"v{stuck.veu} place {stuck.place}: {task.operator}[{task.index}]"
        raise VerifyError(f"rows wait for each other in a cycle: nothing can finish counter {stuck.counter}", where) from None
    owners = _buffer_owners(program)
    moved = check_seam(program, owners)
    _check_outputs(program, owners, moved)
    reads = _Reads(program, clocks, owners)
    reads.check()
    pairs = _check_arena(program, clocks)
    if vdevice is not None:
        _check_resources(program, vdevice, spinning, local_bytes)
    waits = sum([len(t.waits) for row in program.rows for t in row])
    return VerifyReport(program.task_count, waits, len(reads.ordered), reads.single, pairs, program.arena_bytes)


# --- writes -----------------------------------------------------------------------------------


def _buffer_owners(program: RProgram) -> dict[str, Owners]:
    """Return the writers of every buffer. Raise VerifyError if two collide or an input or constant is written."""
    writes: dict[str, list[Write]] = {b.name: [] for b in program.buffers}
    for operator in program.operators:
        for tensor in operator.outputs:
            storage = program.storage[tensor]
            if program.buffer[storage.buffer].kind in ("input", "constant"):
                kind = program.buffer[storage.buffer].kind
                raise VerifyError(f"{tensor} is written into the {kind} buffer {storage.buffer}", operator.name)
            if operator.task_count:
                writes[storage.buffer].append(Write(operator.name, storage))
    result = {}
    for name, items in writes.items():
        try:
            result[name] = Owners(program.buffer[name].size, items)
        except WrittenTwice as twice:
            raise VerifyError(
                f"an element of buffer {name} is written by {twice.first} and again by {twice.second}", f"operator {twice.second}"
            ) from None
    return result


def _check_outputs(program: RProgram, owners: Mapping[str, Owners], moved: Collection[str]) -> None:
    """Check that outputs are written completely, except those in ``moved``, which iterations write in slices."""
    for port in program.outputs:
        storage = program.storage[port.tensor]
        kind = program.buffer[storage.buffer].kind
        if kind not in ("output", "state"):
            raise VerifyError(f"output {port.external!r} lives in the {kind} buffer {storage.buffer}", port.tensor)
        if storage.buffer not in moved and not owners[storage.buffer].of(storage)[1]:
            raise VerifyError(f"output {port.external!r} is not fully written", port.tensor)


# --- reads ------------------------------------------------------------------------------------


class _Reads:
    """A check that every read follows its writes: by whole operators first, then by single tasks."""

    def __init__(self, program: RProgram, clocks: Clocks, owners: Mapping[str, Owners]) -> None:
        self.program, self.clocks, self.owners = program, clocks, owners
        self.ordered: set[tuple[str, str]] = set()
        self.single = 0
        self.painted: dict[tuple[str, str], NDArray[np.int32]] = {}
        self.old = {p.tensor for p in program.inputs}  #: Values from before the run, including the past of states.

    def check(self) -> None:
        for reader in self.program.operators:
            if not reader.task_count:
                continue
            loose: dict[str, list[str]] = {}
            for tensor in reader.inputs:
                for writer in self._find_writers(reader, tensor):
                    if not self._whole(writer, reader.name):
                        loose.setdefault(tensor, []).append(writer)
            if loose:
                self._single_tasks(reader, loose)

    def _find_writers(self, reader: ROperator, tensor: str) -> tuple[str, ...]:
        storage = self.program.storage[tensor]
        if self.program.buffer[storage.buffer].kind in ("input", "constant") or tensor in self.old:
            return ()
        writers, complete = self.owners[storage.buffer].of(storage)
        if not complete:
            raise VerifyError(f"{reader.name} reads {tensor}, parts of which are never written", f"buffer {storage.buffer}")
        if reader.name in writers:
            raise VerifyError(f"{reader.name} reads {tensor}, parts of which it writes itself", reader.name)
        return writers

    def _whole(self, writer: str, reader: str) -> bool:
        if (writer, reader) in self.ordered:
            return True
        if self.clocks.operator_before(writer, reader):
            self.ordered.add((writer, reader))
            return True
        return False

    def _single_tasks(self, reader: ROperator, loose: Mapping[str, Sequence[str]]) -> None:
        base = self.clocks.base[reader.name]
        for index in range(reader.task_count):
            boxes = reader.boxes(reader.task_box(index), self.program.types)
            for tensor, writers in loose.items():
                for writer in writers:
                    needed = self._needed_tasks(tensor, writer, tuple(slice(lo, hi) for lo, hi in boxes[tensor]))
                    self.single += 1
                    if not self.clocks.tasks_before(needed + self.clocks.base[writer], base + index):
                        raise self._race_error(reader.name, index, tensor, writer)

    def _needed_tasks(self, tensor: str, writer: str, box: tuple[slice, ...]) -> NDArray[np.int64]:
        """Return the tasks of ``writer`` that write elements of ``box`` of ``tensor``."""
        storage = self.program.storage[tensor]
        key = (storage.buffer, writer)
        if key not in self.painted:
            self.painted[key] = self.owners[storage.buffer].tasks(self.program.operator[writer])
        found = strided_view(self.painted[key], storage)[box]
        return distinct_values(found[found >= 0].astype(np.int64))

    def _race_error(self, reader: str, index: int, tensor: str, writer: str) -> VerifyError:
        task = self.clocks.base[reader] + index
        where = f"v{self.clocks.veu[task]} place {self.clocks.place[task]}: {reader}[{index}]"
        return VerifyError(
            f"{reader}[{index}] reads {tensor} before {writer} is guaranteed to have written it",
            where,
            f"a wait for {writer} is missing",
        )


# --- arena ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ArenaUse:
    """An arena buffer that holds a value, with its writers and users. ``age`` sorts buffers in any legal order of reuse. ``over``
    is the position after the last user on every row, ``known`` the minimum clock of all writers."""

    buffer: Buffer
    writers: tuple[str, ...]
    users: tuple[str, ...]
    age: int
    over: NDArray[np.int32]
    known: NDArray[np.int32]


def _arena_uses(program: RProgram, clocks: Clocks) -> list[_ArenaUse]:
    """Return the arena buffers that hold a value."""
    # Clocks grow strictly along happens-before, so their sum is a topological key.
    age = clocks.known.astype(np.int64).sum(axis=1)
    writers: dict[str, list[str]] = {}
    users: dict[str, list[str]] = {}
    for operator in program.operators:
        if not operator.task_count:
            continue
        for tensor in (*operator.outputs, *operator.inputs):
            users.setdefault(program.storage[tensor].buffer, []).append(operator.name)
        for tensor in operator.outputs:
            writers.setdefault(program.storage[tensor].buffer, []).append(operator.name)
    result = list[_ArenaUse]()
    for b in program.buffers:
        if b.kind == "arena" and b.nbytes and b.name in writers:
            by, of = ([clocks.number[o] for o in names[b.name]] for names in (writers, users))
            over, known = clocks.done[of].max(axis=0), clocks.known[by].min(axis=0)
            result.append(_ArenaUse(b, tuple(writers[b.name]), tuple(users[b.name]), int(age[by].min()), over, known))
    return result


def _check_arena(program: RProgram, clocks: Clocks) -> int:
    """Sweep over arena addresses; return the number of neighbours in time that were proved to be in order. At each byte, the
    buffers must be ordered, sorted by age. Checking neighbours is enough, because every buffer has a writer."""
    uses = _arena_uses(program, clocks)
    active: list[tuple[int, int]] = []
    checked = 0
    for _, opens, i in _address_events(uses):
        key = (uses[i].age, i)
        at = bisect_left(active, key)
        if not opens:
            # Its neighbours now meet. Each was in order with it, so they are in order with each other.
            del active[at]
            continue
        active.insert(at, key)
        for (_, a), (_, b) in pairwise(active[max(at - 1, 0) : at + 2]):
            _check_reuse(uses[a], uses[b], clocks)
            checked += 1
    return checked


def _address_events(uses: Sequence[_ArenaUse]) -> Iterator[tuple[int, bool, int]]:
    """Yield (byte, opens, use) in address order; at one address the buffers that end come first."""
    events = [(u.buffer.offset, True, i) for i, u in enumerate(uses)]
    events += [(u.buffer.offset + u.buffer.nbytes, False, i) for i, u in enumerate(uses)]
    yield from sorted(events)


def _check_reuse(old: _ArenaUse, new: _ArenaUse, clocks: Clocks) -> None:
    if (old.over <= new.known).all():  # so each writer starts after each user
        return
    for writer in new.writers:
        for user in old.users:
            if not clocks.operator_before(user, writer):
                raise VerifyError(
                    f"buffer {new.buffer.name} takes arena bytes of {old.buffer.name}, but its writer {writer} "
                    f"may start before {user} is done with the old value",
                    f"bytes {new.buffer.offset}..{new.buffer.offset + new.buffer.nbytes} and "
                    f"{old.buffer.offset}..{old.buffer.offset + old.buffer.nbytes}",
                )


# --- resources --------------------------------------------------------------------------------


def unknown_layers(program: RProgram, device: VDevice) -> Iterator[tuple[ROperator, Connection]]:
    """Yield the connections at memory layers that ``device`` lacks, with their operators."""
    scopes = {"thread", *(m.scope for m in device.layers)}
    return ((o, e) for o in program.operators for e in o.connections if e.layer not in scopes)


def _check_resources(program: RProgram, device: VDevice, spinning: bool, local_bytes: Callable[[ROperator], int] | None) -> None:
    layer = device.layer("veu")
    for operator, edge in unknown_layers(program, device):
        raise VerifyError(f"{edge} meets at a layer that {device.name} lacks", f"operator {operator.name}")
    if local_bytes is not None and layer.capacity:
        for operator in program.operators:
            need = local_bytes(operator)
            if need > layer.capacity:
                raise VerifyError(
                    f"a task of {operator.name} needs {need} bytes of {layer.name}, a vEU of {device.name} has {layer.capacity}",
                    f"operator {operator.name}",
                )
    if spinning:
        filled = [row for row in program.rows if row]
        waiting = sum(any(t.waits for t in row) for row in filled)
        # Once waiting rows hold every resident slot, the rows they wait for never start.
        if len(filled) > device.resident and waiting >= device.resident:
            raise VerifyError(
                f"{waiting} of {len(filled)} rows wait, but only {device.resident} vEUs of {device.name} "
                "are guaranteed to run at once",
                f"program {program.name}",
            )
