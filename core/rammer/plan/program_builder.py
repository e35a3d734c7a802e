"""Construction of a verified RProgram from a schedule and storages."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rammer.errors import DeviceFailure
from rammer.ir.collector import collector_paused
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator
from rammer.ir.program import Buffer, BufferKind, Port, RProgram, Storage
from rammer.ir.types import itemsize
from rammer.plan.arena import BufferUse, plan_memory
from rammer.plan.waits import plan_waits, stage_order
from rammer.process_memory import available_bytes
from rammer.schedule.policy import Schedule
from rammer.verify.verifier import verify


class Storages(Protocol):
    """Storages by tensor, and (dtype, elements) of every buffer."""

    @property
    def storages(self) -> Mapping[str, Storage]:
        """Storage of every tensor that is not interior to an operator."""
        ...

    @property
    def buffers(self) -> Mapping[str, tuple[str, int]]:
        """Element type and number of elements of each buffer."""
        ...


@dataclass(frozen=True)
class PlacedTensors:
    """The storages and buffers of a program's tensors, for building another program of its operators."""

    storages: Mapping[str, Storage]
    buffers: Mapping[str, tuple[str, int]]

    @staticmethod
    def of(program: RProgram) -> PlacedTensors:
        """Return the storages of ``program``."""
        return PlacedTensors(program.storage, {b.name: (b.dtype, b.size) for b in program.buffers})

    def with_others(self, dtypes: Mapping[Storage, str]) -> PlacedTensors:
        """Return the storages with additional ones, here by their element types, that fill separate buffers."""
        buffers = {s.buffer: (dtype, math.prod(s.shape)) for s, dtype in dtypes.items()}
        return PlacedTensors({**self.storages, **{s.tensor: s for s in dtypes}}, {**self.buffers, **buffers})


@dataclass(frozen=True)
class Interface:
    """A program's name, its ports, and the names of constant tensors."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    constants: Collection[str]


@collector_paused()
def build_program(
    interface: Interface,
    schedule: Schedule,
    storage: Storages,
    *,
    policy: str = "custom",
    vdevice: VDevice | None = None,
    precision: str = "float32",
) -> RProgram:
    """Return a program for ``schedule`` with waits, arena offsets and buffers, checked by ``verify.verifier``.

    Constants that no chosen operator reads, directly or as a view, are left out. ``precision`` is the precision that the kernels
    were chosen for. Raises ValueError for an output that no operator computes (upstream adds a copy), VerifyError for an illegal
    program.
    """
    inputs, outputs, constants = interface.inputs, interface.outputs, interface.constants
    operators = stage_order(schedule)
    tensors = _program_tensors(operators, inputs, outputs)
    known, touched = set(tensors), {storage.storages[t].buffer for t in tensors}
    tensors += [c for c in constants if c not in known and storage.storages[c].buffer in touched]  # a view of it is read
    storages = {t: storage.storages[t] for t in tensors}
    kinds = _buffer_kinds(storages, inputs, outputs, constants)
    _check_outputs(operators, outputs, storages, kinds)
    waits = plan_waits(schedule, storages)
    uses = _buffer_uses(operators, storages, storage.buffers, kinds)
    memory = plan_memory(uses, waits.order)
    buffers = tuple(Buffer(b, *storage.buffers[b], kind, memory.offsets.get(b, 0)) for b, kind in kinds.items())
    program = RProgram(
        interface.name,
        policy,
        inputs,
        outputs,
        buffers,
        tuple(storages.values()),
        operators,
        waits.counters,
        waits.rows,
        schedule.predicted,
        precision,
    )
    verify(program, vdevice)
    return program


def _program_tensors(operators: Sequence[ROperator], inputs: tuple[Port, ...], outputs: tuple[Port, ...]) -> list[str]:
    """Return the tensors that the program uses, without duplicates: ports, then operands in operator order."""
    used = [p.tensor for p in (*inputs, *outputs)]
    for op in operators:
        used += [*op.inputs, *op.outputs]
    return list(dict.fromkeys(used))


def _buffer_kinds(
    storages: Mapping[str, Storage], inputs: tuple[Port, ...], outputs: tuple[Port, ...], constants: Collection[str]
) -> dict[str, BufferKind]:
    """Return the kind of every buffer in use."""
    kinds: dict[str, BufferKind] = {s.buffer: "arena" for s in storages.values()}
    kinds |= {storages[p.tensor].buffer: "output" for p in outputs}
    kinds |= {storages[t].buffer: "constant" for t in constants if t in storages}
    read = {storages[p.tensor].buffer for p in inputs}
    kinds |= {b: "state" if kinds[b] == "output" else "input" for b in read}
    return kinds


def _check_outputs(
    operators: Sequence[ROperator], outputs: tuple[Port, ...], storages: Mapping[str, Storage], kinds: Mapping[str, BufferKind]
) -> None:
    written = {storages[t].buffer for op in operators for t in op.outputs}
    for port in outputs:
        target = storages[port.tensor]
        if kinds[target.buffer] not in ("output", "state") or (target.buffer not in written and 0 not in target.shape):
            raise ValueError(
                f"internal: output {port.external!r} ({port.tensor}) lives in the {kinds[target.buffer]} buffer "
                f"{target.buffer}, which no operator writes; it needs a copy compute before planning"
            )


def _buffer_uses(
    operators: Sequence[ROperator],
    storages: Mapping[str, Storage],
    buffers: Mapping[str, tuple[str, int]],
    kinds: Mapping[str, BufferKind],
) -> list[BufferUse]:
    writers: dict[str, dict[str, None]] = {b: {} for b, kind in kinds.items() if kind == "arena"}
    readers: dict[str, dict[str, None]] = {b: {} for b in writers}
    for op in operators:
        if not op.task_count:
            continue
        for tensors, table in ((op.outputs, writers), (op.inputs, readers)):
            for buffer in (storages[t].buffer for t in tensors):
                if buffer in table:
                    table[buffer][op.name] = None
    return [BufferUse(b, _tensor_bytes(*buffers[b]), tuple(writers[b]), tuple(readers[b])) for b in writers]


def _tensor_bytes(dtype: str, size: int) -> int:
    return size * itemsize(dtype)


def check_capacity(name: str, plan: Storages, kept: Iterable[str], device: VDevice) -> None:
    """Raise DeviceFailure if persistent tensors and the largest other buffer exceed the device's lowest memory layer.

    The tensors in ``kept`` (inputs, outputs, constants) are persistent. Capacity 0 means that the layer is not modelled; the
    limit is then this machine's memory."""
    layer = device.layers[0]
    capacity = layer.capacity or available_bytes()
    sizes = {buffer: size * itemsize(dtype) for buffer, (dtype, size) in plan.buffers.items()}
    permanent = {plan.storages[tensor].buffer for tensor in kept if tensor in plan.storages}
    others = [n for buffer, n in sizes.items() if buffer not in permanent]
    need = sum(sizes[buffer] for buffer in permanent) + max(others, default=0)
    if need > capacity:
        raise DeviceFailure(
            f"out of memory: {name} needs at least {need} bytes of {layer.name}, {device.name} has {capacity}",
            hint="use a smaller batch or input, or a device with more memory",
        )
