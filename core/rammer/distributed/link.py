"""The programs of several devices as one table of parts and transfers, which is verified like any other.

The rows of device h are those of its steps, in sequence, plus one for each transfer that departs from it. A step does not wait
for all of the preceding step, although its device runs it after that: the table contains only the necessary order. Names of step
k start with ``dh_k_``; buffers ``dh_TENSOR`` store tensors shared by steps, users and transfers. Each step has a separate range
of the arena, as its program has when it is loaded.

A transfer of a tensor with a dynamic shape has two more rows. The source computes the extents from the lengths, and they cross
first. A row of the target then fetches the tensor (``rammer.verify.multi_device``).
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
from rammer.ir.program import ALIGNMENT, Buffer, BufferKind, Counter, HomeDevice, Port, RProgram, Storage, Task, Wait, dense
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
    """Return all ``parts`` as one verified program with ``predicted`` seconds.

    An input has a port ``NAME@DEVICE`` on each device that reads it. Raises ValueError for steps that cannot be linked (loop
    programs, steps with states), VerifyError for an illegal program."""
    results, sources = {(0, o.tensor) for o in outputs}, _transferred_tensors(parts, transfers)
    joined = _Joined({t.name: t for t in transfers}, {i.tensor for i in inputs}, results, sources)
    for device, part in enumerate(parts):
        joined.device(device, part)
    program = joined.program(name, inputs, outputs)
    program = replace(program, predicted=predicted, precision=_common_precision(parts))
    verify(program)
    return program


def joined_constants(parts: Sequence[DevicePart]) -> dict[str, np.ndarray]:
    """Return the constants of the whole program."""
    steps = ((d, k, step) for d, part in enumerate(parts) for k, step in enumerate(part.steps))
    return {f"{_name_prefix(d, k)}{n}": v for d, k, step in steps if step.outline is None for n, v in step.constants.items()}


def _common_precision(parts: Sequence[DevicePart]) -> str:
    return next((s.table.precision for part in parts for s in part.steps), RProgram.precision)


def _transferred_tensors(parts: Sequence[DevicePart], transfers: Sequence[Transfer]) -> dict[str, str]:
    """Return the tensor of the whole program that each transfer moves."""
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
    """The whole program under construction. ``results`` are devices and tensors of the user's outputs. ``makers`` are the
    operators that write shared buffers, by buffer. Counts of waits are filled in at the end."""

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
        """Add the steps of a device, in order, and the transfers that depart from them."""
        first = len(self.rows)
        self.rows += [[] for _ in range(max((s.table.veus for s in part.steps), default=0))]
        for number, step in enumerate(part.steps):
            if step.table.repeat is not None or any(b.kind == "state" for b in step.table.buffers):
                raise ValueError(f"step {number} of device {device} is a loop program or has a state: it cannot be linked")
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
        """Add a row with one task, after all producers of the tensor."""
        made, source = self.shared(transfer.target, transfer.tensor, transfer.type), self.sources[transfer.name]
        makers = self.makers[f"d{transfer.source}_{transfer.tensor}"]
        self._add_row(transfer.name, _all_of(made, transfer.type, source), makers, TRANSFER)

    def _add_shape_record(self, transfer: Transfer, late: RunShape) -> None:
        """Add a row that computes the extents, and one that transfers them after all producers of the tensor."""
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
        """Add a row that reads the tensor after its record has arrived."""
        made, kind = self.shared(transfer.target, transfer.tensor, transfer.type), transfer.type
        whole, record = _all_of(made, kind, ""), f"d{transfer.target}_{transfer.name}_record"
        fills = {d: Const(late.fills[d], kind.dtype) for d, e in enumerate(late.extents) if e is not None}
        body = fetched_body(self.sources[transfer.name], record, whole, fills)
        self._add_row(transfer.name, replace(whole, body=body), [f"{transfer.name}_record"], FETCH)

    def _add_row(self, name: str, compute: Compute, makers: Sequence[str], family: str = "") -> None:
        """Add a row with one task, which waits for ``makers``."""
        self.storages.append(dense(compute.name, compute.name, compute.shape))
        self.operators.append(ROperator(name, (compute,), (), (compute.name,), compute.shape, family))
        self.rows.append([Task(name, 0, tuple(self.wait(m) for m in makers))])

    def shared(self, device: int, tensor: str, known: TensorType) -> str:
        """Return the buffer of a tensor that steps of a device share with other steps, transfers or
        users, creating it if needed."""
        name = f"d{device}_{tensor}"
        kind: BufferKind = "output" if (device, tensor) in self.results else "input" if tensor in self.given else "arena"
        if name not in self.buffers:
            offset = self.allocate(device, known.nbytes) if kind == "arena" else 0
            self.buffers[name] = Buffer(name, known.dtype, known.size, kind, offset, device)
        return name

    def wait(self, operator: str) -> Wait:
        """Return a wait for all tasks of an operator, which may be added later."""
        self.counters.setdefault(operator, Counter(operator, operator, 0, 0))
        return Wait(operator, 0)

    def program(self, name: str, inputs: Sequence[SpreadInput], outputs: Sequence[SpreadOutput]) -> RProgram:
        """Return the linked program with final counts and offsets."""
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
        """Return an offset in the device's section of the arena."""
        begin = self.used.get(device, 0)
        self.used[device] = -(-(begin + nbytes) // ALIGNMENT) * ALIGNMENT
        return begin

    def _offset_buffers(self) -> Iterator[Buffer]:
        """Yield the buffers with offsets in one arena, in which the sections of the devices follow each other."""
        sizes = [self.used.get(device, 0) for device in range(len(self.homes))]
        for b in self.buffers.values():
            yield replace(b, offset=b.offset + sum(sizes[: b.home])) if b.kind == "arena" else b


def _all_of(made: str, kind: TensorType, source: str) -> Compute:
    """Return a compute that copies ``source``."""
    axes = tuple(Axis(f"i{k}", n) for k, n in enumerate(kind.shape))
    return Compute(made, kind.dtype, axes, Load(source, tuple(Ref(a.name) for a in axes)))


@dataclass
class _JoinedStep:
    """One step's program with its names in the whole; ``first`` is the first row of its device."""

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
        """Add the step's program to the whole."""
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
                raise ValueError(
                    f"counter {c.name} counts only some tasks of {c.operator}, which a linked program does not support"
                )
        for veu, row in enumerate(program.rows):
            whole.rows[self.first + veu] += self._link_row(row)
        for o in program.operators:  # for later steps and transfers
            for place in {places[program.storage[t].buffer] for t in o.outputs} if o.task_count else ():
                whole.makers.setdefault(place, []).append(f"{self.head}{o.name}")

    def _type(self, port: str) -> TensorType:
        return self.step.outputs[port] if port in self.step.outputs else self.step.inputs[port]

    def _rename_operator(self, o: ROperator) -> ROperator:
        computes = tuple(replace(c, name=self.names[c.name], body=ex.rename_tensors(c.body, self.names)) for c in o.computes)
        edges = tuple(Connection(self.names[e.producer], self.names[e.consumer], e.layer) for e in o.connections)
        outputs = tuple(self.names[t] for t in o.outputs)
        endings = tuple(replace(e, extent=self._rename_extent(e.extent)) for e in o.skips)
        stops = tuple(replace(s, compute=self.names[s.compute], extent=self._rename_extent(s.extent)) for s in o.reduce_bounds)
        made = replace(o, name=f"{self.head}{o.name}", computes=computes, connections=edges, outputs=outputs)
        return replace(made, skips=endings, reduce_bounds=stops) if endings or stops else made

    def _rename_extent(self, extent: AffineExtent) -> AffineExtent:
        """Return the extent with lengths that are inputs of the whole program."""
        kind, ports = TensorType("int64", ()), {p.tensor: p.external for p in self.step.table.inputs}
        return replace(extent, terms=tuple((self.whole.shared(self.device, ports[n], kind), f) for n, f in extent.terms))

    def _link_row(self, row: Sequence[Task]) -> Iterator[Task]:
        """Yield the tasks of a row. The first task that reads an output of another step, or a transfer, waits for it."""
        program, waited = self.step.table, set[str]()
        needs = {o.name: self._external_makers(o) for o in program.operators}
        for task in row:
            late = [m for m in needs[task.operator] if m not in waited]
            waited.update(late)
            waits = (*(f"{self.head}{program.counter[w.counter].operator}" for w in task.waits), *late)
            yield Task(f"{self.head}{task.operator}", task.index, tuple(map(self.whole.wait, waits)))

    def _external_makers(self, o: ROperator) -> tuple[str, ...]:
        """Return the operators of earlier steps, and transfers, that write inputs of ``o``."""
        ports = (self.port.get(self.step.table.storage[t].buffer) for t in o.inputs)
        found = (m for p in ports if p in self.step.inputs for m in self.whole.makers.get(f"d{self.device}_{p}", ()))
        return tuple(dict.fromkeys(found))
