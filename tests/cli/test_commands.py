"""Help, devices, compare, inspect, bench, cache, and the installed command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import Command
from onnx import TensorProto, helper, numpy_helper

from rammer.cli.group import COMMANDS
from rammer.device.loader import Registry
from rammer.report.stage_text import STAGES
from rammer.version import __version__
from rammer_testing.cache_files import entries
from rammer_testing.nonempty import some

PAGES = [[], *([name] for name in COMMANDS), *(["cache", name] for name in ("info", "export", "import", "clear"))]


@pytest.mark.parametrize("words", PAGES, ids=lambda words: "-".join(words) or "rammer")
def test_every_help_page_has_an_example(rammer: Command, words: list[str]) -> None:
    done = rammer(*words, "--help")
    assert done.code == 0
    example = re.search(r"Example: rammer ([\w-]+)", done.out)
    assert example is not None
    assert example.group(1) == (words[0] if words else "run")


def test_version_and_unknown_commands(rammer: Command) -> None:
    assert rammer("--version").out == f"rammer, version {__version__}\n"
    done = rammer("frobnicate")
    assert done.code == 2 and "No such command 'frobnicate'" in done.err


# --- devices ------------------------------------------------------------------------------------------


def test_devices_are_listed_with_a_live_self_test(rammer: Command) -> None:
    done = rammer("devices")
    assert done.code == 0
    rows = {line.split()[0]: line for line in done.out.partition("\n\n")[0].splitlines()[2:]}
    for name in ("ipu_sim:0", "rocm:0", "toy:0"):
        assert re.search(r" ok +.* ok \(error \d", rows[name]), rows[name]


def test_devices_as_json(rammer: Command) -> None:
    rows = {r["device"]: r for r in json.loads(rammer("devices", "--json", "--no-test").out)}
    memory = rows["toy:0"].pop("memory")
    assert memory.endswith("iB")
    assert rows["toy:0"] == {
        "device": "toy:0",
        "state": "ok",
        "name": "the host, by NumPy",
        "kind": "cpu",
        "veus": "-",
        "self_test": "skipped",
        "detail": {},
        "reaches": [],
    }
    assert rows["ipu_sim:0"]["kind"] == "simulator" and rows["ipu_sim:0"]["detail"]


def test_no_device_is_no_error(rammer: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMMER_DISABLE", "cuda rocm ipu_sim toy")
    done = rammer("devices")
    assert done.code == 0 and done.out.count("disabled") == 4


# --- compare ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("against", ["onnxruntime", "reference"])
def test_compare_agrees(rammer: Command, model: Path, against: str) -> None:
    done = rammer("compare", model, "--device", "toy", "--device", "ipu_sim", "--against", against)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0].split() == ["device", "output", "max", "abs", "max", "rel", "rel", "L2", "verdict"]
    assert len(re.findall(r" ok *$", done.out, re.MULTILINE)) == 4


def test_compare_finds_a_mismatch(rammer: Command, model: Path, tmp_path: Path) -> None:
    rammer("run", model, "--device", "toy", "--save-outputs", tmp_path / "f.npz")
    wanted = dict(np.load(tmp_path / "f.npz"))
    assert rammer("compare", model, "--device", "toy", "--against", tmp_path / "f.npz").code == 0
    wanted["y"] = wanted["y"][:, ::-1]
    np.savez(tmp_path / "f.npz", **wanted)
    done = rammer("compare", model, "--device", "toy", "--against", tmp_path / "f.npz")
    assert (done.code, done.err) == (1, f"rammer: error: 1 outputs differ from {tmp_path / 'f.npz'}\n")
    wanted["w"] = wanted.pop("y")
    np.savez(tmp_path / "f.npz", **wanted)
    done = rammer("compare", model, "--device", "toy", "--against", tmp_path / "f.npz")
    assert done.code == 1 and "MISMATCH (missing)" in done.out


@pytest.mark.parametrize("factors, word", [((4, 4, 1 / 16), "not finite within float16's range"), ((2, 1, 0.5), "ok")])
def test_compare_draws_outliers_in_float16(rammer: Command, tmp_path: Path, factors: tuple[float, ...], word: str) -> None:
    """Check weights that multiply an activation of 10,000 by 16: products exceed float16 only with outliers."""
    weights = [numpy_helper.from_array(f * np.eye(16, dtype=np.float32), f"w{k}") for k, f in enumerate(factors)]
    nodes = [helper.make_node("MatMul", [f"v{k}", f"w{k}"], [f"v{k + 1}"]) for k in range(3)]
    ports = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 16])] for n in ("v0", "v3")]
    graph = helper.make_graph(nodes, "scaled", *ports, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    done = rammer("compare", tmp_path / "m.onnx", "--device", "ipu_sim", "--precision", "float16")
    rows = [line for line in done.out.splitlines() if "v3" in line]
    assert len(rows) == 2 and rows[0].endswith("ok") and "v3, outliers" in rows[1] and word in rows[1]
    assert done.code == (0 if word == "ok" else 1)
    assert "outliers" not in rammer("compare", tmp_path / "m.onnx", "--device", "ipu_sim").out


@pytest.mark.slow
def test_compare_says_where_onnxruntime_does_something_else(rammer: Command, tmp_path: Path, rng: np.random.Generator) -> None:
    """Check an integer layer of ONNX Runtime that quantises the rows of each thread. Its results differ only with several
    threads."""
    node = helper.make_node(
        "DynamicQuantizeLSTM", ["x", "w", "r", *[""] * 5, "s", "z", "s", "z"], ["y"], domain="com.microsoft", hidden_size=4
    )
    weights = [numpy_helper.from_array(rng.integers(0, 255, (1, n, 16)).astype(np.uint8), w) for n, w in ((3, "w"), (4, "r"))]
    weights += [numpy_helper.from_array(np.full(1, v, t), n) for n, v, t in (("s", 0.005, np.float32), ("z", 120, np.uint8))]
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [5, 2, 3]), ("y", [5, 1, 2, 4]))]
    graph = helper.make_graph([node], "m", ports[:1], ports[1:], weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    said = "ONNX Runtime's DynamicQuantizeLSTM quantises the state over the rows of each of its threads, not the batch"
    done = rammer("compare", tmp_path / "m.onnx", "--device", "toy")
    assert done.code == 1 and f"toy: {said}" in done.out
    done = rammer("compare", tmp_path / "m.onnx", "--device", "toy", "--rtol", "1", "--atol", "1")
    assert done.code == 0 and said not in done.out


@pytest.mark.parametrize("against", ["onnxruntime", "reference"])
def test_compare_says_what_a_reference_refuses(rammer: Command, tmp_path: Path, against: str) -> None:
    rows = helper.make_tensor_value_info("rows", TensorProto.INT64, [4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 2])
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "rows"], ["y"])],
        "g",
        [rows],
        [y],
        [numpy_helper.from_array(np.ones((3, 2), np.float32), "table")],
    )
    path = tmp_path / "gather.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    done = rammer("compare", path, "--device", "ipu_sim", "--range", "rows:90..99", "--against", against)
    assert done.code == 2 and "refuses this model or these inputs" in done.err and "Traceback" not in done.err


def test_compare_needs_a_reference(rammer: Command, model: Path) -> None:
    done = rammer("compare", model, "--device", "toy", "--against", "tensorflow")
    assert (done.code, done.err) == (
        2,
        "rammer: error: unknown reference 'tensorflow'\n  hint: use onnxruntime, reference or a file F.npz\n",
    )


# --- inspect ------------------------------------------------------------------------------------------

FIRST_WORDS = {
    "graph": "graph little(",
    "compute": "computegraph little(",
    "tile": "tilegraph little on toy",
    "kernels": "operator ",
    "source": "// ",
    "program": "program little policy wavefront on 2 vEUs",
    "schedule": "schedule little on 2 vEUs",
    "trace": '{"displayTimeUnit": "ns", "traceEvents": [',
}


@pytest.mark.parametrize("stage", STAGES)
def test_inspect_prints_every_stage(rammer: Command, model: Path, stage: str) -> None:
    done = rammer("inspect", model, "--device", "toy", "--stage", stage)
    assert done.code == 0
    assert done.out.startswith(FIRST_WORDS[stage])


@pytest.mark.slow
@pytest.mark.parametrize(("device", "target"), [("cuda", "sm_90a"), ("rocm", "gfx90a")])
def test_inspect_tells_the_registers_of_every_kernel(rammer: Command, model: Path, device: str, target: str) -> None:
    """Check register counts where the device's compiler reports them; other devices print a question mark."""
    done = rammer("inspect", model, "--device", device, "--target", target, "--stage", "kernels")
    if done.code == 3:
        pytest.skip(done.err)
    assert all(re.search(r" [1-9]\d* regs ", line) for line in some(done.out.splitlines()) if line.startswith("  kernel "))
    assert "  kernel " in done.out


def test_dump_writes_what_inspect_prints(rammer: Command, model: Path, tmp_path: Path) -> None:
    done = rammer("inspect", model, "--device", "ipu_sim", "--stage", "program", "--dump", tmp_path / "d")
    files = sorted((tmp_path / "d").iterdir())
    assert [f.stem for f in files] == [f"{i:02d}-{name}" for i, name in enumerate(STAGES)]
    assert (tmp_path / "d" / "05-program.txt").read_text() == done.out
    assert all(f.read_text().strip() for f in some(files))
    assert done.err.splitlines() == [f"wrote {f}" for f in files]
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = rammer("inspect", model, "--device", "toy", "--dump", blocked / "d")
    assert (done.code, done.err) == (2, f"rammer: error: cannot write {blocked / 'd'}: Not a directory\n")


def test_inspect_is_deterministic(rammer: Command, model: Path) -> None:
    first, second = (rammer("inspect", model, "--device", "ipu_sim").out for _ in range(2))
    assert first == second


# --- bench --------------------------------------------------------------------------------------------


def test_bench_tables(rammer: Command, model: Path, tmp_path: Path) -> None:
    words = (
        "--device",
        "toy",
        "--device",
        "ipu_sim",
        "--peer",
        "onnxruntime",
        "--iterations",
        3,
        "--duration",
        0,
        "--warmup",
        1,
        "--json",
        tmp_path / "b.json",
        "--markdown",
        tmp_path / "b.md",
    )
    done = rammer("bench", model, *words)
    assert done.code == 0
    table, note = done.out.rstrip().split("\n\n")
    own, simulated, peer = table.splitlines()[2:]
    assert re.search(r"\d+\.\d\dx onnxruntime", own) and "x onnxruntime" not in simulated + peer
    assert "(simulated)" in simulated and " * " not in simulated and own.count(" * ") + peer.count(" * ") == 1
    assert note == "* the fastest measured of a model"
    data = json.loads((tmp_path / "b.json").read_text())
    assert data["environment"]["rammer-core"] == __version__
    toy, sim, peer = data["rows"]
    assert (toy["runner"], sim["runner"], peer["runner"]) == ("toy", "ipu_sim", "onnxruntime")
    assert sim["simulated"] and sim["timed"] == "simulated cycles" and not toy["simulated"]
    assert all(row["agrees"] and row["error"] < 1e-5 for row in (toy, sim, peer))
    # Weights, inputs and outputs at least
    assert toy["memory"] >= 4 * (4 * 3 * 9 + 4 + 192 + 144 + 72) and peer["memory"] == 0
    assert toy["iterations"] == 3 and 0 < toy["median"] <= toy["p90"] <= toy["p99"] and toy["compile"] > 0
    text = (tmp_path / "b.md").read_text()
    assert text.startswith("| model") and "## Environment" in text


def test_bench_lists_a_missing_device_with_the_reason(
    rammer: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMMER_DISABLE", "cuda,rocm")
    words = ("--iterations", 1, "--duration", 0, "--option", "tiles=4")
    done = rammer("bench", model, "--device", "ipu_sim", "--device", "cuda", *words, "--json", tmp_path / "b.json")
    assert done.code == 0, done.err
    missing = done.out.splitlines()[3]
    assert missing.startswith("little") and "cuda" in missing and "RAMMER_DISABLE" in missing
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [(r["runner"], bool(r["why"])) for r in rows] == [("ipu_sim", False), ("cuda", True)]
    assert rammer("bench", model, "--device", "cuda", *words).code == 3


def test_bench_of_all_devices_has_a_row_for_each(rammer: Command, model: Path, tmp_path: Path) -> None:
    words = ("--device", "all", "--iterations", 1, "--duration", 0, "--json", tmp_path / "b.json")
    assert rammer("bench", model, *words).code == 0
    names = {r["runner"] for r in json.loads((tmp_path / "b.json").read_text())["rows"]}
    assert names == set(Registry().devices) and {"toy", "ipu_sim"} <= names


def test_bench_refuses_a_peer_without_the_precision_before_it_measures(rammer: Command, model: Path, tmp_path: Path) -> None:
    table = tmp_path / "b.md"
    words = ("--device", "ipu_sim", "--peer", "onnxruntime", "--precision", "float16", "--markdown", table)
    done = rammer("bench", model, *words)
    assert (done.code, done.out) == (2, "") and not table.exists()
    assert done.err == (
        "rammer: error: ONNX Runtime on the CPU does not compute in float16\n  at: --peer onnxruntime\n"
        "  hint: leave it out, or compare in float32\n"
    )
    table.mkdir()
    done = rammer("bench", model, "--device", "toy", "--iterations", 1, "--duration", 0, "--markdown", table)
    assert (done.code, done.err) == (2, f"rammer: error: cannot write {table}: it is a folder\n")


@pytest.mark.parametrize("words", [("plugins", "test", "toy"), ("onnx-tests", "--device", "toy")])
def test_a_command_without_the_kit_says_what_to_install(
    rammer: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("rammer.cli.distributions.find_spec", lambda package: None)
    done = rammer(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"rammer: error: rammer {' '.join(words[:1] if words[0] == 'onnx-tests' else words[:2])} needs rammer-testing, "
        "which is not installed\n  hint: pip install rammer-testing; in a checkout, pip install -e tests/kit\n"
    )


def test_bench_without_peers_says_what_to_install(rammer: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("bench", model, "--device", "toy", "--peer")
    done = rammer(*words, "tensorflow")
    assert done.code == 2 and done.err.startswith(
        "rammer: error: unknown peer 'tensorflow'\n  at: --peer\n  hint: one of: jax, onnx"
    )
    monkeypatch.setattr("rammer.cli.bench.peer_names", lambda: ())
    done = rammer(*words, "onnxruntime")
    assert (done.code, done.out) == (2, "") and "needs rammer-bench, which is not installed" in done.err
    assert "hint: pip install rammer-bench; in a checkout, pip install -e benchmarks\n" in done.err


EXECUTORS = {
    "executor=waves": "option executor=waves: not one of auto, graph, wavewise, persistent, mixed\n"
    "  hint: --option executor=auto|graph|wavewise|persistent|mixed",
    "speed=1": "device cuda has no option 'speed'\n"
    "  hint: it takes executor=auto|graph|wavewise|persistent|mixed, watchdog=FLOAT",
}


@pytest.mark.parametrize("option", EXECUTORS)
def test_executors_of_cuda(rammer: Command, model: Path, tmp_path: Path, option: str) -> None:
    file = tmp_path / "m.rammer"
    done = rammer("compile", model, "--device", "cuda", "--target", "sm_90a", "--option", option, "-o", file)
    assert (done.code, done.out, done.err) == (2, "", f"rammer: error: {EXECUTORS[option]}\n") and not file.exists()


# --- cache --------------------------------------------------------------------------------------------


def test_cache_info_and_clear(rammer: Command, model: Path, own_cache: Path) -> None:
    assert rammer("run", model, "--device", "toy", "--tune", "quick").code == 0
    found = json.loads(rammer("cache", "info", "--json").out)
    counts = {row["kind"]: row["files"] for row in found["kinds"]}
    assert counts["tuned"] >= 2 and counts["programs"] == counts["heads"] == 1
    assert found["folder"] == str(own_cache) and found["bytes"] == sum(row["bytes"] for row in some(found["kinds"])) > 0
    assert all(row["oldest"] <= row["newest"] for row in some(found["kinds"]))
    lines = rammer("cache", "info").out.splitlines()
    assert lines[0] == str(own_cache) and lines[1].endswith(" of 16 GiB") and len(lines) == 4 + len(counts)
    assert rammer("cache", "clear", "programs").out == "removed 1 programs\n"
    assert not entries(own_cache, "programs") and len(entries(own_cache, "heads")) == 1
    assert rammer("cache", "clear").out == f"removed 1 heads, {counts['tuned']} tuned\n"
    assert not entries(own_cache) and rammer("cache", "clear").out == "removed nothing\n"
    assert rammer("cache", "clear", "../x").code == 2


def test_cache_clear_removes_older_layouts(rammer: Command, own_cache: Path) -> None:
    for name in ("programs/a.rammer", "binaries/cuda/b.cubin", "kernels.sqlite", "kernels.sqlite-wal", "mine/file"):
        (own_cache / name).parent.mkdir(parents=True, exist_ok=True)
        (own_cache / name).write_text("old")
    assert "files of older versions" in rammer("cache", "info").out
    assert rammer("cache", "clear").code == 0
    assert [str(p.relative_to(own_cache)) for p in own_cache.rglob("*") if p.is_file()] == ["lock", "mine/file"]
    assert "files of older versions" not in rammer("cache", "info").out


# --- the installed command ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_installed_command(model: Path) -> None:
    command = Path(sys.executable).with_name("rammer")
    done = subprocess.run([command, "run", model, "--device", "toy"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        [sys.executable, "-m", "rammer.cli.main", "run", "none.onnx"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "rammer: error: model file not found\n  at: none.onnx\n  hint: check the path\n"


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(model: Path) -> None:
    command = f"{sys.executable} -m rammer.cli.main inspect {model} --device ipu_sim --stage source"
    line = command + " | head -1; exit ${PIPESTATUS[0]}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_mistake_of_our_own_is_no_mismatch(rammer: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import rammer_toy

    def breaks(*args: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(rammer_toy.ToyBackend, "candidates", breaks)
    done = rammer("run", model, "--device", "toy")
    assert done.code == 4
    assert done.err.endswith("rammer: internal error: planted\n  at: rammer or a plugin; the traceback says where\n")


def test_inspect_writes_a_stage_to_a_file(rammer: Command, model: Path, tmp_path: Path) -> None:
    printed = rammer("inspect", model, "--device", "toy", "--stage", "tile")
    done = rammer("inspect", model, "--device", "toy", "--stage", "tile", "-o", tmp_path / "tile.txt")
    assert (done.code, done.out, done.err) == (0, "", f"wrote {tmp_path / 'tile.txt'}\n")
    assert (tmp_path / "tile.txt").read_text() == printed.out
    assert rammer("inspect", model, "--device", "toy", "--stage", "graph", "-o", tmp_path / "after.onnx").code == 0
    made = onnx.load(tmp_path / "after.onnx")
    assert [n.op_type for n in made.graph.node] == ["Conv", "Relu", "Gather"]
    assert [v.name for v in made.graph.output] == ["y", "z"]
    done = rammer("inspect", model, "--device", "toy", "-o", tmp_path / "program.onnx")
    assert done.code == 2 and "stage program is a text" in done.err and not (tmp_path / "program.onnx").exists()


def test_results_of_compare_compile_and_plugins_as_json(rammer: Command, model: Path, tmp_path: Path) -> None:
    done = rammer("compare", model, "--device", "toy", "--json")
    found = json.loads(done.out)
    assert not done.code and found["against"] == "onnxruntime" and found["notes"] == []
    assert [(o["device"], o["name"], o["good"]) for o in found["outputs"]] == [("toy", "y", True), ("toy", "z", True)]
    assert all(0 <= o["l2"] < 1e-4 for o in some(found["outputs"]))
    done = rammer("compile", model, "--device", "toy", "-o", tmp_path / "m.rammer", "--json")
    found = json.loads(done.out)
    (compiled,) = found["compiled"]
    assert not done.code and Path(found["file"]).stat().st_size and compiled["tasks"] > 0 and compiled["hosted"] == 0
    assert len(compiled["kernels"]) > 1 and all(k["predicted"] >= 0 for k in compiled["kernels"])
    done = rammer("plugins", "list", "--json")
    assert not done.code and "toy" in [row["plugin"] for row in json.loads(done.out)]


def test_a_mismatch_is_in_the_json(rammer: Command, model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", y=np.zeros((1, 4, 6, 6), np.float32), z=np.zeros((1, 2, 5, 6), np.float32))
    done = rammer("compare", model, "--device", "toy", "--against", tmp_path / "other.npz", "--json")
    found = json.loads(done.out)
    assert done.code == 1 and not any(o["good"] for o in some(found["outputs"]))
    assert found["outputs"][1]["l2"] is None and "shape" in found["outputs"][1]["why"]


@pytest.mark.parametrize(
    ("words", "want"),
    [("run m.onnx --device to", "toy"), ("compare m.onnx --device toy,to", "toy,toy"), ("plugins test to", "toy")],
)
def test_shells_complete_devices(model: Path, words: str, want: str) -> None:
    program = "import sys; sys.argv = ['rammer']; from rammer.cli.main import main; main()"
    typed = f"rammer {words}"
    environment = {"_RAMMER_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert f"plain,{want}" in done.stdout.splitlines(), done.stderr
