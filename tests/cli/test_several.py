"""``rammer run`` and ``rammer bench`` over several devices: one process with several, or one process per device."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import Command

from rammer.distributed.joining import launched_processes
from rammer.ir.program import RProgram
from rammer.report.text_table import format_duration
from rammer.runtime.inputs import load_npz
from rammer.verify.verifier import verify
from rammer_testing import walkthrough
from rammer_testing.nonempty import some
from rammer_testing.small_models import MODELS

needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or find_spec("mpi4py") is None, reason="needs mpirun (openmpi-bin) and mpi4py"
)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.onnx"
    onnx.save(walkthrough.model(), path)
    return path


def launched(count: int, *arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``rammer`` in MPI processes."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    line = ["mpirun", "-n", str(count), "--oversubscribe", sys.executable, "-m", "rammer.cli.main", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=400, env={**os.environ, **root, **(env or {})})


def same(one: Path, other: Path) -> None:
    a, b = load_npz(one), load_npz(other)
    assert a.keys() == b.keys()
    for name in some(a):
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6)


def test_several_devices_of_one_process(rammer: Command, tiny: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    seed, one, two = int(rng.integers(1000)), tmp_path / "one.npz", tmp_path / "two.npz"
    assert rammer("run", tiny, "--device", "rocm", "--seed", seed, "--save-outputs", one).code == 0
    asked = ("--device", "rocm:0,ipu_sim", "--option", "ipu_sim.tiles=8", "--seed", seed, "--json", "-", "--expected", one)
    done = rammer("run", tiny, *asked, "--save-outputs", two, "--iterations", 2)
    assert done.code == 0, done.err
    same(one, two)
    report = json.loads(done.out)
    assert report["transport"] == "local" and [d.partition(":")[0] for d in report["devices"]] == ["rocm", "ipu_sim"]
    assert sum(c["payload_writes"] for c in report["counters"]) == len(report["transfers"])
    assert sum(c["nbytes"] for c in report["counters"]) == sum(t["bytes"] for t in report["transfers"])
    for counters in some(report["counters"]):
        assert [counters[n] for n in ("allocations", "serialisations", "copies")] == [0] * 3
    mine, chip = report["counters"]
    assert mine["host_copies"] == 0 < chip["host_copies"]  # a processor computes on arrays in place, a chip in separate memory


def test_a_trace_has_all_devices(rammer: Command, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    asked = ("--device", "rocm,ipu_sim", "--option", "ipu_sim.tiles=8", "--iterations", 3, "--trace", file)
    done = rammer("run", tiny, *asked)
    assert done.code == 0 and "by the clock of device 0" in done.out, done.err
    assert "device 1 (ipu_sim) is simulated" in done.out and "device 0 (rocm) is simulated" not in done.out
    spans = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {0, 1} and len({e["args"]["run"] for e in spans}) == 3
    assert {e["args"]["by"] for e in spans if (e["pid"], e["cat"]) == (1, "step")} == {"simulated cycles"}


def test_runs_in_flight_are_measured(rammer: Command, tiny: Path) -> None:
    asked = ("--devices", "ipu_sim,ipu_sim", "--option", "tiles=8", "--iterations", 2, "--duration", 0, "--in-flight", 3)
    done = rammer("bench", tiny, *asked)
    assert done.code == 0 and "between results" in done.out and "ipu_sim, ipu_sim" in done.out, done.err


@pytest.mark.parametrize(
    ("device", "code", "said"),
    [
        ("rocm,rocm:0", 3, "device rocm:0 is named 2 times"),
        ("cuda:0,cuda:0", 3, "device cuda:0 is named 2 times"),
        ("rocm,", 2, "has an empty name"),
        ("rocm,nothing", 2, "unknown device 'nothing'"),
        ("rocm,ipu_sim:7", 3, "unit ipu_sim:7 does not exist"),
    ],
)
def test_what_cannot_be_joined_is_refused(rammer: Command, tiny: Path, device: str, code: int, said: str) -> None:
    done = rammer("run", tiny, "--device", device)
    assert (done.code, done.out) == (code, "") and said in done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--place", "nowhere"), "cannot read nowhere"),
        (("--tune", "quick"), "cannot be measured for several devices"),
        (("--shape", "seq=1..4"), "the model has no open dimension 'seq'"),
    ],
)
def test_what_one_device_alone_can_do(rammer: Command, tiny: Path, options: tuple[str, str], said: str) -> None:
    done = rammer("run", tiny, "--device", "rocm,ipu_sim", *options)
    assert done.code == 2 and said in done.err


def test_a_transport_that_is_not_there(rammer: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = rammer("run", tiny, "--device", "rocm,ipu_sim", "--transport", "mpi")
    assert done.code == 3 and "no transport joins rocm, ipu_sim" in done.err and "in one process" in done.err
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    done = rammer("run", tiny, "--device", "rocm")
    assert done.code == 3 and "needs mpi4py" in done.err
    assert launched_processes() == 2


@pytest.mark.slow
def test_one_name_with_an_option_for_several_is_several(rammer: Command, tiny: Path, tmp_path: Path) -> None:
    """Check chips of one simulation: their links are modelled, and the predicted time of a run on all chips is reported."""
    options, one = ("--option", "tiles=8", "--seed", 3), tmp_path / "one.npz"
    assert rammer("run", tiny, "--device", "ipu_sim", *options, "--save-outputs", one).code == 0
    several = ("--device", "ipu_sim", "--option", "chips=2")
    done = rammer("run", tiny, *several, *options, "--expected", one, "--json", "-")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["transport"] == "chips" and len(report["devices"]) == 2
    (said,) = [n for n in report["notes"] if n.startswith("simulated over the links of 2 chips: ")]
    told = re.fullmatch(r".*: ([\d.]+) (n|u)s a run, .* between 8 in flight", said)
    assert told is not None and "one of 2 chips" in report["devices"][0]
    simulated = float(told[1]) * {"n": 1e-9, "u": 1e-6}[told[2]]
    assert report["predicted_latency_seconds"] == pytest.approx(simulated, rel=0.15)
    printed = rammer("inspect", tiny, *several, "--option", "tiles=8").out
    assert f"predicted {format_duration(report['predicted_latency_seconds'])} a run" in printed


@pytest.mark.slow
@needs_mpi
def test_a_process_a_device(rammer: Command, tiny: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    seed, one, two = int(rng.integers(1000)), tmp_path / "one.npz", tmp_path / "two.npz"
    assert rammer("run", tiny, "--device", "rocm", "--seed", seed, "--save-outputs", one).code == 0
    done = launched(2, "run", tiny, "--device", "rocm", "--seed", seed, "--save-outputs", two, "--timeout", 60)
    assert done.returncode == 0 and done.stdout.count("model     tiny") == 1, done.stderr
    same(one, two)


@pytest.mark.slow
@needs_mpi
@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", ["mpi", "messages"])
@pytest.mark.parametrize("count", [2, 3])
def test_recurrences_of_several_chips(
    rammer: Command, count: int, transport: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    small, path = MODELS["recurrence"], tmp_path / "m.onnx"
    onnx.save(small.build(rng), path)
    shapes = [f"--shape={n}:{'x'.join(map(str, a.shape))}" for n, a in small.inputs(rng, small.shapes[0]).items()]
    as_one_chip_has(rammer, path, ("--option", "tiles=16", *shapes), (count, transport), tmp_path / "one.npz")


@needs_mpi
@pytest.mark.large
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["lstm10_script", "lstm_two_ways_dynamo", "gru_two_ways_script", "bert_script", "bert_dynamo"])
def test_models_of_several_chips(rammer: Command, name: str, count: int, tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "models" / "exports" / f"{name}.onnx"
    as_one_chip_has(rammer, path, (), (count, "mpi"), tmp_path / "one.npz")


def as_one_chip_has(rammer: Command, path: Path, options: tuple[str, ...], how: tuple[int, str], one: Path) -> None:
    """Check that this number of processes and this transport give the outputs of one chip."""
    count, transport = how
    asked = ("run", path, "--device", "ipu_sim", *options, "--seed", 5)
    alone = rammer(*asked, "--save-outputs", one)
    assert alone.code == 0, alone.err
    done = launched(count, *asked, "--expected", one, "--transport", transport, "--timeout", 60)
    assert done.returncode == 0 and f"device {count - 1}  ipu_sim" in done.stdout, done.stderr


PAIR = """
import sys
from dataclasses import replace
from rammer.device.hooks import hookimpl
from rammer.device.manifest import Device
from rammer_ipu_sim.plugin import DEVICE

def probe():
    return [replace(unit, index=n) for unit in DEVICE.probe() for n in range(2)]

def opened(options):
    print(f"<opened {options.index}>", file=sys.stderr, flush=True)
    return DEVICE.open(replace(options, index=0, options={"tiles": "8"}))

@hookimpl
def rammer_devices():
    return [Device(name="pair", summary="two units", probe=probe, open=opened, simulated=True, api=5)]
"""


@pytest.mark.slow
@needs_mpi
def test_processes_of_a_host_have_units_of_their_own(tiny: Path, tmp_path: Path) -> None:
    """Check without device numbers: each process opens one unit and compiles for all on it, since they are alike."""
    (tmp_path / "pair.py").write_text(PAIR)
    made = tmp_path / "pair-1.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: pair\nVersion: 1\n")
    (made / "entry_points.txt").write_text("[rammer.devices]\npair = pair\n")
    where = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = launched(2, "run", tiny, "--device", "pair", "--timeout", 60, env=where)
    assert done.returncode == 0, done.stderr
    assert "device 0  pair:0: " in done.stdout and "device 1  pair:1: " in done.stdout
    assert sorted(re.findall("<opened .>", done.stderr)) == ["<opened 0>", "<opened 1>"]


@pytest.mark.slow
@needs_mpi
def test_other_counts_of_processes_are_refused(tiny: Path) -> None:
    done = launched(3, "run", tiny, "--device", "rocm,ipu_sim")
    assert done.returncode == 3 and "2 devices for 3 processes" in done.stderr


@pytest.mark.slow
@needs_mpi
def test_the_option_that_processes_differ_in_is_named(tiny: Path) -> None:
    own = ("-n", 1, sys.executable, "-m", "rammer.cli.main", "run", tiny, "--device", "rocm", "--in-flight", 3)
    done = launched(1, "run", tiny, "--device", "rocm", ":", *own)
    assert done.returncode == 3 and "device 1 (rocm) has another option depth than device 0 (rocm)" in done.stderr, done.stderr
    assert "at: 3 and 2" in done.stderr


def test_devices_reach_each_other(rammer: Command) -> None:
    rows = {r["device"]: r for r in json.loads(rammer("devices", "--json").out)}
    (way,) = [w for w in rows["ipu_sim:0"]["reaches"] if w["to"] == "rocm:0"]
    assert way["by"] == "local" and 0 < way["latency"] < 0.1 and way["bandwidth"] > 1e6
    printed = rammer("devices").out.splitlines()
    assert any(line.split()[:3] == ["ipu_sim:0", "rocm:0", "local"] for line in printed)


@needs_mpi
@pytest.mark.large
def test_processes_reach_each_other() -> None:
    done = launched(3, "devices")
    assert done.returncode == 0, done.stderr
    found = [line.split()[:5] for line in done.stdout.splitlines() if line.startswith("process")]
    assert found == [["process", str(a), "process", str(b), "mpi"] for a, b in ((0, 1), (0, 2), (1, 2))]


@pytest.mark.slow
def test_inspect_prints_the_cut_and_the_whole_table(rammer: Command, tiny: Path, tmp_path: Path) -> None:
    asked = ("inspect", tiny, "--device", "ipu_sim,ipu_sim", "--option", "tiles=4")
    done = rammer(*asked)
    assert done.code == 0, done.err
    head, program = done.out.split("program tiny policy joined", 1)
    assert head.startswith("spread tiny over 2 devices: a pipeline over layers\n  predicted ")
    assert "device 1 ipu_sim: rows v" in head and "reads input x" in head and ": 512 B, " in head
    assert verify(RProgram.parse(f"program tiny policy joined{program}")).tasks
    assert rammer(*asked).out == done.out
    hand = tmp_path / "hand.txt"
    hand.write_text("relu 0\npool 1\ndown 0\n")
    by_hand = rammer(*asked, "--place", hand)
    assert by_hand.code == 0 and "over 2 devices: by hand" in by_hand.out, by_hand.err
    hand.write_text("relu 0\nnowhere 1\n")
    wrong = [
        (("--place", hand), "does not compute 'nowhere'"),
        (("--stage", "tile"), "only the program can be printed"),
        (("--shape", "n=1..4"), "the model has no open dimension 'n'"),
        (("--place", tmp_path / "no"), "cannot read"),
    ]
    for more, said in wrong:
        refused = rammer(*asked, *more)
        assert refused.code == 2 and said in refused.err and not refused.out
