"""Memory layers between the device's and the vEU's: decisions there, right results, and refusals of what the core cannot use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from cluster_device import LOCAL, SHARERS, SRAM, clusters, registry
from test_c_plugin import needs_compiler

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.frontend.read.reader import read_model
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.program import RProgram
from rammer.tuning.kernel_store import KernelStore
from rammer.verify.verifier import VerifyError, verify
from rammer_testing.conformance import CHECKS, ConformanceError, check_model
from rammer_testing.nonempty import some
from rammer_testing.small_models import SmallModel
from rammer_testing.subject import Subject

import rammer_c

#: Models whose tiles exceed a core's memory, by the kind of their readers: rows, windows with halos, products, and siblings.
MODELS: Mapping[str, SmallModel] = {
    "rows": SmallModel(
        "rows",
        """(float[64,12000] x) => (float[64,12000] y) {
        a = Gelu(x)
        b = Gelu(a)
        c = Gelu(b)
        y = Softmax<axis=-1>(c)
    }""",
    ),
    "windows": SmallModel(
        "windows",
        """(float[1,64,48,48] x, float[64,1,3,3] w_a, float[64,1,3,3] w_b) => (float[1,64,46,46] y) {
        a = Conv<group=64>(x, w_a)
        r = Relu(a)
        y = Conv<group=64, pads=[1,1,1,1]>(r, w_b)
    }""",
    ),
    "products": SmallModel(
        "products",
        """(float[128,2000] x, float[2000] w_s, float[2000] w_b, float[2000,32] w) => (float[128,32] y) {
        n = LayerNormalization<axis=-1>(x, w_s, w_b)
        y = MatMul(n, w)
    }""",
    ),
    "siblings": SmallModel(
        "siblings",
        """(float[64,8000] x, float[8000] w_c) => (float[64,1] m, float[64,8000] y, float[64,8000] z) {
        axes = Constant<value_ints=[1]>()
        a = Gelu(x)
        t = Tanh(a)
        b = Gelu(t)
        m = ReduceMean<keepdims=1>(b, axes)
        y = Softmax<axis=-1>(b)
        z = Sub(b, m)
    }""",
    ),
}


def compiled(model: SmallModel, device: VDevice) -> ProgramSegment:
    """Return the model's program for ``device``, whose kernels are those of the clusters."""
    backend = registry().open("clusters")
    backend.plain.vdevice = device  # type: ignore[attr-defined]
    read = read_model(model.build(np.random.default_rng(1)))
    shapes = {v.name: tuple(int(n or 1) for n in v.shape) for v in read.inputs}
    compiler = Compiler(backend, CompileOptions(), KernelStore(None), registry(), device="clusters")
    (segment,) = compiler.compile_model(read, shapes).segments
    assert isinstance(segment, ProgramSegment)
    return segment


def shared_edges(segment: ProgramSegment) -> set[tuple[str, str]]:
    return {(e.producer, e.consumer) for o in segment.program.operators for e in o.connections if e.layer == "cluster"}


@needs_compiler
@pytest.mark.parametrize("kind", MODELS)
def test_each_kind_of_reader_meets_in_shared_memory(kind: str) -> None:
    """Check that tiles are held in the clusters' SRAM as far as its capacity and bandwidth allow, and no program is slower so."""
    segment = compiled(MODELS[kind], clusters())
    assert shared_edges(segment)
    assert segment.tile is not None and "<sram>" in segment.tile.describe(clusters())
    assert RProgram.parse(str(segment.program)) == segment.program
    without, little = (compiled(MODELS[kind], clusters(sram)) for sram in (0, SHARERS * 64))
    assert not shared_edges(little) and segment.program.predicted <= without.program.predicted
    if kind == "products":
        assert segment.program.predicted < 0.7 * without.program.predicted
    slow = compiled(MODELS[kind], clusters(bandwidth=1e8))
    assert shared_edges(slow) != shared_edges(segment)


@needs_compiler
@pytest.mark.parametrize("kind", MODELS)
def test_results_are_right(kind: str) -> None:
    check_model(Subject("clusters", registry=registry()), MODELS[kind])


@needs_compiler
@pytest.mark.parametrize("check", ["virtual device", "shared layers", "kernels", "odd operators", "large tiles"])
def test_conformance(check: str) -> None:
    device = Subject("clusters", registry=registry())
    CHECKS[check](device)
    assert not device.whole


@needs_compiler
def test_tiles_of_two_layers_in_one_place_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rammer_c, "starts", lambda function: [0] * (1 + len(function.outer)) + [SRAM])
    monkeypatch.setattr(rammer_c, "compiler_of", rammer_c.Compiler)
    with pytest.raises(ConformanceError, match="two layers"):
        CHECKS["shared layers"](Subject("clusters", registry=registry()))


@needs_compiler
def test_a_program_of_another_device_is_refused() -> None:
    program = compiled(MODELS["rows"], clusters()).program
    verify(program, clusters())
    with pytest.raises(VerifyError, match="meets at a layer that clusters lacks"):
        verify(program, clusters(0))


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([MemoryLayer("a", "cluster", SRAM, 1e11)], "0 of 8 vEUs share"),
        ([MemoryLayer("a", "cluster", SRAM, 1e11, sharers=9)], "9 of 8 vEUs share"),
        ([MemoryLayer("a", "of it", SRAM, 1e11, sharers=4)], "share a layer of the scope 'of it'"),
        ([MemoryLayer(n, "cluster", SRAM, 1e11, sharers=4) for n in "ab"], "each once"),
        ([MemoryLayer(n, n, SRAM, 1e11, sharers=4) for n in "ab"], "not shared by fewer"),
        ([MemoryLayer("b", "veu", LOCAL, 1e11)], "each once"),
    ],
)
def test_layers_that_cannot_be_used_are_refused(layers: list[MemoryLayer], problem: str) -> None:
    dram, _, *rest = clusters().layers
    with pytest.raises(ValueError, match=problem):
        replace(clusters(), layers=(dram, *layers, *rest))


def test_layers_have_an_order() -> None:
    dram, sram, local, register = clusters().layers
    with pytest.raises(ValueError, match="stand in order"):
        replace(clusters(), layers=(dram, local, sram, register))
    wide = replace(sram, name="network", scope="half", sharers=8)
    both = replace(clusters(), layers=(dram, wide, sram, local, register))
    assert [m.scope for m in some(both.tile_layers)] == ["veu", "cluster", "half"]
