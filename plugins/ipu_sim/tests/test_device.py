"""The manifest, the backend's kernels and clock, and a graph through the whole pipeline."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest
from chip_operators import make_operator, relative_error

from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable
from rammer.ir.compute import Compute, ComputeGraph
from rammer.ir.operator import ROperator
from rammer.ir.program import Port, RProgram, dense
from rammer.ir.types import TensorType
from rammer.jit.self_test import self_test, tiny_graph
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some

from rammer_ipu_sim.chip import GC2, SOURCES, configure_chip
from rammer_ipu_sim.device import SimulatorBackend
from rammer_ipu_sim.plugin import DEVICE

SMALL = OpenOptions(options={"tiles": "16", "sram": "65536"})


def matmul(tile: tuple[int, int] = (8, 16)) -> tuple[ROperator, Binding]:
    line = "y: f32[m:64, n:64] = sum[k:32] a[m, k] * b[k, n]"
    kinds = {
        "a": TensorType("float32", (64, 32)),
        "b": TensorType("float32", (32, 64)),
        "y": TensorType("float32", (64, 64)),
    }
    return make_operator("mm", [line], tile), Binding(kinds, {n: dense(n, n, t.shape) for n, t in kinds.items()})


def test_manifest() -> None:
    assert DEVICE.simulated
    (unit,) = DEVICE.probe()
    assert unit.kind == "simulator"
    assert unit.memory == 1216 * 256 * 1024
    plugin = importlib.import_module("rammer_ipu_sim.plugin")
    assert plugin.rammer_devices() == [DEVICE]


def test_figures_agree_with_the_published_totals() -> None:
    assert GC2.matrix_flops * GC2.tiles * GC2.clock == pytest.approx(31.1e12, rel=0.01)
    assert GC2.exchange_bytes * GC2.tiles * GC2.clock == pytest.approx(7.8e12, rel=0.01)
    fields = set(GC2.__dataclass_fields__) - {"name"}
    assert fields == set(SOURCES)


def test_vdevice() -> None:
    device = SimulatorBackend(OpenOptions()).vdevice
    assert (device.veus, device.staged, device.simulated) == (1216, True, True)
    assert [layer.scope for layer in device.layers] == ["host", "device", "veu"]
    assert all(layer.source for layer in some(device.layers))


@pytest.mark.parametrize("options", [{"tiles": "0"}, {"sram": "x"}, {"sram": "1001"}, {"no_stream": "7"}])
def test_bad_options(options: dict[str, str]) -> None:
    with pytest.raises(BadInput):
        SimulatorBackend(OpenOptions(options=options))


def test_what_it_is_not() -> None:
    with pytest.raises(DeviceUnavailable, match="simulator"):
        SimulatorBackend(OpenOptions(require="gpu"))
    with pytest.raises(DeviceUnavailable, match="no unit 1"):
        SimulatorBackend(OpenOptions(index=1))


def test_smaller_chips_have_their_own_fingerprint() -> None:
    assert configure_chip({}) is GC2
    assert SimulatorBackend(SMALL).fingerprint != SimulatorBackend(OpenOptions()).fingerprint


def test_candidates_fit_and_kernels_carry_codelets() -> None:
    backend = SimulatorBackend(SMALL)
    op, binding = matmul()
    tiled = backend.candidates(replace(op, tile=()), binding)
    assert tiled
    for candidate in tiled:
        kernel = backend.kernel(candidate, binding)
        assert "poplar::Vertex" in kernel.source
        assert 0 < kernel.resources.local_bytes <= backend.vdevice.layer("veu").capacity
        assert (kernel.resources.threads, kernel.origin) == (6, "simulated")
        assert 0 < kernel.alone <= kernel.crowded


def test_task_times_count_cycles() -> None:
    backend = SimulatorBackend(OpenOptions())
    op, binding = matmul()
    profiler = backend.profiler
    alone, crowded = profiler.task_time(backend.kernel(op, binding), binding)
    # 8x32x16 multiply-adds at 16 FLOP a cycle; 8x32 and 32x16 elements in at 4 bytes a cycle, 8x16 out.
    compute, moved = 36 + 8 * 32 * 16 * 2 / 16, 8 * 32 + 32 * 16 + 8 * 16
    assert alone == pytest.approx((compute + moved) / GC2.clock, rel=0.02)
    assert crowded >= alone
    larger, _ = matmul((16, 16))
    assert profiler.task_time(backend.kernel(larger, binding), binding)[0] > alone


def test_a_kernel_larger_than_a_tile_is_refused() -> None:
    op, binding = matmul((64, 64))
    with pytest.raises(DeviceFailure, match="out of memory"):
        SimulatorBackend(OpenOptions(options={"sram": "8192"})).kernel(op, binding)


def test_reductions_deeper_than_a_tile(rng: np.random.Generator) -> None:
    backend = SimulatorBackend(OpenOptions(options={"tiles": "16", "sram": "8192"}))
    graph = wide_graph(rng)
    segment = Compiler(backend, CompileOptions(), KernelStore(None)).program(graph, (Port("x", "x"),), (Port("y", "y"),))
    assert len(segment.program.operators) == 2
    x = rng.standard_normal((2, 1000)).astype(np.float32)
    result = backend.load(segment.program, segment.constants).run({"x": x})
    assert relative_error(result.outputs["y"], x.astype(np.float64) @ graph.constants["w"].astype(np.float64)) <= 1e-5
    assert any("streamed" in note for note in result.notes)


def wide_graph(rng: np.random.Generator) -> ComputeGraph:
    compute = Compute.parse("y: f32[i:2, j:40] = sum[k:1000] x[i, k] * w[k, j]")
    kinds = {"x": TensorType("float32", (2, 1000)), "w": TensorType("float32", (1000, 40)), "y": compute.type}
    weights = {"w": rng.standard_normal((1000, 40)).astype(np.float32)}
    return ComputeGraph("wide", ("x",), ("y",), (compute,), kinds, weights)


@pytest.mark.parametrize("policy", ["sequential", "greedy", "wavefront", "ios"])
def test_down_the_staircase(policy: str, rng: np.random.Generator) -> None:
    backend = SimulatorBackend(SMALL)
    graph = tiny_graph(int(rng.integers(1 << 30)))
    compiler = Compiler(backend, CompileOptions(policy), KernelStore(None))
    segment = compiler.program(graph, (Port("x", "x"),), (Port("y", "y"),))
    assert RProgram.parse(str(segment.program)) == segment.program
    first = backend.profiler.program_time(segment.program, segment.constants)
    assert first == backend.profiler.program_time(segment.program, segment.constants) > 0


@pytest.mark.parametrize("options", [SMALL, OpenOptions()])
def test_self_test(options: OpenOptions) -> None:
    assert self_test(SimulatorBackend(options)).startswith("ok")


def test_inputs_are_checked_and_closing_ends_runs() -> None:
    backend = SimulatorBackend(SMALL)
    graph = tiny_graph(1)
    segment = Compiler(backend, CompileOptions(), KernelStore(None)).program(graph, (Port("x", "x"),), (Port("y", "y"),))
    loaded = backend.load(segment.program, segment.constants)
    with pytest.raises(BadInput, match="missing"):
        loaded.run({})
    with pytest.raises(BadInput, match="float64"):
        loaded.run({"x": np.zeros((5, 9, 10))})
    loaded.close()
    with pytest.raises(DeviceFailure, match="closed"):
        loaded.run({"x": np.zeros((5, 9, 10), np.float32)})
