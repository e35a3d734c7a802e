"""Predicted times of latency-bound kernels: start-up times, and one stage after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from random import Random

import numpy as np
import onnx
import pytest

pytest.importorskip("cuda.bindings")

from onnx import helper
from onnx_models import model, tensor
from sibling_models import cell

from rammer.codegen.task_parameters import Unsuited
from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.frontend.bind.binder import bind
from rammer.frontend.read.reader import read_model
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram
from rammer.schedule.stage_clock import in_waves
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.cases import Sampler
from rammer_testing.nonempty import some
from rammer_testing.single import subjects

from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.families import family_of
from rammer_cuda.generic.cost import GENERIC, MAP_START, is_suitable
from rammer_cuda.generic.staged import START


def target() -> CudaBackend:
    found = open_backend(OpenOptions(target="sm_90a"))
    assert isinstance(found, CudaBackend)
    return found


def compiled(proto: onnx.ModelProto, backend: CudaBackend) -> tuple[RProgram, Binding]:
    """Return the single program of a model, and its binding."""
    (segment,) = Compiler(backend, CompileOptions(), KernelStore(None)).compile(bind(read_model(proto), {})).segments
    return segment.program, Binding.of(segment.program, segment.constants)


def softmax() -> onnx.ModelProto:
    return model([helper.make_node("Softmax", ["x"], ["y"], axis=-1)], [tensor("x", (1, 12, 128, 128))], ["y"])


def normalisation() -> onnx.ModelProto:
    constants = {"scale": np.ones(768, np.float32), "shift": np.ones(768, np.float32)}
    node = helper.make_node("LayerNormalization", ["x", "scale", "shift"], ["y"], axis=-1)
    return model([node], [tensor("x", (1, 128, 768))], ["y"], constants=constants)


def mean() -> onnx.ModelProto:
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("GlobalAveragePool", ["r"], ["y"])]
    return model(nodes, [tensor("x", (1, 768, 8, 8))], ["y"])


def step() -> onnx.ModelProto:
    return cell(np.random.default_rng(0), steps=1, width=64)


#: Models, the tile of their last operator, and the measured microseconds of its generic kernel. The device was an H200 with 128
#: threads a block and no launch (2026-11-21; the cell: an eighth of a program of eight).
MEASURED: dict[str, tuple[Callable[[], onnx.ModelProto], tuple[int, ...], float]] = {
    "softmax": (softmax, (1, 1, 2, 128), 3.01),
    "normalisation": (normalisation, (1, 1, 768), 3.91),
    "mean": (mean, (1, 3, 1, 1), 1.48),
    "cell": (step, (1, 1), 2.12),
}


@pytest.mark.parametrize("name", MEASURED)
def test_kernels_that_keep_values_on_chip_take_what_they_took(name: str) -> None:
    """Check predictions within a factor of 1.35. Bytes and operations alone predicted 0.05 us for the cell."""
    proto, tile, took = MEASURED[name]
    backend = target()
    program, binding = compiled(proto(), backend)
    tiled = replace(program.operators[-1], tile=tile, family="", config=())
    assert not is_suitable(tiled)
    found = GENERIC.seconds(tiled, binding, backend.gpu) * 1e6
    assert took / 1.35 < found < took * 1.35
    assert backend.kernel(tiled, binding).operator_time(backend.gpu.sms) == pytest.approx(found / 1e6)


@pytest.mark.parametrize("cells", [2, 10])
def test_several_on_one_sm_wait_side_by_side(cells: int) -> None:
    """Check blocks of 128 threads, a dozen on an SM: ten cells of a wave need the time of one, not ten times as long."""
    backend = target()
    program, binding = compiled(step(), backend)
    tiled = replace(program.operators[-1], tile=(1, 1), family="", config=())
    names = [f"cell{n}" for n in range(cells)]
    kernels = {n: (backend.kernel(replace(tiled, name=n), binding),) for n in names}
    without_start = replace(backend.vdevice, start=0.0)
    one, together = (in_waves({n: kernels[n] for n in wave}, {}, without_start) for wave in (names[:1], names))
    assert one <= together < 1.5 * one


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, pytest.param(96, id="a width of no power of two")])
def test_a_recurrence_takes_a_start_for_each_of_its_steps(width: int) -> None:
    """Check that steps, which wait for each other, each cost a start with any kernel."""
    backend = target()
    program, _ = compiled(cell(np.random.default_rng(0), steps=3, width=width), backend)
    assert program.predicted > 3 * (backend.gpu.launch + START / backend.gpu.model_clock / 2)


def offered(seed: int, backend: CudaBackend) -> Iterator[tuple[str, ROperator, Binding]]:
    """Yield the first choices of every family, and generic tiles of operators without one, for random graphs of all kinds."""
    sampler = Sampler(Random(seed), 20_000, ("float32", "tf32", "float16", "bfloat16"))
    for case in islice(iter(sampler.next, None), 12):
        for subject in subjects(case, backend):
            families = (islice(f.candidates(subject.operator, subject.binding, backend.gpu), 2) for f in backend.usable)
            tiled = [c.operator for found in families for c in found]
            tiled += backend.otherwise(subject.operator, subject.binding)
            yield from ((str(case), o, subject.binding) for o in tiled if o.task_count)


@pytest.mark.slow
def test_no_kernel_takes_less_than_a_start(seed: int) -> None:
    """Check every family and tile. A kernel without cost would be chosen over all others."""
    backend = target()
    for case, tiled, binding in some(offered(seed, backend)):
        try:
            seconds = family_of(tiled).seconds(tiled, binding, backend.gpu)
        except Unsuited:
            continue
        assert seconds >= MAP_START / backend.gpu.model_clock, (case, tiled.head())
