"""Random programs over several devices, and edits that may make them illegal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.operator import ROperator
from rammer.ir.program import Buffer, Counter, HomeDevice, Port, RProgram, Storage, Task, Wait, dense
from rammer.verify.multi_device import CROSSING, FETCH, TRANSFER, fetched_body
from rammer.verify.verifier import VerifyError, verify
from rammer_testing.programs import copying, random_net

LENGTH = 16


class HomeNet:
    """A random DAG of operators on random devices, each with one to three rows; arena bytes are shared where legal."""

    def __init__(self, seed: int, operators: int, devices: int) -> None:
        self.random = Random(seed)
        self.net = random_net(self.random, operators, LENGTH)
        self.devices = devices
        self.where = {o.name: self.random.randrange(devices) for o in self.net.operators}
        self.where["y"] = 0
        self.operators: list[ROperator] = []
        self.storages: dict[str, Storage] = {}
        self.buffers: dict[str, Buffer] = {}
        self.ports: list[Port] = []
        self.rows: list[list[list[Task]]] = [[[] for _ in range(self.random.randint(1, 3))] for _ in range(devices)]
        self.sends: list[list[list[Task]]] = [[] for _ in range(devices)]
        self.readers: dict[str, set[str]] = {}

    def program(self) -> RProgram:
        for operator in self.net.operators:
            home = self.where[operator.name]
            names = {t: self._here(t, home) for t in operator.inputs}
            self._add(_reading(operator, names), home)
        counts = [len(r) + len(s) for r, s in zip(self.rows, self.sends, strict=True)]
        homes = tuple(HomeDevice(f"device {h}", n) for h, n in enumerate(counts))
        rows = tuple(tuple(row) for h in range(self.devices) for row in (*self.rows[h], *self.sends[h]))
        counters = tuple(Counter(o.name, o.name, 0, o.task_count) for o in self.operators)
        made = RProgram(
            "net", "random", tuple(self.ports), (Port("y", "y"),), tuple(self._placed()), tuple(self.storages.values()),
            tuple(self.operators), counters, rows, homes=homes,
        )  # fmt: skip
        return self._sharing(made)

    def _here(self, tensor: str, home: int) -> str:
        """Return the name of ``tensor`` on a device; transfer it there, or add an input if it has no producer."""
        if self.where.get(tensor) == home:
            return tensor
        name = f"{tensor}_at_{home}"
        if name in self.storages:
            return name
        if tensor not in self.where:
            self._store(name, home, "input")
            self.ports.append(Port(f"{tensor}@{home}", name))
            return name
        if self.random.random() < 0.5:
            self._fetch(tensor, name, home)
            return name
        move = replace(copying(name, (LENGTH,), tensor, (LENGTH,)), family=TRANSFER)
        self._store(name, home, "arena")
        self.operators.append(move)
        self.readers.setdefault(tensor, set()).add(move.name)
        self.sends[self.where[tensor]].append([Task(move.name, 0, (self._wait(tensor),))])
        return name

    def _fetch(self, tensor: str, name: str, home: int) -> None:
        """Add a fetch of a part of ``tensor``, with the extent of a record and zeros past it."""
        source, axis = self.where[tensor], Axis("i", 1)
        told, record = f"{name}_told", f"{name}_record"
        length = Compute(told, "int64", (axis,), ex.integer(self.random.randint(1, LENGTH)))
        brought = Compute(record, "int64", (axis,), ex.Load(told, (ex.Ref("i"),)))
        whole = Compute(name, "float32", (Axis("i", LENGTH),), ex.Const(0.0))
        whole = replace(whole, body=fetched_body(tensor, record, whole, {0: ex.Const(0.0)}))
        made = ((length, source, source, ""), (brought, home, source, TRANSFER), (whole, home, home, FETCH))
        for compute, at, device, family in made:
            self.storages[compute.name] = dense(compute.name, f"b_{compute.name}", compute.shape)
            self.buffers[compute.name] = Buffer(f"b_{compute.name}", compute.dtype, compute.type.size, "arena", 0, at)
            needs = {told: (), record: (told, tensor), name: (record,)}[compute.name]
            self.operators.append(ROperator(compute.name, (compute,), (), (compute.name,), compute.shape, family))
            self.sends[device].append([Task(compute.name, 0, tuple(self._wait(n) for n in needs))])

    def _wait(self, operator: str) -> Wait:
        return Wait(operator, next(o.task_count for o in self.operators if o.name == operator))

    def _add(self, operator: ROperator, home: int) -> None:
        self._store(operator.name, home, "output" if operator.name == "y" else "arena")
        self.operators.append(operator)
        rows = self.rows[home]
        for index in range(operator.task_count):
            row = self.random.choice(rows)
            known = {w.counter for t in row for w in t.waits}
            made = {t: o.name for o in self.operators for t in o.outputs}
            needs = [made[t] for t in operator.inputs if t in made]
            row.append(Task(operator.name, index, tuple(self._wait(n) for n in needs if n not in known)))

    def _store(self, name: str, home: int, kind: str) -> None:
        self.storages[name] = dense(name, f"b_{name}", (LENGTH,))
        self.buffers[name] = Buffer(f"b_{name}", "float32", LENGTH, kind, 0, home)  # type: ignore[arg-type]

    def _placed(self) -> Iterator[Buffer]:
        arenas = [b for b in sorted(self.buffers.values(), key=lambda b: b.home) if b.kind == "arena"]
        yield from (replace(b, offset=64 * k) for k, b in enumerate(arenas))
        yield from (b for b in self.buffers.values() if b.kind != "arena")

    def _sharing(self, program: RProgram) -> RProgram:
        """Move some buffers to the offset of another buffer of the same device if the program stays legal."""
        for one in program.buffers:
            mine = [b for b in program.buffers if b.kind == "arena" and b.home == one.home and b.name != one.name]
            if one.kind != "arena" or not mine:
                continue
            moved = replace(program.buffer[one.name], offset=self.random.choice(mine).offset)
            edited = replace(program, buffers=tuple(moved if b.name == one.name else b for b in program.buffers))
            try:
                verify(edited)
            except VerifyError:
                continue
            program = edited
        return program


def _reading(operator: ROperator, names: dict[str, str]) -> ROperator:
    computes = tuple(replace(c, body=ex.rename_tensors(c.body, names)) for c in operator.computes)
    return replace(operator, computes=computes)


# --- edits ----------------------------------------------------------------------------------------


def transfers(program: RProgram) -> list[ROperator]:
    return [o for o in program.operators if o.family == TRANSFER]


def crossing(program: RProgram) -> list[ROperator]:
    return [o for o in program.operators if o.family in CROSSING]


def without_wait(program: RProgram, veu: int, place: int, counter: str) -> RProgram:
    rows = [list(row) for row in program.rows]
    task = rows[veu][place]
    rows[veu][place] = replace(task, waits=tuple(w for w in task.waits if w.counter != counter))
    return replace(program, rows=tuple(map(tuple, rows)))


def unheard(program: RProgram) -> Iterator[RProgram]:
    """Yield programs without a wait for a transfer or a fetch: the data or the record may be missing."""
    names = {o.name for o in crossing(program)}
    for veu, row in enumerate(program.rows):
        for place, task in enumerate(row):
            for wait in task.waits:
                if wait.counter in names:
                    yield without_wait(program, veu, place, wait.counter)


def early(program: RProgram) -> Iterator[RProgram]:
    """Yield programs with a transfer that does not wait for its data or record: the flag precedes the data."""
    names = {o.name for o in transfers(program)}
    for veu, row in enumerate(program.rows):
        if row and row[0].operator in names:
            yield from (without_wait(program, veu, 0, wait.counter) for wait in row[0].waits)


def misheard(program: RProgram) -> Iterator[RProgram]:
    """Yield programs with a wait for the data's producer on another device instead of for the transfer."""
    makers = {o.name: o.inputs[0] for o in transfers(program)}
    for veu, row in enumerate(program.rows):
        for place, task in enumerate(row):
            for wait in task.waits:
                if wait.counter in makers:
                    rows, other = [list(r) for r in program.rows], program.counter[makers[wait.counter]]
                    waits = tuple(Wait(other.name, other.total) if w == wait else w for w in task.waits)
                    rows[veu][place] = replace(task, waits=waits)
                    yield replace(program, rows=tuple(map(tuple, rows)))


def dropped(program: RProgram) -> Iterator[RProgram]:
    """Yield programs without one transfer and without all waits for it."""
    for gone in transfers(program):
        rows = tuple(
            tuple(replace(t, waits=tuple(w for w in t.waits if w.counter != gone.name)) for t in row if t.operator != gone.name)
            for row in program.rows
        )
        operators = tuple(o for o in program.operators if o.name != gone.name)
        yield replace(program, rows=rows, operators=operators, counters=tuple(c for c in program.counters if c.name != gone.name))


def doubled(program: RProgram) -> Iterator[RProgram]:
    """Yield programs with a transfer executed twice into the same memory: by two operators, or by two tasks."""
    for one in transfers(program):
        row = next(r for r in program.rows if r and r[0].operator == one.name)
        veu = program.rows.index(row)
        yield replace(program, rows=(*program.rows[:veu], (*row, Task(one.name, 0)), *program.rows[veu + 1 :]))
        twin = replace(one.computes[0], name=f"{one.anchor.name}_twin")
        again = ROperator(f"{one.name}_twin", (twin,), (), (twin.name,), one.tile, TRANSFER)
        home = program.row_homes[veu]
        homes = tuple(replace(h, rows=h.rows + (k == home)) for k, h in enumerate(program.homes))
        last = sum(h.rows for h in program.homes[: home + 1])
        rows = (*program.rows[:last], (Task(again.name, 0, row[0].waits),), *program.rows[last:])
        storages = (*program.storages, replace(program.storage[one.anchor.name], tensor=twin.name))
        yield replace(program, homes=homes, rows=rows, operators=(*program.operators, again), storages=storages)


def reused(program: RProgram) -> Iterator[RProgram]:
    """Yield programs in which sent or received data shares memory with another value of its device."""
    for one in crossing(program):
        for tensor in (*one.inputs, one.anchor.name):
            mine = program.buffer[program.storage[tensor].buffer]
            for other in program.buffers:
                if mine.kind == other.kind == "arena" and other.home == mine.home and other.offset != mine.offset:
                    moved = replace(mine, offset=other.offset)
                    yield replace(program, buffers=tuple(moved if b.name == mine.name else b for b in program.buffers))


def crossed(program: RProgram) -> Iterator[RProgram]:
    """Yield programs with a circular wait: the first task of a row waits for a transfer of data that depends on it."""
    for one in transfers(program):
        home = program.buffer[program.storage[one.anchor.name].buffer].home
        for veu, row in enumerate(program.rows):
            if row and program.row_homes[veu] == home and program.operator[row[0].operator].family != TRANSFER:
                rows = [list(r) for r in program.rows]
                rows[veu][0] = replace(row[0], waits=(*row[0].waits, Wait(one.name, 1)))
                yield replace(program, rows=tuple(map(tuple, rows)))


def acknowledged(program: RProgram) -> Iterator[tuple[int, bool, RProgram]]:
    """Yield the row's device, True if the fetch reads there, and the program. The last task of a row waits for a fetch."""
    for one in (o for o in program.operators if o.family == FETCH):
        homes = {program.buffer[program.storage[t].buffer].home for t in (*one.inputs, one.anchor.name)}
        for veu, row in enumerate(program.rows):
            if row and program.operator[row[-1].operator].family not in CROSSING:
                rows, counters = [list(r) for r in program.rows], program.counters
                rows[veu][-1] = replace(row[-1], waits=(*row[-1].waits, Wait(one.name, 1)))
                home = program.row_homes[veu]
                yield home, home in homes, replace(program, rows=tuple(map(tuple, rows)), counters=counters)


def elsewhere(program: RProgram) -> Iterator[RProgram]:
    """Yield programs with one buffer assigned to another device."""
    for k, b in enumerate(program.buffers):
        if b.kind != "arena" and len(program.homes) > 1:
            moved = replace(b, home=(b.home + 1) % len(program.homes))
            yield replace(program, buffers=(*program.buffers[:k], moved, *program.buffers[k + 1 :]))
