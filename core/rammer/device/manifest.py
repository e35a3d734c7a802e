"""Device: the frozen manifest that a plugin returns, and the protocols that its objects implement.

Importing a manifest imports no driver; ``probe`` and ``open`` do. The hot path is these typed protocols; hooks
(``rammer.device.hooks``) only find and compose manifests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from rammer.device.bound import Bound as Bound  # re-exported for plugins
from rammer.errors import MissingDependency as MissingDependency  # re-exported for plugins
from rammer.ir.at_length import PARTS
from rammer.ir.device import VDevice
from rammer.ir.operator import Resources, RKernel, ROperator
from rammer.ir.program import RProgram, Storage
from rammer.ir.types import TensorType

__all__ = [
    "ALIGNED_ELEMENTS",
    "API_VERSION",
    "Array",
    "Backend",
    "Binding",
    "Bound",
    "Device",
    "Exhaustive",
    "Families",
    "Hardware",
    "Loaded",
    "MissingDependency",
    "OpenOptions",
    "Poisoned",
    "Preparing",
    "Profiler",
    "PrologueRated",
    "Rated",
    "Recorded",
    "RunResult",
    "Span",
    "Tracer",
]

#: Incremented whenever plugins written for the previous version stop working.
API_VERSION = 5

#: Offsets (elements) equal modulo this number have equal alignment for every load and copy of up to 16 bytes.
ALIGNED_ELEMENTS = 16

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True, slots=True)
class Hardware:
    """One physical unit that ``probe`` found. ``memory`` is in bytes; ``kind`` is e.g. ``gpu``, ``cpu``, ``simulator``;
    ``detail`` holds driver and platform versions for result files."""

    index: int
    name: str
    kind: str
    memory: int
    detail: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """The unit to open. ``target`` names hardware to compile for without running it; ``require`` rejects any other ``kind``;
    ``options`` are the device's ``--option key=value`` pairs."""

    index: int = 0
    target: str = ""
    require: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Binding:
    """The facts about tensors that kernel generators may use: types of all, storages of the stored ones, and ``constants``.

    ``constants`` hold values known at compile time, which kernels may require packed. ``reused`` are the constants that several
    operators read, such as the steps of a recurrent layer: worth holding on chip. With ``precision`` tf32 a contraction of
    float32 may round its operands to it. ``parts`` are fractions of the longest length at which operators of a range are priced.
    """

    types: Mapping[str, TensorType]
    storages: Mapping[str, Storage]
    constants: frozenset[str] = frozenset()
    reused: frozenset[str] = frozenset()
    precision: str = "float32"
    parts: tuple[float, ...] = PARTS

    @staticmethod
    def of(program: RProgram, constants: Collection[str]) -> Binding:
        """Return the binding of the tensors of ``program``, by which its kernels were chosen."""
        known = frozenset(constants)
        return Binding(program.types, program.storage, known, reused_constants(program.operators, known), program.precision)

    def key(self, operator: ROperator) -> str:
        """Return a key that is equal for operators that differ only in the names of tensors and in origins.

        A device has the same candidates, kernel texts and times for equal keys, so the result for one operator serves all.

        The key holds all inputs of a kernel generator: expressions, connections, outputs, tile, family, lengths and precision.
        For each tensor it holds type, strides, alignment (offsets modulo ``ALIGNED_ELEMENTS``), and if it is constant or reused.
        """
        stored = {*operator.inputs, *operator.outputs}
        names: dict[str, str] = {}
        for name in (*operator.inputs, *(c.name for c in operator.computes)):
            names[name] = f"t{len(names)}"
        lines = [
            f"{new}: {self.types[old]}{self._describe_tensor(old) if old in stored else ' interior'}"
            for old, new in names.items()
        ]
        lines += [c.text_with(names) for c in operator.computes]
        lines += [f"{names[c.producer]} <{c.layer}> {names[c.consumer]}" for c in operator.connections]
        lines.append(f"writes {' '.join(names[o] for o in operator.outputs)}")
        for ending in operator.skips:
            terms = [(names.setdefault(n, f"t{len(names)}"), f) for n, f in ending.extent.terms]
            lines.append(f"skip {replace(ending, extent=replace(ending.extent, terms=tuple(terms)))}")
        for stop in operator.reduce_bounds:
            terms = [(names.setdefault(n, f"t{len(names)}"), f) for n, f in stop.extent.terms]
            extent = replace(stop.extent, terms=tuple(terms))
            lines.append(f"reduce_bound {replace(stop, compute=names[stop.compute], extent=extent)}")
        at = f" at {self.parts}" if operator.lengths and self.parts != PARTS else ""
        return "\n".join([*lines, f"tile {operator.tile} {operator.family} {operator.config} {self.precision}{at}"])

    def _describe_tensor(self, name: str) -> str:
        """Return the facts about a stored tensor besides its type."""
        place = self.storages.get(name)
        where = "" if place is None else f" strides {list(place.strides)} from {place.offset % ALIGNED_ELEMENTS}"
        return f"{where}{' constant' if name in self.constants else ''}{' reused' if name in self.reused else ''}"


def reused_constants(operators: Iterable[ROperator], constants: Collection[str]) -> frozenset[str]:
    """Return the constants that more than one operator reads."""
    count = Counter(n for o in operators for n in o.inputs if n in constants)
    return frozenset(n for n, times in count.items() if times > 1)


@dataclass(frozen=True, slots=True)
class RunResult:
    """The outputs of a run by ONNX name, and its seconds on the device (host copies excluded). ``notes`` are facts that affect
    the interpretation, such as bytes streamed from the host."""

    outputs: dict[str, Array]
    seconds: float
    notes: tuple[str, ...] = ()


class Loaded(Protocol):
    """A program resident on a device, ready for repeated runs.

    The core calls it and its bound calls from any thread, but one at a time. It calls ``close`` once, and only ``Bound.release``
    after that (``rammer.device.guard``), so a plugin needs no locks. Programs of one device may run concurrently: resources that
    they share (a queue, a compiler's cache) must be thread-safe.
    """

    @property
    def kernels(self) -> int:
        """The number of kernel launches (or supersteps) of one run."""
        ...

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """Run once; inputs by ONNX name, already of the right type and shape. Outputs are new arrays, which later runs never
        modify."""
        ...

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        """Return a call bound to these arrays, already of the right types and shapes. Missing outputs are allocated.

        Arrays are on the host or on the device, by NumPy's protocols, DLPack's or ``__cuda_array_interface__``. A host array
        bound to a device with separate memory is copied there once. Raises BadInput for an array that is elsewhere or overlaps an
        output. A ``stream`` (a queue of the device's kind) is also rejected if the device has no queues.
        """
        ...

    def close(self) -> None:
        """Wait for queued runs and free the device memory."""
        ...


@runtime_checkable
class Poisoned(Protocol):
    """A loaded program that can fill the memory of its runs and kernels with NaN, for tests."""

    def poison(self) -> None:
        """Set all bits of arena, inputs, outputs and the units' local memory: NaN in every float type. From now on the device
        also starts operators as early as it may, before those that they wait for have finished."""
        ...


class Profiler(Protocol):
    """Rammer's three measurements (section 4.3). A device with a clock must measure, not predict."""

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        """Return the seconds of one rTask alone on a vEU, and with every vEU running it."""
        ...

    def resources(self, kernel: RKernel, binding: Binding) -> Resources:
        """Return threads, registers and local memory of one rTask, from the compiler if it reports them."""
        ...

    def program_time(self, program: RProgram, constants: Mapping[str, Array], iterations: int = 10) -> float:
        """Return the median seconds of a whole rProgram on random inputs."""
        ...


@runtime_checkable
class Preparing(Protocol):
    """A Profiler that can build several kernels at once, with concurrent compilers, before measuring them."""

    def prepare(self, options: Sequence[tuple[ROperator, Binding]]) -> None:
        """Build the kernels of tiled operators before they are measured. Build errors are raised when the kernel is measured."""
        ...


class Backend(Protocol):
    """An opened device. One thread at a time compiles and loads models for it, while others may run programs."""

    @property
    def vdevice(self) -> VDevice:
        """The virtual device that programs are compiled for."""
        ...

    @property
    def hardware(self) -> Hardware:
        """The physical hardware of the device."""
        ...

    @property
    def profiler(self) -> Profiler:
        """The profiler with the three measurements."""
        ...

    @property
    def fingerprint(self) -> str:
        """Key of the kernel store: device, driver and generator versions."""
        ...

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Return tiles and kernel families worth trying for an untiled operator, best predicted first. Callers read only the
        first few: a device with expensive candidates returns a ``LazySequence`` (``rammer.device.lazy_sequence``)."""
        ...

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        """Return source, resources and predicted times for a tiled operator. Raises DeviceFailure if it does not compile."""
        ...

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        """Compile every kernel and upload constants (by tensor name). Raises DeviceFailure if memory does not suffice."""
        ...

    def close(self) -> None:
        """Free the resources of the opened device: a context, queues, threads, files. The core calls it once, after all programs
        are closed, and nothing after it. Other Backends of the device must keep working."""
        ...


@runtime_checkable
class Exhaustive(Protocol):
    """A Backend that can list the candidates that ``candidates`` omits as slow, for tests of every kernel."""

    def all_candidates(self, operator: ROperator, binding: Binding) -> Iterable[ROperator]:
        """Yield every tile and family in the search space; ``kernel`` raises DeviceFailure for some."""
        ...


@runtime_checkable
class Rated(Protocol):
    """A Backend that rates its kernels on operators that keep a contraction's operand on chip (``ROperator.holds_operand``). It
    also rates the separate operators with which these are compared."""

    def rate(self, operator: ROperator, binding: Binding) -> float:
        """Return the predicted FLOP/s of a vEU on an untiled ``operator`` divided by ``vdevice.flops``. Above 1 if units beyond
        those counted in ``vdevice.flops`` compute it. A Backend without this method computes all operators at one rate."""
        ...


@runtime_checkable
class PrologueRated(Protocol):
    """A Backend that rates its kernels on maps before a contraction (``ROperator.prologue``)."""

    def prologue_rate(self, operator: ROperator, binding: Binding) -> float:
        """Return the predicted seconds of an untiled ``operator`` without its maps divided by those with them, at most 1. A
        Backend without this method computes maps at zero cost."""
        ...


@runtime_checkable
class Families(Protocol):
    """A Backend that lists its kernel families, so that a loaded file with an unknown family is rejected. Without this protocol,
    ``load`` alone decides."""

    @property
    def families(self) -> Mapping[str, Mapping[str, range]]:
        """The values of every config key by family; "" is the generic family."""
        ...


@dataclass(frozen=True, slots=True)
class Device:
    """A plugin's manifest. ``probe`` lists units or raises MissingDependency.

    ``targets`` are the values of ``OpenOptions.target``. ``several`` is an option by which one name denotes several units.
    ``api`` is the API version that the plugin was written for, as a literal number."""

    name: str
    summary: str
    probe: Callable[[], Sequence[Hardware]]
    open: Callable[[OpenOptions], Backend]
    targets: tuple[str, ...] = ()
    simulated: bool = False
    several: str = ""
    api: int = field(kw_only=True)

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"device name {self.name!r} is not an identifier")


@dataclass(frozen=True, slots=True)
class Span:
    """One task on one unit of the device, with ``start`` and ``end`` in seconds from the start of the program. The unit is a vEU
    in a predicted schedule, an SM of a GPU in a measured one."""

    veu: int
    operator: str
    index: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """The trace of one run: the spans of its tasks, and the ``program`` of these tasks. It is the original program, or the
    device's version with other tiles or another task placement."""

    program: RProgram
    spans: Sequence[Span]


@runtime_checkable
class Tracer(Protocol):
    """A backend that can report when and where each task ran."""

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        """Return the tasks of one run, by the device's clock; a task of several thread groups has several spans. The kernels are
        rebuilt with time recording, so that ordinary kernels carry no overhead."""
        ...
