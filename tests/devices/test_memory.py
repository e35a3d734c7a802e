"""Memory and disk use of weights: one copy each, as the device packs them, for any number of programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import rammer
from rammer.cache.cached_constants import LARGE
from rammer.device import shared_constants
from rammer.device.shared_constants import ConstantForm, SharedConstants
from rammer.errors import BadInput
from rammer.ir.constants.recipes import Constants
from rammer.runtime.executable import Executable
from rammer_testing.cache_files import entries
from rammer_testing.nonempty import some

#: Script of a process: open a model, run it at every extent of its open dimension, print its peak memory in bytes.
CHILD = """
import json, sys
import numpy as np
import rammer
path, device, extents, options = (json.loads(a) for a in sys.argv[1:])
exe = rammer.compile(path, device, options=options, resident=3)
port = exe.head.inputs[0]
had = []
for extent in extents:
    exe.run({port.name: np.ones((extent, port.shape[1]), np.float32)})
    had.append(int(open("/proc/self/statm").read().split()[1]) * 4096)
print(json.dumps([int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024, had]))
"""
OPTIONS = {"ipu_sim": {"tiles": "16", "sram": str(1 << 28)}}
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def saved(path: Path, count: int, width: int, external: bool = False, wide: int = 0, scaled: bool = False) -> Path:
    """Write consecutive products with ``count`` weights of 4 * width ** 2 bytes, and a last one to ``wide`` columns. With
    ``scaled``, results are scaled by constants, which passes fold into the weights."""
    rng = np.random.default_rng(0)
    shapes = [(width, width)] * count + ([(width, wide)] if wide else [])
    weights = [rng.standard_normal(s, np.float32) / np.float32(width**0.5) for s in shapes]
    nodes, known = list[onnx.NodeProto](), {f"w{i}": a for i, a in enumerate(weights)}
    for i, a in enumerate(weights):
        nodes.append(helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"p{i}" if scaled else f"x{i + 1}"]))
        if scaled:
            nodes.append(helper.make_node("Mul", [f"p{i}", f"s{i}"], [f"x{i + 1}"]))
            known[f"s{i}"] = rng.uniform(0.5, 2, a.shape[1]).astype(np.float32)
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, ["n", width])],
        [helper.make_tensor_value_info(f"x{len(weights)}", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a, name) for name, a in known.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(proto, path, save_as_external_data=external, location=f"{path.stem}.data")
    return path


def measured(path: Path, device: str, extents: list[int], cache: Path) -> tuple[int, list[int]]:
    """Return the peak memory of a fresh process, and its memory after each run, in bytes."""
    arguments = map(json.dumps, (str(path), device, extents, OPTIONS.get(device, {})))
    environment = {**os.environ, "RAMMER_CACHE": str(cache)}
    done = subprocess.run([sys.executable, "-c", CHILD, *arguments], env=environment, capture_output=True, text=True, check=True)
    most, had = json.loads(done.stdout.splitlines()[-1])
    return most, had


def kept(cache: Path) -> int:
    """Return the bytes of programs and constants in a cache folder."""
    return sum(f.stat().st_size for kind in ("programs", "constants") for f in entries(cache, kind))


@pytest.mark.slow
@linux
@pytest.mark.parametrize(("device", "external"), [("rocm", False), pytest.param("ipu_sim", True, marks=pytest.mark.large)])
def test_weights_are_in_memory_once(device: str, external: bool, tmp_path: Path) -> None:
    """Check cold and warm starts. A small model gives the base memory of the process. A second copy exceeds the bound: of weights
    of 1 MB, each thread packs one at a time. A device's runtime may cache kernels, and needs memory to compile them."""
    path, weights = saved(tmp_path / "m.onnx", 64, 512, external), 64 * 4 * 512**2
    small = saved(tmp_path / "small.onnx", 1, 16)
    for model in (small, path):
        measured(model, device, [4], tmp_path / "before")
    least, _ = measured(small, device, [4], tmp_path / "small")
    for what in ("cold", "warm"):
        most, _ = measured(path, device, [4], tmp_path / "cache")
        assert most - least < 1.6 * weights, (what, most, least)
        assert kept(tmp_path / "cache") < 0.05 * weights  # data of the model's files is not stored again


@pytest.mark.slow
@linux
def test_weights_that_passes_changed_are_made_of_the_model_again(tmp_path: Path) -> None:
    """Check that a warm start packs them again: one copy in memory, and none elsewhere on disk."""
    path, weights = saved(tmp_path / "m.onnx", 64, 512, external=True, scaled=True), 64 * 4 * 512**2
    small = saved(tmp_path / "small.onnx", 1, 16, scaled=True)
    (least, _), (most, _) = ([measured(m, "rocm", [4], tmp_path / m.stem) for _ in range(3)][-1] for m in (small, path))
    assert most - least < 1.6 * weights, (most, least)
    assert kept(tmp_path / "m") < 0.05 * weights


@pytest.mark.slow
@linux
@pytest.mark.parametrize(
    "device", ["toy", pytest.param("ipu_sim", marks=pytest.mark.large), pytest.param("rocm", marks=pytest.mark.large)]
)
def test_many_shapes_take_no_more_than_few(device: str, tmp_path: Path) -> None:
    """Check 40 shapes of 3 MB of inputs and outputs each: 120 MB, if none were freed."""
    path = saved(tmp_path / "m.onnx", 0, 128, wide=8192)
    _, had = measured(path, device, list(range(90, 130)), tmp_path / "cache")
    assert len(had) == 40 and max(had[20:]) - had[9] < 45e6


def test_constants_are_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Check one copy on disk for three shapes of a model in memory; another process's programs use it too."""
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))
    data, weights = saved(tmp_path / "m.onnx", 4, 256).read_bytes(), 4 * 4 * 256**2
    x = rng.standard_normal((9, 256)).astype(np.float32)
    wanted = {n: rammer.compile(data, "toy").run({"x0": x[:n]})["x4"] for n in (1, 4, 9)}
    assert len(entries(tmp_path / "cache", "programs")) == 3
    assert weights <= kept(tmp_path / "cache") < 1.1 * weights
    monkeypatch.setattr("rammer.compiler.compiler.Compiler.compile_model", None)  # compilation is disabled
    again = rammer.compile(data, "toy")
    for n, values in wanted.items():
        np.testing.assert_array_equal(again.run({"x0": x[:n]})["x4"], values)


@pytest.mark.parametrize("spoil", ["gone", "short", "flipped"])
def test_damaged_constants_are_made_again(
    spoil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))
    data = saved(tmp_path / "m.onnx", 2, 256).read_bytes()
    x = {"x0": rng.standard_normal((3, 256)).astype(np.float32)}
    wanted = rammer.compile(data, "toy").run(x)["x2"]
    files = entries(tmp_path / "cache", "constants")
    assert len(files) == 2 and min(f.stat().st_size for f in files) >= LARGE
    if spoil == "gone":
        files[0].unlink()
    else:
        content = bytearray(files[0].read_bytes())
        content[int(rng.integers(len(content)))] ^= 1
        files[0].write_bytes(content[: 1000 if spoil == "short" else None])
    np.testing.assert_array_equal(rammer.compile(data, "toy").run(x)["x2"], wanted)
    assert "compiling again" in capfd.readouterr().err
    np.testing.assert_array_equal(rammer.compile(data, "toy").run(x)["x2"], wanted)
    assert "compiling again" not in capfd.readouterr().err


def test_a_compiled_file_names_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that cache data is not a valid compiled model. As a compiled model it could make another user's process read local
    files."""
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))
    rammer.compile(saved(tmp_path / "m.onnx", 2, 256), "toy").run({"x0": np.ones((1, 256), np.float32)})
    (program,) = entries(tmp_path / "cache", "programs")
    with pytest.raises(BadInput, match="is not a compiled model"):
        rammer.compile(program, "toy")


@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_programs_share_constants_on_the_device(device: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Check two shapes with one tile: one copy of every form, freed after its last use."""
    data = saved(tmp_path / "m.onnx", 3, 256).read_bytes()
    exe = rammer.compile(data, device, options=OPTIONS.get(device))
    held = _shared(exe).held
    for n in (64, 128):
        x = rng.standard_normal((n, 256)).astype(np.float32)
        want = x.astype(np.float64)
        for w in some(exe.source.model.weights.values()):
            want = want @ w
        np.testing.assert_allclose(exe.run({"x0": x})["x3"], want, rtol=1e-4, atol=1e-4)
    assert len(exe.cache) == 2 and len({f.content for f in held}) == 3
    assert sum(f.nbytes for f in held) < 1.5 * 3 * 4 * 256**2
    exe.close()
    assert not held


def _shared(exe: Executable) -> SharedConstants[object]:
    """Return the constants of an executable's device."""
    found: object = getattr(exe.backend, "constants")  # noqa: B009
    shared = getattr(found, "shared", found)
    assert isinstance(shared, SharedConstants)
    return shared


def siblings(path: Path, rng: np.random.Generator, extents: list[int]) -> Path:
    """Write products of one tensor with separate weights, which batching merges."""
    columns = [192 * n for n in extents]
    nodes = [helper.make_node("MatMul", ["x", f"w{i}"], [f"p{i}"]) for i in range(len(columns))]
    nodes += [helper.make_node("Tanh", [f"p{i}"], [f"t{i}"]) for i in range(len(columns))]
    nodes += [helper.make_node("ReduceSum", [f"t{i}", "axes"], [f"s{i}"]) for i in range(len(columns))]
    nodes.append(helper.make_node("Sum", [f"s{i}" for i in range(len(columns))], ["y"]))
    weights = [numpy_helper.from_array(rng.standard_normal((192, n), np.float32) / 14, f"w{i}") for i, n in enumerate(columns)]
    ports = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, s)] for n, s in (("x", [24, 192]), ("y", None))]
    weights.append(numpy_helper.from_array(np.array([1]), "axes"))
    graph = helper.make_graph(nodes, "siblings", *ports, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("extents", [[1, 1, 1], [1, 2]])
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_weights_of_siblings_are_kept_nowhere_else(
    device: str, extents: list[int], rng: np.random.Generator, tmp_path: Path
) -> None:
    """Check merged products in a process that compiles, and in one that loads the program."""
    path = siblings(tmp_path / "m.onnx", rng, extents)
    x = rng.standard_normal((24, 192), np.float32)
    results = []
    for _ in range(2):
        exe = rammer.compile(path, device, batching="all", options={"tiles": "16"} if device == "ipu_sim" else {})
        exe.cache_root = tmp_path / "kept"
        special = exe.prepare({"x": x})
        constants = [s.constants for s in special.compiled.segments if isinstance(getattr(s, "constants", None), Constants)]
        recipes = [p for c in some(constants) for p in c.parts.values() if not isinstance(p, np.ndarray)]
        assert recipes and (device == "ipu_sim" or not any(p.alive for p in recipes))  # simulated memory holds the array itself
        results.append(exe.run({"x": x})["y"])
        exe.close()
    assert not entries(tmp_path / "kept", "constants") and len(entries(tmp_path / "kept", "programs")) == 1
    np.testing.assert_array_equal(*results)


def test_programs_of_a_range_pack_weights_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this with the limit on predicted time removed."""
    monkeypatch.setattr(shared_constants, "WITHIN", 1e9)
    forms = dict[str, set[str]]()
    before = SharedConstants.take

    def taken(self: SharedConstants[object], wanted: dict[ConstantForm, object], upload: object) -> object:
        for form in wanted:
            if form.nbytes > LARGE and form.arrangement:
                forms.setdefault(form.content, set()).add(form.arrangement)
        return before(self, wanted, upload)  # type: ignore[arg-type]

    monkeypatch.setattr(SharedConstants, "take", taken)
    path = saved(tmp_path / "m.onnx", 2, 320)
    exe = rammer.compile(path, "rocm", shapes={"n": (1, 256)})
    for n in (40, 256, 100, 3, 180):
        exe.run({"x0": np.ones((n, 320), np.float32)})
    assert len(exe.cache) >= 3
    exe.close()
    assert all(len(found) == 1 for found in some(forms.values())), forms
