"""Device: the frozen manifest that a plugin returns, and the base classes of its objects.

Importing a manifest imports no driver; ``probe`` and ``open`` do. The hot path is the methods of ``Backend``, ``Profiler``,
``Loaded`` and ``Bound``. Abstract ones are required; all others have a default, so the core calls them without checking for
them. Hooks (``rammer.device.hooks``) only find and compose manifests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar, cast, get_args

import numpy as np

from rammer.device.arrays import HostRoom
from rammer.device.bound import Bound as Bound  # re-exported for plugins
from rammer.device.execution_forms import ExecutionForm
from rammer.errors import BadInput, DeviceFailure, NoMachineCode
from rammer.errors import MissingDependency as MissingDependency  # re-exported for plugins
from rammer.ir.at_length import PARTS
from rammer.ir.device import VDevice
from rammer.ir.operator import Resources, RKernel, ROperator
from rammer.ir.program import RProgram, Storage
from rammer.ir.types import TensorType
from rammer.ir.untrusted_json import whole_number

__all__ = [
    "ALIGNED_ELEMENTS",
    "API_VERSION",
    "FUSED_FORMS",
    "Array",
    "Backend",
    "Binding",
    "Bound",
    "Device",
    "FusedForm",
    "Hardware",
    "IterationCost",
    "Loaded",
    "MachineCode",
    "MissingDependency",
    "OpenOptions",
    "Option",
    "Profiler",
    "Recorded",
    "RunResult",
    "Span",
]

#: Incremented whenever plugins written for the previous version stop working.
API_VERSION = 5

#: Offsets (elements) equal modulo this number have equal alignment for every load and copy of up to 16 bytes.
ALIGNED_ELEMENTS = 16

#: Forms of fusion around one sum of an operator (a product, a window or a reduction): maps of its results, maps of a product's
#: operand, further sums in the same task, and rows that every task of a product of few rows computes. All but the last are those
#: of the core's emitter.
FusedForm: TypeAlias = Literal["trailing maps", "leading maps", "further sums", "leading rows"]
FUSED_FORMS: Final[frozenset[FusedForm]] = frozenset(get_args(FusedForm)) - {"leading rows"}

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Value = TypeVar("Value", bound=bool | int | float | str)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One physical unit that ``probe`` found. ``memory`` is in bytes; ``kind`` is e.g. ``gpu``, ``cpu``, ``simulator``;
    ``detail`` holds driver and platform versions for result files."""

    index: int
    name: str
    kind: str
    memory: int
    detail: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Option(Generic[Value]):
    """An option of a device, set by ``--option NAME=VALUE``. The manifest lists all, help texts show them, and the core rejects
    any other.

    The type of ``default`` is that of the value. ``choices`` are the values that a user may write, and ``least`` and ``most`` the
    bounds of a number. A text's default may be none of the choices: the device then decides."""

    name: str
    default: Value
    help: str
    choices: tuple[str, ...] = ()
    least: float = -inf
    most: float = inf

    @property
    def spelling(self) -> str:
        """The form on the command line, such as ``executor=single|waves`` or ``tiles=INT``."""
        kind = type(self.default)
        return f"{self.name}={'|'.join(self.choices) or ('0|1' if kind is bool else kind.__name__.upper())}"

    def parse(self, text: str) -> Value:
        """Return the value that ``text`` spells. Raises BadInput for another form, type or choice."""
        kind, hint = type(self.default), f"--option {self.spelling}"
        problem = BadInput(f"option {self.name}={text}: not one of {', '.join(self.choices)}", hint=hint)
        if self.choices:
            if text not in self.choices:
                raise problem
        elif kind is bool:
            if text.lower() not in _TRUTH:
                raise BadInput(f"option {self.name}={text}: not a truth value", hint=hint)
            return cast(Value, _TRUTH[text.lower()])
        elif kind is not str:
            number = whole_number(text) if kind is int else _parse_float(text)
            if number is None or not self.least <= number <= self.most:
                bounds = f" from {self.least:g} to {self.most:g}" if self.most < inf else f" of at least {self.least:g}"
                what = f"{'a whole number' if kind is int else 'a number'}{bounds if self.least > -inf else ''}"
                raise BadInput(f"option {self.name}={text}: not {what}", hint=hint)
            return cast(Value, number)
        return cast(Value, text)


#: Spellings of a truth value. A name without a value (``--option no_stream=``) is true.
_TRUTH: Final = {"": True, "1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def _parse_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """The unit to open. ``target`` names hardware to compile for without running it; ``require`` rejects any other ``kind``;
    ``options`` are the texts of the device's ``--option key=value`` pairs. With ``run_only`` the backend only loads machine code
    of compiled files, so a device whose kernels need the compiler opens without it."""

    index: int = 0
    target: str = ""
    require: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    run_only: bool = False

    def value(self, option: Option[Value]) -> Value:
        """Return the value of ``option``: the user's, or its default. Raises BadInput if it is malformed."""
        return option.parse(self.options[option.name]) if option.name in self.options else option.default


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
    """The outputs of a run by ONNX name, and its seconds on the device (host copies excluded), or a function of them that any
    thread may call once a reader needs them. ``notes`` are facts that affect the interpretation, such as streamed bytes."""

    outputs: dict[str, Array]
    clock: float | Callable[[], float]
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds on the device."""
        return self.clock() if callable(self.clock) else self.clock


@dataclass(frozen=True, slots=True)
class MachineCode:
    """The machine code of one program for the unit ``target`` (``Backend.code_target``), as a compiled file contains it.

    ``record`` is data of the device, which JSON can express. ``arrays`` are its bytes by name: binaries, packed constants."""

    target: str
    record: Mapping[str, Any]
    arrays: Mapping[str, Array]


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
    """The trace of one run: the spans of its tasks, and the ``program`` of these tasks."""

    program: RProgram
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class IterationCost:
    """The cost between two iterations of a loop program: the number of steps that take as long.

    ``cells`` counts steps of recurrent layers, ``light`` those of a model's loops. Steps that a run does not need cost as much as
    others. The numbers are smaller if the device skips them."""

    cells: int = 2
    light: int = 32


def _undefined(thing: object, name: str) -> AttributeError:
    """Return the error for a required attribute that a plugin's object does not define."""
    return AttributeError(f"{type(thing).__name__} does not define {name!r}")


class Loaded(ABC):
    """A program resident on a device, ready for repeated runs.

    The core calls it and its bound calls from any thread, but one at a time. It calls ``close`` once, and only ``Bound.release``
    after that (``rammer.device.guard``), so a plugin needs no locks. Programs of one device may run concurrently: resources that
    they share (a queue, a compiler's cache) must be thread-safe.
    """

    @cached_property
    def kernels(self) -> int:
        """The number of kernel launches (or supersteps) of one run."""
        raise _undefined(self, "kernels")

    @abstractmethod
    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """Run once; inputs by ONNX name, already of the right type and shape. Outputs are new arrays, which later runs never
        modify."""

    @abstractmethod
    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        """Return a call bound to these arrays, already of the right types and shapes. Missing outputs are allocated.

        Arrays are on the host or on the device, by NumPy's protocols, DLPack's or ``__cuda_array_interface__``. A host array
        bound to a device with separate memory is copied there once. Raises BadInput for an array that is elsewhere or overlaps an
        output. A ``stream`` (a queue of the device's kind) is also rejected if the device has no queues.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for queued runs and free the device memory."""

    def poison(self) -> bool:
        """Set all bits of arena, inputs, outputs and the units' local memory, for tests. They are NaN in every float type.

        From now on the device also starts operators as early as it may, before those that they wait for have finished. Return
        True if done. The default does nothing and returns False."""
        return False


class Profiler(ABC):
    """Rammer's three measurements (section 4.3). A device with a clock must measure, not predict."""

    @abstractmethod
    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        """Return the seconds of one rTask alone on a vEU, and with every vEU running it."""

    @abstractmethod
    def resources(self, kernel: RKernel, binding: Binding) -> Resources:
        """Return threads, registers and local memory of one rTask, from the compiler if it reports them."""

    @abstractmethod
    def program_time(self, program: RProgram, constants: Mapping[str, Array], iterations: int = 10) -> float:
        """Return the median seconds of a whole rProgram on random inputs."""

    def prepare(self, options: Sequence[tuple[ROperator, Binding]]) -> None:  # noqa: B027  (optional)
        """Build the kernels of tiled operators before they are measured, with concurrent compilers. Build errors are raised when
        the kernel is measured. The default does nothing: each kernel is built when it is measured."""


class Backend(ABC):
    """An opened device. One thread at a time compiles and loads models for it, while others may run programs.

    A device defines the attributes ``vdevice``, ``hardware``, ``profiler`` and ``fingerprint``, and the abstract methods. All
    others are optional capabilities; each has a default that does without it. An attribute is set on the object, or overridden in
    the class by a value or a property."""

    @cached_property
    def vdevice(self) -> VDevice:
        """The virtual device that programs are compiled for."""
        raise _undefined(self, "vdevice")

    @cached_property
    def hardware(self) -> Hardware:
        """The physical hardware of the device."""
        raise _undefined(self, "hardware")

    @cached_property
    def profiler(self) -> Profiler:
        """The profiler with the three measurements."""
        raise _undefined(self, "profiler")

    @cached_property
    def fingerprint(self) -> str:
        """Key of the kernel store: device, driver and generator versions."""
        raise _undefined(self, "fingerprint")

    @abstractmethod
    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Return tiles and kernel families worth trying for an untiled operator, best predicted first. Callers read only the
        first few: a device with expensive candidates returns a ``LazySequence`` (``rammer.device.lazy_sequence``)."""

    @abstractmethod
    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        """Return source, resources and predicted times for a tiled operator. Raises DeviceFailure if it does not compile."""

    def exclude_families(self, patterns: Sequence[str]) -> None:
        """Offer no kernels of families whose name matches one of ``patterns``. Raises BadInput if a pattern matches none. The
        default has no families."""
        if patterns:
            raise BadInput(f"kernel family {patterns[0]!r} does not exist on this device", "--exclude-family", "leave it out")

    @abstractmethod
    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        """Compile every kernel and upload constants (by tensor name). Raises DeviceFailure if memory does not suffice."""

    @abstractmethod
    def close(self) -> None:
        """Free the resources of the opened device: a context, queues, threads, files. The core calls it once, after all programs
        are closed, and nothing after it. Other Backends of the device must keep working."""

    # --- kernels ---

    @cached_property
    def families(self) -> Mapping[str, Mapping[str, range]] | None:
        """The values of every config key by kernel family; "" is the generic family. A loaded file with an unknown family or
        value is rejected. The default None declares nothing: ``load`` alone decides."""
        return None

    def all_candidates(self, operator: ROperator, binding: Binding) -> Iterable[ROperator]:
        """Yield every tile and family in the search space, for tests of every kernel; ``kernel`` raises DeviceFailure for some.
        The default is ``candidates``."""
        return self.candidates(operator, binding)

    def smallest_kernel(self, operator: ROperator, binding: Binding) -> ROperator | None:
        """Return the operator tiled for the least vEU time of its tasks in all (Rammer, section 4.2: resource-efficient rTasks).

        It runs beside other operators, and is predicted to take not much longer than the best alone. The fastest candidates need
        not include it, since they fill the device. The default is None: no other kernel."""
        return None

    # --- schedules ---

    @cached_property
    def default_policy(self) -> str:
        """The spelling of the policy for users who choose none, such as one that the plugin's hook ``rammer_policies`` adds. The
        default is "wavefront"."""
        return "wavefront"

    # --- fusion ---

    @cached_property
    def fused_forms(self) -> Mapping[str, frozenset[FusedForm]]:
        """The forms of fusion that kernels compute, by kernel family; families that are missing have none.

        Fusion tries no form that no family has. If the family of a sum's best kernel lacks trailing maps, they join only if the
        device's kernels for both together are predicted to be faster. The default is all forms for the generic family "", and
        none for others."""
        return {"": FUSED_FORMS}

    def rate(self, operator: ROperator, binding: Binding) -> float:
        """Return the FLOP/s of a vEU that kernels can reach on an untiled ``operator``, divided by ``vdevice.flops``. Above 1 if
        units beyond those counted in ``vdevice.flops`` compute it.

        Fusion asks for operators with a product and sums that depend on each other, and asks for kernels only if this bound does
        not exclude the operator. So the answer should be quick. The default is 1: all operators are computed at one rate."""
        return 1.0

    # --- constants ---

    def arrangements(self, operator: ROperator, binding: Binding) -> frozenset[str]:
        """Return the arrangements of constants that a tiled operator's kernel reads (keys as in ``ConstantForm``), so that
        programs share packed constants. Raises DeviceFailure without a kernel. The default is none: constants are read as they
        are."""
        return frozenset()

    def same_packing(self, operator: ROperator, binding: Binding, held: Collection[str], within: float) -> ROperator | None:
        """Return the best choice of a tiled operator's family that needs only arrangements of ``held``, or None. It is predicted
        to take no more than 1 + ``within`` times as long as the family's best. The default is None."""
        return None

    # --- ranges of lengths ---

    @cached_property
    def cases(self) -> int:
        """The maximum number of parts of a range with separate tables (length variants). The default 0 disables them."""
        return 0

    def retile_for(self, operator: ROperator, binding: Binding, within: float) -> ROperator:
        """Return the operator with the tile and kernel that are best at the lengths of ``binding``, with its constant
        arrangements. The default is the operator itself, the answer if no kernel is predicted to be faster by more than
        ``within``."""
        return operator

    def load_case(self, program: RProgram, constants: Mapping[str, Array], first: Loaded) -> Loaded:
        """Load a table for other lengths than those of ``first``, with the same ports. The two never run at the same time, so it
        may use the memory of ``first``. The default is ``load``, with memory of its own."""
        return self.load(program, constants)

    # --- machine code in compiled files ---

    @cached_property
    def code_target(self) -> str:
        """The name of the hardware and software whose machine code this unit can load: equal names, equal code. The default ""
        says that compiled files have no machine code for the device."""
        return ""

    def export_code(self, program: RProgram, constants: Mapping[str, Array]) -> MachineCode:
        """Return the machine code of a program for ``code_target``. Raises NoMachineCode for a form of programs without it, as
        the default does."""
        raise NoMachineCode("the device writes no machine code")

    def load_code(self, program: RProgram, constants: Mapping[str, Array], code: MachineCode) -> Loaded:
        """Load a program with machine code for ``code_target``, and compile nothing. The user trusts the code. Raises
        DeviceFailure if it is malformed or does not load. The default raises it."""
        raise DeviceFailure("the device loads no machine code")

    # --- execution forms ---

    @cached_property
    def forms(self) -> Sequence[ExecutionForm]:
        """The forms in which the device runs programs. A program without a form runs in the first one. The default is one."""
        return (ExecutionForm("single"),)

    def suitable_forms(self, program: RProgram, binding: Binding) -> Sequence[ExecutionForm]:
        """Return the forms that may be the fastest for a program, which was planned for the first form.

        It is planned for another one if the first form is missing. The default is the first form."""
        return self.forms[:1]

    def form_kernels(self, form: ExecutionForm, operator: ROperator, binding: Binding, part: bool = False) -> Sequence[RKernel]:
        """Return the kernels of a tiled operator that ``form`` can run, priced in it, the best prediction first.

        The operator's own kernel is the only one if it is to be kept, or if there is no other. A ``part`` of a split sum has no
        kernel yet; the result may be empty. The default is the operator's own kernel, and none for parts."""
        return () if part else (self.kernel(operator, binding),)

    def holds_constants(self, operator: ROperator) -> bool:
        """Return True if a form with ``phases`` or ``private`` keeps the operator's constants on chip from task to task. The
        default is False."""
        return False

    # --- runs ---

    @cached_property
    def iteration_cost(self) -> IterationCost | None:
        """The cost between two iterations of loop programs (``RProgram.repeat``): the table in iterations, with moves between
        buffers around each. The default None says that the device runs no such programs: the core repeats them from the host."""
        return None

    @cached_property
    def host_room(self) -> HostRoom:
        """The requirements on a host array that programs access in place, on a device that shares the host's memory. The default
        is that of any array."""
        return HostRoom()

    def device_array(self, values: Array) -> Any:
        """Return values of the host as an array that bound calls use in place. The default returns ``values``: programs share the
        host's memory, or copy arrays of the host in every run."""
        return values

    def host_array(self, array: Any) -> Array:
        """Return a copy of an array of ``device_array`` on the host. The default supports NumPy arrays."""
        return np.array(array)

    @property
    def records_tasks(self) -> bool:
        """True if the device overrides ``trace``."""
        return type(self).trace is not Backend.trace

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        """Return the tasks of one run, by the device's clock; a task of several thread groups has several spans. The kernels are
        rebuilt with time recording, so that ordinary kernels carry no overhead. The default raises DeviceFailure."""
        raise DeviceFailure("the device does not record when its tasks run")


@dataclass(frozen=True, slots=True)
class Device:
    """A plugin's manifest. ``probe`` lists units or raises MissingDependency.

    ``targets`` are the values of ``OpenOptions.target``. ``options`` are all that the device takes; ``several`` names the one
    by which a name denotes several units. ``providers`` are ONNX Runtime's names of the execution providers that the device's
    GPUs replace. ``api`` is the API version that the plugin was written for, as a literal number."""

    name: str
    summary: str
    probe: Callable[[], Sequence[Hardware]]
    open: Callable[[OpenOptions], Backend]
    targets: tuple[str, ...] = ()
    simulated: bool = False
    several: str = ""
    options: tuple[Option[Any], ...] = ()
    providers: tuple[str, ...] = ()
    api: int = field(kw_only=True)

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"device name {self.name!r} is not an identifier")
        for option in self.options:
            if not option.name.isidentifier():
                raise ValueError(f"option name {option.name!r} of device {self.name} is not an identifier")

    def check_options(self, given: Mapping[str, str]) -> None:
        """Raise BadInput for an option that the device does not take, and for a malformed value."""
        known = {o.name: o for o in self.options}
        for name, text in given.items():
            if name not in known:
                takes = f"it takes {', '.join(o.spelling for o in self.options)}" if known else "it takes none"
                raise BadInput(f"device {self.name} has no option {name!r}", hint=takes)
            known[name].parse(text)
