"""Candidates that hang, die or break the device: they are left out, and the compiling process survives and reports them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.guard import opening_of
from rammer.device.loader import GROUP, Registry
from rammer.device.manifest import Backend, Binding
from rammer.errors import DeviceFailure
from rammer.ir.operator import RKernel
from rammer.ir.program import Port
from rammer.jit.self_test import tiny_graph
from rammer.tuning import measure_process
from rammer.tuning.kernel_store import KernelStore
from rammer.tuning.measure_process import Measurer

PORTS = ((Port("x", "x"),), (Port("y", "y"),))
#: A device whose clock hangs, dies or fails for some kernels, selected by its options and by task counts.
PLUGIN = """
import os, signal, time
from dataclasses import replace
from rammer.device.hooks import hookimpl
from rammer.device.manifest import Device, OpenOptions, Option
from rammer.errors import DeviceFailure
from rammer.fusion.tile_search import candidates
from rammer_toy import ToyBackend, ToyProfiler, probe

class Profiler(ToyProfiler):
    def task_time(self, kernel, binding):
        deed = self.backend.deeds.get(str(kernel.operator.task_count % 3))
        if deed == "hangs":
            time.sleep(1000)
        if deed == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if deed == "raises":
            raise DeviceFailure("an illegal address")
        if deed == "errs":
            raise ZeroDivisionError("of its own")
        return float(os.getpid()), 1e9

class Backend(ToyBackend):
    def __init__(self, options):
        super().__init__(OpenOptions())
        self.deeds = {name[1:]: deed for name, deed in options.options.items()}
        self.profiler = Profiler(self)

    def candidates(self, operator, binding):
        return candidates(operator, binding, replace(self.vdevice, veus=16), 16)

OPTIONS = tuple(Option(f"n{n}", "", "what happens to tiles of this many tasks") for n in range(17))

@hookimpl
def rammer_devices():
    return [Device("hazard", "a toy with a bad clock", probe, Backend, api=5, options=OPTIONS)]
"""


@pytest.fixture
def open_hazard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Yield a function that opens the device of an installed plugin.

    This process and its child processes find the entry point."""
    (tmp_path / "rammer_hazard.py").write_text(PLUGIN)
    info = tmp_path / "rammer_hazard-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rammer-hazard\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rammer.devices]\nhazard = rammer_hazard\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(measure_process, "MEASURERS", {})
    yield lambda **deeds: Registry().open("hazard", options={f"n{k[1:]}": v for k, v in deeds.items()})
    measure_process.close_all()
    sys.modules.pop("rammer_hazard", None)


def measured(backend: Backend, seconds: float, monkeypatch: pytest.MonkeyPatch) -> tuple[list[RKernel], Measurer]:
    """Return the kernels stored after compiling with ``--tune full``, and the measuring process's handle."""
    monkeypatch.setattr(measure_process.task_timer, "__defaults__", (seconds,))
    compiler = Compiler(backend, CompileOptions("wavefront", "full"), KernelStore(None))
    segment = compiler.program(tiny_graph(0), *PORTS)
    (measurer,) = measure_process.MEASURERS.values()
    return [k for kept in segment.kernels.values() for k in kept], measurer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "seconds", "said"),
    [("hangs", 2.0, "not measured within 2 s"), ("dies", 60.0, "by signal 11"), ("raises", 60.0, "an illegal address")],
)
def test_a_candidate_that_breaks_the_device_costs_itself(
    deed: str,
    seconds: float,
    said: str,
    open_hazard: object,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    lost, honest = list[bool](), Measurer.task_time

    def noting(self: Measurer, *given: object) -> tuple[float, float]:
        lost.append(True)
        found = honest(self, *given)  # type: ignore[arg-type]
        lost[-1] = False
        return found

    monkeypatch.setattr(Measurer, "task_time", noting)
    kept, measurer = measured(open_hazard(_1=deed), seconds, monkeypatch)  # type: ignore[operator]
    assert kept and all(k.operator.task_count % 3 != 1 and k.alone != os.getpid() for k in kept)
    told = capfd.readouterr().err
    assert said in told and 0 < sum(lost) == told.count("candidate left out: operator ")
    assert measurer.started == 1 + sum(lost[:-1])  # one for the first candidate and one for each that follows a lost one


@pytest.mark.slow
def test_where_every_candidate_is_lost_the_compile_fails_and_says_why(
    open_hazard: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceFailure, match="an illegal address"):
        measured(open_hazard(_0="raises", _1="raises", _2="raises"), 9.0, monkeypatch)  # type: ignore[operator]


def test_an_error_of_our_own_is_none_of_the_devices(open_hazard: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError: of its own"):
        measured(open_hazard(_0="errs", _1="errs", _2="errs"), 9.0, monkeypatch)  # type: ignore[operator]


@pytest.mark.slow
def test_a_process_that_ended_is_followed_by_another(open_hazard: object, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Backend = open_hazard()  # type: ignore[operator]
    opening = opening_of(backend)
    assert opening is not None
    kept, measurer = measured(backend, 9.0, monkeypatch)
    kernel, binding = kept[0], Binding({}, {})
    del binding
    assert measurer.started == 1
    measurer.close()
    again, _ = measured(backend, 9.0, monkeypatch)
    assert measurer.started == 2 and again[0].alone != kernel.alone  # the kernel's time is its process id


def test_plugins_that_were_handed_over_are_measured_here() -> None:
    points = [p for p in __import__("importlib.metadata").metadata.entry_points(group=GROUP) if p.name == "toy"]
    if points:
        assert opening_of(Registry(points).open("toy")) is None
