"""Device: the frozen manifest that a plugin returns, and the protocols behind it.

Importing a manifest imports no driver; ``probe`` and ``open`` do. The hot path is these typed
protocols; hooks (``rammer.device.hooks``) only find and compose manifests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from rammer.errors import MissingDependency as MissingDependency  # where plugins look for it
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

#: Raised by one whenever a plugin written for the previous version would no longer work.
API_VERSION = 4

#: Offsets (elements) that agree modulo this many are aligned alike for every load and copy of up to 16 bytes.
ALIGNED_ELEMENTS = 16

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True, slots=True)
class Hardware:
    """One unit that ``probe`` found: what it really is. ``memory`` in bytes; ``kind`` e.g. ``gpu``,
    ``cpu``, ``simulator``; ``detail`` holds driver and platform versions for result files."""

    index: int
    name: str
    kind: str
    memory: int
    detail: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """Which unit to open. ``target`` names hardware to compile for without running it; ``require``
    refuses any other ``kind``; ``options`` are the device's own ``--option key=value`` pairs."""

    index: int = 0
    target: str = ""
    require: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Binding:
    """What a kernel generator may know of the tensors: types of all, storages of the stored ones, and
    which hold values known at compile time (``constants``), so that a kernel may want them packed.

    ``reused`` are the constants that several operators read, as the steps of a recurrent layer do: worth holding on chip. With
    ``precision`` tf32 a contraction of float32 may round its operands to it. ``parts`` of the longest length are those at which
    operators of a range are priced."""

    types: Mapping[str, TensorType]
    storages: Mapping[str, Storage]
    constants: frozenset[str] = frozenset()
    reused: frozenset[str] = frozenset()
    precision: str = "float32"
    parts: tuple[float, ...] = PARTS

    @staticmethod
    def of(program: RProgram, constants: Collection[str]) -> Binding:
        """What kernels may know of the tensors of ``program``: what they were chosen by."""
        known = frozenset(constants)
        return Binding(program.types, program.storage, known, reused_constants(program.operators, known), program.precision)

    def key(self, operator: ROperator) -> str:
        """Equal for operators that differ only in the names of tensors and in origins: a device has the same candidates,
        kernel texts and times for them, so what was found for one serves all.

        It holds all that a kernel generator may ask: expressions, connections, outputs, tile, family, lengths; of every tensor
        its type, strides, alignment (offsets modulo ``ALIGNED_ELEMENTS``), whether it is constant, reused; and the precision.
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
        for ending in operator.endings:
            terms = [(names.setdefault(n, f"t{len(names)}"), f) for n, f in ending.extent.terms]
            lines.append(f"ends {replace(ending, extent=replace(ending.extent, terms=tuple(terms)))}")
        for stop in operator.stops:
            terms = [(names.setdefault(n, f"t{len(names)}"), f) for n, f in stop.extent.terms]
            extent = replace(stop.extent, terms=tuple(terms))
            lines.append(f"stops {replace(stop, compute=names[stop.compute], extent=extent)}")
        at = f" at {self.parts}" if operator.lengths and self.parts != PARTS else ""
        return "\n".join([*lines, f"tile {operator.tile} {operator.family} {operator.config} {self.precision}{at}"])

    def _describe_tensor(self, name: str) -> str:
        """What a generator may know of a stored tensor besides its type."""
        place = self.storages.get(name)
        where = "" if place is None else f" strides {list(place.strides)} from {place.offset % ALIGNED_ELEMENTS}"
        return f"{where}{' constant' if name in self.constants else ''}{' reused' if name in self.reused else ''}"


def reused_constants(operators: Iterable[ROperator], constants: Collection[str]) -> frozenset[str]:
    """The constants that more than one operator reads."""
    count = Counter(n for o in operators for n in o.inputs if n in constants)
    return frozenset(n for n, times in count.items() if times > 1)


@dataclass(frozen=True, slots=True)
class RunResult:
    """Outputs by ONNX name and the seconds that the program took on the device (host copies apart).

    ``notes`` are facts a reader of the output must know, such as bytes streamed from the host.
    """

    outputs: dict[str, Array]
    seconds: float
    notes: tuple[str, ...] = ()


class Bound(Protocol):
    """A program with fixed arrays for its inputs and outputs: a run checks nothing and moves nothing through the host.

    The arrays may be overwritten between runs, and each run reads what is in them then. Runs of one program are
    in order, also with runs of other bound calls of it.
    """

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The bound inputs by ONNX name, as the device's own arrays."""
        ...

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The bound outputs by ONNX name, as the device's own arrays: the same ones in every run."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a run does besides running, such as a copy into an array that the kernels cannot write themselves."""
        ...

    @property
    def clock(self) -> str:
        """What ``seconds`` measures with, and whether copies are in it: "GPU events"."""
        ...

    @property
    def stream(self) -> Any:
        """The device's own queue that runs go to; None where it has none, and a run has finished when it returns."""
        ...

    def run(self) -> None:
        """One run, queued where the device has a queue. DeviceFailure once the program is closed."""
        ...

    def synchronize(self) -> None:
        """Wait for every queued run; DeviceFailure where one failed."""
        ...

    def seconds(self) -> float:
        """One run, waited for; its seconds on the device by ``clock``."""
        ...

    def write(self, inputs: Mapping[str, Any]) -> None:
        """Copy values, from the host or the device, into bound inputs. BadInput for a wrong name, type or shape."""
        ...

    def to_host(self, *names: str) -> dict[str, Array]:
        """Copies of the outputs (all, or those named) after the runs queued so far."""
        ...

    def close(self) -> None:
        """Let go of the arrays; closing the program does it too."""
        ...


class Loaded(Protocol):
    """A program resident on a device, ready for repeated runs.

    The core calls it and its bound calls from any thread, but from one at a time, and ``close`` once, after which it calls
    nothing but ``Bound.close`` (``rammer.device.guard``): a plugin needs no locks. Programs of one device may run at the same
    time: what they share (a queue, a compiler's cache) must bear that.
    """

    @property
    def kernels(self) -> int:
        """Kernel launches (or supersteps) of one run."""
        ...

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """One run; inputs by ONNX name, already of the right type and shape. Outputs are new arrays, which no later run
        touches."""
        ...

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        """A call with these arrays, already of the right types and shapes. Outputs that are not given are allocated.

        Arrays are on the host or on the device, by NumPy's protocols, DLPack's or ``__cuda_array_interface__``; a host
        array bound to a device with memory of its own is copied there once. BadInput naming the one that is elsewhere
        or overlaps an output; for ``stream`` (a queue of the device's kind) where the device has none.
        """
        ...

    def close(self) -> None:
        """Wait for queued runs and free the device memory."""
        ...


@runtime_checkable
class Poisoned(Protocol):
    """A loaded program may also fill what its runs write, and what kernels use besides, with NaN: for tests."""

    def poison(self) -> None:
        """Every byte of arena, inputs, outputs and the units' own memory gets all bits set: NaN in every float type.

        Where the device may start an operator before those that it waits for have finished, it does so from now on.
        """
        ...


class Profiler(Protocol):
    """Rammer's three measurements (section 4.3). A device with a clock must measure, not predict."""

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        """Seconds of one rTask alone on a vEU, and with every vEU running it."""
        ...

    def resources(self, kernel: RKernel, binding: Binding) -> Resources:
        """Threads, registers, local memory of one rTask, from the compiler where it tells."""
        ...

    def program_time(self, program: RProgram, constants: Mapping[str, Array], iterations: int = 10) -> float:
        """Median seconds of a whole rProgram on random inputs."""
        ...


@runtime_checkable
class Preparing(Protocol):
    """A Profiler may also build what it will measure at once: compilers that work side by side."""

    def prepare(self, options: Sequence[tuple[ROperator, Binding]]) -> None:
        """Build the kernels of tiled operators, so that measuring finds them made. A kernel that cannot be built says so when it
        is measured."""
        ...


class Backend(Protocol):
    """An opened device. Models are compiled and loaded for it by one thread at a time, while others may run programs."""

    @property
    def vdevice(self) -> VDevice:
        """The virtual device that programs are compiled for."""
        ...

    @property
    def hardware(self) -> Hardware:
        """What is really underneath."""
        ...

    @property
    def profiler(self) -> Profiler:
        """The three measurements."""
        ...

    @property
    def fingerprint(self) -> str:
        """Key of the kernel store: device, driver and generator versions."""
        ...

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Tiles and kernel families worth trying for an untiled operator, best predicted first. Of them only the first few are
        asked for: a device to which a candidate is work gives them ``LazySequence`` (``rammer.device.lazy_sequence``)."""
        ...

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        """Source, resources and predicted times for a tiled operator; raises DeviceFailure if it does not compile."""
        ...

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        """Compile every kernel, upload constants (by tensor name). DeviceFailure when memory does not suffice."""
        ...

    def close(self) -> None:
        """Free what opening took: a context, queues, threads, files. The core calls it once, when all programs are closed, and
        nothing after it. Another Backend of the device may be open, and must go on as it was."""
        ...


@runtime_checkable
class Exhaustive(Protocol):
    """A Backend may also list what ``candidates`` leaves out because it is predicted slow: for tests of every kernel."""

    def offered(self, operator: ROperator, binding: Binding) -> Iterable[ROperator]:
        """Every tile and family that the search could come up with; ``kernel`` raises DeviceFailure for some."""
        ...


@runtime_checkable
class Rated(Protocol):
    """A Backend may also say how good its kernels are at operators that keep a contraction's operand on chip
    (``ROperator.holds_operand``), and at the parts that such a one is compared with."""

    def rate(self, operator: ROperator, binding: Binding) -> float:
        """Predicted FLOP/s of a vEU on an untiled ``operator`` over ``vdevice.flops``; above 1 where other units than
        those counted there do the work. A Backend without this method computes all operators at one rate."""
        ...


@runtime_checkable
class PrologueRated(Protocol):
    """A Backend may also say how good its kernels are at maps before a contraction (``ROperator.prologue``)."""

    def prologue_rate(self, operator: ROperator, binding: Binding) -> float:
        """Predicted seconds of an untiled ``operator`` without its maps over those with them, at most 1. A Backend without this
        method computes them at no cost."""
        ...


@runtime_checkable
class Families(Protocol):
    """A Backend may also say which kernel families it has, so that a loaded file that names another one is refused. Without
    it, ``load`` alone decides."""

    @property
    def families(self) -> Mapping[str, Mapping[str, range]]:
        """The values of every config key by family; "" is the generic one."""
        ...


@dataclass(frozen=True, slots=True)
class Device:
    """A plugin's manifest. ``probe`` lists units or raises MissingDependency; ``targets`` are what ``OpenOptions.target`` takes,
    ``several`` is an option by which one name is several units, ``api`` the version it was written for, as a literal number."""

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
            raise ValueError(f"device name {self.name!r} is no identifier")


@dataclass(frozen=True, slots=True)
class Span:
    """One task on one unit of the device (a vEU in a predicted schedule, an SM of a GPU in a measured one); ``start``
    and ``end`` in seconds from the start of the program."""

    veu: int
    operator: str
    index: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """One run: when its tasks ran, and the ``program`` whose tasks they are. That is the one that was to run, or what the device
    made of it: with other tiles, or placed anew."""

    program: RProgram
    spans: Sequence[Span]


@runtime_checkable
class Tracer(Protocol):
    """A backend that can also say when and where each task ran."""

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        """The tasks of one run, by the device's own clock; a task that is several groups of threads has several spans.

        The kernels are built once more with what records times, so that ordinary ones carry nothing of it.
        """
        ...
