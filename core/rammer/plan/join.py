"""The programs of several devices as one table, which is proved like any other: parts and transfers are all there is.

Device h's rows are those of its steps, one behind the other, and one more for each transfer that departs there. A step does not
wait for all of the one before it, though its device runs it after that: the table says what has to be. Names of step k begin with
``dh_k_``; what steps leave for each other, for users and for transfers lies in buffers ``dh_TENSOR``. Steps have ranges of the
arena of their own, as their programs have when they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Load, Ref
from rammer.ir.homes import TRANSFER
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import (
    ALIGNMENT,
    Buffer,
    BufferKind,
    Counter,
    HomeDevice,
    Port,
    RProgram,
    Storage,
    Task,
    Wait,
    dense,
)
from rammer.ir.spread import DevicePart, DeviceStep, SpreadInput, SpreadOutput, Transfer
from rammer.ir.types import TensorType
from rammer.ir.verify import verify

__all__ = ["join", "joined_constants"]


def join(
    name: str,
    parts: Sequence[DevicePart],
    transfers: Sequence[Transfer],
    inputs: Sequence[SpreadInput],
    outputs: Sequence[SpreadOutput],
    predicted: float = 0.0,
) -> RProgram:
    """All ``parts`` as one verified program, predicted to take so many seconds. An input has a port ``NAME@DEVICE`` on each
    device that reads it. Raises ValueError for steps that have no such form (repeated ones, those with states), VerifyError for
    an illegal program."""
    joined = _Joined({t.name: t for t in transfers}, {i.tensor for i in inputs}, {(0, o.tensor) for o in outputs})
    for device, part in enumerate(parts):
        joined.device(device, part)
    program = joined.program(name, inputs, outputs)
    program = replace(program, predicted=predicted, precision=_precision(parts))
    verify(program)
    return program


def joined_constants(parts: Sequence[DevicePart]) -> dict[str, np.ndarray]:
    """The constants of the whole program."""
    steps = ((d, k, step) for d, part in enumerate(parts) for k, step in enumerate(part.steps))
    return {f"{_head(d, k)}{n}": v for d, k, step in steps if step.outline is None for n, v in step.constants.items()}


def _precision(parts: Sequence[DevicePart]) -> str:
    return next((s.table.precision for part in parts for s in part.steps), RProgram.precision)


def _head(device: int, step: int) -> str:
    return f"d{device}_{step}_"


@dataclass
class _Joined:
    """The whole on its way. ``results`` are devices and tensors of the user's outputs, ``makers`` the operators that write what
    steps leave for others, by buffer. Waits are for counts that are filled in at the end."""

    transfers: Mapping[str, Transfer]
    given: set[str]
    results: set[tuple[int, str]]
    buffers: dict[str, Buffer] = field(default_factory=dict)
    storages: list[Storage] = field(default_factory=list)
    operators: list[ROperator] = field(default_factory=list)
    counters: dict[str, Counter] = field(default_factory=dict)
    rows: list[list[Task]] = field(default_factory=list)
    homes: list[HomeDevice] = field(default_factory=list)
    makers: dict[str, list[str]] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)

    def device(self, device: int, part: DevicePart) -> None:
        """Its steps, in order, and what departs from them."""
        first, sends = len(self.rows), list[tuple[str, Transfer]]()
        self.rows += [[] for _ in range(max((s.table.veus for s in part.steps), default=0))]
        for number, step in enumerate(part.steps):
            if step.table.repeat is not None or any(b.kind == "state" for b in step.table.buffers):
                raise ValueError(
                    f"step {number} of device {device} repeats turns or has a state: it cannot be joined with others"
                )
            for name in step.arrivals:
                self.makers[self.shared(device, self.transfers[name].tensor, self.transfers[name].type)] = [name]
            _JoinedStep(self, device, number, step, first).add()
            tensor = {p.external: f"{_head(device, number)}{p.tensor}" for p in step.table.outputs}
            sends += [(tensor[t.tensor], t) for t in (self.transfers[name] for name in step.departures)]
        for source, transfer in sends:
            self._send(source, transfer)
        self.homes.append(HomeDevice(part.device, len(self.rows) - first))

    def _send(self, source: str, transfer: Transfer) -> None:
        """One row with one task, after all that make the tensor."""
        made = self.shared(transfer.target, transfer.tensor, transfer.type)
        self.storages.append(dense(made, made, transfer.type.shape))
        axes = tuple(Axis(f"i{k}", n) for k, n in enumerate(transfer.type.shape))
        compute = Compute(made, transfer.type.dtype, axes, Load(source, tuple(Ref(a.name) for a in axes)))
        self.operators.append(ROperator(transfer.name, (compute,), (), (made,), transfer.type.shape, TRANSFER))
        makers = self.makers[f"d{transfer.source}_{transfer.tensor}"]
        self.rows.append([Task(transfer.name, 0, tuple(self.wait(m) for m in makers))])

    def shared(self, device: int, tensor: str, known: TensorType) -> str:
        """The buffer of what steps of a device leave for others, get, or are given."""
        name = f"d{device}_{tensor}"
        kind: BufferKind = "output" if (device, tensor) in self.results else "input" if tensor in self.given else "arena"
        if name not in self.buffers:
            offset = self.allocate(device, known.nbytes) if kind == "arena" else 0
            self.buffers[name] = Buffer(name, known.dtype, known.size, kind, offset, device)
        return name

    def wait(self, operator: str) -> Wait:
        """For all tasks of an operator, which may come later."""
        self.counters.setdefault(operator, Counter(operator, operator, 0, 0))
        return Wait(operator, 0)

    def program(self, name: str, inputs: Sequence[SpreadInput], outputs: Sequence[SpreadOutput]) -> RProgram:
        """All of it."""
        total = {o.name: o.task_count for o in self.operators}

        def counted(task: Task) -> Task:
            return replace(task, waits=tuple(Wait(w.counter, total[w.counter]) for w in task.waits)) if task.waits else task

        ports = [(f"{i.name}@{device}", self.shared(device, i.tensor, i.type), i.type) for i in inputs for device in i.devices]
        ends = [(o.name, self.shared(0, o.tensor, o.type), o.type) for o in outputs]
        have = {s.tensor for s in self.storages}
        loose = [dense(tensor, tensor, known.shape) for _, tensor, known in (*ports, *ends) if tensor not in have]
        return RProgram(
            name,
            "joined",
            tuple(Port(external, tensor) for external, tensor, _ in ports),
            tuple(Port(external, tensor) for external, tensor, _ in ends),
            tuple(self._placed()),
            (*self.storages, *loose),
            tuple(self.operators),
            tuple(replace(c, last=total[c.operator]) for c in self.counters.values()),
            tuple(tuple(map(counted, row)) for row in self.rows),
            homes=tuple(self.homes),
        )

    def allocate(self, device: int, nbytes: int) -> int:
        """An offset in the device's own arena."""
        begin = self.used.get(device, 0)
        self.used[device] = -(-(begin + nbytes) // ALIGNMENT) * ALIGNMENT
        return begin

    def _placed(self) -> Iterator[Buffer]:
        """Buffers with offsets in one arena, where each device's begins behind the one before."""
        sizes = [self.used.get(device, 0) for device in range(len(self.homes))]
        for b in self.buffers.values():
            yield replace(b, offset=b.offset + sum(sizes[: b.home])) if b.kind == "arena" else b


@dataclass
class _JoinedStep:
    """One step's program under its names; ``first`` is the first row of its device."""

    whole: _Joined
    device: int
    number: int
    step: DeviceStep
    first: int

    def __post_init__(self) -> None:
        program = self.step.table
        self.head = _head(self.device, self.number)
        ports = {p.tensor: p.external for p in (*program.inputs, *program.outputs)}
        self.port = {program.storage[t].buffer: name for t, name in ports.items()}
        self.inside = {c.name for o in program.operators for c in o.computes} | program.storage.keys()
        self.names = {n: f"{self.head}{n}" for n in self.inside}

    def add(self) -> None:
        """All of it, into the whole."""
        whole, program = self.whole, self.step.table
        base, places = whole.allocate(self.device, program.arena_bytes), dict[str, str]()
        for b in program.buffers:
            if b.name in self.port:
                places[b.name] = whole.shared(self.device, self.port[b.name], self._type(self.port[b.name]))
                continue
            places[b.name] = f"{self.head}{b.name}"
            offset = b.offset + base if b.kind == "arena" else b.offset
            whole.buffers[places[b.name]] = replace(b, name=places[b.name], offset=offset, home=self.device)
        whole.storages += [replace(s, tensor=self.names[s.tensor], buffer=places[s.buffer]) for s in program.storages]
        whole.operators += [self._operator(o) for o in program.operators]
        for c in program.counters:
            if (c.first, c.last) != (0, program.operator[c.operator].task_count):
                raise ValueError(f"counter {c.name} counts some tasks of {c.operator}, which a joined program does not")
        for veu, row in enumerate(program.rows):
            whole.rows[self.first + veu] += self._row(row)
        for o in program.operators:  # known to later steps and transfers
            for place in {places[program.storage[t].buffer] for t in o.outputs} if o.task_count else ():
                whole.makers.setdefault(place, []).append(f"{self.head}{o.name}")

    def _type(self, port: str) -> TensorType:
        return self.step.outputs[port] if port in self.step.outputs else self.step.inputs[port]

    def _operator(self, o: ROperator) -> ROperator:
        computes = tuple(replace(c, name=self.names[c.name], body=ex.rename_tensors(c.body, self.names)) for c in o.computes)
        edges = tuple(Connection(self.names[e.producer], self.names[e.consumer], e.layer) for e in o.connections)
        outputs = tuple(self.names[t] for t in o.outputs)
        return replace(o, name=f"{self.head}{o.name}", computes=computes, connections=edges, outputs=outputs)

    def _row(self, row: Sequence[Task]) -> Iterator[Task]:
        """Its tasks, the first of which to read what another step made or sent waits for it."""
        program, waited = self.step.table, set[str]()
        needs = {o.name: self._makers(o) for o in program.operators}
        for task in row:
            late = [m for m in needs[task.operator] if m not in waited]
            waited.update(late)
            waits = (*(f"{self.head}{program.counter[w.counter].operator}" for w in task.waits), *late)
            yield Task(f"{self.head}{task.operator}", task.index, tuple(map(self.whole.wait, waits)))

    def _makers(self, o: ROperator) -> tuple[str, ...]:
        """Operators of earlier steps, and transfers, that write what ``o`` reads."""
        ports = (self.port.get(self.step.table.storage[t].buffer) for t in o.inputs)
        found = (m for p in ports if p in self.step.inputs for m in self.whole.makers.get(f"d{self.device}_{p}", ()))
        return tuple(dict.fromkeys(found))
