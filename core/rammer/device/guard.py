"""What the core promises every plugin about threads: one call of a program at a time, and none after ``close``. And what it
promises users of every plugin: errors of a driver, of the system and of a package that is not there are RammerErrors.

A plugin's Backend is put into a guard where it is opened, and gives guarded programs and bound calls from then on. A guard
forwards whatever else it is asked for, and tells the class of what it stands for, so a device's own attributes are still there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from threading import RLock
from types import MethodType
from typing import Any, cast
from weakref import WeakSet

from rammer.device.code_hash import code_hash, package_of
from rammer.device.manifest import Array, Backend, Bound, Loaded, OpenOptions, RunResult
from rammer.errors import DeviceFailure, of_driver
from rammer.ir.program import RProgram


class Telling:
    """A block in which errors of ``device``'s driver and of the system become RammerErrors. A class, as every run has
    some: a generator takes a microsecond more."""

    __slots__ = ("device",)

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        if isinstance(problem, Exception):
            error = of_driver(problem, f"device {self.device}")
            if error is not None:
                raise error from problem


class Turn:
    """A block in which no other call of ``program`` runs. DeviceFailure once that is closed."""

    __slots__ = ("outer", "program")

    def __init__(self, program: GuardedLoaded) -> None:
        self.program, self.outer = program, False

    def __enter__(self) -> None:
        program = self.program
        program.lock.acquire()
        if program.shut:
            program.lock.release()
            raise DeviceFailure(f"program {program._name} was closed", hint="open or compile the model again")
        self.outer, program.busy = program.busy, True

    def __exit__(self, *problem: object) -> None:
        self.program.busy = self.outer
        self.program.lock.release()


@dataclass(frozen=True, slots=True)
class Opening:
    """How a device was opened, such that another process of this environment can open it too."""

    device: str
    options: OpenOptions

    def __hash__(self) -> int:
        o = self.options
        return hash((self.device, o.index, o.target, o.require, frozenset(o.options.items())))


class Guard:
    """Stands for ``plain``, an object of the plugin of device ``device``."""

    def __init__(self, plain: Any, device: str) -> None:
        self._plain, self._device = plain, device

    def __getattr__(self, name: str) -> Any:
        with self.told():
            found = getattr(self._plain, name)
        return self._wrap_method(found) if isinstance(found, MethodType) else found

    def _wrap_method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **named: Any) -> Any:
            with self.told():
                return method(*args, **named)

        return call

    def told(self) -> Telling:
        """Here the plugin meets its driver and the system: what they raise is told as a RammerError."""
        return Telling(self._device)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return type(self._plain)


class GuardedBackend(Guard):
    """An opened device. ``lock`` is held while something is compiled or loaded for it; runs do not need it."""

    def __init__(self, plain: Backend, device: str, opening: Opening | None = None) -> None:
        super().__init__(plain, device)
        self.opening = opening
        self.lock, self.shut = RLock(), False
        self._programs: WeakSet[GuardedLoaded] = WeakSet()

    def _wrap_method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        told = super()._wrap_method(method)

        @wraps(method)
        def call(*args: Any, **named: Any) -> Any:
            self._check_open()
            return told(*args, **named)

        return call

    def _check_open(self) -> None:
        """DeviceFailure once closed. What describes the device can still be read."""
        if self.shut:
            raise DeviceFailure(f"device {self._device} was closed", hint="open it again")

    @property
    def fingerprint(self) -> str:
        """The plugin's, with a hash of its code: what an edited plugin made before is not used."""
        with self.told():
            return f"{self._plain.fingerprint}, code {code_hash(package_of(self._plain))}"

    @property
    def profiler(self) -> Any:
        """The plugin's, guarded: it measures on the device."""
        self._check_open()
        with self.told():
            return Guard(self._plain.profiler, self._device)

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        """The plugin's program, guarded."""
        with self.lock, self.told():
            self._check_open()
            made = GuardedLoaded(self._plain.load(program, constants), program.name, self._device)
            self._programs.add(made)
            return made

    def load_case(self, program: RProgram, constants: Mapping[str, Array], first: GuardedLoaded) -> Loaded:
        """The plugin's table for other lengths than those of ``first``, which takes turns with it."""
        with self.lock, self.told():
            self._check_open()
            made = GuardedLoaded(self._plain.load_case(program, constants, first._plain), program.name, self._device)
            made.lock = first.lock
            self._programs.add(made)
            return made

    def close(self) -> None:
        """Close its programs, when their calls have returned, then the device; closing again does nothing. DeviceFailure from
        within a call of one of them."""
        with self.lock:
            if self.shut:
                return
            programs = list(self._programs)
            for program in programs:
                with program.ending():
                    pass
            for program in programs:
                program.close()
            self.shut = True
            with self.told():
                self._plain.close()


class GuardedLoaded(Guard):
    """A program on the device: ``run``, ``bind``, ``close`` and its bound calls take turns. DeviceFailure once closed."""

    def __init__(self, plain: Loaded, name: str, device: str) -> None:
        super().__init__(plain, device)
        self._name, self.lock, self.shut, self.busy = name, RLock(), False, False

    @property
    def kernels(self) -> int:
        """The plugin's answer."""
        return cast(int, self._plain.kernels)

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """One run, when all calls that came before have returned."""
        with self.turn(), self.told():
            return cast(RunResult, self._plain.run(inputs))

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        """A bound call that takes turns with this program's other calls."""
        with self.turn(), self.told():
            return GuardedBound(self, self._plain.bind(inputs, outputs, stream))

    def turn(self) -> Turn:
        """No other call meanwhile. DeviceFailure once closed."""
        return Turn(self)

    def close(self) -> None:
        """Free the program when the call that is running has returned; closing again does nothing."""
        with self.ending():
            if not self.shut:
                self.shut = True
                self._plain.close()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """No call meanwhile. DeviceFailure where this thread is in one: what Python collects during a run may try."""
        with self.lock:
            if self.busy:
                raise DeviceFailure(f"program {self._name} cannot be closed from within a call of it")
            with self.told():
                yield


class GuardedBound(Guard):
    """A bound call of ``program``, which takes turns with the program's other calls."""

    def __init__(self, program: GuardedLoaded, plain: Bound) -> None:
        super().__init__(plain, program._device)
        self._program = program

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The plugin's answer."""
        return cast(Mapping[str, Any], self._plain.inputs)

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The plugin's answer."""
        return cast(Mapping[str, Any], self._plain.outputs)

    @property
    def notes(self) -> tuple[str, ...]:
        """The plugin's answer."""
        return cast("tuple[str, ...]", self._plain.notes)

    @property
    def clock(self) -> str:
        """The plugin's answer."""
        return cast(str, self._plain.clock)

    @property
    def stream(self) -> Any:
        """The plugin's answer."""
        return self._plain.stream

    def run(self) -> None:
        """One run, queued or done."""
        with self._program.turn(), self.told():
            self._plain.run()

    def synchronize(self) -> None:
        """Wait for every queued run; ``close`` of the program has waited for them."""
        with self._program.lock, self.told():
            if not self._program.shut:
                self._plain.synchronize()

    def seconds(self) -> float:
        """One run, waited for."""
        with self._program.turn(), self.told():
            return cast(float, self._plain.seconds())

    def write(self, inputs: Mapping[str, Any]) -> None:
        """Copy values into bound inputs."""
        with self._program.turn(), self.told():
            self._plain.write(inputs)

    def to_host(self, *names: str) -> dict[str, Array]:
        """Copies of outputs."""
        with self._program.turn(), self.told():
            return cast("dict[str, Array]", self._plain.to_host(*names))

    def close(self) -> None:
        """Let go of the arrays."""
        with self._program.ending():
            self._plain.close()


def guard_backend(backend: Backend, device: str, opening: Opening | None = None) -> Backend:
    """``backend`` of device ``device`` in a guard; one that is in a guard already as it is. ``opening`` says how another process
    can open it."""
    return backend if type(backend) is GuardedBackend else cast(Backend, GuardedBackend(backend, device, opening))


def opening_of(backend: Backend) -> Opening | None:
    """How another process can open ``backend``; None where it cannot."""
    return backend.opening if type(backend) is GuardedBackend else None


def compile_lock(backend: Backend) -> AbstractContextManager[Any]:
    """Held while models are compiled for a guarded ``backend``, whose methods one thread calls at a time."""
    return cast(GuardedBackend, backend).lock
