"""float16 on devices that have it, and that nothing kept is mixed up with what is kept of another precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
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


@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_float16_on_devices(device: str, rng: np.random.Generator) -> None:
    pytest.importorskip(f"rammer_{device}")
    if Registry().status(device).state != "ok":
        pytest.skip(f"{device} does not work here")
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
