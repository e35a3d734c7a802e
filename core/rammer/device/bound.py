"""The bound call: a program or a model with fixed input and output arrays, and the part of it that a device implements."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import Any

import numpy as np

from rammer.device.arrays import Array, by_name, check_names, check_type, dtype_of, host_view, shape_of
from rammer.errors import BadInput, DeviceFailure
from rammer.ir.types import TensorType

__all__ = ["Bound"]


class CallGuard:
    """A context for each call of a bound call, which excludes its other calls. Entering it raises DeviceFailure after ``close``.

    It is a class because every run enters it: a generator takes a microsecond more."""

    def __init__(self, lock: Any = None) -> None:
        self.lock, self.closed = lock or RLock(), False

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.closed:
            self.lock.release()
            raise DeviceFailure("the bound call was closed", hint="bind the arrays again")

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        self.lock.release()

    @property
    def has_ended(self) -> bool:
        """True if calls raise DeviceFailure."""
        return self.closed

    def closing(self) -> AbstractContextManager[object]:
        """Return a context for ``close``, which is entered with ``lock`` held."""
        return nullcontext()


class Bound(ABC):
    """A program with fixed input and output arrays: a run checks nothing and moves nothing through the host.

    The arrays may be overwritten between runs, and each run reads their current content. Runs of one program execute in order,
    including runs of its other bound calls.

    Users call the methods up to ``close``. A device implements ``launch``. It overrides the other methods that follow if its runs
    are queued or its arrays are not NumPy arrays. These methods are called one at a time, and not after ``close``.

    ``inputs`` and ``outputs`` are the device's own arrays by ONNX name: the same ones in every run. ``clock`` names the clock of
    ``seconds`` and states whether times include copies. ``stream`` is the device queue on which runs are enqueued, or None if a
    run has finished when ``run`` returns. ``notes`` state additional work of a run, such as a copy into an array that the kernels
    cannot write directly. ``copied`` names the inputs and outputs that each run copies between their array and the memory in
    which the program computes; the default is all of them."""

    def __init__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        clock: str = "wall",
        stream: Any = None,
        notes: Sequence[str] = (),
        copied: tuple[Sequence[str], Sequence[str]] | None = None,
    ) -> None:
        self.inputs, self.outputs, self.clock, self.stream = inputs, outputs, clock, stream
        self.copied = (tuple(inputs), tuple(outputs)) if copied is None else copied
        self._notes = tuple(notes)
        self.guard = CallGuard()

    @property
    def notes(self) -> tuple[str, ...]:
        """Additional work of a run. The default is the notes given to ``__init__``."""
        return self._notes

    def run(self, **lengths: int) -> None:
        """Run once, queued if the device has a queue. ``lengths`` set those of a model's ranges for this run and later ones.

        Raises DeviceFailure if the call or its program is closed, and BadInput for a length outside its range."""
        with self.guard:
            if lengths:
                self.set_lengths(lengths)
            self.launch()

    def seconds(self, **lengths: int) -> float:
        """Run once like ``run``, wait, and return the run's seconds on the device by ``clock``."""
        with self.guard:
            if lengths:
                self.set_lengths(lengths)
            return self.measure()

    def synchronize(self) -> None:
        """Wait for every queued run. Raises DeviceFailure if one failed. Does nothing after ``close``, which has waited."""
        guard = self.guard
        with guard.lock:
            if not guard.has_ended:
                with guard:
                    self.wait()

    def write(self, inputs: Mapping[str, Any]) -> None:
        """Copy values, from the host or the device, into bound inputs. Raises BadInput for a wrong name, type or shape."""
        inputs = by_name("input", inputs)
        with self.guard:
            check_names("input", inputs, self.inputs)
            self.store({name: self.accept(name, value) for name, value in inputs.items()})

    def to_host(self, *names: str) -> dict[str, Array]:
        """Return copies of the outputs (all, or ``names``) after the queued runs. Raises BadInput for a wrong name."""
        with self.guard:
            check_names("output", dict.fromkeys(names), self.outputs)
            return self.fetch(names or tuple(self.outputs))

    def close(self) -> None:
        """Release the arrays after the running call has returned. Closing again does nothing; closing the program does it too.
        Raises DeviceFailure if called from within a call of the program."""
        guard = self.guard
        with guard.lock:
            if not guard.closed:
                with guard.closing():
                    guard.closed = True
                    self.release()

    # --- the part of a device -----------------------------------------------------------------

    @abstractmethod
    def launch(self) -> None:
        """Run once, queued if the device has a queue."""

    def wait(self) -> None:  # noqa: B027
        """Wait for every queued run. Raises DeviceFailure if one failed. The default returns at once: runs are not queued."""

    def measure(self) -> float:
        """Run once, wait, and return the seconds by ``clock``. The default is the wall-clock time."""
        self.wait()
        start = time.perf_counter()
        self.launch()
        self.wait()
        return time.perf_counter() - start

    def accept(self, name: str, value: Any) -> Any:
        """Return a value for ``store``. The default raises BadInput unless it has the type and shape of the bound input."""
        check_values(name, value, self.inputs[name])
        return value

    def store(self, values: Mapping[str, Any]) -> None:
        """Copy values, which have the types and shapes of their inputs, into the arrays. The default supports NumPy arrays."""
        for name, value in values.items():
            given = host_view(f"input {name!r}", value)
            if not self.inputs[name].flags.writeable:
                raise BadInput(f"input {name!r} was bound as an array that cannot be written")
            np.copyto(self.inputs[name], given)

    def fetch(self, names: Sequence[str]) -> dict[str, Array]:
        """Return copies of outputs after the queued runs. The default supports NumPy arrays."""
        self.wait()
        return {name: self.outputs[name].copy() for name in names}

    def set_lengths(self, lengths: Mapping[str, Any]) -> None:
        """Set lengths for the next run. The default raises BadInput, since all shapes are fixed."""
        raise BadInput(f"the bound call has no length {next(iter(lengths))!r}", hint="all of its shapes are fixed")

    def release(self) -> None:  # noqa: B027
        """Release the resources of the call after its queued runs. The default does nothing.

        It is called once, possibly after the program's ``close``."""


def check_values(name: str, given: Any, array: Any) -> None:
    """Raise BadInput unless ``given`` has the type and shape of the bound ``array``."""
    check_type(f"input {name!r}", given, TensorType(dtype_of(array), shape_of(array)))
