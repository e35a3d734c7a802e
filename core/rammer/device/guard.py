"""Guards around the objects of plugins: thread safety for plugins, uniform errors for users.

The core calls a program from one thread at a time, and never after ``close``. Errors of a driver, of the system and of a missing
package become RammerErrors.

A plugin's Backend is wrapped in a guard when it is opened, and returns guarded programs. A guard forwards all other attributes
and reports the class of the wrapped object, so a device's additional attributes remain accessible. A bound call has its program's
guard as an attribute (``rammer.device.bound``).
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

from rammer.device.bound import Bound, CallGuard
from rammer.device.code_hash import code_hash, package_of
from rammer.device.manifest import Array, Backend, Loaded, MachineCode, OpenOptions, RunResult
from rammer.errors import DeviceFailure, of_driver
from rammer.ir.program import RProgram


class Telling:
    """A context in which errors of ``device``'s driver and of the system become RammerErrors. A class, since every run enters it:
    a generator takes a microsecond more."""

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


class ProgramGuard(CallGuard):
    """A context for a call of ``program`` or of one of its bound calls, which excludes their other calls. Errors of the driver
    become RammerErrors. Entering it raises DeviceFailure if the program or the bound call is closed."""

    def __init__(self, program: GuardedLoaded) -> None:
        super().__init__(program.lock)
        self.program = program

    def __enter__(self) -> None:
        super().__enter__()
        program = self.program
        if program.shut:
            self.lock.release()
            raise DeviceFailure(f"program {program._name} was closed", hint="open or compile the model again")
        program.running += 1

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        self.program.running -= 1
        self.lock.release()
        if problem is not None:
            self.program.told().__exit__(kind, problem, trace)

    @property
    def has_ended(self) -> bool:
        return self.closed or self.program.shut

    def closing(self) -> AbstractContextManager[object]:
        return self.program.ending()


@dataclass(frozen=True, slots=True)
class Opening:
    """The parameters with which a device was opened, so that another process of this environment can open it too."""

    device: str
    options: OpenOptions

    def __hash__(self) -> int:
        o = self.options
        return hash((self.device, o.index, o.target, o.require, frozenset(o.options.items())))


class Guard:
    """A wrapper around ``plain``, an object of the plugin of device ``device``."""

    def __init__(self, plain: Any, device: str) -> None:
        self.plain, self._device = plain, device

    def __getattr__(self, name: str) -> Any:
        with self.told():
            found = getattr(self.plain, name)
        return self._wrap_method(found) if isinstance(found, MethodType) else found

    def _wrap_method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **named: Any) -> Any:
            with self.told():
                return method(*args, **named)

        return call

    def told(self) -> Telling:
        """Return a context for calls into the plugin, which converts its exceptions to RammerErrors."""
        return Telling(self._device)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return type(self.plain)


class GuardedBackend(Guard):
    """An opened device. ``lock`` is held during compiling and loading; runs do not need it."""

    def __init__(self, plain: Backend, device: str, opening: Opening | None = None) -> None:
        super().__init__(plain, device)
        self.opening = opening
        self.lock, self.shut = RLock(), False
        self._programs: WeakSet[GuardedLoaded] = WeakSet()

    def _wrap_method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        told = super()._wrap_method(method)

        @wraps(method)
        def call(*args: Any, **named: Any) -> Any:
            self.check_open()
            return told(*args, **named)

        return call

    def check_open(self) -> None:
        """Raise DeviceFailure if the device is closed. Descriptive attributes remain readable."""
        if self.shut:
            raise DeviceFailure(f"device {self._device} was closed", hint="open it again")

    @property
    def fingerprint(self) -> str:
        """The plugin's fingerprint with a hash of its code, so that results of an edited plugin are not reused."""
        with self.told():
            return f"{self.plain.fingerprint}, code {code_hash(package_of(self.plain))}"

    @property
    def profiler(self) -> Any:
        """The plugin's profiler, guarded, since it measures on the device."""
        self.check_open()
        with self.told():
            return Guard(self.plain.profiler, self._device)

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        with self.lock, self.told():
            self.check_open()
            made = GuardedLoaded(self.plain.load(program, constants), program.name, self._device)
            self._programs.add(made)
            return cast(Loaded, made)

    def load_code(self, program: RProgram, constants: Mapping[str, Array], code: MachineCode) -> Loaded:
        """Load a program with machine code of a compiled file."""
        with self.lock, self.told():
            self.check_open()
            made = GuardedLoaded(self.plain.load_code(program, constants, code), program.name, self._device)
            self._programs.add(made)
            return cast(Loaded, made)

    def load_case(self, program: RProgram, constants: Mapping[str, Array], first: GuardedLoaded) -> Loaded:
        """Load the plugin's table for other lengths than those of ``first``; the two programs share one lock."""
        with self.lock, self.told():
            self.check_open()
            made = GuardedLoaded(self.plain.load_case(program, constants, first.plain), program.name, self._device)
            made.lock = first.lock
            self._programs.add(made)
            return cast(Loaded, made)

    def close(self) -> None:
        """Close the programs after their calls have returned, then the device. Closing again does nothing. Raises DeviceFailure
        if called from within a call of one of the programs."""
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
                self.plain.close()


class GuardedLoaded(Guard):
    """A loaded program whose ``run``, ``bind``, ``close`` and bound calls exclude each other. Calls raise DeviceFailure after
    ``close``."""

    def __init__(self, plain: Loaded, name: str, device: str) -> None:
        super().__init__(plain, device)
        self._name, self.lock, self.shut = name, RLock(), False
        self.running = 0  # calls of the thread that holds the lock

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """Run the program after all earlier calls have returned."""
        with ProgramGuard(self):
            return cast(RunResult, self.plain.run(inputs))

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        """Return a bound call that excludes this program's other calls. Raises DeviceFailure unless it is a ``Bound``."""
        with ProgramGuard(self):
            bound = self.plain.bind(inputs, outputs, stream)
            if not isinstance(bound, Bound):
                raise DeviceFailure(
                    f"device {self._device} returned an object of class {type(bound).__name__} as bound call, not a Bound"
                )
        bound.guard = ProgramGuard(self)
        return bound

    def close(self) -> None:
        """Free the program after the running call has returned. Closing again does nothing."""
        with self.ending():
            if not self.shut:
                self.shut = True
                self.plain.close()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Exclude other calls while the program is closed. Raises DeviceFailure if this thread is in a call of the program:
        garbage collection during a run may try to close it."""
        with self.lock:
            if self.running:
                raise DeviceFailure(f"program {self._name} cannot be closed from within a call of it")
            with self.told():
                yield


def guard_backend(backend: Backend, device: str, opening: Opening | None = None) -> Backend:
    """Return ``backend`` of device ``device`` in a guard, or unchanged if it is guarded already. ``opening`` holds the parameters
    for another process to open it."""
    return backend if issubclass(type(backend), GuardedBackend) else cast(Backend, GuardedBackend(backend, device, opening))


def opening_of(backend: Backend) -> Opening | None:
    """Return the parameters for another process to open ``backend``, or None if it cannot be reopened."""
    return cast(GuardedBackend, backend).opening if issubclass(type(backend), GuardedBackend) else None


def compile_lock(backend: Backend) -> AbstractContextManager[Any]:
    """Return the lock of a guarded ``backend``, held while models are compiled: one thread at a time calls its methods. Raises
    DeviceFailure if the device is closed."""
    guard = cast(GuardedBackend, backend)
    guard.check_open()
    return guard.lock
