"""States (outputs that are inputs of the next run) over several devices: agreement with a loop over one device's runs, and the
transfers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from spread_launch import needs_mpi, surroundings

from rammer.compile_options import CompileOptions, Request
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.distributed.distributed_program import DistributedProgram
from rammer.distributed.joining import Joining
from rammer.distributed.partition.manual import assign_stages
from rammer.distributed.partition.ranged_model import OpenShapes
from rammer.distributed.partition.search import Spreading, compile_open
from rammer.distributed.runtime.distributed_run import Joined, SpreadRuns
from rammer.distributed.runtime.distributed_session import open_spread
from rammer.distributed.transport.local import LOCAL
from rammer.distributed.transport.protocol import Site
from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind_until
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some

Arrays = dict[str, np.ndarray]
#: Sizes of a small decoder: positions of its caches, and elements of a row.
POSITIONS, WIDTH = 6, 8
OPTIONS = {"ipu_sim": {"tiles": "4"}, "rocm": {}}


def compiler(device: str) -> Compiler:
    registry = Registry()
    return Compiler(registry.open(device, options=OPTIONS[device]), CompileOptions(), KernelStore(None), registry, device=device)


def decoder(layers: int, seed: int) -> onnx.ModelProto:
    """Return a decoder whose layers each write a row into a cache at a position and attend to the cached rows."""
    rng = np.random.default_rng(seed)
    lines, size = ["here = Equal(places, at)", "past = LessOrEqual(places, at)"], f"{POSITIONS},{WIDTH}"
    weights = {"low": np.float32(-1e9), "places": np.arange(POSITIONS, dtype=np.int64).reshape(POSITIONS, 1)}
    for k in range(layers):
        h = f"h{k - 1}" if k else "x"
        lines += [
            f"row{k} = MatMul({h}, wk{k})",
            f"new{k} = Where(here, row{k}, old{k})",
            f"turned{k} = Transpose <perm = [1, 0]> (new{k})",
            f"near{k} = MatMul({h}, turned{k})",
            f"flat{k} = Transpose <perm = [1, 0]> (near{k})",
            f"seen{k} = Where(past, flat{k}, low)",
            f"share{k} = Softmax <axis = 0> (seen{k})",
            f"shares{k} = Transpose <perm = [1, 0]> (share{k})",
            f"mixed{k} = MatMul(shares{k}, new{k})",
            f"sum{k} = Add(mixed{k}, {h})",
            f"h{k} = Tanh(sum{k})",
        ]
        weights[f"wk{k}"] = (rng.standard_normal((WIDTH, WIDTH)) / 8).astype(np.float32)
    lines.append(f"y = Identity(h{layers - 1})")
    inputs = ", ".join([f"float[1,{WIDTH}] x", "int64[1] at", *(f"float[{size}] old{k}" for k in range(layers))])
    outputs = ", ".join([f"float[1,{WIDTH}] y", *(f"float[{size}] new{k}" for k in range(layers))])
    text = f'<ir_version: 8, opset_import: ["" : 17]>\ndecoder ({inputs}) => ({outputs}) {{\n'
    model = onnx.parser.parse_model(text + "\n".join(lines) + "\n}")
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), n) for n, v in weights.items())
    return model


def network(random: Random, states: int, nodes: int) -> onnx.ModelProto:
    """Return a random network with states.

    Each node reads two earlier values (nodes, states or the input). Each state is computed from a node, and the output from the
    last node. No node amplifies a small difference, so rounding errors stay bounded over many runs."""
    known, lines = ["x", *(f"s{k}" for k in range(states))], list[str]()
    for k in range(nodes):
        a, b = random.choice(known[-4:]), random.choice(known)
        lines += [f"p{k} = {random.choice(('Add', 'Mul', 'Sub'))}({a}, {b})", f"q{k} = Mul(p{k}, half)", f"n{k} = Tanh(q{k})"]
        known.append(f"n{k}")
    made = random.sample(range(nodes), states)
    lines += [f"t{k} = Mul(n{n}, half)" for k, n in enumerate(made)] + [f"y = Neg(n{nodes - 1})"]
    inputs = ", ".join(["float[5] x", *(f"float[5] s{k}" for k in range(states))])
    outputs = ", ".join([*(f"float[5] t{k}" for k in range(states)), "float[5] y"])
    text = f'<ir_version: 8, opset_import: ["" : 17]>\nnetwork ({inputs}) => ({outputs}) <float half = {{0.5}}> {{\n'
    return onnx.parser.parse_model(text + "\n".join(lines) + "\n}")


def looped(model: onnx.ModelProto, kept: dict[str, str], inputs: list[Arrays], first: Arrays) -> list[Arrays]:
    """Return the outputs of consecutive reference runs, each of which reads the states of the previous run."""
    evaluator, names, held, found = ReferenceEvaluator(model), [o.name for o in model.graph.output], dict(first), list[Arrays]()
    for given in inputs:
        held |= given
        made = dict(zip(names, evaluator.run(None, held), strict=True))
        held |= {kept[o]: a for o, a in made.items() if o in kept}
        found.append({n: a for n, a in made.items() if n not in kept})
    return found


def runs_of(spread: DistributedProgram, device: str, depth: int) -> SpreadRuns:
    registry, count = Registry(), len(spread.parts)
    joined = Joined(tuple(Site(device) for _ in range(count)), LOCAL, depth, 30.0)
    return SpreadRuns(spread, {d: registry.open(device, options=OPTIONS[device]) for d in range(count)}, joined)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(20))
def test_states_of_networks_cut_at_random(number: int, rng: np.random.Generator) -> None:
    """Check that each state is transferred to the devices that read it, and to no others."""
    random = Random(int(rng.integers(2**31)))
    states, count, device = random.randint(1, 3), random.randint(2, 3), random.choice(list(OPTIONS))
    model = network(random, states, random.randint(states + 1, 9))
    kept, made = {f"t{k}": f"s{k}" for k in range(states)}, compiler(device)
    shapes = {i.name: (5,) for i in model.graph.input}
    bound, rest = bind_until(read_model(model), shapes, made.lowerings)
    assert rest is None
    graph = lower(made.rewritten(bound, made.passes)[0], made.lowerings)
    spreading = Spreading(graph, [made] * count, (device,) * count, {}, states=kept)
    where = {c.name: random.randrange(count) for c in graph.computes}
    found = spreading.made(graph, assign_stages(graph, where), "at random")
    assert found is not None
    spread = found.joined(graph.name)
    readers = {i.name: set(i.devices) for i in spread.inputs}
    for state in some(spread.states):
        assert {spread.transfer[n].target for n in state.transfers} == readers[state.input] - {state.device}
    inputs = [{"x": rng.random(5, np.float32)} for _ in range(6)]
    first = {n: rng.random(5, np.float32) for n in kept.values() if random.random() < 0.5}
    runs = runs_of(spread, device, random.randint(1, 3))
    outputs, _ = runs.run_all([inputs[0] | first, *inputs[1:3]])
    outputs += runs.run_all(inputs[3:])[0]
    runs.close()
    zeros = {n: np.zeros(5, np.float32) for n in kept.values()}
    for got, want in some(list(zip(outputs, looped(model, kept, inputs, zeros | first), strict=True))):
        assert got.keys() == want.keys()
        for name, values in want.items():
            np.testing.assert_allclose(got[name], values, rtol=1e-5, atol=1e-5)


def tokens(rng: np.random.Generator) -> list[Arrays]:
    return [{"x": rng.random((1, WIDTH), np.float32), "at": np.array([k], np.int64)} for k in range(POSITIONS)]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", list(OPTIONS))
def test_a_decoder_keeps_its_caches_where_they_are_read(device: str, rng: np.random.Generator) -> None:
    layers, count = 4, 2
    model, kept = decoder(layers, int(rng.integers(2**31))), {f"new{k}": f"old{k}" for k in range(layers)}
    shapes = {i.name: tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in model.graph.input}
    at = OpenShapes(shapes, states=kept)
    spread = compile_open([(device, compiler(device))] * count, read_model(model), at)
    assert {s.device for s in some(spread.states)} == set(range(count))
    assert not any(s.transfers for s in some(spread.states))
    runs, inputs = runs_of(spread, device, 2), tokens(rng)
    outputs = [runs.run(given) for given in inputs]
    counters = runs.counters()
    runs.close()
    zeros = {n: np.zeros((POSITIONS, WIDTH), np.float32) for n in kept.values()}
    for got, want in some(list(zip(outputs, looped(model, kept, inputs, zeros), strict=True))):
        np.testing.assert_allclose(got["y"], want["y"], rtol=1e-4, atol=1e-5)
    assert sum(c.copies for c in counters) == layers * POSITIONS
    assert sum(c.nbytes for c in counters) < POSITIONS * len(spread.transfers) * 4 * POSITIONS * WIDTH


@pytest.mark.slow
@needs_mpi
def test_processes_keep_states(tmp_path: Path, rng: np.random.Generator) -> None:
    """Check the command with five runs after one that receives caches."""
    model, seed = decoder(2, 3), int(rng.integers(2**31))
    path, given = tmp_path / "decoder.onnx", np.random.default_rng(seed)
    path.write_bytes(model.SerializeToString())
    inputs = {"x": given.random((1, WIDTH), np.float32), "at": np.array([3], np.int64)}
    first = {f"old{k}": given.random((POSITIONS, WIDTH), np.float32) for k in range(2)}
    np.savez(tmp_path / "in.npz", **inputs, **first)
    kept = {"new0": "old0", "new1": "old1"}
    want = looped(model, kept, [inputs] * 6, first)[-1]
    words = [str(path), "--device", "rocm", "--inputs", str(tmp_path / "in.npz"), "--iterations", "5", "--timeout", "60"]
    words += [w for o, i in kept.items() for w in ("--state", f"{o}={i}")]
    words += ["--save-outputs", str(tmp_path / "out.npz"), "--json", "-"]
    line = ["mpirun", "-n", "2", "--oversubscribe", sys.executable, "-m", "rammer.cli.main", "run", *words]
    done = subprocess.run(line, env=surroundings(str(tmp_path)), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    report, found = json.loads(done.stdout), np.load(tmp_path / "out.npz")
    assert list(found) == ["y"] and any("is copied into input 'old0' after every run" in n for n in report["notes"])
    np.testing.assert_allclose(found["y"], want["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("states", "match"),
    [
        (("new0=old9",), "no input 'old9'"),
        (("none=old0",), "no output 'none'"),
        (("y=old0",), r"output 'y' .* cannot be input 'old0'"),
        (("new0=old0", "new1=old0"), "cannot be input 'old0'"),
        (("new0",), "does not define states"),
        (("=old0",), "does not define states"),
    ],
)
def test_what_is_no_state_is_refused(states: tuple[str, ...], match: str, tmp_path: Path) -> None:
    path = tmp_path / "decoder.onnx"
    path.write_bytes(decoder(2, 1).SerializeToString())
    inputs = tokens(np.random.default_rng(0))[0] | {f"old{k}": np.zeros((POSITIONS, WIDTH), np.float32) for k in (0, 1)}
    found = open_spread(path, ("rocm", "ipu_sim"), Request(device_options={"ipu_sim.tiles": "4"}), Joining(states=states))
    try:
        with pytest.raises(BadInput, match=match):
            found.prepare(inputs)
    finally:
        found.close()


def test_states_of_a_range_are_refused() -> None:
    at = OpenShapes({"x": (1, WIDTH)}, {"n": (1, 2)}, states={"new0": "old0"})
    with pytest.raises(BadInput, match="have fixed shapes on several devices"):
        compile_open([("ipu_sim", compiler("ipu_sim"))] * 2, read_model(decoder(2, 1)), at)


def test_one_device_keeps_states_by_bind(tmp_path: Path) -> None:
    path = tmp_path / "decoder.onnx"
    path.write_bytes(decoder(2, 1).SerializeToString())
    words = [sys.executable, "-m", "rammer.cli.main", "run", str(path), "--device", "rocm", "--state", "new0=old0"]
    done = subprocess.run(words, env=surroundings(str(tmp_path)), capture_output=True, text=True, timeout=100)
    assert done.returncode == BadInput.exit_code and "--state new0=old0 is for several devices" in done.stderr
