"""How-to pages of users' tasks and the programs in docs/examples: all of them run.

The blocks of a page are executed in order, in a temporary folder with a model. Python shares one namespace."""

from __future__ import annotations

import importlib.util
import re
import shlex
import textwrap
import threading
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from command import typed
from onnx import helper, numpy_helper

from rammer_testing.nonempty import some

ROOT = Path(__file__).parents[2]
PAGES = ("deploy", "faster", "quantise", "serve", "wrong_number")
#: Maximum words of a page.
MOST_WORDS = 1500
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / f"docs/howto/{page}.md").read_text()


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a current folder with a model of two dense layers for any batch."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.standard_normal(s).astype(np.float32) / 4, n) for n, s in (("a", (16, 32)), ("b", (32, 8)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], "first"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "b"], ["y"], "second"),
    ]
    ports = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["batch", e]) for n, e in (("x", 16), ("y", 8))]
    graph = helper.make_graph(nodes, "layers", ports[:1], ports[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_pages_run(page: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run, found, count = partial(typed, monkeypatch, capsys), dict[str, Any](), 0
    for _, language, text in some(BLOCK.findall(text_of(page))):
        code = textwrap.dedent(text)
        if language == "python":
            exec(compile(code, f"{page}.md", "exec"), found)
            count += 1
        for line in code.splitlines() if language == "bash" else ():
            words = shlex.split(line)
            assert words[0] == "rammer"
            done = run(*words[1:])
            assert not done.code, f"{line}\n{done.out}\n{done.err}"
            count += 1
    assert count > 2


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short(page: str) -> None:
    assert len(text_of(page).split()) < MOST_WORDS


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/examples/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_decoder_keeps_its_cache_on_the_device() -> None:
    assert load_example("decoder_cache").main(steps=12) < 1e-5


def test_server_answers_in_batches() -> None:
    sizes = load_example("batching_server").main(requests=48)
    assert sum(sizes) == 48 and len(sizes) < 48, "no two requests shared a run"


def test_server_refuses_what_is_no_row() -> None:
    example = load_example("batching_server")
    batcher = example.Batcher(example.classifier(), "rocm")
    server = example.make_server(batcher)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", b"[1, 2]", timeout=60)
    finally:
        server.shutdown()
        server.server_close()
        batcher.close()


def test_mlserver_batches_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlserver")
    monkeypatch.syspath_prepend(ROOT / "docs/examples")  # MLServer imports the runtime by its name
    sizes = importlib.import_module("mlserver_runtime").main(requests=48)
    assert sum(sizes) == 48 and len(sizes) < 48, "no two requests shared a run"


def test_devices_agree() -> None:
    errors = load_example("several_devices").main()
    assert {"rocm", "ipu_sim"} <= errors.keys() and max(errors.values()) < 1e-5


def test_every_example_is_listed_and_run() -> None:
    listed = (ROOT / "docs/examples/README.md").read_text()
    run = "".join(
        p.read_text() for folder in ("documents", "devices", "from_torch") for p in (ROOT / "tests" / folder).glob("*.py")
    )
    for path in some(sorted((ROOT / "docs/examples").glob("*.py"))):
        assert f"({path.name})" in listed, f"docs/examples/README.md does not list {path.name}"
        name = path.stem.removeprefix("onnxruntime_")
        assert f'"{path.stem}"' in run or f'"{name}"' in run or path.name in run, f"no test runs {path.name}"
