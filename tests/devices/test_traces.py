"""Traces on available devices: every task has times in its row's order and after the tasks that it waits for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from rammer.cli.main import cli
from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.device.loader import Registry
from rammer.device.manifest import Span
from rammer.ir.program import RProgram, waves
from rammer.jit.onnx_source import open_source
from rammer.runtime.executable import Executable
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some
from rammer_testing.small_models import MODELS

DEVICES = [("rocm", {"executor": "single"}), ("rocm", {"executor": "waves"}), ("ipu_sim", {"tiles": "24"})]


def ordered(program: RProgram, spans: Sequence[Span], slack: float) -> None:
    """Check that each task occurs once, rows are in order, and no task starts before an earlier wave ends. ``slack`` is the error
    of the clock."""
    by_task = {(s.operator, s.index): s for s in spans}
    assert len(by_task) == len(spans) == program.task_count
    for row in some(program.rows):
        mine = [by_task[t.operator, t.index] for t in row]
        assert all(a.end <= b.start + slack for a, b in pairwise(mine))
    ended = 0.0
    for wave in some(waves(program)):
        mine = [by_task[p.task.operator, p.task.index] for p in wave]
        assert min(s.start for s in mine) >= ended - slack
        ended = max(s.end for s in mine)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", DEVICES, ids=lambda d: "-".join([d[0], *d[1].values()]))
@pytest.mark.parametrize("model", ["branches", "recurrence"])
@pytest.mark.parametrize("policy", ["wavefront", "sequential"])
def test_every_task_has_its_times(device: tuple[str, dict[str, str]], model: str, policy: str, rng: np.random.Generator) -> None:
    name, options = device
    registry = Registry()
    backend, small = registry.open(name, options=options), MODELS[model]
    source, feeds = open_source(small.build(rng)), small.inputs(rng, small.shapes[0])
    exe = Executable(source, backend, name, CompileOptions(policy), registry, store=KernelStore(None))
    for segment in some(exe.compile_only({n: a.shape for n, a in feeds.items()}).segments):
        assert isinstance(segment, ProgramSegment) and backend.records_tasks
        run = backend.trace(segment.program, segment.constants, feeds)
        # Units of a processor agree on its counter within a few ticks.
        ordered(run.program, run.spans, 0.0 if backend.vdevice.simulated else 2e-7)
        seconds = backend.load(segment.program, segment.constants).run(feeds).seconds
        if backend.vdevice.simulated:
            assert 0 < max(s.end for s in run.spans) <= seconds * (1 + 1e-9)
    exe.close()


@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_run_writes_the_trace(device: str, tmp_path: Path, rng: np.random.Generator) -> None:
    onnx.save(MODELS["branches"].build(rng), tmp_path / "m.onnx")
    file = tmp_path / "t.json"
    said = CliRunner().invoke(cli, ["run", str(tmp_path / "m.onnx"), "--device", device, "--trace", str(file)])
    assert said.exit_code == 0 and "units busy" in said.output, said.output
    assert sum(e["ph"] == "X" for e in json.loads(file.read_text())["traceEvents"]) > 0
