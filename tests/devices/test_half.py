"""float16 on devices that support it, and separate cache entries for each precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from half_chains import draw_chain, draw_exact
from half_judge import complaint, spread_of
from onnx import TensorProto, helper, numpy_helper
from precision_model import LITTLE

import rammer
from rammer.compile_options import CompileOptions, Request
from rammer.compiled.artifact import save_artifact
from rammer.compiled.artifact_reader import load_artifact
from rammer.device.loader import Registry
from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.ir.evaluate import run_graph
from rammer.jit.session import open_executable
from rammer.passes.graph.convert_to_float16 import narrow_graph
from rammer.passes.pass_pipeline import Pipeline, default_passes
from rammer_testing.cache_files import entries
from rammer_testing.nonempty import some


def open_or_skip(device: str) -> None:
    """Skip the test if ``device`` does not work here."""
    pytest.importorskip(f"rammer_{device}")
    if Registry().status(device).state != "ok":
        pytest.skip(f"{device} does not work here")


@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_float16_on_devices(device: str, rng: np.random.Generator) -> None:
    open_or_skip(device)
    model = LITTLE.build(np.random.default_rng(5))
    feeds = {"x": rng.standard_normal((1, 3, 8, 8)).astype(np.float32), "i": np.array([0, 2])}
    want = run_graph(lower(bind(read_model(model), {})), feeds)
    exe = rammer.compile(model, device=device, precision="float16")
    for name, have in some(exe.run(feeds).items()):
        assert have.dtype == np.float32
        error = np.linalg.norm(have - want[name]) / np.linalg.norm(want[name])
        assert 1e-6 < error < 2e-3
    exe.close()


@pytest.mark.slow
def test_nothing_kept_is_mixed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check one model, device and options with two precisions: two programs, two keys, and a file that names its precision."""
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "m.onnx"
    onnx.save(LITTLE.build(np.random.default_rng(5)), str(path))
    feeds = {"x": np.ones((1, 3, 8, 8), np.float32), "i": np.array([0, 2])}
    for precision in ("float32", "float16", "float32"):
        exe = rammer.compile(path, device="ipu_sim", precision=precision)
        exe.run(feeds)
        compiled = next(iter(exe.cache.values())).compiled
        assert ("float16" in {b.dtype for p in compiled.programs for b in p.buffers}) == (precision == "float16")
        exe.close()
    assert len(entries(tmp_path / "cache", "programs")) == 2
    half = open_executable(path, "ipu_sim", Request(precision="float16"))
    file = tmp_path / "half.rammer"
    save_artifact(file, half.artifact(half.compile_only({})))
    record = load_artifact(file).record
    assert record["precision"] == "float16" and record["policy"]
    assert open_executable(file, "").options == CompileOptions(record["policy"], precision="float16")
    with pytest.raises(BadInput, match="compiled in float16, not in tf32"):
        open_executable(file, "", Request(precision="tf32"))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["rocm", "ipu_sim", "toy"])
def test_float16_between_operators_is_rounded_as_if_it_were_stored(device: str, rng: np.random.Generator) -> None:
    """Check that every bit equals that of stored results, for any fusion, policy and choice of outputs."""
    open_or_skip(device)
    for _ in range(12):
        build, names, feeds = draw_exact(rng)
        values = run_graph(lower(bind(read_model(build(names)), {})), feeds, precise=False)
        some_names = [n for n in names[:-1] if rng.random() < 0.3]
        for wanted in (names[-1:], [*some_names, names[-1]]):
            policy = str(rng.choice(["wavefront", "greedy", "sequential"]))
            exe = rammer.compile(build(wanted), device=device, policy=policy)
            for name, have in exe.run(feeds).items():
                np.testing.assert_array_equal(have, values[name], err_msg=f"{name} of {build(wanted).graph.node}")
            exe.close()


@pytest.mark.parametrize("device", ["rocm", "ipu_sim", "toy"])
def test_a_result_that_overflows_float16_is_infinite_for_its_readers(device: str) -> None:
    open_or_skip(device)
    body = "q = Mul(x, x) y = Div(q, x)"
    x = np.array([60000, 300, -300, 2e-4], np.float16)
    for outputs in ("y", "y, float16[4] q"):
        text = f'<ir_version: 9, opset_import: ["": 17]> g (float16[4] x) => (float16[4] {outputs}) {{ {body} }}'
        exe = rammer.compile(onnx.parser.parse_model(text), device=device)
        assert exe.run({"x": x})["y"].tolist() == [np.inf, np.inf, -np.inf, np.float16(np.float16(x[3] * x[3]) / x[3])]
        exe.close()


@pytest.mark.slow
def test_values_that_outgrow_float16_stay_float32(rng: np.random.Generator) -> None:
    """Check norms, attention, statistics and quotients in ``float16``, with activations of up to 10,000, against float32."""
    for _ in range(30):
        model, feeds, names = draw_chain(rng)
        graph = Pipeline(default_passes()).run(bind(read_model(model), {}))[0]
        half, whole = narrow_graph(graph, default_passes())[0], lower(graph)
        assert narrow_graph(half, default_passes())[0] is half, names
        (output,) = whole.outputs
        have = run_graph(lower(half), feeds, precise=False)[half.outputs[0].name]
        assert not complaint(have, run_graph(whole, feeds)[output], spread_of(whole, feeds, rng)[output]), names


@pytest.mark.slow
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_values_that_outgrow_float16_stay_float32_on_devices(device: str, rng: np.random.Generator) -> None:
    open_or_skip(device)
    for _ in range(4):
        model, feeds, names = draw_chain(rng)
        whole = lower(bind(read_model(model), {}))
        exe = rammer.compile(model, device=device, precision="float16")
        (output,) = whole.outputs
        (have,) = exe.run(feeds).values()
        exe.close()
        assert not complaint(have, run_graph(whole, feeds)[output], spread_of(whole, feeds, rng)[output]), names


NORM = """<ir_version: 9, opset_import: ["": 17]> g (float[2,8] x) => (float[2,8] y) {
    c = Abs(x)
    e = Relu(c)
    y = Neg(e)
}"""


def named_model() -> onnx.ModelProto:
    """Return a model of three operators, two of which have names."""
    model = onnx.parser.parse_model(NORM)
    model.graph.node[0].name, model.graph.node[1].name = "/first/Abs", "/first/Relu"
    return model


@pytest.mark.parametrize("patterns, kept", [(("*/Abs",), 1), (("Relu", "Neg"), 2), (("/first/*",), 2), (("*",), 3)])
def test_patterns_keep_operators_in_float32(patterns: tuple[str, ...], kept: int) -> None:
    exe = open_executable(named_model(), "ipu_sim", Request(precision="float16", keep_float32=patterns))
    compiled = exe.compile_only({})
    lines = compiled.float32
    assert len(lines) == kept and all("kept by an option" in line for line in lines)
    wide = {o for n in compiled.graph.nodes if n.op != "Cast" for o in n.outputs if compiled.graph.types[o].dtype == "float32"}
    assert len(wide) == kept
    exe.close()


@pytest.mark.parametrize(
    "precision, patterns, message",
    [("float16", ("Relu", "*/Gemm"), r"no operator's name or type matches '\*/Gemm'"), ("float32", ("Relu",), "becomes float16")],
)
def test_patterns_that_keep_nothing_are_refused(precision: str, patterns: tuple[str, ...], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        rammer.compile(named_model(), device="ipu_sim", precision=precision, keep_float32=patterns)


def test_a_file_names_the_operators_that_stay_float32(tmp_path: Path) -> None:
    exe = open_executable(named_model(), "ipu_sim", Request(precision="float16", keep_float32=("Relu",)))
    file = tmp_path / "kept.rammer"
    save_artifact(file, exe.artifact(exe.compile_only({})))
    assert load_artifact(file).compiled.float32 == ("Relu /first/Relu: kept by an option",)
    with pytest.raises(BadInput, match="compiled before, with its keep-float32"):
        open_executable(file, "", Request(keep_float32=("Relu",)))
    exe.close()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["ipu_sim", "rocm"])
@pytest.mark.parametrize("op, gates", [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_recurrences_without_their_first_output_become_float16(
    device: str, op: str, gates: int, rng: np.random.Generator
) -> None:
    weights = {"w": rng.standard_normal((1, gates * 3, 5)), "r": rng.standard_normal((1, gates * 3, 3))}
    x, h = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [4, 2, 5]), ("h", [1, 2, 3])))
    constants = [numpy_helper.from_array((v / 2).astype(np.float32), n) for n, v in weights.items()]
    graph = helper.make_graph([helper.make_node(op, ["x", "w", "r"], ["", "h"], hidden_size=3)], "g", [x], [h], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feeds = {"x": rng.standard_normal((4, 2, 5)).astype(np.float32)}
    half, full = (rammer.compile(model, device, precision=p).run(feeds)["h"] for p in ("float16", "float32"))
    assert 0 < np.abs(half - full).max() < 5e-3
