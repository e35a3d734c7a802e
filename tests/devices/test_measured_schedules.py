"""Schedules chosen by the device's own clock: whole programs for ``auto``, stages for ``ios``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rammer.compiled.options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler import Compiler
from rammer.device.loader import Registry
from rammer.ir.compute import Compute, ComputeGraph
from rammer.ir.operator import RKernel
from rammer.ir.program import Port, RProgram
from rammer.ir.types import TensorType
from rammer.ir.verify import verify
from rammer.plan.stages import StageTimer, stage_program
from rammer.profile.store import KernelStore

POLICIES = ("sequential", "wavefront", "wavefront{lean=0}", "ios")


def branches(rng: np.random.Generator) -> ComputeGraph:
    """Four products of different depths on one input, two of which meet again."""
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
    assert timer(chosen.program, chosen.constants) == min(seconds.values())
    assert chosen.choice.startswith(f"{chosen.program.policy}, by measurement: ")


@pytest.mark.parametrize("device", ["rocm", "toy"])
def test_what_is_kept_was_timed_and_is_right(device: str, rng: np.random.Generator) -> None:
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
    assert ", by prediction: " in chosen.choice or chosen.choice.endswith("every policy does the same")


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

    monkeypatch.setattr("rammer.compiler.StageTimer", Noted)
    ports = tuple(Port(n, n) for n in graph.outputs)
    backend = Registry().open(device)
    first = Compiler(backend, CompileOptions("ios", tune="quick"), store).program(graph, (Port("x", "x"),), ports)
    (measured,) = [timer.measured for timer in timers.values()]
    # Products of equal widths, which are drawn, are measured once.
    assert len({str(p) for p in run}) >= measured >= 3 and max(len(p.operators) for p in run) >= 2
    again = Compiler(backend, CompileOptions("ios", tune="quick"), store).program(graph, (Port("x", "x"),), ports)
    assert [timer.measured for timer in timers.values()] == [measured, 0] and again.program == first.program
