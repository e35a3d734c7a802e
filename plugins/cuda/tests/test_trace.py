"""Measured traces on cuda: every kernel compiles with records (NVRTC, no GPU), and on a GPU the times add up."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.jit.onnx_source import open_source
from rammer.report.measured_trace import summarise_run
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some
from rammer_testing.small_models import MODELS

pytest.importorskip("cuda.bindings")

from rammer_cuda.backend import open_backend
from rammer_cuda.compile import compile_cubin
from rammer_cuda.persistent.bodies import operator_bodies
from rammer_cuda.persistent.dataflow import plan_words
from rammer_cuda.persistent.kernel_text import kernel_text
from rammer_cuda.persistent.task_table import make_table
from rammer_cuda.source import Writer, translation_unit


def segment_of(rng: np.random.Generator, name: str, target: str = "sm_90a") -> ProgramSegment:
    model = MODELS[name]
    compiler = Compiler(open_backend(OpenOptions(target=target)), CompileOptions(), KernelStore(None))
    (segment,) = compiler.compile_model(open_source(model.build(rng)).model, {}).segments
    assert isinstance(segment, ProgramSegment)
    return segment


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", ["convolution", "product", "branches"])
def test_traced_kernels_compile_and_ordinary_ones_carry_nothing(name: str, target: str, rng: np.random.Generator) -> None:
    segment = segment_of(rng, name, target)
    program = segment.program
    binding = Binding(program.types, program.storage, frozenset(segment.constants))
    for kernel in some({k.entry: k for k in Writer().all(program.operators, binding).values()}.values()):
        recorded = replace(kernel, traced=True)
        plain, with_records = translation_unit([kernel]), translation_unit([recorded])
        assert "globaltimer" not in plain and (kernel.device, kernel.body) == (recorded.device, recorded.body)
        found = compile_cubin(with_records, target).resources[kernel.entry]
        assert found.registers > 0
        assert b"rm_records" not in compile_cubin(plain, target).code


@pytest.mark.parametrize("name", ["product", "branches"])
def test_the_persistent_kernel_compiles_with_records(name: str, rng: np.random.Generator) -> None:
    segment = segment_of(rng, name)
    binding = Binding(segment.program.types, segment.program.storage, frozenset(segment.constants))
    flow = plan_words(segment.program, binding)
    parts = operator_bodies(flow, binding)
    pointers = {o.name: [0] * (len(parts.arguments[o.name]) + len(parts.words[o.name])) for o in flow.program.operators}
    form = make_table(flow.program, parts.number, pointers, parts.held()).form
    plain = kernel_text(parts.bodies, form, parts.threads)
    assert kernel_text(parts.bodies, form, parts.threads, traced=True) == f"#define RM_TRACE 1\n{plain}"
    codes = [compile_cubin(text, "sm_90a").code for text in (plain, f"#define RM_TRACE 1\n{plain}")]
    assert [b"rm_records" in code for code in codes] == [False, True]


@pytest.mark.cuda
@pytest.mark.parametrize("executor", ["graph", "persistent"])
@pytest.mark.parametrize("name", ["product", "branches"])
def test_both_executors_trace_and_bind(name: str, executor: str, rng: np.random.Generator) -> None:
    from rammer_cuda.executor import CudaProgram
    from rammer_cuda.persistent.persistent_executor import PersistentProgram
    from rammer_cuda.trace import record_trace, trace_persistent

    model = MODELS[name]
    compiler = Compiler(open_backend(OpenOptions(options={"executor": executor})), CompileOptions(), KernelStore(None))
    (segment,) = compiler.compile_model(open_source(model.build(rng)).model, {}).segments
    assert isinstance(segment, ProgramSegment)
    inputs = model.inputs(rng, model.shapes[0])
    want = open_backend(OpenOptions()).load(replace(segment.program, form="graph"), segment.constants).run(inputs).outputs
    loaded = compiler.backend.load(segment.program, segment.constants)
    if executor == "graph":
        assert isinstance(loaded, CudaProgram)
        found = record_trace(loaded, inputs)
    else:
        assert isinstance(loaded, PersistentProgram)
        found = trace_persistent(loaded, inputs)
    tasks = {(o.name, i) for o in loaded.program.operators for i in range(o.task_count)}
    assert {(s.operator, s.index) for s in found.run.spans} == tasks and found.plain > 0 and found.seconds > 0
    bound = loaded.bind(inputs, {})
    for _ in range(3):
        bound.run()
    for n, have in some(bound.to_host().items()):
        assert np.linalg.norm(have - want[n]) <= 1e-5 * np.linalg.norm(want[n])
    loaded.close()


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["convolution", "branches"])
def test_a_trace_has_every_task(name: str, rng: np.random.Generator) -> None:
    import rammer

    model = MODELS[name]
    exe = rammer.compile(model.build(rng), device="cuda")
    inputs = model.inputs(rng, model.shapes[0])
    special = exe.prepare(exe.checked(inputs))
    (segment,) = special.compiled.segments
    assert isinstance(segment, ProgramSegment) and exe.backend.records_tasks
    run = exe.backend.trace(segment.program, segment.constants, inputs)
    tasks = {(o.name, i) for o in run.program.operators for i in range(o.task_count)}
    assert {(s.operator, s.index) for s in run.spans} == tasks
    assert all(0 <= s.start <= s.end < 1e-2 and 0 <= s.veu < exe.backend.vdevice.veus for s in some(run.spans))
    summary = summarise_run(run, exe.backend.vdevice.veus)
    assert 0 < summary.utilisation <= 1 and 0 <= summary.idle < 1
    # An operator starts after its producers have finished.
    assert all(o.gap >= -1e-7 for o in some(summary.operators))
    exe.close()


@pytest.mark.cuda
def test_the_command_writes_a_trace(tmp_path: Path, rng: np.random.Generator) -> None:
    import onnx

    onnx.save(MODELS["convolution"].build(rng), str(tmp_path / "m.onnx"))
    command = [sys.executable, "-m", "rammer.cli.main", "run", "m.onnx", "--device", "cuda", "--trace", "t.json"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "units busy" in said.stdout
    assert any(e["ph"] == "X" for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"])
