"""The programs of several devices as one table, which is proved like any other: parts and transfers are all there is.

Device h's rows are those of its steps, one behind the other, and one more for each transfer that departs there. A step does not
wait for all of the one before it, though its device runs it after that: the table says what has to be. Names of step k begin with
``dh_k_``; what steps leave for each other, for users and for transfers lies in buffers ``dh_TENSOR``. Steps have ranges of the
arena of their own, as their programs have when they are loaded.

A transfer of a tensor whose shape is a run's has two rows more: its extents are computed at its source from the lengths, they
are what crosses first, and a row of its target fetches the tensor then (``rammer.verify.multi_device``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rammer.distributed.distributed_program import DevicePart, DeviceStep, RunShape, SpreadInput, SpreadOutput, Transfer
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Const, Expr, Load, Ref
from rammer.ir.extent import AffineExtent
from rammer.ir.operator import Connection, ROperator
from rammer.ir.piecewise import make_piecewise
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
from rammer.ir.types import TensorType
from rammer.verify.multi_device import FETCH, TRANSFER, fetched_body
from rammer.verify.verifier import verify

__all__ = ["joined_constants", "link_programs"]


def link_programs(
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
    results, sources = {(0, o.tensor) for o in outputs}, _transferred_tensors(parts, transfers)
    joined = _Joined({t.name: t for t in transfers}, {i.tensor for i in inputs}, results, sources)
    for device, part in enumerate(parts):
        joined.device(device, part)
    program = joined.program(name, inputs, outputs)
    program = replace(program, predicted=predicted, precision=_common_precision(parts))
    verify(program)
    return program


def joined_constants(parts: Sequence[DevicePart]) -> dict[str, np.ndarray]:
    """The constants of the whole program."""
    steps = ((d, k, step) for d, part in enumerate(parts) for k, step in enumerate(part.steps))
    return {f"{_name_prefix(d, k)}{n}": v for d, k, step in steps if step.outline is None for n, v in step.constants.items()}


def _common_precision(parts: Sequence[DevicePart]) -> str:
    return next((s.table.precision for part in parts for s in part.steps), RProgram.precision)


def _transferred_tensors(parts: Sequence[DevicePart], transfers: Sequence[Transfer]) -> dict[str, str]:
    """Transfer -> the tensor of the whole program that it moves."""
    found, moved = dict[str, str](), {t.name: t.tensor for t in transfers}
    for device, part in enumerate(parts):
        for number, step in enumerate(part.steps):
            tensor = {p.external: f"{_name_prefix(device, number)}{p.tensor}" for p in step.table.outputs}
            found |= {name: tensor[moved[name]] for name in step.departures}
    return found


def _name_prefix(device: int, step: int) -> str:
    return f"d{device}_{step}_"


@dataclass
class _Joined:
    """The whole on its way. ``results`` are devices and tensors of the user's outputs, ``makers`` the operators that write what
    steps leave for others, by buffer. Waits are for counts that are filled in at the end."""

    transfers: Mapping[str, Transfer]
    given: set[str]
    results: set[tuple[int, str]]
    sources: Mapping[str, str]
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
        first = len(self.rows)
        self.rows += [[] for _ in range(max((s.table.veus for s in part.steps), default=0))]
        for number, step in enumerate(part.steps):
            if step.table.repeat is not None or any(b.kind == "state" for b in step.table.buffers):
                raise ValueError(
                    f"step {number} of device {device} repeats turns or has a state: it cannot be joined with others"
                )
            for name in step.arrivals:
                self.makers[self.shared(device, self.transfers[name].tensor, self.transfers[name].type)] = [name]
            _JoinedStep(self, device, number, step, first).add()
        for name in (n for step in part.steps for n in step.departures):
            transfer = self.transfers[name]
            if transfer.late is None:
                self._add_transfer(transfer)
            else:
                self._add_shape_record(transfer, transfer.late)
        for transfer in self.transfers.values():
            if transfer.late is not None and transfer.target == device:
                self._add_fetch(transfer, transfer.late)
        self.homes.append(HomeDevice(part.device, len(self.rows) - first))

    def _add_transfer(self, transfer: Transfer) -> None:
        """One row with one task, after all that make the tensor."""
        made, source = self.shared(transfer.target, transfer.tensor, transfer.type), self.sources[transfer.name]
        makers = self.makers[f"d{transfer.source}_{transfer.tensor}"]
        self._add_row(transfer.name, _all_of(made, transfer.type, source), makers, TRANSFER)

    def _add_shape_record(self, transfer: Transfer, late: RunShape) -> None:
        """A row that computes the extents, and one that brings them, after all that make the tensor."""
        kind = TensorType("int64", (len(transfer.type.shape),))
        told = self.shared(transfer.source, f"{transfer.name}_record", kind)
        extents = [self._extent_expr(e, n, transfer.source) for e, n in zip(late.extents, transfer.type.shape, strict=True)]
        body = make_piecewise("i0", [1] * len(extents), extents)
        self._add_row(f"{transfer.name}_shape", Compute(told, kind.dtype, (Axis("i0", len(extents)),), body), ())
        made, makers = self.shared(transfer.target, f"{transfer.name}_record", kind), [f"{transfer.name}_shape"]
        makers += self.makers[f"d{transfer.source}_{transfer.tensor}"]
        self._add_row(f"{transfer.name}_record", _all_of(made, kind, told), makers, TRANSFER)

    def _extent_expr(self, extent: AffineExtent | None, whole: int, device: int) -> Expr:
        if extent is None:
            return ex.integer(whole)
        total: Expr = ex.integer(extent.offset)
        for name, factor in extent.terms:
            total = ex.make_add(ex.make_mul(Load(self.shared(device, name, TensorType("int64", ())), ()), factor), total)
        return total

    def _add_fetch(self, transfer: Transfer, late: RunShape) -> None:
        """A row that reads the tensor, once it was told of."""
        made, kind = self.shared(transfer.target, transfer.tensor, transfer.type), transfer.type
        whole, record = _all_of(made, kind, ""), f"d{transfer.target}_{transfer.name}_record"
        fills = {d: Const(late.fills[d], kind.dtype) for d, e in enumerate(late.extents) if e is not None}
        body = fetched_body(self.sources[transfer.name], record, whole, fills)
        self._add_row(transfer.name, replace(whole, body=body), [f"{transfer.name}_record"], FETCH)

    def _add_row(self, name: str, compute: Compute, makers: Sequence[str], family: str = "") -> None:
        """One task alone on a row, which waits for ``makers``."""
        self.storages.append(dense(compute.name, compute.name, compute.shape))
        self.operators.append(ROperator(name, (compute,), (), (compute.name,), compute.shape, family))
        self.rows.append([Task(name, 0, tuple(self.wait(m) for m in makers))])

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
            tuple(self._offset_buffers()),
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

    def _offset_buffers(self) -> Iterator[Buffer]:
        """Buffers with offsets in one arena, where each device's begins behind the one before."""
        sizes = [self.used.get(device, 0) for device in range(len(self.homes))]
        for b in self.buffers.values():
            yield replace(b, offset=b.offset + sum(sizes[: b.home])) if b.kind == "arena" else b


def _all_of(made: str, kind: TensorType, source: str) -> Compute:
    """A copy of ``source``."""
    axes = tuple(Axis(f"i{k}", n) for k, n in enumerate(kind.shape))
    return Compute(made, kind.dtype, axes, Load(source, tuple(Ref(a.name) for a in axes)))


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
        self.head = _name_prefix(self.device, self.number)
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
        whole.operators += [self._rename_operator(o) for o in program.operators]
        for c in program.counters:
            if (c.first, c.last) != (0, program.operator[c.operator].task_count):
                raise ValueError(f"counter {c.name} counts some tasks of {c.operator}, which a joined program does not")
        for veu, row in enumerate(program.rows):
            whole.rows[self.first + veu] += self._link_row(row)
        for o in program.operators:  # known to later steps and transfers
            for place in {places[program.storage[t].buffer] for t in o.outputs} if o.task_count else ():
                whole.makers.setdefault(place, []).append(f"{self.head}{o.name}")

    def _type(self, port: str) -> TensorType:
        return self.step.outputs[port] if port in self.step.outputs else self.step.inputs[port]

    def _rename_operator(self, o: ROperator) -> ROperator:
        computes = tuple(replace(c, name=self.names[c.name], body=ex.rename_tensors(c.body, self.names)) for c in o.computes)
        edges = tuple(Connection(self.names[e.producer], self.names[e.consumer], e.layer) for e in o.connections)
        outputs = tuple(self.names[t] for t in o.outputs)
        endings = tuple(replace(e, extent=self._rename_extent(e.extent)) for e in o.endings)
        stops = tuple(replace(s, compute=self.names[s.compute], extent=self._rename_extent(s.extent)) for s in o.stops)
        made = replace(o, name=f"{self.head}{o.name}", computes=computes, connections=edges, outputs=outputs)
        return replace(made, endings=endings, stops=stops) if endings or stops else made

    def _rename_extent(self, extent: AffineExtent) -> AffineExtent:
        """Of the same lengths, which are inputs of the whole program."""
        kind, ports = TensorType("int64", ()), {p.tensor: p.external for p in self.step.table.inputs}
        return replace(extent, terms=tuple((self.whole.shared(self.device, ports[n], kind), f) for n, f in extent.terms))

    def _link_row(self, row: Sequence[Task]) -> Iterator[Task]:
        """Its tasks, the first of which to read what another step made or sent waits for it."""
        program, waited = self.step.table, set[str]()
        needs = {o.name: self._external_makers(o) for o in program.operators}
        for task in row:
            late = [m for m in needs[task.operator] if m not in waited]
            waited.update(late)
            waits = (*(f"{self.head}{program.counter[w.counter].operator}" for w in task.waits), *late)
            yield Task(f"{self.head}{task.operator}", task.index, tuple(map(self.whole.wait, waits)))

    def _external_makers(self, o: ROperator) -> tuple[str, ...]:
        """Operators of earlier steps, and transfers, that write what ``o`` reads."""
        ports = (self.port.get(self.step.table.storage[t].buffer) for t in o.inputs)
        found = (m for p in ports if p in self.step.inputs for m in self.whole.makers.get(f"d{self.device}_{p}", ()))
        return tuple(dict.fromkeys(found))
