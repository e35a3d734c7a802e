"""A model over several devices: the steps of each device, and one verified table of all.

Devices are numbered from 0, in the order in which the user names them. A device runs its steps in order. It waits for the
arrivals of a step, runs its program, and writes the departures into the memory of other devices. Each tensor that crosses devices
is sent by a ``Transfer``: one write into preallocated memory, followed by a flag. ``whole`` is the complete model as one
RProgram, with transfers as operators (``rammer.distributed.link``); this is the program that is proved.

Ports of steps have the names of tensors, which are unique in a model. So one output may depart twice (to two devices), and
several steps may read one arrival. A tensor that one step writes for a later step of its device has one name in both. Users see
the names of ``inputs`` and ``outputs``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from rammer.ir.constants.digest import digest_array
from rammer.ir.extent import AffineExtent, Point, Ranged
from rammer.ir.program import RProgram
from rammer.ir.types import TensorType

__all__ = [
    "DevicePart",
    "DeviceStep",
    "DistributedProgram",
    "Link",
    "OnHost",
    "Prediction",
    "RunShape",
    "SpreadInput",
    "SpreadOutput",
    "SpreadState",
    "Transfer",
]


@dataclass(frozen=True, slots=True)
class RunShape:
    """The dynamic shape of a tensor in a run. ``extents`` are functions of inputs of one element (int64), or None for an axis of
    the type's extent, which is the maximum. ``fills`` are the values past the extents in the reader's memory."""

    extents: tuple[AffineExtent | None, ...]
    fills: tuple[float, ...]

    @property
    def lengths(self) -> tuple[str, ...]:
        """The scalar inputs that determine the extents."""
        return tuple(dict.fromkeys(n for e in self.extents if e is not None for n, _ in e.terms))

    def at(self, whole: tuple[int, ...], point: Point) -> tuple[int, ...]:
        """Return the shape at the lengths in ``point``, for a tensor of the maximum shape ``whole``."""
        ends = zip(whole, self.extents, strict=True)
        return tuple(n if e is None else max(0, min(n, e.at(point))) for n, e in ends)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy of ``tensor``, dense and row-major, from device ``source`` into memory of device ``target``, once in every run.

    With ``late`` the shape is dynamic and ``type`` is the maximum: the source retains the tensor, and the target reads its actual
    size."""

    name: str
    tensor: str
    type: TensorType
    source: int
    target: int
    late: RunShape | None = None

    @property
    def nbytes(self) -> int:
        """The maximum number of bytes of the payload."""
        return self.type.nbytes

    def shape(self, point: Point) -> tuple[int, ...]:
        """Return the shape that crosses at the lengths in ``point``, by scalar input."""
        return self.type.shape if self.late is None else self.late.at(self.type.shape, point)

    def __str__(self) -> str:
        said = f"transfer {self.name}: {self.tensor} {self.type} from {self.source} to {self.target}"
        if self.late is None:
            return said
        ends = (n if e is None else e for n, e in zip(self.type.shape, self.late.extents, strict=True))
        return f"{said}, in a run [{', '.join(map(str, ends))}]"


@dataclass(frozen=True, slots=True)
class Link:
    """The link from one device to another.

    ``latency`` is in seconds until the first byte and its flag arrive, ``bandwidth`` in bytes a second. ``origin`` names the
    source of these numbers (``measured by mpi``, ``as given``). ``through`` lists the sections shared with other links, by name,
    with bytes a second of each."""

    source: int
    target: int
    latency: float
    bandwidth: float
    origin: str = ""
    through: tuple[tuple[str, float], ...] = ()

    @property
    def stretches(self) -> tuple[tuple[str, float], ...]:
        """The sections of the link, each of which carries one transfer at a time."""
        return self.through or ((f"{self.source} to {self.target}", self.bandwidth),)

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of a write of ``nbytes`` bytes with its flag."""
        return self.latency + nbytes / self.bandwidth


class OnHost(Protocol):
    """An operator that the host computes (``rammer.compiled.segments.HostOperator``)."""

    @property
    def title(self) -> str:
        """The operator's name in messages."""
        ...

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the operator and return its outputs by tensor."""
        ...

    def to_bytes(self) -> bytes:
        """Return a serialised form of the operator."""
        ...


@dataclass(frozen=True)
class DeviceStep:
    """A step of a device: one program or one host operator.

    ``arrivals`` are the transfers that it reads first on its device, ``departures`` those of its outputs. ``frees`` are arrivals
    of this or earlier steps that no later step of the device reads: their memory may be overwritten. ``outline`` replaces a loop
    program or a host operator in the table of all devices. For a step that ``host`` computes, ``program`` is the outline, too."""

    program: RProgram
    constants: Mapping[str, np.ndarray]
    arrivals: tuple[str, ...] = ()
    departures: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()
    outline: RProgram | None = None
    host: OnHost | None = None

    @property
    def table(self) -> RProgram:
        """The step's program in the table of all devices."""
        return self.program if self.outline is None else self.outline

    @cached_property
    def inputs(self) -> Mapping[str, TensorType]:
        """The tensors that the step reads, with types: model inputs, arrivals, or outputs of earlier steps of its device."""
        return {p.external: self.program.types[p.tensor] for p in self.program.inputs}

    @cached_property
    def outputs(self) -> Mapping[str, TensorType]:
        """The tensors that departures, later steps of its device, or the user read."""
        return {p.external: self.program.types[p.tensor] for p in self.program.outputs}


@dataclass(frozen=True)
class DevicePart:
    """The steps of one device, in order. ``device`` is its name (``rocm``, ``cuda:1``), which several parts may have."""

    device: str
    steps: tuple[DeviceStep, ...]


@dataclass(frozen=True, slots=True)
class SpreadInput:
    """A model input: the user's ``name``, its ``tensor`` (the port of the steps that read it), and the devices of these steps."""

    name: str
    tensor: str
    type: TensorType
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpreadOutput:
    """A model output: ``device`` computes ``tensor``, and ``transfer`` brings it to device 0 if ``device`` is another. No step
    frees its memory, since the user reads it."""

    name: str
    tensor: str
    type: TensorType
    device: int
    transfer: str = ""


@dataclass(frozen=True, slots=True)
class SpreadState:
    """A model output that is an input of the next run and is not returned to the user. ``output`` and ``input`` are the user's
    names; ``device`` computes ``tensor``. ``transfers`` bring it to the other devices that read ``into``."""

    output: str
    input: str
    tensor: str
    into: str
    device: int
    transfers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds: ``latency`` of one run alone, ``interval`` between the results of consecutive runs in flight.

    ``busy`` is the time of each device in a run, ``transfers`` that of each transfer. ``alone`` is the time of one run on each
    single device, if that was compiled."""

    latency: float = 0.0
    interval: float = 0.0
    busy: tuple[float, ...] = ()
    transfers: Mapping[str, float] = field(default_factory=dict)
    alone: tuple[float, ...] = ()


@dataclass(frozen=True)
class DistributedProgram:
    """A model over ``parts``. Raises ValueError if steps and transfers are inconsistent or form a cycle.

    ``how`` describes the partition in words. ``ranged`` describes how it serves every length of a range, by tensors. ``states``
    stay on the devices that read them in the next run."""

    parts: tuple[DevicePart, ...]
    transfers: tuple[Transfer, ...]
    whole: RProgram
    inputs: tuple[SpreadInput, ...]
    outputs: tuple[SpreadOutput, ...]
    predicted: Prediction = field(default_factory=Prediction, compare=False)
    how: str = field(default="", compare=False)
    ranged: Ranged | None = None
    states: tuple[SpreadState, ...] = ()

    def __post_init__(self) -> None:
        if len(self.transfer) != len(self.transfers):
            raise ValueError("two transfers have the same name")
        for transfer in self.transfers:
            if transfer.source == transfer.target or not {transfer.source, transfer.target} <= set(range(len(self.parts))):
                raise ValueError(f"{transfer} does not connect two of {len(self.parts)} devices")
        for device in range(len(self.parts)):
            self._check_part(device)
        self._check_departures()
        self._check_order()

    @cached_property
    def transfer(self) -> Mapping[str, Transfer]:
        """The transfers by name."""
        return {t.name: t for t in self.transfers}

    @cached_property
    def fixed(self) -> DistributedProgram:
        """This program with every tensor transferred at its maximum shape."""
        return replace(self, transfers=tuple(replace(t, late=None) for t in self.transfers))

    def results(self, device: int) -> tuple[str, ...]:
        """Return the transfers that bring ``device`` outputs of the model, or states for the next run."""
        brought = [o.transfer for o in self.outputs if o.transfer] + [n for s in self.states for n in s.transfers]
        return tuple(n for n in brought if self.transfer[n].target == device)

    def staying(self, device: int) -> tuple[SpreadState, ...]:
        """Return the states that ``device`` reads in the next run."""
        readers = {i.tensor: i.devices for i in self.inputs}
        return tuple(s for s in self.states if device in readers[s.into])

    @cached_property
    def digest(self) -> str:
        """Hash of all facts on which processes must agree before they run: tables, constants, steps and transfers."""
        found = hashlib.sha256(str(self.whole).encode())
        for line in self._text_lines():
            found.update(f"{line}\n".encode())
        return found.hexdigest()

    def _text_lines(self) -> Iterator[str]:
        yield from map(str, self.transfers)
        yield from map(repr, (*self.inputs, *self.outputs, *self.states))
        yield f"range {self.ranged}"
        for part in self.parts:
            yield f"part {part.device}"
            for step in part.steps:
                yield f"step {step.program.digest} {step.arrivals} {step.departures} {step.frees}"
                yield from (f"constant {n} {digest_array(v)}" for n, v in sorted(step.constants.items()))
                yield f"host {hashlib.sha256(step.host.to_bytes()).hexdigest()}" if step.host is not None else "device"

    def _check_part(self, device: int) -> None:
        """Raise ValueError unless every tensor is available with its type when a step reads it. Memory of arrivals must be freed
        exactly once, after its last use."""
        given = {i.tensor: i.type for i in self.inputs if device in i.devices}
        held: dict[str, str] = {}  # tensors of unfreed arrivals -> transfer
        for number, step in enumerate(self.parts[device].steps):
            where = f"step {number} of device {device}"
            for name in step.arrivals:
                transfer = self._known(name, where)
                if transfer.target != device or transfer.tensor in (given.keys() | held.keys()):
                    raise ValueError(f"{where}: {transfer} does not arrive here, or arrives twice")
                held[transfer.tensor] = name
            for tensor, known in step.inputs.items():
                have = self.transfer[held[tensor]].type if tensor in held else given.get(tensor)
                if have != known:
                    raise ValueError(f"{where} reads {tensor} as {known}, but it is {have}")
            for name in step.frees:
                if held.pop(self._known(name, where).tensor, None) != name or name in self.results(device):
                    raise ValueError(f"{where} frees {name}, which it does not hold")
            for tensor, known in step.outputs.items():
                if tensor in given or tensor in held:
                    raise ValueError(f"{where} computes {tensor}, which already exists")
                given[tensor] = known
            for name in step.departures:
                transfer = self._known(name, where)
                if transfer.source != device or step.outputs.get(transfer.tensor) != transfer.type:
                    raise ValueError(f"{where}: {transfer} does not depart here")
        if kept := set(held.values()) - set(self.results(device)):
            raise ValueError(f"device {device} never frees {sorted(kept)}")
        for output in self.outputs:
            if output.device == device and given.get(output.tensor) != output.type:
                raise ValueError(f"device {device} does not compute output {output.name!r}")
        for state in self.states:
            if state.device == device and given.get(state.tensor) != {i.tensor: i.type for i in self.inputs}.get(state.into):
                raise ValueError(f"device {device} does not compute {state.output!r} with the type of {state.input!r}")

    def _known(self, name: str, where: str) -> Transfer:
        if name not in self.transfer:
            raise ValueError(f"{where} names {name}, which is not a transfer")
        return self.transfer[name]

    def _check_departures(self) -> None:
        """Raise ValueError unless every transfer departs once and arrives once, at a step or as a result."""
        steps = [s for part in self.parts for s in part.steps]
        left = [n for s in steps for n in s.departures]
        come = [n for s in steps for n in s.arrivals]
        come += [n for d in range(len(self.parts)) for n in self.results(d) if n not in come]
        if sorted(left) != sorted(self.transfer) or sorted(come) != sorted(self.transfer):
            raise ValueError("each transfer must depart once and arrive once")
        for output in self.outputs:
            brought = self.transfer[output.transfer] if output.transfer else None
            target, source = (brought.target, brought.source) if brought else (output.device, output.device)
            if target or source != output.device or (brought and (brought.tensor, brought.type) != (output.tensor, output.type)):
                raise ValueError(f"output {output.name!r} does not arrive at device 0")

    def _check_order(self) -> None:
        """Raise ValueError if the devices deadlock, by running each as far as its arrivals allow."""
        at, gone, moved = [0] * len(self.parts), set[str](), True
        while moved:
            moved = False
            for device, part in enumerate(self.parts):
                while at[device] < len(part.steps) and gone.issuperset(part.steps[at[device]].arrivals):
                    gone.update(part.steps[at[device]].departures)
                    at[device] += 1
                    moved = True
        stuck = [f"step {n} of device {d}" for d, n in enumerate(at) if n < len(self.parts[d].steps)]
        if stuck:
            raise ValueError(f"devices wait for each other in a cycle: {', '.join(stuck)}")
