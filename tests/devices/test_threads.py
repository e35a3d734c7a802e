"""Thread safety: detection of planted mistakes by the kit, and the command that makes many runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rammer
from rammer.device import bound as bound_module
from rammer.device import guard
from rammer.device.bound import Bound, CallGuard
from rammer.device.guard import GuardedBackend, ProgramGuard
from rammer.device.loader import Registry
from rammer.device.manifest import Array, Device, OpenOptions
from rammer.errors import BadInput, DeviceFailure
from rammer.runtime import executable
from rammer.runtime.executable import Executable
from rammer.runtime.loaded_model import LoadedModel
from rammer.runtime.loaded_programs import LoadedPrograms
from rammer.tuning.kernel_store import KernelStore, TunedKernel
from rammer_testing import thread_checks, threads
from rammer_testing.conformance import CHECKS, ConformanceError, Subject, registry_of
from rammer_testing.small_models import MODELS

import rammer_toy


class UnlockedProgram(ProgramGuard):
    """A guard that does not serialise calls of a program."""

    def __enter__(self) -> None: ...

    def __exit__(self, *problem: object) -> None: ...


class UnlockedCall(CallGuard):
    """A guard that does not serialise calls of a bound call."""

    def __enter__(self) -> None: ...

    def __exit__(self, *problem: object) -> None: ...


def always(self: ProgramGuard) -> None:
    """Enter with calls serialised even after ``close``."""
    self.lock.acquire()
    self.program.running += 1


def views(self: rammer_toy.ToyProgram, inputs: Mapping[str, Array]) -> Any:
    """Return the outputs of a run as views of the program's memory."""
    result = plain_run(self, inputs)
    for port in self.program.outputs:
        result.outputs[port.external] = self.memory.tensors[port.tensor]
    return result


plain_run = rammer_toy.ToyProgram.run


def emptied(self: Executable) -> None:
    """Free all programs, so that the next call compiles again."""
    for special in list(self.cache.values()):
        special.close()
    self.cache.clear()


def retired(self: LoadedModel) -> bool:
    """Free the model even while calls use it."""
    self.closed = True
    return True


#: Mistake -> (attribute to replace, replacement, check that detects it, message of the check).
MISTAKES: dict[str, tuple[Any, str, Any, str, str]] = {
    "no lock": (guard, "ProgramGuard", UnlockedProgram, "threads: runs", "runs of product in threads are wrong"),
    "bound calls take no turn": (
        Bound,
        "run",
        lambda self: self.launch(),
        "threads: bound calls",
        "wrong runs of bound calls",
    ),
    "writes between programs": (
        bound_module,
        "CallGuard",
        UnlockedCall,
        "threads: bound calls",
        "neither of two written sets",
    ),
    "compiled by everybody": (executable, "compile_lock", lambda backend: nullcontext(), "threads: first runs", "were compiled"),
    "runs after close": (ProgramGuard, "__enter__", always, "closed", "after shutdown"),
    "opens again after close": (Executable, "close", emptied, "closed", "no DeviceFailure that says 'closed'"),
    "views": (rammer_toy.ToyProgram, "run", views, "own outputs", "share memory"),
    "nothing is freed": (LoadedPrograms, "trim", lambda self, newest: None, "resident", "3 sets of shapes stay"),
    "bound programs are freed": (LoadedModel, "retire", retired, "resident", "closed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_kit_finds(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, check, words = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(Exception, match=words) as found:
        for _ in range(5):  # a fault between threads need not occur every time
            CHECKS[check](Subject("toy"))
    assert isinstance(found.value, ConformanceError) or mistake in ("runs after close", "bound programs are freed")


def test_a_thread_that_hangs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_checks, "PATIENCE", 0.5)
    subject = Subject("toy")
    (job,) = thread_checks.jobs_of(subject, "softmax")
    special = job.exe.prepare(job.inputs(subject.rng))
    (program,) = special.loaded.values()
    with program.lock, pytest.raises(ConformanceError, match="threads have not ended"):  # type: ignore[attr-defined]
        thread_checks.run_many(subject, [job], 2, 1)
    job.exe.close()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["rocm", "ipu_sim", "toy", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_many_runs(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert threads.main(["--device", device, "--runs", "240", "--seed", "5"]) == 0
    assert "240 runs from 8 threads, seed 5: all right" in capsys.readouterr().out


@pytest.mark.slow
def test_many_runs_say_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert threads.main(["--device", "toy", "--runs", "1", "--option", "speed=1"]) == 2
    assert "no option 'speed'" in capsys.readouterr().err
    monkeypatch.setattr(guard, "ProgramGuard", UnlockedProgram)
    assert threads.main(["--device", "toy", "--runs", "200"]) == 1
    assert " wrong (" in capsys.readouterr().out


# --- implementation -------------------------------------------------------------------------------------


def test_a_guard_is_what_it_stands_for() -> None:
    backend = Registry().open("toy")
    assert issubclass(type(backend), GuardedBackend)
    assert isinstance(backend, rammer_toy.ToyBackend)
    assert backend.limit > 0
    with pytest.raises(AttributeError, match="ToyBackend"):
        backend.speed  # type: ignore[attr-defined]  # noqa: B018


def test_every_device_of_a_registry_is_guarded() -> None:
    registry = registry_of(Device("mine", "", rammer_toy.probe, rammer_toy.ToyBackend, options=(rammer_toy.MEMORY,), api=5))
    assert issubclass(type(registry.open("mine")), GuardedBackend)
    plain = rammer_toy.ToyBackend(OpenOptions())
    exe = Executable(Subject("toy").executable(MODELS["softmax"]).source, plain, "toy")  # type: ignore[arg-type]
    assert issubclass(type(exe.backend), GuardedBackend)


@pytest.mark.parametrize("who", ["executable", "specialised", "program", "bound call", "bound program"])
def test_nothing_is_closed_from_within_its_own_call(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject("toy")
    exe = subject.executable(MODELS["softmax"])
    inputs = MODELS["softmax"].inputs(subject.rng, {})
    special, bound = exe.prepare(inputs), exe.bind(inputs)
    (program,) = special.loaded.values()
    close = {
        "executable": exe.close,
        "specialised": special.close,
        "program": program.close,
        "bound call": bound.close,
        "bound program": bound.programs[0].whole.close,
    }[who]
    calls: list[Callable[[], Any]] = [lambda: exe.run(inputs), lambda: special.run(inputs), lambda: program.run(inputs)]
    with monkeypatch.context() as patch:
        patch.setattr(rammer_toy.ToyProgram, "run", lambda self, given: close())
        for call in calls:
            with pytest.raises(DeviceFailure, match=r"cannot be closed from within|was closed"):
                call()
    if who in ("executable", "program"):
        assert not program.shut  # type: ignore[attr-defined]
    exe.close()
    assert program.shut  # type: ignore[attr-defined]


def test_a_store_is_used_by_several_threads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = KernelStore(tmp_path)
    kernel = TunedKernel((1,), "", (), rammer_toy.Resources(), 1.0, 1.0, "measured")

    def work(key: str) -> Callable[[], Any]:
        def call() -> Any:
            store.put(key, [kernel])
            store.forget()
            return store.get(key)

        return call

    found = thread_checks.at_once(Subject("toy"), [work(str(i)) for i in range(8)])
    assert found == [(kernel,)] * 8
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "4"])
def test_resident_is_checked(count: Any) -> None:
    with pytest.raises(BadInput, match=r"resident is .* not a whole number of at least 1"):
        rammer.compile("nothing.onnx", "toy", resident=count)


def test_resident_reaches_the_executable() -> None:
    model = MODELS["dynamic"].build(np.random.default_rng(0)).SerializeToString()
    exe = rammer.compile(model, "toy", resident=1)
    for n in (2, 3, 4):
        exe.run({"x": np.zeros((n, 2), np.float32)})
    assert [dict(key)["x"] for key in exe.cache] == [(8, 2)]  # a ranged program, since lengths changed
    exe.close()


def test_a_gpu_is_current_in_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    import rammer_cuda.hardware as hardware

    class Runtime:
        """A runtime of two GPUs. Every thread begins with the first GPU and without a context."""

        def __init__(self) -> None:
            self.own = threading.local()
            self.set = list[int]()

        def getDevice(self) -> int:
            return int(getattr(self.own, "device", 0))

        def setDevice(self, index: int) -> None:
            self.own.device = index
            self.set.append(index)

    runtime = Runtime()
    monkeypatch.setattr(hardware, "import_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    first, second = hardware.Unit(0), hardware.Unit(1)

    def work() -> list[int]:
        runtime.set.clear()
        with first, second, first:
            pass
        assert runtime.getDevice() == 0
        return list(runtime.set)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == [0, 1, 0, 1, 0]
