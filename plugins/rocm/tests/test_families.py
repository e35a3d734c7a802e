"""Prices of candidates, single writing of kernels, and families as values: on a described CPU, without OpenCL."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from families import CASES as OTHERS
from products import CASES as PRODUCTS

from rammer.codegen.task_parameters import Unsuited
from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding
from rammer.errors import DeviceFailure
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.operator import ROperator
from rammer.ir.program import Port
from rammer.jit.self_test import tiny_graph
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some
from rammer_testing.small_models import SmallModel

from rammer_rocm import families
from rammer_rocm.families import OpenClKernels
from rammer_rocm.kernels.task import TaskFunction
from rammer_rocm.offline import CARDS

LAYERS = (
    MemoryLayer("dram", "device", 16 << 30, 47e9, 64),
    MemoryLayer("cache", "veu", 1 << 20, 768e9, 64),
    MemoryLayer("register", "thread", 2048, 1536e9, 64),
)
CPU = VDevice("opencl_cpu", "two cores", 2, LAYERS, flops=96e9, launch=3e-6, vector=16, resident=2)
CASES = {**OTHERS, **PRODUCTS}


class Described(OpenClKernels):
    """A backend that only compiles."""

    fingerprint, profiler = "described", None


@pytest.mark.slow
@pytest.mark.parametrize("unit", [CPU, CARDS["gfx90a"].vdevice("gfx90a")], ids=["cpu", "gfx90a"])
def test_a_candidate_is_scheduled_by_what_it_is_ranked_by(unit: VDevice) -> None:
    backend, seen = OpenClKernels(unit), Counter[str]()
    for operator, binding in some(CASES.values()):
        for family in some(backend.usable):
            for seconds, tiled in list(family.candidates(operator, binding, unit))[:5]:
                kernel = backend.kernel(tiled, binding)
                seen[family.name] += 1
                if family.times is None:  # otherwise the last round of tasks may be shorter
                    assert kernel.operator_time(unit.veus) + unit.launch == pytest.approx(seconds, rel=1e-9)
                assert family.seconds(tiled, binding, unit) + unit.launch == pytest.approx(seconds, rel=1e-9)
    assert seen[""] > 20 and (seen["panel"] > 20) == (unit is CPU)


def test_nobody_asks_for_a_family_by_its_name() -> None:
    root = Path(families.__file__).parent
    files = sorted(root.rglob("*.py"))
    assert len(files) > 15
    found = [f"{p.name}: {line}" for p in files for line in p.read_text().splitlines() if re.search(r"\.family\s*[!=]=", line)]
    assert not found, found


def test_what_the_search_wrote_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a program of the same tensors: equal operators share one text everywhere."""
    written, honest = list[str](), families.task_function

    def noting(operator: ROperator, binding: Binding, device: VDevice) -> TaskFunction:
        written.append(binding.key(operator))
        return honest(operator, binding, device)

    monkeypatch.setattr(families, "task_function", noting)
    backend = Described(CPU)
    compiler = Compiler(backend, CompileOptions("wavefront"), KernelStore(None))  # type: ignore[arg-type]
    made = compiler.program(tiny_graph(0), (Port("x", "x"),), (Port("y", "y"),))
    program, searched = made.program, list(written)
    assert any(o.family == "panel" for o in program.operators)
    binding = Binding.of(program, made.constants)
    functions = backend.writer.all(program.operators, binding)
    assert len(written) == len(set(written)), "nothing is written twice"
    panels = [o for o in program.operators if o.family]
    assert all(binding.key(o) in searched for o in some(panels)), "panels were written to see whether they can be"
    for o in some(program.operators):
        assert functions[o.name] == replace(honest(o, binding, CPU), arguments=functions[o.name].arguments)
        assert {a.tensor for a in functions[o.name].arguments} == {*o.inputs, *o.outputs}


@pytest.mark.parametrize("columns", [1152, 1536])
def test_rows_and_their_product_stay_apart_on_a_gpu(columns: int, rng: np.random.Generator) -> None:
    """Check that a layer normalisation is one operator, and its product a kernel of products."""
    gpu = replace(CARDS["gfx90a"].vdevice("gfx90a"), veus=132, flops=5e11)
    text = f"(float[50,384] x, float[384,{columns}] w_1, float[384] w_s, float[384] w_b) => (float[50,{columns}] y)"
    model = SmallModel("rows", text + "{ n = LayerNormalization<axis=-1>(x, w_s, w_b)\ny = MatMul(n, w_1) }")
    compiler = Compiler(Described(gpu), CompileOptions("wavefront"), KernelStore(None))  # type: ignore[arg-type]
    made = compiler.program(lower(bind(read_model(model.build(rng)), {})), (Port("x", "x"),), (Port("y", "y"),))
    assert [o.family for o in made.program.operators] == ["", "ring"]


def test_what_a_family_cannot_compute_is_refused_with_the_reason() -> None:
    backend = OpenClKernels(CPU)
    operator, binding = OTHERS["softmax"] if "softmax" in OTHERS else next(iter(OTHERS.values()))
    tiled = replace(operator, tile=operator.anchor.shape, family="panel", config=(("mr", 4), ("nv", 1)))
    for ask in (backend.kernel, backend.writer.written):
        with pytest.raises(DeviceFailure, match="is unsuited to family panel") as caught:
            ask(tiled, binding)
        assert isinstance(caught.value.__cause__, Unsuited)
    assert not backend.fits(tiled, binding)


def test_an_unknown_family_is_computed_by_the_generic_kernel() -> None:
    backend = OpenClKernels(CPU)
    operator, binding = next(iter(PRODUCTS.values()))
    plain = next(o for o in backend.all_candidates(operator, binding) if not o.family)
    other = replace(plain, family="somebody_elses", config=(("x", 1),))
    assert backend.writer.written(other, binding) == backend.writer.written(plain, binding)
    assert backend.kernel(other, binding).alone == backend.kernel(plain, binding).alone
