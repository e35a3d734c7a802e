"""Programs planned for the rows of persistent kernels: kernels that a block can call, with sums in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import onnx
import pytest
from onnx import parser
from zoo import find
from zoo.net import Net

pytest.importorskip("cuda.bindings")

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.compiler.form_planning import SEARCH
from rammer.device.manifest import OpenOptions
from rammer.frontend.read.reader import read_model
from rammer.ir.program import RProgram, waves
from rammer.runtime.host_memory import HostMemory
from rammer.schedule.ios import IOS
from rammer.schedule.split_reductions import PARTS
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some

from .cuda_choices import planned_rows
from rammer_cuda.backend import open_backend
from rammer_cuda.families import family_of

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@pytest.mark.slow
def test_stages_of_rows_are_searched_for_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_backend(OpenOptions(target="sm_90a"))
    compiler = Compiler(backend, CompileOptions(policy="ios{r=1,s=2}"), KernelStore(None))
    (segment,) = compiler.compile_model(read_model(find("squeezenet:small").build()), {}).segments
    assert isinstance(segment, ProgramSegment)
    asked, search = list[IOS](), IOS.search
    monkeypatch.setattr(IOS, "search", lambda self, *given: asked.append(self) or search(self, *given))
    planned_rows(backend, segment)
    assert all((policy.r, policy.s, policy.seconds) == (1, 2, SEARCH) for policy in some(asked))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_kernels_chosen_for_rows_round_operands_as_the_program_does(precision: str, seed: int) -> None:
    """Check that results depend on the executor only by the order of sums, since the fastest one is chosen by measurement."""
    backend = open_backend(OpenOptions(target="sm_90a"))
    model = read_model(find("resnext29_branches:small").build(seed))
    segment = (
        Compiler(backend, CompileOptions(precision=precision, fusion="elementwise"), KernelStore(None))
        .compile_model(model, {})
        .segments[0]
    )
    assert isinstance(segment, ProgramSegment)
    program = segment.program
    wanted = {c.name: family_of(o).operand_rounding for o in program.operators for c in o.computes if c.kind == "contraction"}
    assert any(wanted.values()) == (precision != "float32"), "no product was rounded"
    made = planned_rows(backend, segment).program
    changed = {o.name for o in made.operators} - {o.name for o in program.operators}
    assert changed or made.operators != program.operators, "no kernel was chosen again"
    for o in some(o for o in made.operators if any(c.kind == "contraction" for c in o.computes)):
        (product,) = (c.name for c in o.computes if c.kind == "contraction")
        assert family_of(o).operand_rounding == wanted[product.partition("_parts")[0]], o.head()


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


def rows_of(model: onnx.ModelProto) -> tuple[ProgramSegment, RProgram]:
    backend = open_backend(OpenOptions(target="sm_90a"))
    (segment,) = Compiler(backend, CompileOptions(), KernelStore(None)).compile_model(read_model(model), {}).segments
    assert isinstance(segment, ProgramSegment)
    return segment, planned_rows(backend, segment).program


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


def test_generic_kernels_have_few_tasks_on_rows(rng: np.random.Generator) -> None:
    """Check that a tile with many tasks, which suits a launch, is replaced: each task takes time of its row."""
    model = parser.parse_model("""<ir_version: 9, opset_import: ["" : 21]>
        m (float[1,64,32,32] x, float[1,128,16,16] y) => (float[1,128,16,16] z)
        <int64[8] pads = {0, 0, 0, 0, 0, 64, 0, 0}> {
            p = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(x) q = Pad(p, pads) s = Add(q, y) z = Relu(s) }""")
    segment, rows = rows_of(model)
    (launched,), (called,) = segment.program.operators, rows.operators
    assert not launched.family and not called.family
    assert called.task_count <= len(rows.rows) < launched.task_count
    inputs = {n: rng.standard_normal(s, dtype=np.float32) for n, s in (("x", (1, 64, 32, 32)), ("y", (1, 128, 16, 16)))}
    np.testing.assert_array_equal(run(rows, segment, inputs)["z"], run(segment.program, segment, inputs)["z"])
