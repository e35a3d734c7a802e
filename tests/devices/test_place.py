"""Models cut for several devices: cuts are legal, balanced, equal in every process, and give one device's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import onnx
import pytest

from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.distributed.distributed_program import DevicePart, DistributedProgram, Link
from rammer.distributed.link import joined_constants
from rammer.distributed.partition.measured_links import MeasuredDevices, seconds_of
from rammer.distributed.partition.search import compile_spread
from rammer.errors import BadInput
from rammer.frontend.read.reader import read_model
from rammer.ir.expr import rename_tensors
from rammer.ir.program import ALIGNMENT, RProgram
from rammer.tuning.kernel_store import KernelStore
from rammer.verify.multi_device import TRANSFER
from rammer.verify.verifier import VerifyError, verify
from rammer_testing.models import light_model
from rammer_testing.small_models import dense_layers
from rammer_testing.spreads import run_steps, run_whole, whole_inputs


def compiler(tiles: int = 8) -> Compiler:
    """Return a compiler for a small simulated chip."""
    registry = Registry()
    backend = registry.open("ipu_sim", options={"tiles": str(tiles)})
    return Compiler(backend, CompileOptions(), KernelStore(None), registry, device="ipu_sim")


def spread_of(
    model: onnx.ModelProto, devices: int, links: tuple[Link, ...] | MeasuredDevices = (), goal: str = "throughput"
) -> DistributedProgram:
    read, made = read_model(model), compiler()
    shapes = {p.name: tuple(int(d or 0) for d in p.shape) for p in read.inputs}
    return compile_spread([("ipu_sim", made)] * devices, read, shapes, links, goal)


def expected(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> np.ndarray:
    from onnx.reference import ReferenceEvaluator

    return np.asarray(ReferenceEvaluator(model).run(None, inputs)[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_pipeline_computes_what_one_device_does(devices: int) -> None:
    model, spread = dense_layers(8), spread_of(dense_layers(8), devices)
    assert len(spread.parts) == devices and all(len(p.steps) == 1 for p in spread.parts)
    inputs = {"x": np.random.default_rng(devices).standard_normal((4, 32)).astype(np.float32)}
    want = expected(model, inputs)
    backend = Registry().open("ipu_sim", options={"tiles": "64"})
    for got in (run_steps(spread, inputs, [backend] * devices), run_whole(spread, inputs, backend)):
        np.testing.assert_allclose(got["y"], want, rtol=1e-5, atol=1e-6)


def test_it_is_balanced_and_known_to_be() -> None:
    spread = spread_of(dense_layers(8), 2)
    low, high = sorted(spread.predicted.busy)
    assert high < 1.3 * low and spread.predicted.interval < 0.7 * spread.predicted.alone[0]
    assert spread.predicted.latency >= sum(spread.predicted.busy)


@pytest.mark.slow
def test_it_is_balanced_by_what_its_parts_took() -> None:
    """Check device 0 at four times its predicted time: the best measured cut is selected, and ``how`` reports it."""
    slow, took = (4.0, 1.0), list[float]()

    def clock(parts: Sequence[DevicePart]) -> list[list[float]]:
        found = [[f * s.program.predicted for s in part.steps] for f, part in zip(slow, parts, strict=True)]
        took.append(max(map(sum, found)))
        return found

    model = dense_layers(16)
    plain, timed = spread_of(model, 2), spread_of(model, 2, MeasuredDevices((), clock))
    least = max(f * s.program.predicted for f, part in zip(slow, timed.parts, strict=True) for s in part.steps)
    assert len(took) > 1 and least == pytest.approx(min(took)) and least < took[0]
    assert len(timed.parts[0].steps[0].program.operators) < len(plain.parts[0].steps[0].program.operators)
    assert "balanced by what the parts took alone" in timed.how and "balanced" not in plain.how
    late = spread_of(model, 2, MeasuredDevices((), clock), "latency")
    assert "balanced" not in late.how  # a single run is not balanced


def test_parts_are_measured_by_their_devices() -> None:
    (part, _), backend = spread_of(dense_layers(6), 2).parts, compiler().backend
    (seconds,) = seconds_of(part, backend)
    assert seconds == backend.profiler.program_time(part.steps[0].program, part.steps[0].constants) > 0


@pytest.mark.slow
def test_a_slow_link_moves_the_cut() -> None:
    """Check cuts between layers of 32 and of 4 numbers; a slow link justifies a part of twice the length."""
    text = '<ir_version: 8, opset_import: ["" : 17]>\nneck (float[64,64] x) => (float[64,64] y) {\n' + "\n".join(
        (
            "a0 = MatMul(x, w)\n a = Tanh(a0)\n b0 = MatMul(a, w)\n b = Tanh(b0)\n c0 = MatMul(b, w)\n c = Tanh(c0)",
            "d0 = MatMul(c, down)\n d = Tanh(d0)\n e0 = MatMul(d, up)\n y = Tanh(e0)\n}",
        )
    )
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    for name, shape in (("w", (64, 64)), ("down", (64, 1)), ("up", (1, 64))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    fast = spread_of(model, 2, (Link(0, 1, 0.0, 1e15), Link(1, 0, 0.0, 1e15)))
    slow = spread_of(model, 2, (Link(0, 1, 0.0, 1e8), Link(1, 0, 0.0, 1e8)))
    assert fast.transfers[0].nbytes == 64 * 64 * 4 and slow.transfers[0].nbytes == 64 * 4
    assert slow.predicted.busy[0] > slow.predicted.busy[1]


@pytest.mark.large
def test_squeezenet_in_three() -> None:
    spread = spread_of(light_model("squeezenet"), 3)
    assert RProgram.parse(str(spread.whole)) == spread.whole and verify(spread.whole).tasks
    assert spread.predicted.interval < 0.5 * spread.predicted.alone[0]
    assert max(t.nbytes for t in spread.transfers) <= 128 * 27 * 27 * 4


@pytest.mark.slow
def test_it_is_the_same_again() -> None:
    one, two = spread_of(dense_layers(4), 2), spread_of(dense_layers(4), 2)
    assert one.digest == two.digest and str(one.whole) == str(two.whole)
    assert one.digest != spread_of(dense_layers(4, seed=1), 2).digest


def test_what_cannot_be_spread_is_refused() -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]>\ng (float[2] x) => (float[2] y) { y = Tanh(x) }'
    with pytest.raises(BadInput, match="cannot be partitioned for 3 devices"):
        spread_of(onnx.parser.parse_model(text), 3)
    late = '<ir_version: 8, opset_import: ["" : 17]>\ng (float[4] x) => (int64[1,n] y) { a = Tanh(x) y = NonZero(a) }'
    with pytest.raises(BadInput, match="do not depend on run-time data"):
        spread_of(onnx.parser.parse_model(late), 2)
    with pytest.raises(BadInput, match="unknown goal"):
        spread_of(dense_layers(4), 2, goal="speed")
    with pytest.raises(BadInput, match="at least two devices"):
        spread_of(dense_layers(4), 1)


def unheard(whole: RProgram) -> Iterator[RProgram]:
    """Yield ``whole`` without all waits for one transfer."""
    for name in (o.name for o in whole.operators if o.family == TRANSFER):
        rows = ([replace(t, waits=tuple(w for w in t.waits if w.counter != name)) for t in row] for row in whole.rows)
        edited = replace(whole, rows=tuple(map(tuple, rows)))
        if edited != whole:  # else only the user waits for it
            yield edited


def dropped(whole: RProgram) -> Iterator[RProgram]:
    """Yield ``whole`` with a transfer that sends an unwritten tensor of the same type."""
    for one in (o for o in whole.operators if o.family == TRANSFER):
        source = whole.storage[one.inputs[0]]
        end = -(-whole.arena_bytes // ALIGNMENT) * ALIGNMENT
        stray = replace(whole.buffer[source.buffer], name="hole", kind="arena", offset=end)
        names = {one.inputs[0]: "hole"}
        compute = replace(one.computes[0], body=rename_tensors(one.computes[0].body, names))
        operators = tuple(replace(o, computes=(compute,)) if o.name == one.name else o for o in whole.operators)
        storages = (*whole.storages, replace(source, tensor="hole", buffer="hole"))
        yield replace(whole, operators=operators, buffers=(*whole.buffers, stray), storages=storages)


@pytest.mark.parametrize("edit", [unheard, dropped])
def test_the_simulated_chip_shows_planted_faults(edit: Callable[[RProgram], Iterator[RProgram]]) -> None:
    spread, backend = spread_of(dense_layers(6), 3), Registry().open("ipu_sim", options={"tiles": "64"})
    inputs = {"x": np.random.default_rng(1).standard_normal((4, 32)).astype(np.float32)}
    assert np.isfinite(run_whole(spread, inputs, backend)["y"]).all()
    edits = list(edit(spread.whole))
    assert len(edits) >= 2
    faults = 0
    for edited in edits:
        loaded = backend.load(edited, joined_constants(spread.parts))
        shown = not np.isfinite(loaded.run(whole_inputs(spread, inputs)).outputs["y"]).all()
        with pytest.raises(VerifyError):
            verify(edited)
        faults += shown
    # A barrier of the chip may come in time for a task without a wait.
    assert faults >= len(edits) - (edit is unheard)


def by_hand(text: str, devices: int = 2) -> DistributedProgram:
    read, made = read_model(dense_layers(4)), compiler()
    return compile_spread([("ipu_sim", made)] * devices, read, {"x": (4, 32)}, place=text)


def test_by_hand() -> None:
    """Check a path back and forth: only h1 is on device 1."""
    spread = by_hand("# a layer elsewhere\n m0 0\nm1 1\nm2 0\n")
    assert [len(p.steps) for p in spread.parts] == [2, 1] and spread.how == "by hand"
    assert [(t.tensor, t.source, t.target) for t in spread.transfers] == [("h0", 0, 1), ("h1", 1, 0)]
    inputs = {"x": np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)}
    backend = Registry().open("ipu_sim", options={"tiles": "64"})
    for got in (run_steps(spread, inputs, [backend] * 2), run_whole(spread, inputs, backend)):
        np.testing.assert_allclose(got["y"], expected(dense_layers(4), inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m9 1", "does not compute 'm9'"),
        ("m1", "'m1' is not a name followed by a device number"),
        ("m1 -1", "is not a name followed by a device number"),
        ("m1 2", "placed on device 2, but there are 2 devices"),
        ("m1 0\nm1 1", "on two devices"),
        ("# nothing\n", "placement is empty"),
    ],
)
def test_what_cannot_be_placed_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        by_hand(text)


def lstms(layers: int, hidden: int, steps: int) -> onnx.ModelProto:
    """Return stacked LSTMs, as exporters write them."""
    rng, helper = np.random.default_rng(0), onnx.helper
    shapes = {"w": (1, 4 * hidden, hidden), "r": (1, 4 * hidden, hidden), "b": (1, 8 * hidden)}
    nodes, values = [], [onnx.numpy_helper.from_array(np.array([1]), "axes")]
    for k in range(layers):
        for n, shape in shapes.items():
            drawn = (rng.standard_normal(shape) / hidden**0.5).astype(np.float32)
            values.append(onnx.numpy_helper.from_array(drawn, f"{n}{k}"))
        reads = f"s{k - 1}" if k else "x"
        nodes.append(helper.make_node("LSTM", [reads, f"w{k}", f"r{k}", f"b{k}"], [f"y{k}"], hidden_size=hidden))
        nodes.append(helper.make_node("Squeeze", [f"y{k}", "axes"], [f"s{k}" if k < layers - 1 else "y"]))
    ports = [[helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [steps, 1, hidden])] for n in "xy"]
    graph = helper.make_graph(nodes, "stack", *ports, values)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.large)])
def test_stacked_layers_run_as_a_wavefront(devices: int) -> None:
    """Check that a chunk of steps is transferred as one tensor, written in place: no copy on either side."""
    model, backend = lstms(devices, 8, 8), Registry().open("ipu_sim", options={"tiles": "128"})
    links = tuple(Link(a, b, 1e-7, 1e10) for a in range(devices) for b in range(devices) if a != b)
    spread = spread_of(model, devices, links, "latency")
    assert spread.how.startswith("a wavefront")
    assert len(spread.parts) == devices and all(len(p.steps) >= 2 for p in spread.parts)
    assert sum(t.target > t.source for t in spread.transfers) == (devices - 1) * len(spread.parts[0].steps)
    made = [o.name for p in spread.parts for s in p.steps for o in s.program.operators]
    assert made and not [n for n in made if "_to_" in n or "_at_" in n]
    inputs = {"x": np.random.default_rng(devices).standard_normal((8, 1, 8)).astype(np.float32)}
    for got in (run_steps(spread, inputs, [backend] * devices), run_whole(spread, inputs, backend)):
        np.testing.assert_allclose(got["y"], expected(model, inputs), rtol=1e-5, atol=1e-6)
