"""Models over several devices: alternating layers, host operators and outputs without a compute give one device's results.
Devices with separate memory copy as needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from recurrent_models import Net
from test_place import compiler, spread_of

from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.arrays import Array, HostRoom
from rammer.device.loader import Registry
from rammer.device.manifest import Backend, Bound
from rammer.distributed.distributed_program import DistributedProgram
from rammer.distributed.partition.search import compile_spread
from rammer.distributed.report.distributed_text import describe_spread
from rammer.distributed.runtime.distributed_run import Joined, SpreadRuns
from rammer.distributed.transport.counters import Counters
from rammer.distributed.transport.local import LOCAL
from rammer.distributed.transport.protocol import Site
from rammer.errors import BadInput
from rammer.frontend.read.reader import read_model
from rammer.passes.loops.chunk_recurrent import ChunkRecurrent
from rammer.passes.pass_pipeline import default_passes
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some
from rammer_testing.peer_process import PeerSession
from rammer_testing.small_models import dense_layers

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
HOSTED = HEAD + (
    "g (float[65,65] x) => (float y, float[65,65] b, float[65,65] same, float[2] known, float[65,65] again) "
    "<float[2] two = {1, 2}> "
    "{ s = Mul(x, small) a = Tanh(s) y = Det(a) b = Mul(a, y) again = Identity(b) same = Identity(x) known = Identity(two) }"
)


def ran(
    spread: DistributedProgram, backends: Sequence[Backend], inputs: Mapping[str, Array], runs: int = 3
) -> tuple[Any, list[Counters]]:
    """Return the outputs and counters of several runs, two of which are in flight."""
    sites = tuple(Site("any") for _ in backends)
    made = SpreadRuns(spread, dict(enumerate(backends)), Joined(sites, LOCAL, 2, 60.0))
    try:
        outputs, _ = made.run_all([inputs] * runs)
        return (outputs, made.notes), made.counters()
    finally:
        made.close()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_layers_in_turns_are_steps(device: str, rng: np.random.Generator, seed: int) -> None:
    net = Net.random(rng, steps := int(rng.integers(8, 40)))
    registry, devices = Registry(), int(rng.integers(2, 4))
    backend = registry.open(device, options={"tiles": "16"} if device == "ipu_sim" else {})
    made = Compiler(backend, CompileOptions(), KernelStore(None), registry)
    chunks = ChunkRecurrent(int(rng.integers(2, steps)), int(rng.integers(2, 9)))
    made.passes = tuple(chunks if isinstance(p, ChunkRecurrent) else p for p in default_passes())
    inputs, read = net.inputs(rng), read_model(net.model(np.random.default_rng(seed)))
    shapes = {n: v.shape for n, v in inputs.items()}
    spread = compile_spread([(device, made)] * devices, read, shapes)
    assert any(s.program.repeat for p in spread.parts for s in p.steps) and " turns" in describe_spread(spread)
    (outputs, _), _ = ran(spread, [backend] * devices, inputs)
    proto = net.model(np.random.default_rng(seed), plain=True)
    session = PeerSession(proto)
    for output, want in some(list(zip(proto.graph.output, session.run(None, inputs), strict=True))):
        for have in some(outputs):
            np.testing.assert_allclose(have[output.name], want, atol=3e-5, err_msg=f"{output.name} of {net}")


def hosted() -> onnx.ModelProto:
    model = onnx.parser.parse_model(HOSTED)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.1), "small"))
    return model


def test_the_host_computes_a_step_and_says_so(rng: np.random.Generator) -> None:
    spread, inputs = spread_of(hosted(), 2), {"x": rng.standard_normal((65, 65)).astype(np.float32)}
    assert "Det) on the host" in describe_spread(spread)
    made = compiler()
    (outputs, notes), counters = ran(spread, [made.backend] * 2, inputs)
    assert any("Det) runs on the host" in note for note in notes) and sum(c.host_copies for c in counters) > 0
    from onnx.reference import ReferenceEvaluator

    want = dict(zip([o.name for o in hosted().graph.output], ReferenceEvaluator(hosted()).run(None, inputs), strict=True))
    for have in some(outputs):
        for name, value in some(want.items()):
            np.testing.assert_allclose(have[name], value, rtol=1e-4, atol=1e-6)
            assert have[name].shape == np.shape(value)


def test_a_device_that_queues_all_its_steps_refuses_the_host() -> None:
    spread, made = spread_of(hosted(), 2), compiler()
    runs = SpreadRuns(spread, {0: made.backend, 1: made.backend}, Joined((Site("any"), Site("any")), LOCAL))
    device = next(d for d, p in enumerate(spread.parts) if any(s.host for s in p.steps))

    class Queueing:
        queues_steps = True

        def part(self, *given: Any) -> None: ...

    with pytest.raises(BadInput, match=r"Det\) runs on the host, and transport local queues all steps"):
        runs.part(device, made.backend, Queueing())  # type: ignore[arg-type]
    runs.close()


class Apart:
    """An array in separate device memory."""

    def __init__(self, values: Array) -> None:
        self.values, self.shape, self.dtype = values.copy(), values.shape, values.dtype
        self.nbytes, self.size = values.nbytes, values.size


class ApartBound(Bound):
    """A bound call whose arrays the host cannot access."""

    def __init__(self, program: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        super().__init__({n: Apart(a) for n, a in inputs.items()}, {n: Apart(a) for n, a in outputs.items()}, copied=((), ()))
        self.program = program

    def launch(self) -> None:
        for name, values in self.program.run({n: a.values for n, a in self.inputs.items()}).outputs.items():
            self.outputs[name].values = values

    def store(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.inputs[name].values = value.copy()

    def fetch(self, names: Sequence[str]) -> dict[str, Array]:
        return {n: self.outputs[n].values.copy() for n in names}


class ApartBackend:
    """A device with separate memory, as the core sees it."""

    host_room = HostRoom()

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def load(self, program: Any, constants: Any) -> Any:
        loaded = self.backend.load(program, constants)

        def bind(inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
            return ApartBound(loaded, inputs, outputs)

        loaded.bind = bind  # type: ignore[method-assign]
        return loaded


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(6))
def test_devices_with_memory_of_their_own_hand_on_what_is_there(number: int, rng: np.random.Generator, seed: int) -> None:
    """Check consecutive steps of one device with another device's step between them; some devices see host memory."""
    random, made, read = Random(seed), compiler(), read_model(hosted() if number % 2 else dense_layers(4))
    names = ["a", "b", "s"] if number % 2 else [f"m{k}" for k in range(4)]
    text = "\n".join(f"{n} {random.randrange(2)}" for n in names)
    shapes = {p.name: tuple(int(d or 0) for d in p.shape) for p in read.inputs}
    spread = compile_spread([("ipu_sim", made)] * 2, read, shapes, place=text)
    inputs = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    (want, _), _ = ran(spread, [made.backend] * 2, inputs)
    backends: list[Any] = [ApartBackend(made.backend) if random.random() < 0.7 else made.backend for _ in range(2)]
    (have, _), _ = ran(spread, backends, inputs)
    for one, other in some(list(zip(have, want, strict=True))):
        for name in some(other):
            np.testing.assert_array_equal(one[name], other[name])
