"""``rammer run``: inputs, outputs, reports and files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import pytest
from command import MODEL, Command

import rammer as api
from rammer.cli.files import write_file
from rammer.errors import BadInput
from rammer.frontend.read.reader import read_model
from rammer.ir.program import RProgram
from rammer.reference.outputs import run_onnxruntime
from rammer.runtime.inputs import load_npz, save_npz
from rammer_testing.small_models import MODELS


def test_prints_hardware_times_and_outputs(rammer: Command, model: Path) -> None:
    done = rammer("run", model, "--device", "toy", "--iterations", 3)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "model     little"
    assert lines[1] == "device    toy:0: the host, by NumPy (cpu)"
    assert lines[2].startswith("compile   ") and "(policy wavefront, " in lines[2]
    assert "on the device (measured)" in lines[3] and lines[3].endswith("median of 3")
    assert lines[4] == "on host   0 operators"
    assert lines[7].split()[:3] == ["y", "float32", "1x4x6x6"]
    assert lines[8].split()[:3] == ["z", "float32", "1x2x6x6"]


def test_simulated_times_say_so(rammer: Command, model: Path) -> None:
    assert "on the device (simulated)" in rammer("run", model, "--device", "ipu_sim").out


def test_the_default_is_the_first_measured_device(rammer: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMMER_DISABLE", "cuda rocm")
    assert "device    toy:0" in rammer("run", model).out
    monkeypatch.setenv("RAMMER_DISABLE", "cuda,rocm,toy")
    done = rammer("run", model)
    assert done.code == 3
    assert done.err.startswith("rammer: error: no device with a clock works here\n  at: cuda: disabled (named in")


def test_a_layout_says_what_it_moved_and_is_kept_apart(rammer: Command, tmp_path: Path, rng: np.random.Generator) -> None:
    """Check also a compiled program from the cache."""
    path = tmp_path / "images.onnx"
    onnx.save(MODELS["images"].build(rng), path)
    for _ in range(2):
        for layout, shown in (("keep", "float32, 3 launches"), ("nhwc", "float32, 2 buffers channels last, ")):
            assert shown in rammer("run", path, "--device", "toy", "--layout", layout).out
    assert " buffers channels last, " in rammer("run", path, "--device", "toy", "--layout", "auto").out
    with pytest.raises(BadInput, match="unknown layout 'nwhc'\n  at: --layout\n  hint: one of: keep, nhwc, auto"):
        api.compile(path, device="toy", layout="nwhc")


def test_files_in_and_out(rammer: Command, model: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    given = MODEL.inputs(rng, {})
    np.savez(tmp_path / "in.npz", **given)
    np.save(tmp_path / "x.npy", given["x"])
    all_files = ("--inputs", tmp_path / "in.npz", "--save-outputs", tmp_path / "out.npz", "--save-inputs", tmp_path / "kept.npz")
    assert rammer("run", model, "--device", "toy", *all_files).code == 0
    want = run_onnxruntime(read_model(model), given)
    have = dict(np.load(tmp_path / "out.npz"))
    assert set(have) == {"y", "z"}
    for name, value in want.items():
        np.testing.assert_allclose(have[name], value, rtol=1e-4, atol=1e-5)
    kept = np.load(tmp_path / "kept.npz")
    assert set(kept) == set(given) and all(np.array_equal(kept[n], a) for n, a in given.items())
    one = ("--input", f"x=@{tmp_path / 'x.npy'}", "--range", "i:2..3", "--save-inputs", tmp_path / "mixed.npz")
    assert rammer("run", model, "--device", "toy", *one).code == 0
    mixed = np.load(tmp_path / "mixed.npz")
    assert np.array_equal(mixed["x"], given["x"]) and mixed["i"].tolist() == [2, 2]
    assert not list(tmp_path.glob("*.partial"))


def test_expected_outputs(rammer: Command, model: Path, tmp_path: Path) -> None:
    good = tmp_path / "good.npz"
    assert rammer("run", model, "--device", "toy", "--save-outputs", good).code == 0
    done = rammer("run", model, "--device", "rocm", "--expected", good, "--json", tmp_path / "r.json")
    assert done.code == 0 and done.out.count(" ok\n") + done.out.endswith(" ok") >= 2
    assert [d["verdict"] for d in json.loads((tmp_path / "r.json").read_text())["differences"]] == ["ok", "ok"]

    wrong = dict(np.load(good))
    wrong["z"] = wrong["z"] + np.float32(1)
    np.savez(tmp_path / "wrong.npz", **wrong)
    done = rammer("run", model, "--device", "toy", "--expected", tmp_path / "wrong.npz")
    assert done.code == 1
    assert done.err == f"rammer: error: 1 of 2 outputs differ from {tmp_path / 'wrong.npz'}\n"
    assert "MISMATCH (differs)" in done.out
    assert rammer("run", model, "--device", "toy", "--expected", tmp_path / "wrong.npz", "--atol", 2).code == 0

    wrong["z"][:] = np.nan
    np.savez(tmp_path / "nan.npz", **wrong)
    assert rammer("run", model, "--device", "toy", "--expected", tmp_path / "nan.npz", "--atol", 1e9).code == 1


def test_json_report(rammer: Command, model: Path) -> None:
    done = rammer("run", model, "--device", "ipu_sim", "--policy", "ios{r=2,s=4}", "--json", "-")
    report = json.loads(done.out)
    assert report["device"] == "ipu_sim:0" and report["simulated"] is True
    assert report["policy"] == "ios{r=2,s=4}"
    assert report["tasks"] > 0 and report["device_seconds"] > 0 and report["host_nodes"] == []
    assert [o["name"] for o in report["outputs"]] == ["y", "z"]
    assert "device    ipu_sim:0" in done.err


def test_seeds_repeat_and_differ(rammer: Command, model: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        rammer("run", model, "--device", "toy", "--seed", seed, "--save-inputs", tmp_path / f"{name}.npz")
    a, b, c = (np.load(tmp_path / f"{n}.npz")["x"] for n in "abc")
    assert np.array_equal(a, b) and not np.array_equal(a, c)


BAD_OPTIONS = {
    ("--shape", "x3"): "--shape 'x3' is not NAME:EXTENTxEXTENT...\n  hint: for example --shape x:1x3x224x224",
    ("--shape", "x=1...3"): "--shape 'x=1...3' is not DIM=LEAST..MOST/STEP\n"
    "  hint: for example --shape seq=1..512, or --shape total=past+1",
    ("--shape", "x=3"): "the model has no open dimension 'x'\n  at: shapes of x\n"
    "  hint: it has no open dimensions; the shape of its input x is given as x:EXTENTxEXTENT...",
    ("--shape", "z=3"): "the model has no open dimension 'z'\n  at: shapes of z\n  hint: it has no open dimensions",
    ("--range", "i:4"): "--range 'i:4' is not NAME:LOW..HIGH\n  hint: for example --range tokens:0..256",
    ("--range", "i:0.2..0.7"): "int64 does not cover the range 1..1\n  at: --range\n"
    "  hint: choose whole numbers from -9223372036854775808 to 9223372036854775807",
    ("--input", "x=a.npy"): "--input 'x=a.npy' is not NAME=@FILE.npy\n  hint: for example --input x=@image.npy",
    ("--option", "memory"): "--option 'memory' is not KEY=VALUE",
    ("--option", "speed=1"): "device toy has no option 'speed'\n  hint: it takes memory=INT",
    ("--policy", "wavefrnt"): "unknown policy 'wavefrnt'\n  at: --policy\n"
    "  hint: did you mean wavefront? Known: sequential, greedy, wavefront, ios, auto",
    ("--precision", "float16"): "device toy (NumPy on the host) does not compute in float16\n  at: --precision\n"
    "  hint: it has float32",
    ("--trace", "trace.json"): "device toy:0 does not record when its tasks run\n  at: --trace\n"
    "  hint: rammer inspect --stage trace shows the predicted schedule of any device",
    ("--option", "executor=graph"): "device toy has no option 'executor'\n  hint: it takes memory=INT",
    ("--range", "q:0..1"): "--range names 'q', which is not an input of the model\n  hint: its inputs are: i, x",
}


@pytest.mark.parametrize("words", BAD_OPTIONS, ids=" ".join)
def test_bad_options(
    rammer: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = rammer("run", model, "--device", "toy", "--save-outputs", "y.npz", "--json", "report.json", *words)
    assert (done.code, done.out, done.err) == (2, "", f"rammer: error: {BAD_OPTIONS[words]}\n")
    assert {p.name for p in tmp_path.iterdir()} <= {model.name, "cache"}


def test_an_unknown_precision_is_a_usage_error(rammer: Command, model: Path) -> None:
    for command in ("run", "compare", "bench", "inspect", "compile"):
        done = rammer(command, model, "--device", "toy", "--precision", "float8")
        assert (done.code, done.out) == (2, "")
        assert "Invalid value for '--precision': 'float8' is not one of 'float32', 'tf32', 'float16', 'bfloat16'." in done.err


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the toy device report that all tasks ran at once, for a second."""
    from rammer.device.manifest import Recorded, Span

    import rammer_toy

    def trace(self: object, program: RProgram, constants: object, inputs: object) -> Recorded:
        return Recorded(program, [Span(v, t.operator, t.index, 0.0, 1.0) for v, row in enumerate(program.rows) for t in row])

    monkeypatch.setattr(rammer_toy.ToyBackend, "trace", trace, raising=False)


@pytest.mark.usefixtures("recording")
def test_a_trace_of_a_device_that_records(rammer: Command, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = rammer("run", model, "--device", "toy", "--trace", path, "--json", "-")
    assert done.code == 0 and "trace: 1 s from the first task's start" in done.err
    tasks = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(tasks) == json.loads(done.out)["tasks"]  # stdout contains only the report
    named = {node for e in tasks for node in e["args"]["onnx"].split(", ")}
    assert {n.rpartition(" ")[2] for n in named} == {"(Conv)", "(Relu)", "(Gather)"}
    assert any("tasks of" in e["args"].get("waits", "") for e in tasks) and all(e["args"]["bytes"] > 0 for e in tasks)


def test_an_interrupted_file_is_not_there_at_all(tmp_path: Path) -> None:
    def fill(file: BinaryIO) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    (tmp_path / "old").write_bytes(b"whole")
    for name in ("new", "old"):
        with pytest.raises(KeyboardInterrupt):
            write_file(tmp_path / name, fill)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("old", b"whole")]


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("option", ["--save-outputs", "--save-inputs", "--json", "--trace"])
def test_unwritable_files(rammer: Command, model: Path, tmp_path: Path, option: str) -> None:
    target = tmp_path / "missing" / "file"
    done = rammer("run", model, "--device", "toy", option, target)
    assert (done.code, done.err) == (2, f"rammer: error: cannot write {target}: its folder does not exist\n")


def test_requirements_and_missing_units(rammer: Command, model: Path) -> None:
    done = rammer("run", model, "--device", "toy", "--require", "gpu")
    assert (done.code, done.err) == (3, "rammer: error: toy is a cpu, not a gpu\n")
    done = rammer("run", model, "--device", "toy:3")
    assert (done.code, done.err) == (3, "rammer: error: unit toy:3 does not exist\n  hint: found: toy:0 the host, by NumPy\n")


def test_the_debug_ladder_shows_tracebacks(rammer: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in rammer("run", tmp_path / "none.onnx", "--device", "toy").err
    monkeypatch.setenv("RAMMER_DEBUG", "2")
    assert "Traceback" in rammer("run", tmp_path / "none.onnx", "--device", "toy").err


def test_outputs_of_any_name_are_saved(rammer: Command, tmp_path: Path) -> None:
    names = ["file", "allow_pickle", "self", "args", "arr_0", "a/b", "../up", "/root", "x", "x.npy", "é \u2028 '"]
    start = onnx.helper.make_tensor_value_info("in", onnx.TensorProto.FLOAT, [3])
    nodes = [onnx.helper.make_node("Elu", ["in"], [n], alpha=float(i)) for i, n in enumerate(names)]
    ends = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [3]) for n in names]
    graph = onnx.helper.make_graph(nodes, "g", [start], ends)
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    target, given = tmp_path / "out.npz", np.array([-1, 0, 2], np.float32)
    np.savez(tmp_path / "in.npz", **{"in": given})
    done = rammer("run", tmp_path / "m.onnx", "--device", "toy", "--inputs", tmp_path / "in.npz", "--save-outputs", target)
    assert done.code == 0, done.err
    found = load_npz(target)
    assert list(found) == names
    for i, name in enumerate(names):
        np.testing.assert_allclose(found[name], np.where(given < 0, i * np.expm1(given), given), rtol=1e-5)
    assert not any((tmp_path / n).exists() for n in ("a", "up", "../up"))
    again = rammer("run", tmp_path / "m.onnx", "--device", "toy", "--inputs", tmp_path / "in.npz", "--expected", target)
    assert again.code == 0, again.err
    with pytest.raises(BadInput, match="too long a name"):
        save_npz(io.BytesIO(), {"n" * 70000: given})


def test_a_checked_run_names_the_operator(rammer: Command, tmp_path: Path) -> None:
    path, data = tmp_path / "m.onnx", tmp_path / "in.npz"
    text = '<ir_version: 9, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { y = Log(x) }'
    onnx.save(onnx.parser.parse_model(text), path)
    np.savez(data, x=np.array([1, -1], np.float32))
    assert rammer("run", path, "--device", "toy", "--inputs", data).code == 0
    done = rammer("run", path, "--device", "toy", "--inputs", data, "--check", "--json", tmp_path / "out.json")
    assert done.code == 2 and "node computing y (Log) makes NaN at [1] (1 of 2 elements) in y" in done.err
    assert not (tmp_path / "out.json").exists()
    np.savez(data, x=np.array([1, 2], np.float32))
    assert rammer("run", path, "--device", "toy", "--inputs", data, "--check").code == 0
    done = rammer("run", path, "--device", "ipu_sim,ipu_sim", "--inputs", data, "--check")
    assert done.code == 2 and "a model over several devices cannot be checked" in done.err
