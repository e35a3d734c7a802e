"""Batching of products on devices: number of operators, absence of copies, and results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from sibling_graphs import sibling_model
from sibling_models import attention, branches, cell, onnx_cell, widths
from view_graphs import failure, opened

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.frontend.read.reader import read_model
from rammer.fusion.tile_graph import BatchTrial
from rammer.ir.operator import ROperator
from rammer.ir.piecewise import piecewise_regions
from rammer.jit.onnx_source import open_source
from rammer.passes.compute.batch_candidates import is_rearrangement
from rammer.runtime.executable import Executable
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some

#: Random models in each run of the tests.
COUNT = {"ipu_sim": 4, "rocm": 2}
Maker = Callable[[np.random.Generator], onnx.ModelProto]


def compiled(proto: onnx.ModelProto, device: str, batching: str) -> ProgramSegment:
    compiler = Compiler(opened(device), CompileOptions(batching=batching), KernelStore(None))
    (segment,) = compiler.compile_model(read_model(proto), {}).segments
    assert isinstance(segment, ProgramSegment)
    return segment


def copies(segment: ProgramSegment) -> list[ROperator]:
    return [o for o in segment.program.operators if any(is_rearrangement(c) or piecewise_regions(c) for c in o.computes)]


@pytest.mark.slow
def test_a_cell_of_products_becomes_what_a_cell_becomes(rng: np.random.Generator) -> None:
    apart, together, given = (
        compiled(cell(rng), "rocm", "off"),
        compiled(cell(rng), "rocm", "auto"),
        compiled(onnx_cell(rng), "rocm", "auto"),
    )
    # Apart, the two products of a gate run side by side, which is predicted faster than one operator for both.
    assert [len(s.program.operators) for s in (apart, together, given)] == [64, 9, 9]
    assert not copies(together) and together.program.predicted < apart.program.predicted


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", COUNT)
@pytest.mark.parametrize(
    ("make", "fewer"), [(attention, 2), (branches, 1), (lambda rng: widths(rng, 16, 16, 16, last=("Relu", "Relu", "Neg")), None)]
)
def test_no_slower_and_nothing_is_copied(make: Maker, fewer: int | None, device: str, rng: np.random.Generator) -> None:
    proto = make(rng)
    apart, together, chosen = (compiled(proto, device, b) for b in ("off", "all", "auto"))
    assert len(copies(together)) <= len(copies(apart)) and len(copies(chosen)) <= len(copies(apart))
    assert chosen.program.predicted <= apart.program.predicted * (1 + 1e-9)
    products = [sum(c.kind == "contraction" for o in s.program.operators for c in o.computes) for s in (apart, together)]
    assert products[0] - products[1] == (2 if fewer is None else fewer)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", COUNT)
def test_random_siblings_agree_with_onnxruntime(device: str, seed: int) -> None:
    backend = opened(device)
    for each in range(seed, seed + COUNT[device]):
        options = CompileOptions(batching=("all", "auto")[each % 2])
        assert not (found := failure(backend, device, each, sibling_model(each), options)), f"seed {each}: {found}"


@pytest.mark.parametrize("device", COUNT)
def test_a_batch_in_float16(device: str, rng: np.random.Generator) -> None:
    """Check that batching after the conversion to 16 bits changes results only by roundings."""
    proto = widths(rng, 8, 8, 5)
    runs = list[dict[str, np.ndarray]]()
    for batching in ("off", "all"):
        options = CompileOptions(precision="float16", batching=batching)
        exe = Executable(open_source(proto), opened(device), device, options, Registry(), store=KernelStore(None))
        runs.append(exe.run({"x": np.linspace(-1, 1, 128, dtype=np.float32).reshape(4, 32)}))
        exe.close()
    for name, value in some(runs[0].items()):
        np.testing.assert_allclose(value, runs[1][name], rtol=2e-3, atol=2e-3)


def test_tasks_that_keep_several_veus_busy_cost_that_many() -> None:
    """Check three products of 14 tasks of 8 blocks, which fill 132 vEUs three times; a schedule counts only tasks."""
    pytest.importorskip("cuda.bindings")
    backend = Registry().open("cuda", target="sm_90a")
    compiler = Compiler(backend, CompileOptions(), KernelStore(None))
    rng = np.random.default_rng(0)
    (segment,) = compiler.compile_model(read_model(widths(rng, 768, 768, 768, rows=128, depth=768)), {}).segments
    assert isinstance(segment, ProgramSegment) and segment.tile is not None
    assert [d.way for d in segment.tile.decisions if isinstance(d, BatchTrial)] == ["stacked"]
