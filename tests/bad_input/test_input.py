"""User errors of every kind: exact messages and exit codes, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import LITTLE, arrays, command, message, model, saved
from onnx import TensorProto, external_data_helper, helper, numpy_helper

import rammer
from rammer.device.loader import Registry
from rammer.device.manifest import API_VERSION, Device, Hardware
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable
from rammer.jit.session import open_executable
from rammer_testing.conformance import registry_of

# --- the model file -----------------------------------------------------------------------------------


def file_message(path: Path) -> str:
    return message(BadInput, lambda: rammer.compile(path, device="toy"))


@pytest.mark.parametrize("data", [b"hello, world\n", b"\x89PNG\r\n\x1a\n" + bytes(64), bytes(range(256))])
def test_not_an_onnx_file(tmp_path: Path, data: bytes) -> None:
    path = saved(tmp_path / "m.onnx", data)
    assert file_message(path) == (
        f"not an ONNX model\n  at: {path}\n  hint: give a .onnx file (an ONNX ModelProto in protobuf's binary format)"
    )


def test_no_file_an_empty_file_and_a_folder(tmp_path: Path) -> None:
    assert file_message(tmp_path / "m.onnx") == f"model file not found\n  at: {tmp_path}/m.onnx\n  hint: check the path"
    assert file_message(tmp_path) == f"the model is a folder\n  at: {tmp_path}\n  hint: give the .onnx file in it"
    path = saved(tmp_path / "m.onnx", b"")
    assert file_message(path) == f"the model file is empty\n  at: {path}\n  hint: download or export the model again"


@pytest.mark.slow
def test_truncated(tmp_path: Path) -> None:
    data = model().SerializeToString()
    path = saved(tmp_path / "m.onnx", data[:60])
    assert file_message(path).startswith("the model file is truncated: graph has ")
    for size in range(1, len(data)):
        path = saved(path, data[:size])
        text = file_message(path)
        assert text.startswith(("the model file is truncated", "not an ONNX model")), (size, text)


def test_unknown_operator(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", model(LITTLE.replace("Relu", "Rleu")))
    assert file_message(path) == (
        "unknown operator Rleu in domain ai.onnx, opset 21\n"
        "  at: node computing y (Rleu)\n  hint: the nearest known operator is Relu"
    )
    foreign = model(LITTLE.replace('["" : 21]', '["" : 21, "com.acme" : 1]').replace("Relu", "com.acme.Fuse"))
    assert file_message(saved(path, foreign)) == (
        "unknown operator Fuse in domain com.acme, opset 1\n  at: node computing y (Fuse)\n"
        "  hint: domain com.acme is not part of ONNX, and no plugin here declares operators of it (`rammer plugins list`): "
        "install or write one that does (hook rammer_operators), or export the model with standard operators only"
    )


def test_cycle(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Add", ["x", "c"], ["a"], "first"),
        helper.make_node("Neg", ["a"], ["b"], "second"),
        helper.make_node("Neg", ["b"], ["c"], "third"),
    ]
    port = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "ring", [port("x", 1, [2])], [port("c", 1, [2])])
    path = saved(tmp_path / "m.onnx", helper.make_model(graph))
    assert file_message(path) == (
        "the graph has a cycle: first -> second -> third -> first\n  at: graph ring\n  hint: export the model again"
    )


def test_external_data_outside_the_folder(tmp_path: Path, rng: np.random.Generator) -> None:
    proto = model()
    weight = numpy_helper.from_array(arrays(rng)["w"], "w")
    del proto.graph.input[1]
    proto.graph.initializer.append(weight)
    (tmp_path / "models").mkdir()
    (tmp_path / "secret").write_bytes(weight.raw_data)
    path = tmp_path / "models" / "m.onnx"

    def point_at(location: str) -> Path:
        tensor = proto.graph.initializer[0]
        tensor.raw_data = weight.raw_data
        external_data_helper.set_external_data(tensor, location)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        return saved(path, proto)

    (tmp_path / "models" / "link").symlink_to(tmp_path / "secret")
    for location in ("../secret", str(tmp_path / "secret"), "a/../../secret", "link"):
        assert file_message(point_at(location)) == (
            f"external data {location!r} is outside the model's folder\n  at: tensor w of {path}\n"
            "  hint: move the file next to the model and store its relative path"
        )
    text = file_message(point_at("weights"))
    assert text == (
        f"external data 'weights' is missing\n  at: tensor w of {path}\n  hint: put the file at {tmp_path}/models/weights"
    )
    (tmp_path / "models" / "weights").write_bytes(weight.raw_data)
    point_at("weights")
    given = arrays(rng)["x"]
    have = rammer.compile(path, device="toy").run({"x": given})["y"]
    np.testing.assert_allclose(have, np.maximum(given @ numpy_helper.to_array(weight), 0), rtol=1e-4, atol=1e-5)


# --- inputs -------------------------------------------------------------------------------------------


def input_message(rng: np.random.Generator, change: Callable[[dict[str, Any]], object]) -> str:
    exe = rammer.compile(model(), device="toy")
    given: dict[str, Any] = arrays(rng)
    change(given)
    return message(BadInput, lambda: exe.run(given))


def test_wrong_dtype(rng: np.random.Generator) -> None:
    text = input_message(rng, lambda given: given.update(x=given["x"].astype(np.float64)))
    assert text == ("input 'x' is float64, the model declares float32[1,N,8]\n  hint: convert it: array.astype('float32')")
    assert input_message(rng, lambda given: given.update(x=[["a"]])).startswith("input 'x' is <U1, the model declares")


def test_wrong_rank_and_shape(rng: np.random.Generator) -> None:
    text = input_message(rng, lambda given: given.update(x=given["x"][0]))
    assert text == "input 'x' has rank 2, the model declares float32[1,N,8]"
    text = input_message(rng, lambda given: given.update(x=given["x"][:, :, :7]))
    assert text == "input 'x' has 7 elements along axis 2, the model declares float32[1,N,8]"


def test_one_name_two_extents(rng: np.random.Generator) -> None:
    text = """<ir_version: 9, opset_import: ["" : 21]> twice (float[1,N,8] x, float[N,5] w) => (float[1,8,5] y) {
        t = Transpose<perm=[0,2,1]>(x)
        y = MatMul(t, w)
    }"""
    exe = rammer.compile(model(text), device="toy")
    given = {"x": arrays(rng, 3)["x"], "w": rng.standard_normal((4, 5)).astype(np.float32)}
    assert message(BadInput, lambda: exe.run(given)) == "dimension 'N' is 3 in input 'x' but 4 in 'w'"


def test_what_is_no_array_by_name(rng: np.random.Generator) -> None:
    exe = rammer.compile(model(), device="toy")
    for call in (exe.run, exe.bind):
        said = message(BadInput, lambda call=call: call({**arrays(rng), "x": [[1.0], [1.0, 2.0]]}))  # type: ignore[misc]
        assert said.startswith("input 'x' cannot be read: setting an array element with a sequence.")
        said = message(BadInput, lambda call=call: call([1.0]))  # type: ignore[misc]
        assert said == "1 inputs were given, the model has 2\n  hint: in this order: x, w"


def test_missing_and_unknown_inputs(rng: np.random.Generator) -> None:
    assert input_message(rng, lambda given: given.pop("w")) == "input 'w' is missing\n  hint: the model needs: x, w"
    text = input_message(rng, lambda given: given.update(z=given["x"]))
    assert text == "the model has no input 'z'\n  hint: its inputs are: x, w"


def test_an_open_dimension_names_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "m.onnx", model())
    done = command(monkeypatch, capsys, "run", path, "--device", "toy")
    assert done == (
        2,
        "",
        "rammer: error: input 'x' has dynamic dimensions [1,N,8]\n  hint: give its shape, for example --shape x:1x1x8\n",
    )
    assert command(monkeypatch, capsys, "run", path, "--device", "toy", "--shape", "x:1x4x8")[0] == 0


def test_input_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    path, junk = saved(tmp_path / "m.onnx", model()), saved(tmp_path / "junk", b"junk")
    code, _, err = command(monkeypatch, capsys, "run", path, "--device", "toy", "--inputs", junk)
    assert code == 2 and err.startswith(f"rammer: error: {junk} is not an .npz file of arrays: ")
    code, _, err = command(monkeypatch, capsys, "run", path, "--device", "toy", "--input", f"x=@{junk}")
    assert code == 2 and err.startswith(f"rammer: error: {junk} is not a .npy file: ")
    np.savez(tmp_path / "pickled.npz", x=np.array([{}], dtype=object))
    code, _, err = command(monkeypatch, capsys, "run", path, "--device", "toy", "--inputs", tmp_path / "pickled.npz")
    assert code == 2 and "Object arrays cannot be loaded when allow_pickle=False" in err
    wrong = tmp_path / "w.npz"
    np.savez(wrong, **{**arrays(rng), "x": arrays(rng)["x"].astype(np.int32)})
    code, _, err = command(monkeypatch, capsys, "run", path, "--device", "toy", "--inputs", wrong)
    assert code == 2 and err.startswith("rammer: error: input 'x' is int32, the model declares float32[1,N,8]\n")


# --- devices ------------------------------------------------------------------------------------------

PLUGINS = "the checkout has plugins: pip install -e plugins/NAME"
PYPI = "(the name 'rammer' on PyPI is another project)"


def test_unknown_device() -> None:
    text = message(BadInput, lambda: rammer.compile(model(), device="rokm"))
    assert text == f"unknown device 'rokm'\n  hint: did you mean 'rocm'? {PYPI}"
    toy = registry_of(Device("toy", "", lambda: [], lambda options: None, api=5))  # type: ignore[arg-type, return-value]
    text = message(BadInput, lambda: open_executable(model(), "ipu-sim", registry=toy))
    assert text == f"unknown device 'ipu-sim'\n  hint: installed: toy; {PLUGINS} {PYPI}"
    text = message(BadInput, lambda: open_executable(model(), "quantum", registry=toy))
    assert text == f"unknown device 'quantum'\n  hint: installed: toy; {PLUGINS} {PYPI}"
    text = message(BadInput, lambda: open_executable(model(), "quantum", registry=Registry([])))
    assert text == f"unknown device 'quantum'\n  hint: installed: none; {PLUGINS} {PYPI}"


@pytest.mark.parametrize("device", ["toy", "rocm", "ipu_sim"])
def test_a_model_larger_than_device_memory(device: str) -> None:
    # 4 TiB where the memory is real, so an allocation of that size must not happen; half a gigabyte on the simulated chip.
    shape = (1 << 20, 1 << (6 if device == "ipu_sim" else 20))
    kind, size = f"float[{shape[0]},{shape[1]}]", shape[0] * shape[1]
    text = f"""<ir_version: 9, opset_import: ["" : 21]> huge ({kind} x) => ({kind} y) {{ y = Relu(x) }}"""
    exe = rammer.compile(model(text), device=device)
    said = message(DeviceFailure, lambda: exe.specialise({"x": shape}))
    if device == "ipu_sim":
        assert said.startswith("out of memory: ")
        return
    name, layer = exe.backend.vdevice.name, exe.backend.vdevice.layers[0]
    first = f"out of memory: huge needs at least {8 * size} bytes of {layer.name}, {name} has {layer.capacity}"
    assert said == f"{first}\n  hint: use a smaller batch or input, or a device with more memory"


def broken_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> EntryPoint:
    """Return an entry point to a module with this text."""
    (tmp_path / "rammer_broken.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "rammer_broken", raising=False)
    return EntryPoint("broken", "rammer_broken", "rammer.devices")


HOOKS = "from rammer.device.hooks import hookimpl\n@hookimpl\n"
LISTS = f"from rammer.device.manifest import Device\n{HOOKS}def rammer_devices(): return "


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise RuntimeError('no driver\\nat all')", "RuntimeError: no driver"),
        ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("def", "SyntaxError: invalid syntax (rammer_broken.py, line 1)"),
        ("import sys; sys.exit(5)", "SystemExit: 5"),
        (f"{HOOKS}def rammer_devices(): raise ValueError('listing')", "ValueError: listing"),
        (f"{HOOKS}def rammer_devices(): return ['no manifest']", "TypeError: 'no manifest' is not a Device"),
        (
            f"{HOOKS}def rammer_gadgets(): return []",
            "PluginValidationError: unknown hook 'rammer_gadgets' in plugin <module 'rammer_broken'",
        ),
        ("def rammer_devices(): return []", "TypeError: rammer_devices is not marked with @hookimpl (rammer.device.hooks)"),
        (f"{HOOKS}def rammer_devices(): return []\ndef rammer_passes(): return []", "TypeError: rammer_passes is not marked"),
        (
            "VALUE = 1",
            "TypeError: it implements no hook; the hooks are rammer_devices, rammer_policies, rammer_passes, rammer_operators",
        ),
        (
            f"{LISTS}[Device('broken', '', list, list)]",
            "TypeError: Device.__init__() missing 1 required keyword-only argument: 'api'",
        ),
        (f"{LISTS}[Device('b', '', list, list, api=5)] * 2", "ValueError: it has two devices 'b'"),
    ],
)
def test_a_plugin_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str) -> None:
    import rammer_toy

    good = EntryPoint("toy", "rammer_toy", "rammer.devices")
    registry = Registry([broken_point(tmp_path, monkeypatch, text), good])
    statuses = {s.name: s for s in registry.statuses()}
    assert statuses["toy"].state == "ok"
    assert statuses["broken"].state == "load-error"
    assert statuses["broken"].reason.startswith(reason)
    assert "Traceback" in statuses["broken"].traceback or "Error" in statuses["broken"].traceback
    said = message(DeviceUnavailable, lambda: open_executable(model(), "broken", registry=registry))
    assert said == (
        f"device broken is not available: load-error\n  at: {statuses['broken'].reason}\n"
        "  hint: `rammer devices` lists what works here"
    )
    assert rammer_toy.VEUS == 2


def test_a_plugin_for_another_api_version() -> None:
    device = Device("old", "", lambda: [Hardware(0, "a", "b", 0)], lambda options: None, api=7)  # type: ignore[arg-type, return-value]
    (status,) = registry_of(device).statuses()
    reason = f"the plugin has API version 7, this core has {API_VERSION}; upgrade the older one"
    assert (status.state, status.reason) == ("api-mismatch", reason)
    said = message(DeviceUnavailable, lambda: open_executable(model(), "old", registry=registry_of(device)))
    assert said == (f"device old is not available: api-mismatch\n  at: {reason}\n  hint: `rammer devices` lists what works here")


def test_a_probe_or_an_opening_that_raises() -> None:
    def fails(*args: object) -> Any:
        raise OSError("bus error")

    (status,) = registry_of(Device("bad", "", fails, fails, api=5)).statuses()
    assert (status.state, status.reason) == ("load-error", "probe failed: bus error")
    opened = registry_of(Device("bad", "", lambda: [Hardware(0, "a", "b", 0)], fails, api=5))
    said = message(DeviceFailure, lambda: open_executable(model(), "bad", registry=opened))
    assert said == "device bad failed to open: bus error\n  at: bad"
