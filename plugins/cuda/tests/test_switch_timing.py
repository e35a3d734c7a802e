"""Early starts of kernels do not depend on a GPU's rising clock. The execution forms of loop programs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest

pytest.importorskip("cuda.bindings")

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.frontend.read.reader import read_model
from rammer.passes.loops.chunk_recurrent import ChunkRecurrent
from rammer.passes.pass_pipeline import default_passes
from rammer.tuning.kernel_store import KernelStore

from rammer_cuda import forms
from rammer_cuda.backend import open_backend
from rammer_cuda.pdl import Switches


class SharedGpu:
    """A GPU that another process uses for ``busy`` of its time, in intervals of some milliseconds. Runs that overlap an interval
    wait for a time slice. For ``cold`` seconds the clock is a third."""

    def __init__(self, rng: np.random.Generator, busy: float = 0.0, cold: float = 0.0) -> None:
        self.rng, self.busy, self.cold, self.now = rng, busy, cold, 0.0
        self.turned, self.there = 0.0, False

    def run(self, seconds: float) -> float:
        """Return the event time of a run of ``seconds``."""
        while self.now >= self.turned:
            self.there = bool(self.busy and self.rng.random() < self.busy)
            self.turned += float(self.rng.uniform(2e-3, 8e-3))
        took = seconds * (3 if self.now < self.cold else 1) * float(self.rng.uniform(1.0, 1.02))
        took += float(self.rng.uniform(1e-3, 3e-3)) if self.there else 0.0
        self.now += took
        return took


@pytest.mark.parametrize("draw", range(3))
def test_switches_are_chosen_at_the_gpus_clock(draw: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check three kernels: one gains by starting its dependents early, one loses, and all seem to gain while the clock rises."""
    gains: Mapping[str, float] = {"gains": -50e-6, "loses": 60e-6, "none": 0.0}
    gpu, switches = SharedGpu(rng, cold=0.05), Switches({})
    monkeypatch.setattr(Switches, "set", lambda self, entries: setattr(self, "on", frozenset(entries)))
    switches.choose([*gains] * 2, lambda: gpu.run(400e-6 + sum(gains[e] for e in switches.on)))
    assert "gains" in switches.on and "loses" not in switches.on


@pytest.mark.parametrize("hidden, keeps", [(24, False), (256, True)])
def test_iterations_suit_a_kernel_that_can_call_all_of_theirs(hidden: int, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a recurrence of 24 steps as four iterations of six, with and without constants that rows hold."""
    segment = rolled(hidden)
    program, binding = segment.program, Binding.of(segment.program, segment.constants)
    assert forms.keeps_constants(program) is keeps and program.form == ("holding" if keeps else "")
    found = forms.Execution().suitable_forms(program, binding)
    assert found == ((forms.GRAPH, forms.MIXED, forms.HOLDING) if keeps else (forms.GRAPH, forms.CALLING))
    monkeypatch.setattr(forms, "callable_part", lambda *given: None)
    assert keeps or forms.Execution().suitable_forms(program, binding) == (forms.GRAPH,)


def rolled(hidden: int) -> ProgramSegment:
    """Return an LSTM whose program repeats."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        turns (float[24, 1, {hidden}] x) => (float[24, 1, 1, {hidden}] y) {{ y = LSTM <hidden_size = {hidden}> (x, w, r) }}""")
    weights = np.full((1, 4 * hidden, hidden), 0.01, np.float32)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(weights, n) for n in "wr")
    compiler = Compiler(open_backend(OpenOptions(target="sm_90a")), CompileOptions(), KernelStore(None))
    compiler.passes = (*default_passes()[:-1], ChunkRecurrent(12, 6))
    found = [s for s in compiler.compile_model(read_model(model), {}).segments if isinstance(s, ProgramSegment)]
    (segment,) = (s for s in found if s.program.repeat is not None)
    return segment
