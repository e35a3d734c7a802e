"""Parts that are compiled during a run are cached for the next process, like programs of input shapes. These are bodies of loops,
chunks of iterations as one program, and parts that wait for values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import BOOL, FLOAT, INT64, model, tensor
from random_loops import Feeds, drawn

import rammer
from rammer.compiled.artifact import save_artifact
from rammer.compiled.segments import Compiled
from rammer.compiler.compiler import Compiler
from rammer.frontend.loops import loop_chunk
from rammer.frontend.read.reader import Model
from rammer.jit import control_flow
from rammer.runtime.executable import Executable
from rammer.runtime.program_cache import part_key
from rammer_testing.cache_files import entries
from rammer_testing.nonempty import some
from rammer_testing.peer_process import PeerSession

DEVICES = ["toy", "rocm", "ipu_sim"]
OPTIONS = {"ipu_sim": {"tiles": "16"}}
node = helper.make_node


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the names of compiled models in order, with a note if a part waits for values of a run. Chunks of iterations are
    compiled soon, and the cache is empty."""
    names, compiles = list[str](), Compiler.compile_model

    def compiled(self: Compiler, model: Model, *more: Any) -> Compiled:
        found = compiles(self, model, *more)
        names.append(f"{model.name} {part_key(model)}{' waits' if found.rest is not None else ''}")
        return found

    monkeypatch.setattr(Compiler, "compile_model", compiled)
    monkeypatch.setattr(control_flow, "LONGEST", 1.0)
    monkeypatch.setattr(loop_chunk, "MOST_STEPS", 8)
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))
    return names


def agreed(session: PeerSession, exe: Executable, feeds: Feeds) -> dict[str, np.ndarray[Any, Any]]:
    names = [o.name for o in session.get_outputs()]
    wanted, found = dict(zip(names, session.run(names, feeds), strict=True)), exe.run(feeds)
    for name, want in some(wanted.items()):
        assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape), name
        np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-5, err_msg=name)
    return found


def growing(weight: float = 1.01) -> onnx.ModelProto:
    """Return a Loop that runs until its state is large; its trip count depends on the data."""
    body = [
        node("Mul", ["s", "w"], ["s2"]),
        node("ReduceMax", ["s2"], ["top"], keepdims=0),
        node("Less", ["top", "bound"], ["go"]),
    ]
    ports = [tensor("i", [], INT64), tensor("c", [], BOOL), tensor("s", [3])]
    loop = node(
        "Loop", ["", "", "x"], ["y"], body=helper.make_graph(body, "body", ports, [tensor("go", [], BOOL), tensor("s2", [3])])
    )
    constants = {"w": np.array(weight, np.float32), "bound": np.array(100, np.float32)}
    return model([loop], [tensor("x", [3])], ["y"], constants=constants)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_the_next_process_compiles_no_turns(device: str, made: list[str], tmp_path: Path) -> None:
    """Check also that it uses the program of several iterations without waiting for many iterations."""
    path, proto, feeds = tmp_path / "m.onnx", growing(), {"x": np.array([1, 2, 3], np.float32)}
    onnx.save(proto, path)
    session = PeerSession(proto)
    exe = rammer.compile(path, device, options=OPTIONS.get(device))
    exe.bodies.warm = 10
    first = agreed(session, exe, feeds)
    exe.close()
    assert any("_turns " in n for n in made)
    made.clear()
    exe = rammer.compile(path, device, options=OPTIONS.get(device))
    again = agreed(session, exe, feeds)
    assert not made and sum(exe.bodies.turned.values()) < 100
    np.testing.assert_array_equal(first["y"], again["y"])
    exe.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_file_keeps_its_turns(device: str, made: list[str], tmp_path: Path) -> None:
    path, proto, feeds = tmp_path / "m.rammer", growing(), {"x": np.array([1, 2, 3], np.float32)}
    exe = rammer.compile(proto, device, options=OPTIONS.get(device))
    save_artifact(path, exe.artifact(exe.compile_only({})))
    exe.close()
    session = PeerSession(proto)
    for compiling in some((True, False)):
        made.clear()
        exe = rammer.compile(path)
        exe.bodies.warm = 10
        agreed(session, exe, feeds)
        exe.close()
        assert bool(made) == compiling, made


@pytest.mark.slow
def test_what_is_damaged_is_made_again(made: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, proto, feeds = tmp_path / "m.onnx", growing(), {"x": np.array([1, 2, 3], np.float32)}
    onnx.save(proto, path)
    session = PeerSession(proto)
    kept = list[int]()
    for _ in range(2):
        exe = rammer.compile(path, "toy")
        exe.bodies.warm = 10
        agreed(session, exe, feeds)
        exe.close()
        kept.append(len(made))
        for file in some(entries(tmp_path / "cache", "programs")):
            file.write_bytes(file.read_bytes()[:-100])
    assert kept[1] == 2 * kept[0] and "compiling again" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.sampled(1, of="device")
@pytest.mark.parametrize("number", range(100))
@pytest.mark.parametrize("device", DEVICES)
def test_random_loops(device: str, number: int, made: list[str], tmp_path: Path, rng: np.random.Generator) -> None:
    """Check bodies with outer values, constants among them, and with any scan outputs."""
    loop, path = drawn(rng), tmp_path / "m.onnx"
    onnx.save(loop.proto, path)
    session = PeerSession(loop.proto)
    several, compiled = [loop.feeds(rng) for _ in range(3)], list[list[str]]()
    for _ in range(2):
        exe = rammer.compile(path, device, options=OPTIONS.get(device))
        exe.bodies.warm = 3
        for feeds in several:
            agreed(session, exe, feeds)
        exe.close()
        compiled.append([n for n in made if "_turns " in n and not n.endswith(" waits")])
        made.clear()
    assert not set(compiled[0]) & set(compiled[1]), compiled


def test_what_waits_for_values_is_kept(made: list[str], tmp_path: Path, rng: np.random.Generator) -> None:
    """Check caching for each shape that occurs, and not for another."""
    nodes = [node("Reshape", ["x", "shape"], ["r"]), node("Softmax", ["r"], ["y"])]
    proto = model(nodes, [tensor("x", [12], FLOAT), tensor("shape", [2], INT64)], ["y"])
    path, compiled = tmp_path / "m.onnx", list[int]()
    onnx.save(proto, path)
    session = PeerSession(proto)
    x = rng.standard_normal(12).astype(np.float32)
    for shapes in ([(3, 4), (4, 3)], [(4, 3), (3, 4)], [(2, 6)]):
        exe = rammer.compile(path, "toy")
        for shape in shapes:
            agreed(session, exe, {"x": x, "shape": np.array(shape)})
        exe.close()
        compiled.append(len(made))
        made.clear()
    assert compiled == [3, 1, 2]  # the part before it is compiled in every process
