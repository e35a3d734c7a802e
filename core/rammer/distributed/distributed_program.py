"""Spread: one model over several devices, as each of them runs it, and as one verified table.

Devices are numbers, from 0 on, in the order in which the user names them. A device runs its steps in order: it waits for what
arrives for a step, runs its program, and writes what departs into the memory of others. What is made here and read
there crosses by a ``Transfer``: one write into memory that was there before, with a flag behind the data. ``whole`` has all
of it in one RProgram, where transfers are operators like any other (``rammer.distributed.link``); it is what is proved.

Ports of steps bear names of tensors, which are unique in a model: so one output may depart twice (to two devices), one
arrival may be read by several steps, and what one step leaves for a later one of its device has one name in both. Names
that users see are those of ``inputs`` and ``outputs``.
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
    """The shape of a tensor in a run: its extent along each axis as a function of inputs of one element (int64), None where it is
    that of its type, which is the most; and what lies beyond in the memory of who reads it."""

    extents: tuple[AffineExtent | None, ...]
    fills: tuple[float, ...]

    @property
    def lengths(self) -> tuple[str, ...]:
        """The scalar inputs that it follows from."""
        return tuple(dict.fromkeys(n for e in self.extents if e is not None for n, _ in e.terms))

    def at(self, whole: tuple[int, ...], point: Point) -> tuple[int, ...]:
        """The shape where the lengths are those of ``point``, of a tensor that at the most has the shape ``whole``."""
        ends = zip(whole, self.extents, strict=True)
        return tuple(n if e is None else max(0, min(n, e.at(point))) for n, e in ends)


@dataclass(frozen=True, slots=True)
class Transfer:
    """``tensor``, dense and row-major, from device ``source`` into memory of device ``target``, once in every run. With ``late``
    its shape is a run's, and its ``type`` the greatest: the source keeps it, and the target reads as much as there is."""

    name: str
    tensor: str
    type: TensorType
    source: int
    target: int
    late: RunShape | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, at the most."""
        return self.type.nbytes

    def shape(self, point: Point) -> tuple[int, ...]:
        """What crosses where the lengths are those of ``point``, by scalar input."""
        return self.type.shape if self.late is None else self.late.at(self.type.shape, point)

    def __str__(self) -> str:
        said = f"transfer {self.name}: {self.tensor} {self.type} from {self.source} to {self.target}"
        if self.late is None:
            return said
        ends = (n if e is None else e for n, e in zip(self.type.shape, self.late.extents, strict=True))
        return f"{said}, in a run [{', '.join(map(str, ends))}]"


@dataclass(frozen=True, slots=True)
class Link:
    """The way from one device to another: ``latency`` in seconds until the first byte and its flag are there, ``bandwidth`` in
    bytes a second, and who says so (``measured by mpi``, ``as given``). ``through``: stretches of the way that other links
    share, by name, with bytes a second of each."""

    source: int
    target: int
    latency: float
    bandwidth: float
    origin: str = ""
    through: tuple[tuple[str, float], ...] = ()

    @property
    def stretches(self) -> tuple[tuple[str, float], ...]:
        """What carries one transfer at a time."""
        return self.through or ((f"{self.source} to {self.target}", self.bandwidth),)

    def seconds(self, nbytes: int) -> float:
        """Of a write of so many bytes with its flag."""
        return self.latency + nbytes / self.bandwidth


class OnHost(Protocol):
    """An operator that the host computes (``rammer.compiled.segments.HostOperator``)."""

    @property
    def title(self) -> str:
        """How messages name it."""
        ...

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by tensor."""
        ...

    def to_bytes(self) -> bytes:
        """All that it is."""
        ...


@dataclass(frozen=True)
class DeviceStep:
    """One program of a device. ``arrivals`` are the transfers that it is the first of its device to read, ``departures`` those
    of what it makes, ``frees`` those arrivals, its own or earlier ones, that no later step of the device reads: their memory may
    be written again. ``outline`` is what the table of all devices has of a program that repeats turns, and of what is no program:
    of that, which ``host`` computes, ``program`` is the outline, too."""

    program: RProgram
    constants: Mapping[str, np.ndarray]
    arrivals: tuple[str, ...] = ()
    departures: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()
    outline: RProgram | None = None
    host: OnHost | None = None

    @property
    def table(self) -> RProgram:
        """What the table of all devices has of it."""
        return self.program if self.outline is None else self.outline

    @cached_property
    def inputs(self) -> Mapping[str, TensorType]:
        """Tensors that it reads, and their types: a model's inputs, arrivals, or outputs of earlier steps of its device."""
        return {p.external: self.program.types[p.tensor] for p in self.program.inputs}

    @cached_property
    def outputs(self) -> Mapping[str, TensorType]:
        """Tensors that departures, later steps of its device, or the user read."""
        return {p.external: self.program.types[p.tensor] for p in self.program.outputs}


@dataclass(frozen=True)
class DevicePart:
    """What one device runs, in order; ``device`` is its name (``rocm``, ``cuda:1``), which several may have."""

    device: str
    steps: tuple[DeviceStep, ...]


@dataclass(frozen=True, slots=True)
class SpreadInput:
    """A model input: the user's ``name``, its ``tensor`` (the port of the steps that read it), and the devices whose steps do."""

    name: str
    tensor: str
    type: TensorType
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpreadOutput:
    """A model output: ``device`` makes ``tensor``; where that is not device 0, ``transfer`` brings it there. The user has it,
    whatever steps read it, so none gives its memory back."""

    name: str
    tensor: str
    type: TensorType
    device: int
    transfer: str = ""


@dataclass(frozen=True, slots=True)
class SpreadState:
    """A model output that is an input of the next run and goes to no user: ``output`` and ``input`` are the user's names,
    ``device`` makes ``tensor``, and ``transfers`` bring it to the other devices that read ``into``."""

    output: str
    input: str
    tensor: str
    into: str
    device: int
    transfers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """Seconds: ``latency`` of one run alone, ``interval`` between the results of runs in flight one behind the other, ``busy`` of
    each device in a run, ``transfers`` of each transfer; ``alone`` of one run on each device by itself, where that was compiled.
    """

    latency: float = 0.0
    interval: float = 0.0
    busy: tuple[float, ...] = ()
    transfers: Mapping[str, float] = field(default_factory=dict)
    alone: tuple[float, ...] = ()


@dataclass(frozen=True)
class DistributedProgram:
    """A model over ``parts``. Raises ValueError where steps and transfers do not fit together, or wait for each other in a
    circle. ``how`` says how it was cut, in words, ``ranged`` how it serves every length of a range, by tensors, ``states`` what
    stays where it is read in the next run."""

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
            raise ValueError("two transfers have one name")
        for transfer in self.transfers:
            if transfer.source == transfer.target or not {transfer.source, transfer.target} <= set(range(len(self.parts))):
                raise ValueError(f"{transfer} is between no two of {len(self.parts)} devices")
        for device in range(len(self.parts)):
            self._check_part(device)
        self._check_departures()
        self._check_order()

    @cached_property
    def transfer(self) -> Mapping[str, Transfer]:
        """Transfers by name."""
        return {t.name: t for t in self.transfers}

    @cached_property
    def fixed(self) -> DistributedProgram:
        """The same where every tensor crosses as it is at the most."""
        return replace(self, transfers=tuple(replace(t, late=None) for t in self.transfers))

    def results(self, device: int) -> tuple[str, ...]:
        """The transfers that bring ``device`` outputs of the model, or states for the next run."""
        brought = [o.transfer for o in self.outputs if o.transfer] + [n for s in self.states for n in s.transfers]
        return tuple(n for n in brought if self.transfer[n].target == device)

    def staying(self, device: int) -> tuple[SpreadState, ...]:
        """The states that ``device`` reads in the next run."""
        readers = {i.tensor: i.devices for i in self.inputs}
        return tuple(s for s in self.states if device in readers[s.into])

    @cached_property
    def digest(self) -> str:
        """Hash of everything that processes must agree on before they run: tables, constants, steps and transfers."""
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
        """Every tensor that a step reads is there by then, with its type, and memory is given back once, after its last use."""
        given = {i.tensor: i.type for i in self.inputs if device in i.devices}
        held: dict[str, str] = {}  # tensors of arrivals that were not given back -> transfer
        for number, step in enumerate(self.parts[device].steps):
            where = f"step {number} of device {device}"
            for name in step.arrivals:
                transfer = self._known(name, where)
                if transfer.target != device or transfer.tensor in (given.keys() | held.keys()):
                    raise ValueError(f"{where}: {transfer} does not arrive here, or again")
                held[transfer.tensor] = name
            for tensor, known in step.inputs.items():
                have = self.transfer[held[tensor]].type if tensor in held else given.get(tensor)
                if have != known:
                    raise ValueError(f"{where} reads {tensor} as {known}, and finds {have}")
            for name in step.frees:
                if held.pop(self._known(name, where).tensor, None) != name or name in self.results(device):
                    raise ValueError(f"{where} gives back {name}, which it does not hold")
            for tensor, known in step.outputs.items():
                if tensor in given or tensor in held:
                    raise ValueError(f"{where} makes {tensor}, which is there already")
                given[tensor] = known
            for name in step.departures:
                transfer = self._known(name, where)
                if transfer.source != device or step.outputs.get(transfer.tensor) != transfer.type:
                    raise ValueError(f"{where}: {transfer} does not depart here")
        if kept := set(held.values()) - set(self.results(device)):
            raise ValueError(f"device {device} never gives back {sorted(kept)}")
        for output in self.outputs:
            if output.device == device and given.get(output.tensor) != output.type:
                raise ValueError(f"device {device} does not make output {output.name!r}")
        for state in self.states:
            if state.device == device and given.get(state.tensor) != {i.tensor: i.type for i in self.inputs}.get(state.into):
                raise ValueError(f"device {device} does not make {state.output!r} as {state.input!r} is")

    def _known(self, name: str, where: str) -> Transfer:
        if name not in self.transfer:
            raise ValueError(f"{where} names {name}, which is no transfer")
        return self.transfer[name]

    def _check_departures(self) -> None:
        """Every transfer departs once and arrives once, at a step or as a result on device 0."""
        steps = [s for part in self.parts for s in part.steps]
        left = [n for s in steps for n in s.departures]
        come = [n for s in steps for n in s.arrivals]
        come += [n for d in range(len(self.parts)) for n in self.results(d) if n not in come]
        if sorted(left) != sorted(self.transfer) or sorted(come) != sorted(self.transfer):
            raise ValueError("a transfer departs or arrives never, or twice")
        for output in self.outputs:
            brought = self.transfer[output.transfer] if output.transfer else None
            target, source = (brought.target, brought.source) if brought else (output.device, output.device)
            if target or source != output.device or (brought and (brought.tensor, brought.type) != (output.tensor, output.type)):
                raise ValueError(f"output {output.name!r} does not come to device 0")

    def _check_order(self) -> None:
        """Run all devices as far as their arrivals let them."""
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
            raise ValueError(f"devices wait for each other in a circle: {', '.join(stuck)}")
