"""Sums in parts: operators of few tasks and many terms, split for the rows of a persistent kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import onnx
import pytest
from zoo.net import Net

pytest.importorskip("cuda.bindings")

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import Axis, Compute
from rammer.ir.operator import RKernel, ROperator, Written
from rammer.ir.program import RProgram, dense, waves
from rammer.ir.types import TensorType
from rammer.runtime.host_memory import HostMemory
from rammer.schedule.policy import OperatorGraph
from rammer.schedule.wavefront import Wavefront
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some

from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.gpu import TARGETS
from rammer_cuda.persistent.fit_to_block import PartedSum, choose_together, fit_program
from rammer_cuda.persistent.split_reductions import LEAST, PARTS, split_sums

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
DEVICE = TARGETS["sm_90a"].vdevice


def deep(rng: np.random.Generator) -> onnx.ModelProto:
    """Return convolutions or products of many terms and few results: added branches, then equal consecutive ones."""
    net = Net("deep", int(rng.integers(1 << 30)))
    channels, width, size = 64 * int(rng.integers(2, 7)), 8 * int(rng.integers(1, 5)), int(rng.integers(3, 9))
    x, taps = net.input("x", (1, channels, size, size)), 1 + 2 * int(rng.integers(2))
    ends = [net.conv(x, width, taps, bias=True) for _ in range(int(rng.integers(1, 3)))]
    y = net.relu(net.map("Add", *ends)) if len(ends) > 1 else ends[0]
    again = int(rng.integers(3))
    if again:
        y = net.conv(y, channels, bias=True)
    for _ in range(again):
        y = net.relu(net.conv(y, channels, taps, bias=True))
    return net.finish(y, fit=False)


def compiled(model: onnx.ModelProto) -> tuple[CudaBackend, ProgramSegment]:
    backend = open_backend(OpenOptions(target="sm_90a"))
    assert isinstance(backend, CudaBackend)
    (segment,) = Compiler(backend, CompileOptions(), KernelStore(None)).compile_model(read_model(model), {}).segments
    assert isinstance(segment, ProgramSegment)
    return backend, segment


def rows_of(model: onnx.ModelProto) -> tuple[ProgramSegment, RProgram]:
    backend, segment = compiled(model)
    return segment, fit_program(segment.program, Binding.of(segment.program, segment.constants), backend.gpu).program


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(24))
def test_rows_compute_what_the_program_does(number: int, rng: np.random.Generator) -> None:
    """Check against the reference, task by task. Half of the random models have a sum in parts."""
    segment, rows = rows_of(deep(rng))
    program = segment.program
    inputs = {p.external: rng.standard_normal(program.types[p.tensor].shape, dtype=np.float32) for p in program.inputs}
    want, have = (run(p, segment, inputs) for p in (program, rows))
    for name, values in some(want.items()):
        assert np.linalg.norm(have[name] - values) <= 1e-5 * np.linalg.norm(values), name


def run(program: RProgram, segment: ProgramSegment, inputs: Mapping[str, Array]) -> dict[str, Array]:
    memory = HostMemory(program, {n: v for n, v in segment.constants.items() if n in program.storage})
    memory.write_inputs(inputs)
    for placed in (placed for wave in waves(program) for placed in wave):
        memory.run_task(program.operator[placed.task.operator], placed.task.index)
    return memory.read_outputs()


def chain(channels: int, size: int) -> onnx.ModelProto:
    net = Net("chain", 3)
    x = net.input("x", (1, channels, size, size))
    for _ in range(2):
        x = net.relu(net.conv(x, channels, 3, bias=True))
    return net.finish(x, fit=False)


def test_deep_sums_of_few_results_are_in_parts_and_shallow_ones_are_not() -> None:
    """Check that two equal consecutive operators have a partial tensor each."""
    _, rows = rows_of(chain(256, 4))
    first, second = (o for o in rows.operators if o.name.endswith("_parts"))
    assert first.outputs != second.outputs and first.tile == second.tile and len(rows.operators) == 4
    (parts,) = {o.anchor.axes[1].extent for o in (first, second)}
    assert parts in PARTS and sum(a.extent for a in first.anchor.reduce if a.name == "c") * parts <= 256
    _, rows = rows_of(chain(16, 32))
    assert len(rows.operators) == 2


def unwritten() -> Written:
    raise AssertionError("nobody asks for the text")


def product(name: str) -> ROperator:
    compute = Compute.parse(f"{name}: f32[n:1, i:64, j:64] = sum[c:512] (x[n, i, c] * w[j, c])")
    return ROperator(name, (compute,), (), (name,), (1, 64, 64))


def kernel(operator: ROperator, tasks: int, seconds: float) -> RKernel:
    """Return a kernel of ``tasks`` tasks of ``seconds`` each."""
    shape = operator.anchor.shape
    tile = next(
        (*(1 for _ in shape[:-2]), a, b)
        for a in range(1, shape[-2] + 1)
        for b in range(1, shape[-1] + 1)
        if np.prod(shape[:-2]) * -(-shape[-2] // a) * -(-shape[-1] // b) == tasks
    )
    return RKernel(replace(operator, tile=tile), unwritten, seconds, seconds)


def known_of(operator: ROperator) -> Binding:
    (compute,) = operator.computes
    shapes = {"x": (1, 64, 512), "w": (64, 512), compute.name: compute.shape}
    return Binding({n: TensorType("float32", s) for n, s in shapes.items()}, {n: dense(n, n, s) for n, s in shapes.items()})


@pytest.mark.slow
@pytest.mark.parametrize("seconds, taken", [(20e-6, True), (1e-6, False)])
def test_branches_are_in_parts_where_two_waves_end_before_the_one(seconds: float, taken: bool) -> None:
    """Check that all sixteen equal branches are split, or none."""
    kernels, sums = dict[str, tuple[RKernel, ...]](), dict[str, list[PartedSum]]()
    for name in (f"o{i}" for i in range(16)):
        o = product(name)
        kernels[name] = (kernel(o, 4, seconds),)
        split = next(s for s in split_sums(o, known_of(o)) if s.partial.anchor.axes[1].extent == 2)
        sums[name] = [PartedSum(split, (kernel(split.partial, 8, seconds / 2),), (kernel(split.rest, 1, 1e-6),))]
    graph = OperatorGraph(kernels, dict.fromkeys(kernels, ()))
    made, found = choose_together(graph, DEVICE, sums)
    assert len(found) == 16 * taken and len(made.kernels) == 16 * (1 + taken)
    assert all(made.after[n] == ((f"{n}_parts",) if taken else ()) for n in some(kernels))
    assert Wavefront()(made, DEVICE).predicted <= Wavefront()(graph, DEVICE).predicted


def test_what_would_round_parts_or_has_none_stays_whole() -> None:
    o = product("o")
    (compute,) = o.computes
    assert [s.partial.anchor.axes[1].extent for s in split_sums(o, known_of(o))] == [*PARTS]
    half = replace(o, computes=(replace(compute, dtype="float16"),))
    prime = replace(o, computes=(replace(compute, reduce=(Axis("c", 509),)),))
    few = replace(o, computes=(replace(compute, reduce=(Axis("c", 2 * LEAST - 2),)),))
    assert not [s for other in some((half, prime, few)) for s in split_sums(other, known_of(o))]
