"""Files of ``rammer compile``: equal outputs, without other dependencies than the target hardware."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import Command
from onnx import parser

import rammer as api
from rammer.compiled.artifact import FORMAT, is_text, save_artifact, seal_of
from rammer.errors import BadInput
from rammer_testing.nonempty import some
from rammer_testing.small_models import MODELS


@pytest.fixture
def compiled(rammer: Command, model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "little.rammer"
    done = rammer("compile", model, "--device", "toy", "-o", path)
    assert done.code == 0
    assert f"wrote {path} (" in done.out and "steps: bind " in done.out
    return path


def test_the_file_runs_like_the_model(rammer: Command, model: Path, compiled: Path, tmp_path: Path) -> None:
    rammer("run", model, "--device", "toy", "--save-outputs", tmp_path / "a.npz")
    done = rammer("run", compiled, "--save-outputs", tmp_path / "b.npz", "--expected", tmp_path / "a.npz")
    assert done.code == 0 and "device    toy:0" in done.out
    a, b = np.load(tmp_path / "a.npz"), np.load(tmp_path / "b.npz")
    assert all(np.array_equal(a[n], b[n]) for n in some(a.files))
    exe = api.compile(compiled)
    assert [str(p) for p in exe.head.inputs] == ["x: float32[1,3,8,8]", "i: int64[2]"]


def test_it_keeps_the_policy(rammer: Command, model: Path, tmp_path: Path) -> None:
    rammer("compile", model, "--device", "toy", "--policy", "sequential", "-o", tmp_path / "s.rammer")
    assert json.loads(rammer("run", tmp_path / "s.rammer", "--json", "-").out)["policy"] == "sequential"


def test_other_devices_and_hardware_are_refused(rammer: Command, compiled: Path) -> None:
    done = rammer("run", compiled, "--device", "ipu_sim")
    assert done.code == 2
    assert done.err == (
        f"rammer: error: {compiled} was compiled for device toy, not for ipu_sim\n"
        "  hint: leave out --device, or compile the model for that device\n"
    )
    done = rammer("run", compiled, "--option", "memory=1000000")
    assert done.code == 2
    assert done.err.startswith(
        f"rammer: error: {compiled} was compiled without --option, not with --option memory=1000000\n"
        "  at: compiled for toy 1, NumPy"
    )
    assert done.err.endswith("  hint: leave out --option, or compile the model again with it\n")


def test_another_version_of_the_plugin_runs(rammer: Command, compiled: Path) -> None:
    rewritten(compiled, "head.json", '"fingerprint": "toy 1', '"fingerprint": "toy 0')
    done = rammer("run", compiled)
    assert (done.code, done.err) == (0, "")


def test_other_hardware_runs_with_a_warning(rammer: Command, compiled: Path) -> None:
    rewritten(compiled, "head.json", '"fingerprint": "toy 1', '"fingerprint": "toy 0')
    rewritten(compiled, "head.json", '"hardware": "the host', '"hardware": "another host')
    done = rammer("run", compiled)
    assert done.code == 0
    assert done.err == (
        f"rammer: warning: {compiled} was compiled for another host, by NumPy, 2 vEUs; here is the host, by NumPy, 2 vEUs\n"
    )


def test_it_keeps_the_options(rammer: Command, model: Path, tmp_path: Path) -> None:
    """Run without --option: the device opens with the options of the compilation. Other options are refused if they matter."""
    path = tmp_path / "o.rammer"
    assert rammer("compile", model, "--device", "ipu_sim", "--option", "tiles=7", "-o", path).code == 0
    done = rammer("run", path)
    assert done.code == 0 and "7 tiles" in done.out
    assert rammer("run", path, "--option", "tiles=7").code == 0
    done = rammer("run", path, "--option", "tiles=8", "--option", "no_stream=1")
    assert done.code == 2
    assert done.err.startswith(
        f"rammer: error: {path} was compiled with --option tiles=7, not with --option no_stream=1 --option tiles=8\n"
    )
    # The compiled program does not depend on this option.
    assert rammer("run", path, "--option", "no_stream=1").code == 0
    assert api.compile(path).device_options == {"tiles": "7"}


def test_it_keeps_the_precision(rammer: Command, model: Path, tmp_path: Path) -> None:
    """Check also an explicit float32: a lower precision must not be used. The tolerances are those of float16."""
    path, good, far = (tmp_path / name for name in ("half.rammer", "good.npz", "far.npz"))
    rammer("compile", model, "--device", "ipu_sim", "--precision", "float16", "-o", path)
    for other in ("float32", "tf32"):
        done = rammer("run", path, "--precision", other)
        assert (done.code, done.out) == (2, "")
        assert done.err == (
            f"rammer: error: {path} was compiled in float16, not in {other}\n  at: --precision\n"
            "  hint: leave out --precision, or compile the model again with it\n"
        )
    assert json.loads(rammer("run", path, "--save-outputs", good, "--json", "-").out)["precision"] == "float16"
    outputs = dict(np.load(good))
    for scale, code in ((1.005, 0), (1.02, 1)):
        np.savez(far, **{n: a * np.float32(scale) for n, a in outputs.items()})
        assert rammer("run", path, "--expected", far).code == code


def test_it_keeps_the_layout(rammer: Command, tmp_path: Path, rng: np.random.Generator) -> None:
    path, compiled = tmp_path / "images.onnx", tmp_path / "last.rammer"
    onnx.save(MODELS["images"].build(rng), path)
    rammer("compile", path, "--device", "toy", "--layout", "nhwc", "-o", compiled)
    rammer("run", path, "--device", "toy", "--layout", "nhwc", "--save-outputs", tmp_path / "a.npz")
    done = rammer("run", compiled, "--expected", tmp_path / "a.npz")
    assert done.code == 0 and "float32, 2 buffers channels last, " in done.out
    done = rammer("run", compiled, "--layout", "auto")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"rammer: error: {compiled} was compiled before, with its layout\n  at: --layout\n"
        "  hint: leave out --layout, or compile the model again with it\n"
    )


def test_a_file_for_a_named_target_runs_on_what_is_here(rammer: Command, model: Path, tmp_path: Path) -> None:
    """Check a file for gfx90a with 7 rows on a device with fewer vEUs."""
    exe = api.compile(model, device="ipu_sim", options={"tiles": "7"})
    made = exe.artifact(exe.compile_only({}))
    here = api.compile(model, device="toy")
    assert made.compiled.programs[0].veus == 7 > here.backend.vdevice.veus
    path = tmp_path / "t.rammer"
    save_artifact(path, replace(made, device="toy:0", record={**made.record, "target": "gfx90a"}, options={}))
    rammer("run", model, "--device", "toy", "--save-outputs", tmp_path / "a.npz")
    done = rammer("run", path, "--expected", tmp_path / "a.npz")
    assert done.code == 0
    assert done.err == f"rammer: warning: {path} was compiled for target gfx90a; here is the host, by NumPy\n"
    assert api.compile(path).cache.popitem()[1].compiled.programs[0].veus == 2


def test_wrong_shapes_are_refused(rammer: Command, compiled: Path) -> None:
    done = rammer("run", compiled, "--shape", "x:2x3x8x8")
    assert done.code == 2 and done.err.startswith("rammer: error: input 'x' has 2 elements along axis 0, the model")


def test_what_needs_the_model_says_so(rammer: Command, compiled: Path) -> None:
    done = rammer("inspect", compiled, "--stage", "tile")
    assert (done.code, done.err) == (
        2,
        f"rammer: error: {compiled} is a compiled model: only its program can be printed\n  at: --stage tile\n"
        "  hint: inspect the ONNX model that it was compiled from\n",
    )
    done = rammer("compare", compiled, "--device", "toy")
    assert done.code == 2 and "hint: this needs the ONNX model that it was compiled from" in done.err


def test_inspect_prints_the_program(rammer: Command, model: Path, compiled: Path) -> None:
    done = rammer("inspect", compiled)
    assert (done.code, done.err) == (0, "")
    assert done.out == rammer("inspect", model, "--device", "toy").out


def test_compare_takes_a_compiled_file(rammer: Command, model: Path, compiled: Path, tmp_path: Path) -> None:
    done = rammer("compare", compiled, "--device", "toy", "--against", model)
    assert done.code == 0 and " ok" in done.out
    rammer("run", model, "--device", "toy", "--save-outputs", tmp_path / "a.npz")
    outputs = dict(np.load(tmp_path / "a.npz"))
    np.savez(tmp_path / "far.npz", **{n: a + 1 for n, a in outputs.items()})
    assert rammer("compare", compiled, "--device", "toy", "--against", tmp_path / "a.npz").code == 0
    assert rammer("compare", compiled, "--device", "toy", "--against", tmp_path / "far.npz").code == 1


def test_bench_takes_a_compiled_file(rammer: Command, compiled: Path) -> None:
    done = rammer("bench", compiled, "--device", "toy", "--iterations", "1", "--duration", "0", "--json", "-")
    assert done.code == 0 and "outputs are not compared" in done.err
    (row,) = json.loads(done.out)["rows"]
    assert row["median"] > 0 and row["error"] is None


def rewritten(path: Path, name: str, change: str, into: str) -> None:
    """Write the same zip with ``change`` replaced in one member and a valid seal."""
    with zipfile.ZipFile(path) as archive:
        parts = {n: archive.read(n) for n in archive.namelist()}
    assert change.encode() in parts[name]
    parts[name] = parts[name].replace(change.encode(), into.encode(), 1)
    with zipfile.ZipFile(path, "w") as archive:
        for n, data in parts.items():
            archive.writestr(n, data)
        archive.comment = seal_of({n: d for n, d in parts.items() if is_text(n)})


def test_damaged_files_are_refused(rammer: Command, compiled: Path, rng: np.random.Generator) -> None:
    whole = compiled.read_bytes()
    for size in (4, len(whole) // 2, len(whole) - 1):
        compiled.write_bytes(whole[:size])
        assert rammer("run", compiled).err.startswith(f"rammer: error: {compiled} is not a compiled model: ")
    for place in some(rng.integers(0, len(whole), 40)):
        data = bytearray(whole)
        data[place] ^= 1 << int(rng.integers(8))
        compiled.write_bytes(bytes(data))
        done = rammer("run", compiled)
        assert done.code in (0, 2) and "Traceback" not in done.err, (place, done.err)  # 0: an unused bit
    compiled.write_bytes(whole)
    rewritten(compiled, "head.json", f'"format": {FORMAT}', '"format": 99')
    done = rammer("run", compiled)
    assert (done.code, done.err) == (
        2,
        f"rammer: error: {compiled} has format 99, this rammer reads 9 and {FORMAT}\n  hint: compile the model again\n",
    )


def test_what_is_whole_by_the_zip_alone_is_refused(rammer: Command, compiled: Path) -> None:
    """Check a changed member that a generic zip tool packed again."""
    with zipfile.ZipFile(compiled) as archive:
        parts, seal = {n: archive.read(n) for n in archive.namelist()}, archive.comment
    parts["0.program"] = parts["0.program"].replace(b"max(", b"min(", 1) + b" "
    for comment in (seal, b"", b"rammer"):
        with zipfile.ZipFile(compiled, "w") as archive:
            for name, data in parts.items():
                archive.writestr(name, data)
            archive.comment = comment
        done = rammer("run", compiled)
        assert done.code == 2 and "it is damaged: its content has another digest" in done.err


def test_a_damaged_constant_is_named(rammer: Command, compiled: Path) -> None:
    with zipfile.ZipFile(compiled) as archive:
        weights = archive.read("0.constants")
    place = compiled.read_bytes().index(weights)
    data = bytearray(compiled.read_bytes())
    data[place] ^= 1
    compiled.write_bytes(bytes(data))
    assert rammer("run", compiled).err == (
        f"rammer: error: {compiled} is not a compiled model: constant w_k is damaged\n  hint: compile the model again\n"
    )


def test_a_program_that_breaks_a_rule_is_not_run(rammer: Command, model: Path, compiled: Path) -> None:
    with zipfile.ZipFile(compiled) as archive:
        text = archive.read("0.program").decode()
    row = next(line for line in text.splitlines() if line.startswith("  row v0"))
    rewritten(compiled, "0.program", row + "\n", "")
    done = rammer("run", compiled)
    assert done.code == 2 and "is on no row" in done.err


def test_operators_on_the_host_travel_too(rammer: Command, tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 21]> det (float[65,65] x) => (float y, float[65,65] z) {
        r = Relu(x)
        scale = Constant<value = float {0.34}>()
        s = Mul(r, scale)
        y = Det(s)
        z = Add(r, y)
    }"""
    onnx.save(parser.parse_model(text), tmp_path / "det.onnx")
    done = rammer("run", tmp_path / "det.onnx", "--device", "toy", "--save-outputs", tmp_path / "a.npz")
    assert "on host   1 operators" in done.out
    assert rammer("compile", tmp_path / "det.onnx", "--device", "toy", "-o", tmp_path / "det.rammer").code == 0
    done = rammer("run", tmp_path / "det.rammer", "--expected", tmp_path / "a.npz", "--rtol", 1e-6)
    assert done.code == 0 and "on host   1 operators" in done.out


def test_where_it_cannot_be_written(rammer: Command, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "no" / "f.rammer"
    done = rammer("compile", model, "--device", "toy", "-o", target)
    assert (done.code, done.err) == (2, f"rammer: error: cannot write {target}: its folder does not exist\n")
    with pytest.raises(BadInput, match="is a compiled model"):
        rammer("compile", model, "--device", "toy", "-o", tmp_path / "f.rammer")
        _ = api.compile(tmp_path / "f.rammer").source.model
