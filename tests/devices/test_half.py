"""float16 on devices that have it, and that nothing kept is mixed up with what is kept of another precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from half_chains import draw_exact
from precision_model import LITTLE

import rammer
from rammer.compiled.artifact import save_artifact
from rammer.compiled.options import CompileOptions, Request
from rammer.compiled.unpack import load_artifact
from rammer.device.loader import Registry
from rammer.errors import BadInput
from rammer.frontend.bind import bind
from rammer.frontend.lower import lower
from rammer.frontend.reader import read_model
from rammer.ir.evaluate import run_graph
from rammer.runtime.session import open_executable
from rammer.testing.some import some


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


def test_nothing_kept_is_mixed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model, device and options but for the precision: two programs, two keys; a file names its own."""
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
    assert len(list((tmp_path / "cache" / "programs").glob("*.rammer"))) == 2
    half = open_executable(path, "ipu_sim", Request(precision="float16"))
    file = tmp_path / "half.rammer"
    save_artifact(file, half.artifact(half.compile_only({})))
    assert load_artifact(file).precision == "float16"
    assert open_executable(file, "").options == CompileOptions(precision="float16")
    with pytest.raises(BadInput, match="compiled in float16, not in tf32"):
        open_executable(file, "", Request(precision="tf32"))


@pytest.mark.parametrize("device", ["rocm", "ipu_sim", "toy"])
def test_float16_between_operators_is_rounded_as_if_it_were_stored(device: str, rng: np.random.Generator) -> None:
    """Whatever is fused, by whatever policy, and whichever results are outputs, every bit is that of results that are stored."""
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
