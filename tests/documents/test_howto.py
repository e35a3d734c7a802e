"""The how-to pages: names and paths exist, and programs and commands run in a temporary folder.

Each page has a module of a plugin, entry points and commands. A test installs the module, runs the commands, and checks that the
described mechanism had its effect."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import registry
import tables
import tables_command
from click.testing import CliRunner
from command import Command, Done, typed
from onnx import parser

import rammer
from rammer.ir.program import RProgram
from rammer_testing.interface import private_uses
from rammer_testing.nonempty import some

ROOT = Path(__file__).parents[2]
PAGES = {p.stem: p.read_text() for p in sorted((ROOT / "docs/howto").glob("*.md"))}
#: Pages with a test below that runs their steps.
EXECUTED = (
    "benchmark",
    "device",
    "element_type",
    "fusion_rule",
    "graph_pass",
    "kernel_family",
    "operator",
    "policy",
    "transport",
)
#: Executed pages for plugins, which use only the public interface.
PUBLIC = ("device", "fusion_rule", "graph_pass", "kernel_family", "operator", "policy")
#: A fenced block, which may be indented in a list.
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
#: A name of a page's own module.
OWN = re.compile(r"(acme\w*|program_sizes)(\.py)?")
#: Folders with the sources of names in backticks.
SOURCES = ("core/rammer", "plugins", "benchmarks", "tests/kit", "tests/core")


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return [textwrap.dedent(m[3]) for m in BLOCK.finditer(PAGES[page]) if m[2] == language]


def commands(page: str, section: str = "") -> list[list[str]]:
    """Return the words of every command before the section "Test", or in it."""
    steps, _, test = PAGES[page].partition("\n## Test\n")
    found = [m[3] for m in BLOCK.finditer(test if section else steps) if m[2] == "bash"]
    return [shlex.split(line) for text in found for line in textwrap.dedent(text).splitlines()]


def model_of(text: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 9, opset_import: ["" : 21, "acme" : 1]> {text}')


@dataclass
class Workplace:
    """A temporary folder, on the path and current, with the commands of a page."""

    folder: Path
    rammer: Command

    def install(self, page: str) -> None:
        """Write the page's module under the name that the page gives it, with its entry points."""
        (name,) = re.findall(r"This is `(\w+)\.py`", PAGES[page])
        (project,) = blocks(page, "toml")
        (self.folder / f"{name}.py").write_text("\n".join(blocks(page, "python")))
        self.add_distribution("acme", tomllib.loads(project)["project"]["entry-points"])

    def add_distribution(self, name: str, groups: dict[str, dict[str, str]]) -> None:
        """Write the metadata of an installed distribution."""
        folder = self.folder / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"[{g}]\n" + "".join(f"{n} = {module}\n" for n, module in points.items()) for g, points in groups.items()]
        (folder / "entry_points.txt").write_text("".join(lines))

    def save(self, text: str) -> onnx.ModelProto:
        """Write ``model.onnx``."""
        model = model_of(text)
        onnx.save(model, self.folder / "model.onnx")
        return model

    def run(self, page: str) -> list[str]:
        """Run the page's ``rammer`` commands in order, and return their outputs."""
        done = [self.rammer(*words[1:]) for words in commands(page) if words[0] == "rammer"]
        assert done and not any(d.code for d in done), done
        return [d.out for d in done]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Workplace]:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RAMMER_DISABLE", "cuda,rocm")  # devices that no page needs here, for speed
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Workplace(tmp_path, partial(typed, monkeypatch, capsys))
    for name in [n for n, module in sys.modules.items() if str(getattr(module, "__file__", "")).startswith(str(tmp_path))]:
        del sys.modules[name]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that disables the page's plugin."""
    return lambda: monkeypatch.setenv("RAMMER_DISABLE", "cuda,rocm,acme")


# --- all pages --------------------------------------------------------------------------------


@cache
def known_names() -> frozenset[str]:
    """Return all identifiers of the sources."""
    texts = (p.read_text() for folder in SOURCES for p in (ROOT / folder).rglob("*.py") if p != Path(__file__))
    return frozenset().union(*(re.findall(r"[A-Za-z]\w{2,}|_\w+", text) for text in texts))


@pytest.mark.parametrize("page", PAGES)
def test_paths_and_names_exist(page: str) -> None:
    """Check every path and every identifier in backticks."""
    prose = BLOCK.sub("", PAGES[page])
    own = {word for m in BLOCK.finditer(PAGES[page]) for word in re.findall(r"\w+", m[3])}
    for text in some(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose)):
        if OWN.fullmatch(text) or " " in text:
            continue
        if re.fullmatch(r"[\w.-]+(/[\w.-]*)+|\w+\.(py|md|toml|txt)", text):
            assert (ROOT / text).exists(), f"{page} names {text}"
        elif re.fullmatch(r"\w+", text):
            assert text in known_names() | own, f"{page} names {text}"


def test_names_are_in_the_files_that_pages_state() -> None:
    """Check every `NAME` in `PATH` of all pages."""
    pattern = re.compile(r"((?:`\w+`(?:, | and )?)+) in\s+`([\w./-]+)`")
    places = [(page, *found) for page, text in PAGES.items() for found in pattern.findall(BLOCK.sub("", text))]
    for page, names, path in some(places):
        words = set(re.findall(r"\w+", (ROOT / path).read_text()))
        for name in some(re.findall(r"`(\w+)`", names)):
            assert name in words, f"{page}: {name} is not in {path}"


@pytest.mark.parametrize("page", EXECUTED)
def test_a_page_ends_with_its_test(page: str) -> None:
    """Check that the last section has commands, that their files exist, and that one of them runs the page."""
    assert re.findall(r"^## (.*)$", PAGES[page], re.MULTILINE)[-1] == "Test"
    words = commands(page, "Test")
    assert ["python", "-m", "pytest", "tests/documents/test_howto.py", "-k", page] == words[-1]
    assert f"test_{page}_" in Path(__file__).read_text()
    for path in some(w for line in words for w in line if w.startswith("tests/")):
        assert (ROOT / path).exists(), f"{page} tests {path}"


def test_every_page_is_linked_from_the_architecture() -> None:
    tasks = (ROOT / "docs/architecture.md").read_text().partition("## I want to")[2].partition("\n## ")[0]
    for page in some(EXECUTED):
        assert f"(howto/{page}.md)" in tasks, f"docs/architecture.md does not link {page}"


@pytest.mark.parametrize("page", PUBLIC)
def test_plugins_of_the_pages_use_public_names(page: str) -> None:
    for text in some(blocks(page, "python")):
        assert not private_uses(text)


# --- the steps of each page -------------------------------------------------------------------


def test_graph_pass_changes_a_graph_and_is_reported(workplace: Workplace, without: Any) -> None:
    workplace.install("graph_pass")
    model = workplace.save("m (float[3,5] x) => (float[3,5] y) { a = Relu(x) b = Relu(a) c = Relu(b) y = Neg(c) }")
    listed, graph = workplace.run("graph_pass")
    assert re.search(r"^acme +1\.0 +ok +rammer_passes$", listed, re.MULTILINE)
    assert re.search(r"^# pass collapse_repeats +nodes 4 -> 4 ", graph, re.MULTILINE) and graph.count("= Relu(") == 1
    exe = rammer.compile(model, device="toy")
    x = np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5)
    np.testing.assert_array_equal(exe.run({"x": x})["y"], -np.maximum(x, 0))
    exe.close()
    without()
    assert workplace.run("graph_pass")[1].count("= Relu(") == 3


def test_fusion_rule_joins_two_readers_of_one_tile(workplace: Workplace, without: Any) -> None:
    workplace.install("fusion_rule")
    image = "float[1,16,64,64]"
    text = f"m ({image} x, float[16,1,3,3] v) => ({image} y, {image} z)"
    pool, product = "y = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(x)", "z = Conv<group=16, pads=[1,1,1,1]>(x, v)"
    workplace.save(f"{text} {{ {pool} {product} }}")
    listed, tile = workplace.run("fusion_rule")
    assert re.search(r"^acme +1\.0 +ok +rammer_fusion_rules$", listed, re.MULTILINE)
    assert re.search(r"^  kept +\w+ <rule join_readers>  .*faster", tile, re.MULTILINE)
    assert len(re.findall(r"^  operator ", tile, re.MULTILINE)) == 1
    without()
    assert len(re.findall(r"^  operator ", workplace.run("fusion_rule")[1], re.MULTILINE)) == 2


def test_policy_schedules_a_program_and_is_listed(workplace: Workplace, without: Any) -> None:
    workplace.install("policy")
    workplace.save("m (float[67,40] a, float[40,33] b) => (float[67,33] y) { t = MatMul(a, b) y = Tanh(t) }")
    text, run = workplace.run("policy")
    program = RProgram.parse(text)
    assert program.policy == "narrow{veus=3}" and len(program.rows) == 8
    assert [bool(row) for row in program.rows] == [True] * 3 + [False] * 5
    assert "(policy narrow, " in run
    unknown = ("inspect", "model.onnx", "--device", "toy", "--policy", "unknown")
    assert re.search(r"Known: .*\bnarrow\b", workplace.rammer(*unknown).err)
    without()
    assert "narrow" not in workplace.rammer(*unknown).err
    assert workplace.rammer("run", "model.onnx", "--device", "toy", "--policy", "narrow").code == 2


def test_transport_is_listed_and_carries_tensors(workplace: Workplace, without: Any) -> None:
    workplace.install("transport")
    workplace.save("m (float[67,40] a, float[40,33] b) => (float[67,33] y) { t = MatMul(a, b) y = Tanh(t) }")
    listed, _, run = workplace.run("transport")
    assert re.search(r"^mailbox +ok +arrays of one process$", listed, re.MULTILINE)
    assert re.search(r"[1-9]\d* transfers of .*, by mailbox$", run, re.MULTILINE)
    without()
    done = workplace.rammer(*commands("transport")[-1][1:])
    assert done.code == 3 and "there is no transport 'mailbox'" in done.err


def test_operator_of_the_page_runs_on_devices(workplace: Workplace, rng: np.random.Generator, without: Any) -> None:
    workplace.install("operator")
    model = workplace.save("m (float[5,7] x, float[7] w) => (float[5,7] y) { g = acme.Gate(x, w) y = Neg(g) }")
    graph, compared = workplace.run("operator")
    assert "= acme.Gate(x, w)" in graph
    assert compared.count(" ok") == 2
    exe = rammer.compile(model, device="toy")
    x, w = rng.standard_normal((5, 7)).astype(np.float32), rng.standard_normal(7).astype(np.float32)
    np.testing.assert_allclose(exe.run({"x": x, "w": w})["y"], -x * np.tanh(w), rtol=1e-5, atol=1e-6)
    assert all(not special.compiled.host_nodes for special in some(exe.cache.values()))
    exe.close()
    without()
    assert "unknown operator Gate in domain acme" in workplace.rammer("run", "model.onnx", "--device", "toy").err


def test_kernel_family_candidates_of_a_plugin_are_chosen(workplace: Workplace, rng: np.random.Generator, without: Any) -> None:
    workplace.install("kernel_family")
    model = workplace.save("m (float[67,40] a, float[40,33] b) => (float[67,33] y) { y = MatMul(a, b) }")
    (kernels,) = workplace.run("kernel_family")
    assert re.search(r"tile\[m=23, n=17\] +6 tasks .* fastest", kernels)
    exe = rammer.compile(model, device="ipu_sim", options={"tiles": "6"})
    a, b = rng.standard_normal((67, 40)).astype(np.float32), rng.standard_normal((40, 33)).astype(np.float32)
    np.testing.assert_allclose(exe.run({"a": a, "b": b})["y"], a @ b, rtol=1e-4, atol=1e-5)
    exe.close()
    without()
    assert "tile[m=23, n=17]" not in workplace.run("kernel_family")[0]


def test_device_from_the_template_runs_a_model(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    (new, inspect) = (words for words in commands("device") if words[0] == "rammer")
    assert workplace.rammer(*new[1:]).code == 0
    folder = workplace.folder / "rammer-mychip"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    module = folder / "rammer_mychip/__init__.py"
    module.write_text(module.read_text().replace("VEUS = 2 ", "VEUS = 3 "))
    monkeypatch.syspath_prepend(str(folder))
    workplace.add_distribution(project["name"], project["entry-points"])
    (text,) = blocks("device", "python")
    exec(compile(text, "device.md", "exec"), {})
    workplace.save("m (float[7,40] a, float[40,33] b) => (float[7,33] y) { t = MatMul(a, b) y = Relu(t) }")
    done: Done = workplace.rammer(*inspect[1:])
    assert len(RProgram.parse(done.out).rows) == 3
    kit = next(words for words in commands("device", "Test") if words[0] == "rammer")
    assert "1 passed" in workplace.rammer(*kit[1:], "--check", "manifest").out


def test_element_type_program_checks_all_codes() -> None:
    (text,) = blocks("element_type", "python")
    exec(compile(text, "element_type.md", "exec"), {})
    for change in (("4, 3, 0x80", "4, 4, 0x80"), ("0x70, 0x78", "0x78, 0x70"), ("codes[finite]", "codes[~finite]")):
        assert text.count(change[0]) == 1
        with pytest.raises(AssertionError):
            exec(compile(text.replace(*change), "element_type.md", "exec"), {})


def test_element_type_check_of_a_device_is_there(workplace: Workplace) -> None:
    (words,) = (words for words in commands("element_type", "Test") if words[0] == "rammer")
    done = workplace.rammer(*words[1:])
    assert done.code == 0 and "1 checks: 1 passed" in done.out


@pytest.mark.slow
def test_benchmark_table_is_listed_and_written(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    function, line = blocks("benchmark", "python")
    (workplace.folder / "program_sizes.py").write_text(function)
    monkeypatch.setattr(tables, "__path__", [*tables.__path__, str(workplace.folder)])
    entry = eval(line, {"Table": registry.Table})
    for module in (registry, tables_command):
        monkeypatch.setattr(module, "TABLES", {**registry.TABLES, entry.name: entry})
    lines = (words for words in commands("benchmark") if words[:3] == ["python", "-m", "benchmarks"])
    listed, made = (CliRunner().invoke(tables_command.main, words[3:]) for words in lines)
    assert made.exit_code == 0, made.output
    assert re.search(rf"^program-sizes +{entry.what}", listed.output, re.MULTILINE)
    text = (workplace.folder / "results/ipu_sim_program_sizes.md").read_text()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("| alexnet:small")]
    assert [row[1] for row in rows] == ["sequential", "wavefront"]
    assert all(int(n) > 0 for row in some(rows) for n in row[2:4]) and all(float(row[-1]) < 1e-4 for row in some(rows))
    assert "## Environment" in text and "`python -m benchmarks program-sizes --device ipu_sim --models alexnet:small" in text
