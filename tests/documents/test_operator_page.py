"""The plugin of the operator page, installed as third-party code: its operators run on every device."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

import rammer
from rammer.cli.main import main
from rammer.errors import BadInput
from rammer_testing.nonempty import some

import rammer_c

ROOT = Path(__file__).parents[2]
#: Operators of the page's domain among ONNX operators of an old opset, with a dynamic dimension and outputs of unknown rank.
MODEL = """<ir_version: 8, opset_import: ["" : 9, "acme" : 1]> m (float[N,6] x) => (float y, float z, float[N] w) {
    a = Abs(x)  s = acme.Swish<beta = 2.0>(x)  t = Add(s, a)
    y, r = acme.Parts<at = 2, scale = -0.5>(t)  z = Relu(r)  w = acme.RowNorm(t)
}"""
#: ``MODEL`` without the operator that lacks a reference.
REFERRED = MODEL.replace("  w = acme.RowNorm(t)", "").replace(", float[N] w)", ")")
#: Devices on which the operators run.
DEVICES = ("toy", "c", "rocm", "ipu_sim")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder on the path with two plugins and their entry points: ``acme_operators`` (the page's Python) and
    ``rammer_c``."""
    text = (ROOT / "docs/operator.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    (tmp_path / "acme_operators.py").write_text("\n".join(blocks))
    (point,) = re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for name, entry in (("acme", point), ("rammer-c", '[project.entry-points."rammer.devices"]\nc = "rammer_c"\n')):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = entry.replace('project.entry-points."rammer.devices"', "rammer.devices").replace('"', "")
        (folder / "entry_points.txt").write_text(lines)
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("acme_operators", None)


def exact(x: np.ndarray) -> dict[str, np.ndarray]:
    """Return the results of ``MODEL`` in float64."""
    x = x.astype(np.float64)
    t = x / (1 + np.exp(-2 * x)) + np.abs(x)
    return {"y": -0.5 * t[:, :2], "z": np.maximum(-0.5 * t[:, 2:], 0), "w": np.sqrt((t * t).sum(-1))}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", DEVICES)
def test_the_pages_operators_run_on_every_device(device: str, installed: Path, rng: np.random.Generator) -> None:
    if device == "c" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("there is no C compiler")
    assert rammer_c
    if (status := {s.name: s for s in rammer.devices()}[device]).state in ("no-hardware", "missing-dependency"):
        pytest.skip(f"{device}: {status.reason}")
    exe = rammer.compile(parser.parse_model(MODEL), device=device, options={"tiles": "4"} if device == "ipu_sim" else None)
    for n in (1, 37):
        x = rng.standard_normal((n, 6)).astype(np.float32)
        have = exe.run({"x": x})
        for name, want in exact(x).items():
            assert have[name].shape == want.shape
            np.testing.assert_allclose(have[name], want, rtol=1e-5, atol=1e-6)
    for special in some(exe.cache.values()):
        assert not special.compiled.host_nodes
        assert {"acme.Swish", "acme.Parts", "acme.RowNorm"} <= {n.op for n in special.compiled.graph.nodes}
    exe.close()


def command(*words: object) -> int:
    """Return the exit code of ``rammer WORDS...``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["rammer", *map(str, words)])
        try:
            main()
        except SystemExit as done:
            return int(done.code or 0)
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("device", ["toy", "ipu_sim"])
def test_commands_take_the_pages_operators(device: str, installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other, compiled = installed / "m.onnx", installed / "r.onnx", installed / "m.rammer"
    onnx.save(parser.parse_model(MODEL), path)
    onnx.save(parser.parse_model(REFERRED), other)
    shape, on = ("--shape", "x:3x6"), ("--device", device)
    assert command("plugins", "list") == 0
    assert re.search(r"acme +1\.0 +ok +rammer_operators, rammer_lowerings", capsys.readouterr().out)
    assert command("inspect", path, *on, *shape, "--stage", "graph") == 0
    assert "acme.Parts(t) {at=2, scale=-0.5}" in capsys.readouterr().out
    assert command("run", path, *on, *shape) == 0 and command("compile", path, *on, *shape, "-o", compiled) == 0
    assert command("run", compiled, *on) == 0
    capsys.readouterr()
    assert command("compare", other, *on, *shape, "--against", "reference") == 0
    assert capsys.readouterr().out.count(" ok") == 2
    assert command("compare", path, *on, *shape) == 2
    told = capsys.readouterr().err
    assert "ONNX Runtime refuses this model, which has operators of plugins: acme.Parts, acme.RowNorm, acme.Swish" in told
    assert command("compare", other, *on, *shape) == 2
    assert "--against reference computes them by the plugin's own reference" in capsys.readouterr().err
    assert command("compare", path, *on, *shape, "--against", "reference") == 2
    assert "plugin acme declares no reference of acme.RowNorm" in capsys.readouterr().err


def test_without_the_plugin_the_domain_is_named(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAMMER_DISABLE", "acme")
    path = installed / "m.onnx"
    onnx.save(parser.parse_model(MODEL), path)
    for words in (("run", path), ("inspect", path), ("compare", path), ("bench", path)):
        assert command(*words, "--device", "toy", "--shape", "x:3x6") == 2
        told = capsys.readouterr().err
        assert "unknown operator Swish in domain acme" in told and "no plugin here declares operators of it" in told
    with pytest.raises(BadInput, match="unknown operator Swish in domain acme"):
        rammer.compile(str(path), device="toy")
