"""Measurement of candidates in a separate process: a kernel that hangs or breaks the device costs a timeout, not the compile.

The process opens the device as this one did, and measures one kernel at a time (``measure_worker.py``). It starts with the first
measurement and stays for later ones. If a kernel times out or ends the process, the process is killed, and the next kernel gets a
new one. Two kinds of devices are measured in this process. A device without an entry point (a plugin that a test passes in)
cannot be opened again. A simulated device cannot break.
"""

from __future__ import annotations

import atexit
import contextlib
import pickle
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from threading import Lock
from typing import Any, Final

from rammer.child_processes import start_python
from rammer.device.guard import Opening, opening_of
from rammer.device.manifest import Backend, Binding
from rammer.errors import DeviceFailure, RammerError
from rammer.ir.operator import RKernel, ROperator

__all__ = ["BEGINNING", "IDLE", "MEASURERS", "SECONDS", "Measurer", "close_all", "restrict_binding", "task_timer", "to_sendable"]

#: Seconds for the process to open the device, for one kernel to be built and measured, and until an idle process exits.
BEGINNING: Final = 120.0
SECONDS: Final = 60.0
IDLE: Final = 60.0

TaskTimer = Callable[[RKernel, Binding], tuple[float, float]]


def task_timer(backend: Backend, seconds: float = SECONDS) -> TaskTimer:
    """Return the ``task_time`` for tuning: in a separate process if the device can be opened there, else the backend's."""
    opening = opening_of(backend)
    if opening is None or opening.options.target or backend.vdevice.simulated:
        return lambda kernel, binding: backend.profiler.task_time(kernel, binding)
    measurer = MEASURERS.setdefault(opening, Measurer(opening))
    return lambda kernel, binding: measurer.task_time(kernel, binding, seconds)


@dataclass
class Measurer:
    """A process that measures kernels on one device, shared by threads under a lock. ``started`` counts its processes."""

    opening: Opening
    started: int = 0
    _child: subprocess.Popen[bytes] | None = None
    _line: Connection | None = None
    _lock: Lock = field(default_factory=Lock)

    def task_time(self, kernel: RKernel, binding: Binding, seconds: float = SECONDS) -> tuple[float, float]:
        """Run ``Profiler.task_time`` in the process. Raise DeviceFailure if the kernel takes more than ``seconds``, ends the
        process or is refused by the device. Each ends the process."""
        operator = kernel.operator
        with self._lock:
            line, told = self._ensure_process(), f"it was not measured within {seconds:.0f} s"
            asked = (operator, restrict_binding(operator, binding))
            alone, crowded = self._request_answer(
                line, asked, seconds, (told, "the process that measured it"), operator.anchor.origin
            )
            return float(alone), float(crowded)

    def _request_answer(self, line: Connection, message: object, seconds: float, says: tuple[str, str], where: str = "") -> Any:
        """Return the process's answer. Raise DeviceFailure with the text of ``says`` if the answer is late or the process has
        ended. Raise the exception of the process here. Each ends the process."""
        try:
            line.send(message)
            if not line.poll(seconds):
                raise DeviceFailure(says[0], where=where)
            answer = line.recv()
            if isinstance(answer, Exception):
                raise answer
            return answer
        except (EOFError, OSError):
            raise DeviceFailure(f"{says[1]} {self._describe_exit()}", where=where) from None
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Terminate the measuring process."""
        with self._lock:
            self._end()

    def _ensure_process(self) -> Connection:
        if self._line is not None and self._child is not None and self._child.poll() is None:
            return self._line
        self._end()
        ours, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            self._child = start_python("rammer.tuning.measure_worker", number, pass_fds=[number])
        self._line, self.started = ours, self.started + 1
        device = self.opening.device
        late = f"device {device} was not opened for measuring within {BEGINNING:.0f} s"
        self._request_answer(ours, self.opening, BEGINNING, (late, f"the process that was to measure on {device}"))
        return ours

    def _describe_exit(self) -> str:
        """Describe the exit of the process, which has closed its connection."""
        code = None
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._child.wait(5)
        self._end()
        return (
            "closed its connection"
            if code is None
            else f"was terminated by signal {-code}"
            if code < 0
            else f"ended with exit code {code}"
        )

    def _end(self) -> None:
        if self._line is not None:
            self._line.close()
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._line = self._child = None


#: The measurers of this process, shared by all users of a device: each is started once.
MEASURERS: Final[dict[Opening, Measurer]] = {}


@atexit.register
def close_all() -> None:
    """Terminate all measurers, when this process ends."""
    for measurer in MEASURERS.values():
        measurer.close()


def restrict_binding(operator: ROperator, binding: Binding) -> Binding:
    """Return the part of ``binding`` for one operator: all data that a kernel generator may read (``Binding.key``)."""
    names = {*operator.inputs, *operator.outputs, *operator.lengths, *(c.name for c in operator.computes)}
    return replace(
        binding,
        types={n: t for n, t in binding.types.items() if n in names},
        storages={n: s for n, s in binding.storages.items() if n in names},
        constants=binding.constants & names,
        reused=binding.reused & names,
    )


def to_sendable(problem: Exception) -> Exception:
    """Return ``problem`` in a form that another process can raise: an expected error unchanged, others with their traceback's
    text."""
    import traceback

    if isinstance(problem, RammerError):
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(problem))
            return problem
        return DeviceFailure(str(problem))
    return RuntimeError("".join(traceback.format_exception(problem)).rstrip())
