"""Schedules chosen by the device's clock: whole programs for ``auto``, stages for ``ios``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest

from rammer.compile_options import CompileOptions, Request
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.distributed.joining import Joining
from rammer.distributed.partition.search import compile_spread
from rammer.distributed.runtime.distributed_session import open_spread
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import Compute, ComputeGraph
from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel
from rammer.ir.program import Port, RProgram
from rammer.ir.types import TensorType
from rammer.plan.stage_latency import StageTimer, stage_program
from rammer.schedule.baselines import Sequential
from rammer.schedule.ios import IOS
from rammer.schedule.policy import OperatorGraph, Policy, Schedule
from rammer.schedule.policy_registry import Auto
from rammer.tuning.fastest_program import SAME
from rammer.tuning.kernel_store import KernelStore
from rammer.verify.verifier import VerifyError, verify
from rammer_testing.nonempty import some
from rammer_testing.small_models import dense_layers

POLICIES = ("sequential", "wavefront", "wavefront{lean=0}", "ios")


def branches(rng: np.random.Generator) -> ComputeGraph:
    """Return four products of different depths on one input, two of which are combined later."""
    kinds = {"x": TensorType("float32", (24, 32))}
    lines, weights = [], {}
    for name, width in zip("abcd", rng.integers(8, 60, 4).tolist(), strict=True):
        lines.append(Compute.parse(f"{name}: f32[i:24, j:{width}] = sum[k:32] x[i, k] * w{name}[k, j]"))
        weights[f"w{name}"] = rng.standard_normal((32, width), np.float32)
    lines.append(Compute.parse(f"y: f32[i:24, j:24] = sum[k:{lines[0].type.shape[1]}] a[i, k] * a[j, k]"))
    kinds |= {c.name: c.type for c in lines} | {n: TensorType("float32", w.shape) for n, w in weights.items()}
    return ComputeGraph("branches", ("x",), ("b", "c", "d", "y"), tuple(lines), kinds, weights)


def compiled(device: str, policy: str, graph: ComputeGraph, **options: str) -> tuple[ProgramSegment, Compiler]:
    compiler = Compiler(Registry().open(device, options=options), CompileOptions(policy), KernelStore(None))
    ports = tuple(Port(n, n) for n in graph.outputs)
    return compiler.program(graph, (Port("x", "x"),), ports), compiler


def test_no_policy_is_faster_by_the_simulators_clock(rng: np.random.Generator) -> None:
    graph = branches(rng)
    chosen, compiler = compiled("ipu_sim", "auto", graph, tiles="16")
    timer = compiler.backend.profiler.program_time
    every = {p: compiled("ipu_sim", p, graph, tiles="16")[0] for p in POLICIES}
    seconds = {p: timer(s.program, s.constants) for p, s in every.items()}
    assert timer(chosen.program, chosen.constants) <= SAME * min(seconds.values())
    assert chosen.choice.startswith(tuple(chosen.program.policy + why for why in (", by measurement: ", ": no other schedule")))


@pytest.mark.parametrize("device", ["rocm", "toy"])
def test_what_is_kept_was_timed_and_is_right(device: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this with schedules of very different predicted times too, so that two or more exist."""
    monkeypatch.setattr("rammer.schedule.policy_registry.FAR", float("inf"))
    graph = branches(rng)
    chosen, compiler = compiled(device, "auto", graph)
    assert "by measurement" in chosen.choice and " ms" in chosen.choice
    x = rng.standard_normal((24, 32), np.float32)
    loaded = compiler.backend.load(chosen.program, chosen.constants)
    try:
        found = loaded.run({"x": x}).outputs
    finally:
        loaded.close()
    weights = {n: w.astype(np.float64) for n, w in graph.constants.items()}
    a = x @ weights["wa"]
    expected = {**{n: x @ weights[f"w{n}"] for n in "bcd"}, "y": a @ a.T}
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= 1e-5 * np.linalg.norm(value)


def test_of_a_chip_that_is_not_here_it_is_the_best_prediction_and_says_so(rng: np.random.Generator) -> None:
    graph = branches(rng)
    compiler = Compiler(Registry().open("cuda", target="sm_90a"), CompileOptions("auto"), KernelStore(None))
    ports = tuple(Port(n, n) for n in graph.outputs)
    chosen = compiler.program(graph, (Port("x", "x"),), ports)
    assert ", by prediction: " in chosen.choice or "no other schedule" in chosen.choice


@pytest.mark.slow
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_stages_are_run_once_for_all_models(device: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, store = branches(rng), KernelStore(None)
    run, timers = list[RProgram](), dict[int, StageTimer]()

    def noted(timer: StageTimer, kernels: Sequence[RKernel]) -> float | None:
        made = stage_program(kernels, timer.binding, timer.backend.vdevice)
        assert made is not None
        verify(made[0])
        run.append(made[0])
        timers[id(timer)] = timer
        return StageTimer.__call__(timer, kernels)

    class Noted(StageTimer):
        __call__ = noted

    monkeypatch.setattr("rammer.compiler.compiler.StageTimer", Noted)
    ports = tuple(Port(n, n) for n in graph.outputs)
    backend = Registry().open(device)
    first = Compiler(backend, CompileOptions("ios", tune="quick"), store).program(graph, (Port("x", "x"),), ports)
    (measured,) = [timer.measured for timer in timers.values()]
    # Equal widths may be drawn; products of equal widths are measured once.
    assert len({str(p) for p in run}) >= measured >= 3 and max(len(p.operators) for p in run) >= 2
    again = Compiler(backend, CompileOptions("ios", tune="quick"), store).program(graph, (Port("x", "x"),), ports)
    assert [timer.measured for timer in timers.values()] == [measured, 0] and again.program == first.program


def test_stages_timed_wrongly_cost_nothing(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that for any stage times the chosen program is not slower than the predicted best, up to measurement noise."""
    graph, made = branches(rng), dict[str, tuple[ProgramSegment, float]]()
    ports, store = tuple(Port(n, n) for n in graph.outputs), KernelStore(None)
    backend = Registry().open("ipu_sim", options={"tiles": "16"})
    found: dict[str, Callable[[StageTimer, Sequence[RKernel]], float | None]] = {
        "by prediction": lambda timer, kernels: None,
        "by chance": lambda timer, kernels: float(rng.uniform(1e-6, 1e-3)),
    }
    for name, told in found.items():
        timer = type("Told", (StageTimer,), {"__call__": told})
        monkeypatch.setattr("rammer.compiler.compiler.StageTimer", timer)
        one = Compiler(backend, CompileOptions("ios", tune="quick"), store).program(graph, (Port("x", "x"),), ports)
        made[name] = one, backend.profiler.program_time(one.program, one.constants)
    assert made["by chance"][1] <= SAME * made["by prediction"][1]
    assert not made["by prediction"][0].choice
    assert made["by chance"][0].program.policy == str(IOS())


@pytest.mark.slow
@pytest.mark.parametrize("device", ["rocm", "ipu_sim", "toy"])
def test_what_was_measured_is_known_when_it_is_compiled_again(
    device: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, store = branches(rng), KernelStore(None)
    ports, backend = tuple(Port(n, n) for n in graph.outputs), Registry().open(device)
    first = Compiler(backend, CompileOptions("auto"), store).program(graph, (Port("x", "x"),), ports)

    def unwanted(*given: Any) -> Any:
        raise AssertionError("it was measured again")

    monkeypatch.setattr(backend, "load", unwanted)
    monkeypatch.setattr(backend.profiler.__class__, "program_time", unwanted)
    again = Compiler(backend, CompileOptions("auto"), store).program(graph, (Port("x", "x"),), ports)
    assert again.program == first.program and again.choice == first.choice.replace("measurement:", "measurement before:")


@dataclass(frozen=True)
class Spoilt(Policy):
    """A policy with the proposals of ``auto``. Those selected by ``spoils``, by position, lack a task."""

    spoils: tuple[bool, ...]
    name: str = "spoilt"

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        return self.proposals(graph, device)[0][1]

    def proposals(self, graph: OperatorGraph, device: VDevice) -> list[tuple[Policy, Schedule]]:
        found = (Auto().proposals(graph, device) + [(Sequential(), Sequential()(graph, device))] * 4)[: len(self.spoils)]
        return [(p, self._less(s) if bad else s) for (p, s), bad in zip(found, self.spoils, strict=True)]

    def _less(self, schedule: Schedule) -> Schedule:
        return replace(schedule, rows=(schedule.rows[0][1:], *schedule.rows[1:]))


@pytest.mark.parametrize("spoils", [*product((False, True), repeat=3)])
def test_what_is_not_legal_is_left_out(
    spoils: tuple[bool, ...], rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = branches(rng)
    compiler = Compiler(Registry().open("ipu_sim", options={"tiles": "8"}), CompileOptions(), KernelStore(None))
    compiler.policy = Spoilt(spoils)
    ports = tuple(Port(n, n) for n in graph.outputs)
    made: Callable[[], ProgramSegment] = lambda: compiler.program(graph, (Port("x", "x"),), ports)  # noqa: E731
    if all(spoils):
        with pytest.raises(VerifyError):
            made()
        return
    chosen = made()
    verify(chosen.program, compiler.backend.vdevice)
    assert (" ms" in chosen.choice) == (sum(spoils) < 2) and ("no other schedule" in chosen.choice) == (sum(spoils) == 2)
    assert capsys.readouterr().err.count("is left out") == sum(spoils)


def scaled(extent: int | str) -> onnx.ModelProto:
    """Return two branches over ``extent`` rows."""
    text = f"""<ir_version: 9, opset_import: ["" : 21]>
        rows (float[{extent}, 16] x) => (float[{extent}, 16] y) {{
            a = Exp(x)
            b = Softmax<axis = 1>(x)
            y = Add(a, b)
        }}"""
    return onnx.parser.parse_model(text)


def test_of_lengths_that_runs_tell_it_is_the_best_prediction_and_says_so() -> None:
    compiler = Compiler(Registry().open("rocm"), CompileOptions("auto"), KernelStore(None))
    compiled = compiler.compile_range(read_model(scaled("n")), {"x": (12, 16)}, {"n": (5, 12)})
    segments = [s for s in compiled.segments if isinstance(s, ProgramSegment)]
    assert all(s.choice.endswith(", by prediction: each run has its own lengths") for s in some(segments))


def test_over_several_devices_nothing_is_measured(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this because each process compiles all devices' parts and must choose alike."""
    path = tmp_path / "layers.onnx"
    onnx.save(dense_layers(8), path)
    found = open_spread(path, ("ipu_sim", "ipu_sim"), Request("auto", device_options={"tiles": "8"}), Joining(timeout=30))
    try:
        devices = found.compilers()
        assert all(c.unmeasured for _, c in some(devices))

        def unwanted(*given: Any) -> Any:
            raise AssertionError("it was measured")

        monkeypatch.setattr(devices[0][1].backend.profiler.__class__, "program_time", unwanted)
        spread = compile_spread(devices, read_model(dense_layers(8)), {"x": (4, 32)})
        assert all(step.program.policy != "auto" for part in some(spread.parts) for step in part.steps)
    finally:
        found.close()
