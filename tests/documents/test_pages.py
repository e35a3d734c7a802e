"""Python code of the pages: it runs, and the results agree with the text."""

from __future__ import annotations

import inspect
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from onnx import parser

import rammer
from rammer.compile_options import Request
from rammer.compiled.segments import ProgramSegment
from rammer.device.loader import Registry
from rammer.ir.program import Task
from rammer.jit.session import open_executable
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.conformance import registry_of
from rammer_testing.judge import relative_error

import rammer_c
from rammer_ipu_sim.plugin import DEVICE

PAGES = Path(__file__).parents[2] / "docs"


class Point:
    """An entry point that is already loaded."""

    def __init__(self, plugin: object) -> None:
        self.name, self.plugin = "page", plugin

    def load(self) -> object:
        return self.plugin


def page(name: str) -> ModuleType:
    """Return the Python blocks of a page as a module."""
    text = (PAGES / f"{name}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    module = ModuleType(name)
    exec(compile("\n".join(blocks), f"{name}.md", "exec"), module.__dict__)
    return module


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path))


def test_lowerings_of_the_operator_page_compute_what_they_say(rng: np.random.Generator) -> None:
    model = parser.parse_model("""<ir_version: 9, opset_import: ["" : 21]>
        m (float[3,5] x) => (float[3,5] y, float[3,5] z) { y = Softsign(x) z = Softmax(x) }""")
    points = [*registry_of(DEVICE).points, Point(page("operator"))]
    request = Request(device_options={"tiles": "4"})
    exe = open_executable(model, "ipu_sim", request, store=KernelStore(None), registry=Registry(points))
    x = rng.standard_normal((3, 5)).astype(np.float32)
    have = exe.run({"x": x})
    (special,) = exe.cache.values()
    origins = [c.name for p in special.compiled.programs for o in p.operators for c in o.computes]
    assert {"z_top", "z_power", "z_total"} <= set(origins), "the page's lowering was not used"
    exact = np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True)
    np.testing.assert_allclose(have["z"], exact, rtol=1e-5)
    np.testing.assert_allclose(have["y"], x / (1 + np.abs(x)), rtol=1e-6)


def _check_fused_family(registry: Registry, rng: np.random.Generator) -> None:
    """Check that fusion leaves a product to the family of the page, which computes the maps that follow."""
    model = parser.parse_model("""<ir_version: 9, opset_import: ["" : 21]>
        m (float[67,40] a, float[40,33] b, float[33] d) => (float[67,33] y)
        { c = MatMul(a, b) e = Add(c, d) f = Sigmoid(e) y = Mul(e, f) }""")
    exe = open_executable(model, "c", store=KernelStore(None), registry=registry)
    inputs = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("a", (67, 40)), ("b", (40, 33)), ("d", (33,)))}
    want = inputs["a"].astype(np.float64) @ inputs["b"] + inputs["d"]
    assert relative_error(exe.run(inputs)["y"], want / (1 + np.exp(-want))) < 1e-6
    (operator,) = (o for s in exe.compile_only({}).segments for o in s.program.operators)
    assert operator.family == "outer" and len(operator.computes) == 4
    exe.close()


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler")
def test_the_family_of_its_page_is_chosen_and_computes_what_it_says(rng: np.random.Generator) -> None:
    (device,) = rammer_c.rammer_devices()
    registry = registry_of(replace(device, open=page("kernel_family").Backend))
    model = parser.parse_model("""<ir_version: 9, opset_import: ["" : 21]>
        m (float[67,40] a, float[40,33] b) => (float[67,33] y) { y = MatMul(a, b) }""")
    exe = open_executable(model, "c", store=KernelStore(None), registry=registry)
    inputs = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("a", (67, 40)), ("b", (40, 33)))}
    have = exe.run(inputs)["y"]
    assert relative_error(have, inputs["a"].astype(np.float64) @ inputs["b"]) < 1e-6
    (segment,) = exe.compile_only({}).segments
    assert isinstance(segment, ProgramSegment)
    (operator,) = segment.program.operators
    assert operator.family == "outer"
    _check_fused_family(registry, rng)
    backend = registry.open("c")
    for rows in (1, 2, 4, 8):  # 67 rows leave a smaller last tile for most of these
        tiled = replace(operator, tile=(rows, 33), config=(("rows", rows),))
        tasks = tuple(Task(operator.name, i) for i in range(tiled.task_count))
        loaded = backend.load(replace(segment.program, operators=(tiled,), rows=(tasks,)), segment.constants)
        assert relative_error(loaded.run(inputs).outputs["y"], inputs["a"].astype(np.float64) @ inputs["b"]) < 1e-6
        loaded.close()


def test_the_python_pages_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = (PAGES / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    model = parser.parse_model("""<ir_version: 9, opset_import: ["" : 21]>
        m (float[n,8] a, float[8,8] b) => (float[n,8] y) { y = MatMul(a, b) }""")
    a, b = np.ones((2, 8), np.float32), np.ones((8, 8), np.float32)
    (first, second) = (block for block in blocks if 'rammer.compile(model, "rocm"' in block)
    found = {"rammer": rammer, "model": model, "a": a, "b": b}
    exec(first, found)
    assert "('y', 'float32', ('n', 8))" in capsys.readouterr().out
    assert (found["y"] == 8).all()
    exec(second, found)
    assert (found["y"] == 8).all() and found["exe"].closed


def test_the_python_page_names_every_argument_and_what_results_have() -> None:
    text = (PAGES / "python.md").read_text()
    arguments = set(inspect.signature(rammer.compile).parameters) - {"model", "device"}
    rows = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", rows)) == arguments
    model = parser.parse_model('<ir_version: 9, opset_import: ["" : 21]> m (float[4] x) => (float[4] y) { y = Abs(x) }')
    exe = rammer.compile(model, device="toy", resident=1)
    assert exe.run({"x": np.full(4, -1, np.float32)})["y"].tolist() == [1, 1, 1, 1]
    assert [(p.name, p.dtype, p.shape) for p in exe.head.inputs] == [("x", "float32", (4,))]
    assert 0 < exe.timing.device <= exe.timing.total
    bound = exe.bind({"x": np.full(4, -2, np.float32)})
    bound.run()
    bound.synchronize()
    assert bound.to_host()["y"].tolist() == [2, 2, 2, 2]
    assert bound.seconds() > 0 and bound.clock
    exe.close()
    with pytest.raises(rammer.errors.DeviceFailure, match="closed"):
        exe.run({"x": np.zeros(4, np.float32)})
