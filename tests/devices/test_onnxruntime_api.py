"""Code for ONNX Runtime, run twice: with ONNX Runtime, and with the import of rammer in its place."""

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, parser

import rammer as ort
from rammer.compile_options import Request
from rammer.compiled.artifact import save_artifact
from rammer.errors import BadInput
from rammer.ir.port import onnx_element
from rammer.jit.session import open_executable
from rammer.onnxruntime_api import providers
from rammer.onnxruntime_api.ort_value import ELEMENTS
from rammer.onnxruntime_api.session_options import warn_once
from rammer_testing.nonempty import some

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
ADD = """<ir_version: 8, opset_import: ["" : 17], producer_name: "kit", model_version: 3, doc_string: "sum", domain: "test",
    metadata_props: ["key": "value"]>
    add (float[batch,4] x, float[batch,4] y) => (float[batch,4] z) { z = Add(x, y) }"""
#: Outputs without a type, without extents, and without axes.
PORTS = """<ir_version: 8, opset_import: ["" : 17], producer_name: "kit">
    ports (float[N,4] x, int64[2] k) => (w, v, float s, float[a,b] u, int64[2] l) {
        w = Concat <axis = 0> (x, x)
        v = Softmax (x)
        s = ReduceSum <keepdims = 0> (x)
        u = Transpose (x)
        l = Abs (k)
    }"""
#: Faults of a caller, as expressions; each must raise an error of the same name in both runtimes.
FAULTS = [
    "s.run(None, {'x': x})",
    "s.run(None, {'x': x, 'y': x, 'other': x})",
    "s.run(None, {'x': x.astype(np.float64), 'y': x})",
    "s.run(None, {'x': x[0], 'y': x})",
    "s.run(None, {'x': np.ones((2, 5), np.float32), 'y': x})",
    "s.run(['other'], {'x': x, 'y': x})",
    "s.run(['x'], {'x': x, 'y': x})",
    "s.run(None, [x])",
    "s.run(None, {'x': x, 'y': x}, stopped)",
    "ort.InferenceSession(b'not a model')",
    "ort.InferenceSession('missing.onnx')",
    "ort.InferenceSession(3)",
    "ort.InferenceSession(path, providers=['Other'], enable_fallback=0)",
    "ort.InferenceSession(path, providers=[3], enable_fallback=0)",
    "ort.InferenceSession(path, providers=['CPUExecutionProvider'], provider_options=[], enable_fallback=0)",
    "ort.SessionOptions().get_session_config_entry('other')",
    "setattr(ort.SessionOptions(), 'other', 1)",
    "setattr(ort.SessionOptions(), 'intra_op_num_threads', 'many')",
    "s.io_binding().bind_cpu_input('other', x)",
    "s.io_binding().bind_output('z', 'other')",
    "s.run_with_iobinding(s.io_binding())",
    "s.run_with_iobinding(bound(x=x.astype(np.float64), y=x))",
    "s.run_with_iobinding(bound(x=x, y=x, z=np.empty((3, 4), np.float32)))",
    "s.run_with_iobinding(bound(x=x, y=x, z=np.empty((2, 4), np.float64)))",
    "ort.OrtValue.ortvalue_from_numpy(x, 'cuda', 0)",
    "ort.OrtValue.ortvalue_from_numpy(x, 'other', 0)",
    "ort.OrtValue.ortvalue_from_numpy(x).update_inplace(x[:1])",
]
CALLER = """
import json, sys, warnings
import numpy as np
import onnxruntime as ort
from rammer_testing.nonempty import some
warnings.simplefilter("ignore")
path, x, stopped = sys.argv[1], np.ones((2, 4), np.float32), ort.RunOptions()
s, stopped.terminate = ort.InferenceSession(path, providers=["CPUExecutionProvider"]), True
def bound(z=None, **inputs):
    binding = s.io_binding()
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("z", *(() if z is None else ("cpu", 0, z.dtype, z.shape, z.ctypes.data)))
    return binding
names = []
for fault in json.loads(sys.argv[2]):
    try:
        eval(fault)
        names.append("none")
    except Exception as problem:
        names.append(type(problem).__name__)
print(json.dumps(names))
"""


@pytest.fixture
def save(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that saves a model's text and returns its path."""

    def saved(text: str) -> str:
        path = tmp_path / "model.onnx"
        onnx.save(parser.parse_model(text), path)
        return str(path)

    return saved


def run_twice(code: str, arguments: Sequence[str]) -> list[Any]:
    """Return what a program prints as JSON with ONNX Runtime, and with rammer."""
    found = []
    for imported in ("import onnxruntime as ort\n", "import rammer as ort\n"):
        given = code.replace("import rammer as ort\n", imported).replace("import onnxruntime as ort\n", imported)
        run = subprocess.run([sys.executable, "-c", given, *arguments], capture_output=True, text=True, timeout=300)
        assert not run.returncode, run.stderr
        found.append(json.loads(run.stdout.splitlines()[-1]))
    return found


@pytest.mark.parametrize("text", [ADD, PORTS], ids=["add", "ports"])
def test_quickstart_is_that_of_onnx_runtime(text: str, save: Callable[[str], str]) -> None:
    want, have = run_twice((EXAMPLES / "onnxruntime_quickstart.py").read_text(), [save(text)])
    for name in some(want.keys() - {"values", "first"}):
        assert have[name] == want[name], name
    for a, b in zip([*have["values"], have["first"]], [*want["values"], want["first"]], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("example", ["io_binding", "threads"])
def test_examples_are_those_of_onnx_runtime(example: str, save: Callable[[str], str]) -> None:
    want, have = run_twice((EXAMPLES / f"onnxruntime_{example}.py").read_text(), [save(ADD)])
    assert have == want


@pytest.mark.cuda
def test_io_binding_on_a_gpu_gives_the_hosts_results(save: Callable[[str], str]) -> None:
    code, path, found = (EXAMPLES / "onnxruntime_io_binding.py").read_text(), save(ADD), list[Any]()
    for place in ("cpu", "cuda"):
        run = subprocess.run([sys.executable, "-c", code, path, place], capture_output=True, text=True, timeout=300)
        assert not run.returncode, run.stderr
        found.append(json.loads(run.stdout.splitlines()[-1]))
    assert found[1]["value"][3] == "cuda"
    found[1]["value"][3] = "cpu"
    assert found[0] == found[1]


def test_errors_have_the_names_of_onnx_runtimes(save: Callable[[str], str]) -> None:
    want, have = run_twice(CALLER, [save(ADD), json.dumps(FAULTS)])
    assert "none" not in want
    assert dict(zip(FAULTS, have, strict=True)) == dict(zip(FAULTS, want, strict=True))


def test_types_have_onnx_names() -> None:
    names = ["FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "BOOL", "INT64", "STRING", "INT4", "FLOAT8E5M2FNUZ", "FLOAT4E2M1"]
    ports = [helper.make_tensor_value_info(f"x{i}", getattr(onnx.TensorProto, n), [2]) for i, n in enumerate(names)]
    outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])]
    pairs = helper.make_map_type_proto(onnx.TensorProto.INT64, helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None))
    outputs.append(helper.make_value_info("z", helper.make_sequence_type_proto(pairs)))
    nodes = [helper.make_node("Identity", ["x0"], ["y"]), helper.make_node("ZipMap", ["q"], ["z"], domain="ai.onnx.ml")]
    nodes[1].attribute.append(helper.make_attribute("classlabels_int64s", [0, 1]))
    ports.append(helper.make_tensor_value_info("q", onnx.TensorProto.FLOAT, [3, 2]))
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(helper.make_graph(nodes, "types", ports, outputs), opset_imports=opsets)
    session = ort.InferenceSession(model.SerializeToString())
    assert [a.type for a in session.get_inputs()[:-1]] == [f"tensor({n.lower()})" for n in names]
    assert [a.type for a in session.get_outputs()] == ["tensor(float)", "seq(map(int64,tensor(float)))"]


def test_element_types_have_onnx_numbers() -> None:
    numbers = onnx.TensorProto.DataType
    for code, name in some(list(enumerate(ELEMENTS[1:], 1))):
        assert numbers.Name(code).lower() == onnx_element(name)
    assert ort.OrtValue.ortvalue_from_numpy(np.zeros(2, np.float16)).element_type() == onnx.TensorProto.FLOAT16
    assert ort.OrtValue.ortvalue_from_shape_and_type([2], onnx.TensorProto.BFLOAT16).data_type() == "tensor(bfloat16)"


def test_sizes_may_change_between_runs(save: Callable[[str], str], rng: np.random.Generator) -> None:
    session = ort.InferenceSession(save(ADD))
    for batch in (3, 5, 17, 9, 40, 3):
        x, y = rng.standard_normal((2, batch, 4)).astype(np.float32)
        (z,) = session.run(None, {"x": x, "y": y})
        np.testing.assert_array_equal(z, x + y)
    assert len(session.executable.cache) < 6, "each size has a program of its own"


def test_compiled_files_open(save: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exe = open_executable(save(ADD), "rocm", Request(lengths={"batch": (1, 8)}))
    save_artifact(tmp_path / "model.rammer", exe.artifact(exe.compile_whole({})))
    exe.close()
    session = ort.InferenceSession(tmp_path / "model.rammer")
    assert [(a.name, a.type, a.shape) for a in (*session.get_inputs(), *session.get_outputs())] == [
        (name, "tensor(float)", ["batch", 4]) for name in "xyz"
    ]
    x = np.ones((5, 4), np.float32)
    assert session.run(None, {"x": x, "y": x})[0].tolist() == (x + x).tolist()
    assert session.get_modelmeta().graph_name == "add"


def test_providers_choose_devices(save: Callable[[str], str]) -> None:
    path = save(ADD)
    units = providers.working_units()
    assert ort.get_available_providers()[-2:] == ["CPUExecutionProvider", "RammerExecutionProvider"]
    session = ort.InferenceSession(path, providers=[("RammerExecutionProvider", {"device": "ipu_sim", "precision": "float16"})])
    assert session.executable.device == "ipu_sim:0" and session.executable.options.precision == "float16"
    assert session.get_providers() == ["RammerExecutionProvider", "CPUExecutionProvider"]
    assert session.get_provider_options()["RammerExecutionProvider"] == {"device": "ipu_sim", "precision": "float16"}
    session.set_providers(["CPUExecutionProvider"])
    cpu = next(f"{u.device}:{u.index}" for u in units if u.kind == "cpu")
    assert session.executable.device == cpu and session.get_providers() == ["CPUExecutionProvider"]
    with pytest.warns(UserWarning, match="'QNNExecutionProvider' is not in available"):
        assert ort.InferenceSession(path, providers=["QNNExecutionProvider"]).executable.device == cpu
    with pytest.warns(UserWarning, match="Duplicate provider"):
        ort.InferenceSession(path, providers=["CPUExecutionProvider"] * 2)
    with pytest.raises(BadInput, match="unknown option 'speed'"):
        ort.InferenceSession(path, providers=[("RammerExecutionProvider", {"speed": "high"})])


def test_providers_of_devices_select_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [providers.Unit("gpus", i, "gpu", ("CUDAExecutionProvider",)) for i in (0, 1)]
    monkeypatch.setattr(providers, "working_units", lambda: (*gpus, providers.Unit("host", 0, "cpu", ())))
    assert ort.get_available_providers() == ["CUDAExecutionProvider", "CPUExecutionProvider", "RammerExecutionProvider"]
    assert providers.get_device() == "GPU"
    for options, device in (({}, "gpus:0"), ({"device_id": "1"}, "gpus:1")):
        assert providers.select_device({"CUDAExecutionProvider": options})[1] == device
    assert providers.select_device({})[1] == "gpus:0"
    assert providers.select_device({"CPUExecutionProvider": {}})[1] == "host:0"
    with pytest.raises(ValueError, match="has no device 2"):
        providers.select_device({"CUDAExecutionProvider": {"device_id": "2"}})


def test_options_without_effect_are_reported_once(save: Callable[[str], str], caplog: pytest.LogCaptureFixture) -> None:
    path = save(ADD)
    options = ort.SessionOptions()
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.test_entry", "1")
    with caplog.at_level(logging.WARNING, "rammer"):
        for _ in range(2):
            ort.InferenceSession(path, options)
    reported = [r.getMessage().split()[1] for r in caplog.records]
    assert reported.count("enable_mem_pattern") == reported.count("session.test_entry") == 1
    warn_once("enable_mem_pattern")


def test_threads_limit_cores(save: Callable[[str], str], caplog: pytest.LogCaptureFixture) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(save(ADD), options)
    assert session.executable.device_options == {"cores": "1"} and session.executable.backend.vdevice.veus == 1
    with caplog.at_level(logging.WARNING, "rammer"):
        ort.InferenceSession(save(ADD), options, providers=[("RammerExecutionProvider", {"device": "ipu_sim"})])
    assert "intra_op_num_threads" in caplog.text


def test_free_dimensions_are_fixed(save: Callable[[str], str]) -> None:
    options = ort.SessionOptions()
    options.add_free_dimension_override_by_name("batch", 2)
    session = ort.InferenceSession(save(ADD), options)
    assert [a.shape for a in (*session.get_inputs(), *session.get_outputs())] == [[2, 4]] * 3
    with pytest.raises(ort.onnxruntime_api.InvalidArgument, match="has 3 elements along axis 0, not 2"):
        session.run(None, {"x": np.ones((3, 4), np.float32), "y": np.ones((3, 4), np.float32)})


def test_no_warning_for_a_provider_that_works(save: Callable[[str], str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ort.InferenceSession(save(ADD), providers=["CPUExecutionProvider"])
