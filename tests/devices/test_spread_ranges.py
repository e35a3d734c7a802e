"""A model over several devices for a range: one device's results at each length, and transfers no longer than the run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest
from ranged_models import RANGED, UNRANGED, RangedModel
from spread_launch import needs_mpi, surroundings

import rammer
from rammer.compile_options import CompileOptions, Request
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.distributed.distributed_program import DistributedProgram
from rammer.distributed.joining import Joining
from rammer.distributed.partition.manual import assign_stages
from rammer.distributed.partition.ranged_model import OpenShapes, graph_of_range
from rammer.distributed.partition.search import Spreading, compile_open
from rammer.distributed.partition.steps import Hosting
from rammer.distributed.runtime.distributed_run import Joined, SpreadRuns
from rammer.distributed.runtime.distributed_session import open_spread
from rammer.distributed.transport.local import LOCAL
from rammer.distributed.transport.protocol import Site
from rammer.errors import BadInput
from rammer.frontend.read.reader import read_model
from rammer.ir.extent import NoRange
from rammer.ir.program import RProgram
from rammer.runtime.shape_buckets import BUCKETS, crop_outputs, pad_inputs
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some
from rammer_testing.spreads import run_whole

Arrays = Mapping[str, np.ndarray]
#: Options of a small simulated chip.
OPTIONS = {"ipu_sim": {"tiles": "4"}, "rocm": {}}


def compiler(device: str) -> Compiler:
    registry = Registry()
    return Compiler(registry.open(device, options=OPTIONS[device]), CompileOptions(), KernelStore(None), registry, device=device)


def open_shapes(model: RangedModel) -> OpenShapes:
    """Return the open shapes of the whole range, in one part."""
    longest = {name: high for name, (_, high) in model.spans.items()}
    found = model.inputs(longest, np.random.default_rng(0))
    return OpenShapes({name: a.shape for name, a in found.items()}, model.spans)


def cut_at_random(model: RangedModel, made: Compiler, names: tuple[str, ...], random: Random) -> DistributedProgram:
    whole = graph_of_range(made, read_model(model.proto), open_shapes(model))
    spreading = Spreading(whole.graph, [made] * len(names), names, {}, Hosting(ended=whole.ended))
    where = dict[str, int]()
    for c in whole.graph.computes:
        near = [where[n] for n in c.reads if n in where]
        where[c.name] = near[-1] if near and random.random() < 0.6 else random.randrange(len(names))
    found = spreading.made(whole.graph, assign_stages(whole.graph, where), "at random")
    assert found is not None
    return found.joined(whole.graph.name, whole.ranged)


def points(model: RangedModel, random: Random, count: int) -> list[dict[str, int]]:
    """Return the ends of the range and lengths between them, in any order."""
    every = [dict(zip(model.spans, p, strict=True)) for p in product(*(range(a, b + 1) for a, b in model.spans.values()))]
    found = [every[0], every[-1], *random.sample(every, min(len(every), count))]
    random.shuffle(found)
    return found


def on_the_way(spread: DistributedProgram, point: Mapping[str, int], device: int) -> int:
    """Return the bytes that a device has to write, or to read, in a run."""
    assert spread.ranged is not None
    lengths, total = spread.ranged.scalars(point), 0
    for t in spread.transfers:
        if device == (t.source if t.late is None else t.target):
            total += t.nbytes // max(t.type.size, 1) * int(np.prod(t.shape(lengths)))
    return total


def check_table(spread: DistributedProgram, inputs: Arrays, want: Arrays) -> None:
    """Check the outputs of the whole table, run on a simulated chip, and of its text."""
    assert RProgram.parse(str(spread.whole)) == spread.whole and spread.ranged is not None
    ins, outs = SpreadRuns.ports(spread)
    wide, point = pad_inputs(spread.ranged, ins, inputs)
    large = Registry().open("ipu_sim", options={"tiles": str(max(8, spread.whole.veus))})
    check_same(crop_outputs(spread.ranged, outs, run_whole(spread, wide, large), point), want)


def check_same(found: Arrays, want: Arrays) -> None:
    for name in some(list(want)):
        assert found[name].shape == want[name].shape and found[name].dtype == want[name].dtype
        np.testing.assert_allclose(found[name], want[name], 1e-4, 1e-5)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("device", ["ipu_sim", "rocm"])
@pytest.mark.parametrize("name", RANGED)
def test_any_cut_is_what_one_device_makes(name: str, device: str, number: int, rng: np.random.Generator) -> None:
    random, model, made = Random(int(rng.integers(2**31))), RANGED[name](rng), compiler(device)
    names = (device,) * random.choice([2, 2, 3])
    spread = cut_at_random(model, made, names, random)
    one = rammer.compile(model.proto, device, shapes=model.spans, options=OPTIONS[device])
    registry, chosen = Registry(), points(model, random, 6)
    backends = {d: registry.open(device, options=OPTIONS[device]) for d in range(len(names))}
    runs = SpreadRuns(spread, backends, Joined(tuple(map(Site, names)), LOCAL, random.randint(1, 3), 30.0))
    inputs = [model.inputs(p, rng) for p in chosen]
    wanted = [one.run(given) for given in inputs]
    found, _ = runs.run_all(inputs)
    counters = runs.counters()
    with pytest.raises(BadInput, match="these programs are for"):
        runs.run(model.inputs({d: high + 1 for d, (_, high) in model.spans.items()}, rng))
    runs.close()
    one.close()
    for got, want in some(list(zip(found, wanted, strict=True))):
        check_same(got, want)
    for number_of, counted in some(list(enumerate(counters))):
        assert counted.nbytes == sum(on_the_way(spread, p, number_of) for p in chosen)
    if device == "ipu_sim":
        check_table(spread, inputs[0], wanted[0])


def test_a_cut_by_hand_serves_a_range(rng: np.random.Generator) -> None:
    model, made = RANGED["causal"](rng), compiler("ipu_sim")
    devices, at = [("ipu_sim", made)] * 2, open_shapes(model)
    spread = compile_open(devices, read_model(model.proto), at, place="sums 1\nproduct 0\n")
    assert spread.how == "by hand" and [t.late is not None for t in spread.transfers if t.tensor == "sums"] == [True]
    one = rammer.compile(model.proto, "ipu_sim", shapes=model.spans, options=OPTIONS["ipu_sim"])
    inputs = model.inputs({"seq": 5}, rng)
    check_table(spread, inputs, one.run(inputs))
    one.close()


@pytest.mark.parametrize("name", UNRANGED)
def test_what_is_no_one_program_is_refused(name: str) -> None:
    proto, made = UNRANGED[name][0](), compiler("ipu_sim")
    spans = {d.dim_param: (1, 9) for i in proto.graph.input for d in i.type.tensor_type.shape.dim if d.dim_param}
    with pytest.raises(NoRange) as refused:
        compile_open([("ipu_sim", made)] * 2, read_model(proto), open_shapes(RangedModel(proto, spans)))
    assert refused.value.hint == "give a length, or one device"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [("ipu_sim", "ipu_sim"), ("rocm", "ipu_sim")])
def test_a_range_takes_few_programs(devices: tuple[str, str], rng: np.random.Generator, tmp_path: Path) -> None:
    model, path = RANGED["causal"](rng), tmp_path / "causal.onnx"
    onnx.save(model.proto, path)
    options = {"ipu_sim.tiles": "4"}
    found = open_spread(path, devices, Request(device_options=options, lengths={"seq": (1, 12)}), Joining(timeout=30))
    one = rammer.compile(model.proto, "ipu_sim", shapes={"seq": (1, 12)}, options=OPTIONS["ipu_sim"])
    for length in some([*map(int, rng.permutation(range(1, 13))), 14, 3]):
        inputs = found.checked(model.inputs({"seq": length}, rng))
        runs = found.prepare(inputs)
        assert (runs.spread.ranged is None) == (length in (1, 14)), "one alone and longer ones are compiled on their own"
        check_same(runs.run(inputs), one.run(inputs))
    assert 2 < len(found.made) <= BUCKETS + 1
    found.close()
    one.close()


@pytest.mark.slow
def test_what_was_not_used_for_longest_is_freed(rng: np.random.Generator, tmp_path: Path) -> None:
    model, path = RANGED["residual"](rng), tmp_path / "residual.onnx"
    onnx.save(model.proto, path)
    request = Request(device_options={"tiles": "4"}, resident=2)
    found, made = open_spread(path, ("ipu_sim", "ipu_sim"), request, Joining(timeout=30)), []
    for batch in (1, 2, 1, 3):
        made.append(found.prepare(found.checked(model.inputs({"batch": batch}, rng))))
    assert made[0] is made[2] and [r.closed for r in made] == [False, True, False, False] and len(found.made) == 2
    given = found.checked(model.inputs({"batch": 1}, rng))
    assert made[0].run(given)["y"].shape[0] == 1
    found.close()
    assert all(r.closed for r in some(made))


@pytest.mark.slow
@pytest.mark.sampled(1)
@needs_mpi
@pytest.mark.parametrize("transport", ["mpi", "messages"])
def test_processes_move_what_a_run_has(transport: str, rng: np.random.Generator, tmp_path: Path) -> None:
    model, path = RANGED["attention"](rng), tmp_path / "attention.onnx"
    onnx.save(model.proto, path)
    given = model.inputs({"seq": 5, "batch": 2}, rng)
    one = rammer.compile(model.proto, "rocm", shapes=model.spans)
    np.savez(tmp_path / "in.npz", **given)
    np.savez(tmp_path / "want.npz", **one.run(given))
    one.close()
    shapes = [part for name, (low, high) in model.spans.items() for part in ("--shape", f"{name}={low}..{high}")]
    line = [sys.executable, "-m", "rammer.cli.main", "run", str(path), "--device", "rocm", "--transport", transport, *shapes]
    line += ["--inputs", str(tmp_path / "in.npz"), "--expected", str(tmp_path / "want.npz"), "--timeout", "60"]
    done = subprocess.run(
        ["mpirun", "-n", "2", "--oversubscribe", *line],
        capture_output=True,
        text=True,
        env=surroundings(str(tmp_path)),
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done
    moved = f"transport {transport} moves "
    assert ("of a run's own shape, by mpi" in done.stdout) == (transport == "mpi"), done.stdout
    assert (moved in done.stdout) == (transport == "messages") and "lengths   seq=" in done.stdout, done.stdout
