"""The README, ARCHITECTURE and the pages quote the program's own text; here every quotation is made again and compared.

A quotation stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``. ``RAMMER_BLESS=1`` rewrites them.
Nothing quoted depends on the machine: the simulator has 8 tiles here and the rocm plugin gets a fixed VDevice.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import draw
import pytest

from rammer import errors
from rammer.cli.lazy import COMMANDS, LazyGroup
from rammer.compiled.options import CompileOptions
from rammer.compiled.segments import Compiled, ProgramSegment
from rammer.compiler import Compiler
from rammer.device.manifest import Backend, Binding, OpenOptions
from rammer.frontend import limits
from rammer.frontend.lowering import REGISTRY
from rammer.frontend.lowerings.gather import data_dependent
from rammer.frontend.reader import read_model
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.operator import RKernel, ROperator
from rammer.ir.program import RProgram, waves
from rammer.ir.verify import VerifyError, verify
from rammer.profile.store import KernelStore
from rammer.report.stages import STAGES
from rammer.schedule.fold import fold
from rammer.testing.walkthrough import model
from rammer.tile.search import candidates
from rammer.tile.traffic import task_cost

from rammer_cuda.launches import launches
from rammer_ipu_sim.chip import GC2
from rammer_ipu_sim.device import SimulatorBackend
from rammer_ipu_sim.executor import LoadedProgram
from rammer_rocm.kernels import written
from rammer_rocm.kernels.choose import panel_candidates

ROOT = Path(__file__).parents[1]
QUOTATION = re.compile(r"(<!-- generated: ([^>]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PAGES = tuple(sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")))
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", *PAGES)
#: From where documents name files.
ROOTS = (
    ROOT,
    ROOT / "core",
    ROOT / "core/rammer",
    *sorted((ROOT / "plugins").iterdir()),
    ROOT / "docs",
    ROOT / "benchmarks",
    ROOT / "plugins/cuda/rammer_cuda",
    ROOT / "core/rammer/plugin-template",
    ROOT / "tests/c_plugin",
)
#: Where every stage, variable and exit code is explained.
COMMANDS_PAGE = "docs/commands.md"
#: Beyond this the README is no first page any more.
README_BYTES = 10_000

#: A CPU that every reader can imagine: two cores of 3 GHz with 8 lanes and 1 MiB of L2.
CPU = VDevice(
    "opencl_cpu",
    "two cores",
    2,
    (
        MemoryLayer("dram", "device", 8 << 30, 47e9),
        MemoryLayer("cache", "veu", 1 << 20, 192e9),
        MemoryLayer("register", "thread", 1024, 384e9, 32),
    ),
    flops=48e9,
    launch=3e-6,
    vector=8,
    resident=2,
)


class PaperCpu:
    """The rocm plugin's kernels for ``CPU``; nothing is compiled or run."""

    vdevice = CPU
    fingerprint = "paper"
    profiler = None

    def candidates(self, operator: ROperator, binding: Binding) -> list[ROperator]:
        panels = [c.operator for c in panel_candidates(operator, binding, CPU, 6)]
        return [*panels, *candidates(operator, binding, CPU, 4)]

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        cost = task_cost(operator, binding.types, CPU)
        return RKernel(operator, lambda: written(operator, binding, CPU), cost.alone, cost.crowded)


@cache
def backend(device: str) -> Backend:
    made: Any = PaperCpu() if device == "rocm" else SimulatorBackend(OpenOptions(options={"tiles": "8"}))
    return made  # type: ignore[no-any-return]


@cache
def compiled(device: str) -> Compiled:
    return Compiler(backend(device), store=KernelStore(None)).compile_model(read_model(model()), {})


def segment(device: str) -> ProgramSegment:
    (found,) = compiled(device).segments
    assert isinstance(found, ProgramSegment)
    return found


def program(device: str) -> RProgram:
    return segment(device).program


def stage(name: str, device: str = "ipu_sim") -> str:
    return fenced(STAGES[name](compiled(device), backend(device).vdevice))


def fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text.rstrip()}\n```\n"


# --- what the documents quote -----------------------------------------------------------------


def source() -> str:
    """The codelet of the pooling operator, without the helper functions that all codelets share."""
    text = segment("ipu_sim").kernels["p"][0].source
    return fenced(text[text.index("static void rm_") :], "cpp")


def lines_of(device: str, *words: str) -> str:
    """The lines of a program's text that start with one of ``words``."""
    return fenced("\n".join(line for line in str(program(device)).splitlines() if line.split()[0] in words))


def moved_lines() -> str:
    """The storages that ``--layout nhwc`` changes."""
    other = Compiler(backend("ipu_sim"), CompileOptions(layout="nhwc"), KernelStore(None)).compile_model(read_model(model()), {})
    before = set(str(program("ipu_sim")).splitlines())
    (changed,) = other.programs
    return fenced("\n".join(n for n in str(changed).splitlines() if n.split()[0] == "storage" and n not in before))


def operators_of(device: str) -> str:
    found = STAGES["tile"](compiled(device), backend(device).vdevice).splitlines()
    return fenced("\n".join(line for line in found if line.split()[0] in ("layer", "operator")))


def verified() -> str:
    return fenced(str(verify(program("ipu_sim"), backend("ipu_sim").vdevice)))


def faulty() -> str:
    """What the verifier says when one wait is struck out of the text."""
    text = str(program("ipu_sim")).replace("wait(r>=8) p", "p", 1)
    assert text != str(program("ipu_sim"))
    with pytest.raises(VerifyError) as caught:
        verify(RProgram.parse(text))
    return fenced(str(caught.value))


def wave_table() -> str:
    lines = []
    for number, wave in enumerate(waves(program("ipu_sim"))):
        counts: dict[str, int] = {}
        for placed in wave:
            counts[placed.task.operator] = counts.get(placed.task.operator, 0) + 1
        lines.append(f"wave {number}: " + ", ".join(f"{n} tasks of {name}" for name, n in counts.items()))
    return fenced("\n".join(lines))


def superstep_table() -> str:
    values = segment("ipu_sim").constants
    chip = backend("ipu_sim").chip  # type: ignore[attr-defined]
    return fenced(LoadedProgram(program("ipu_sim"), values, chip).report())


def launch_table() -> str:
    lines = [
        f"launch {i}: {len(launch.tasks)} blocks of {launch.operator}, after {list(launch.after)}"
        for i, launch in enumerate(launches(program("ipu_sim")))
    ]
    return fenced("\n".join(lines))


def folded() -> str:
    text = str(fold(program("ipu_sim"), 2))
    return fenced("\n".join(line for line in text.splitlines() if line.split()[0] in ("counter", "row")))


def toy_plugin() -> str:
    text = (ROOT / "core/rammer/plugin-template/rammer_toy/__init__.py").read_text()
    assert len(text.splitlines()) <= 150
    return fenced(text, "python")


def c_plugin() -> str:
    return fenced((ROOT / "tests/c_plugin/rammer_c/__init__.py").read_text(), "python")


def toy_project() -> str:
    return fenced((ROOT / "core/rammer/plugin-template/pyproject.toml").read_text(), "toml")


def operators() -> str:
    names = {f"{domain}.{op}" if domain else op: function for (domain, op), function in REGISTRY.items()}
    hosted = sorted(name for name, function in names.items() if function is data_dependent)
    lowered = sorted(names.keys() - set(hosted))
    head = f"These {len(lowered)} operators become tensor expressions, and so kernels on every device:\n\n"
    tail = (
        "\n\nIn rare forms they run on the host instead: MaxPool with its Indices, Scatter with a reduction,\n"
        "Dropout and BatchNormalization in training mode, operators whose parameters depend on run-time data.\n"
        f"\nThese always run on the host, where their output shape is known: {', '.join(hosted)}. So does an\n"
        "operator that is not listed. Operators on the host are counted and named in the output.\n"
    )
    return head + textwrap.fill(", ".join(lowered), 110) + tail


def commands() -> str:
    """Every command, the first sentence of its help and its example."""
    group = LazyGroup()
    rows = ["| command | what it does | example |", "|---|---|---|"]
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        assert command.help, f"{name} has no help"
        text, _, example = inspect.cleandoc(command.help).partition("Example: ")
        assert example, f"{name} has no example"
        rows.append(f"| `{name}` | {text.strip().splitlines()[0]} | `{example.splitlines()[0].strip()}` |")
    return "\n".join(rows) + "\n"


def options() -> str:
    """Every option with its help, and the commands that take it so."""
    group, takes = LazyGroup(), dict[tuple[str, str], list[str]]()
    for name, command in walked(group, ""):
        for given in command.params:
            if isinstance(given, click.Option) and not given.hidden:
                spelled, text = given.get_help_record(click.Context(command)) or ("", "")
                takes.setdefault((spelled, re.sub(r"\s+", " ", text)), []).append(name)
    rows = [
        f"| `{spelled.replace('|', ' or ')}` | {text.replace('|', ' or ')} | {', '.join(names)} |"
        for (spelled, text), names in takes.items()
    ]
    return "\n".join(["| option | what it does | commands |", "|---|---|---|", *rows]) + "\n"


def walked(group: click.Group, before: str) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, with its words."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from walked(command, f"{before}{name} ")
        else:
            yield before + name, command


def results() -> str:
    """One line a model and precision of the committed summary."""
    rows = ["| model | precision | rammer, ms | best peer, ms | which | faster by |", "|---|---|---|---|---|---|"]
    for row in draw.rows_of(draw.SUMMARY):
        cells = [row[head] for head in ("model", "precision", "rammer ms", "best peer ms", "which", "faster by")]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


QUOTED: dict[str, Callable[[], str]] = {
    **{name: lambda name=name: stage(name) for name in ("graph", "compute", "tile", "kernels", "program", "schedule")},
    "source": source,
    "storage": lambda: lines_of("ipu_sim", "buffer", "storage"),
    "layouts": moved_lines,
    "rocm operators": lambda: operators_of("rocm"),
    "rocm kernels": lambda: stage("kernels", "rocm"),
    "rocm rows": lambda: lines_of("rocm", "program", "counter", "row"),
    "verified": verified,
    "faulty": faulty,
    "waves": wave_table,
    "supersteps": superstep_table,
    "launches": launch_table,
    "folded": folded,
    "toy plugin": toy_plugin,
    "toy project": toy_project,
    "c plugin": c_plugin,
    "operators": operators,
    "commands": commands,
    "options": options,
    "results": results,
}


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if "<!-- generated:" in (ROOT / d).read_text()])
def test_quotations_are_what_the_program_prints(document: str) -> None:
    path = ROOT / document
    text = path.read_text()
    names = [m[2] for m in QUOTATION.finditer(text)]
    assert names, f"{document} quotes nothing"
    assert text.count("<!-- generated:") == text.count("<!-- end -->") == len(names)
    made = QUOTATION.sub(lambda m: f"{m[1]}{QUOTED[m[2]]()}{m[4]}", text)
    if os.environ.get("RAMMER_BLESS"):
        path.write_text(made)
        return
    for old, new in zip(QUOTATION.finditer(text), QUOTATION.finditer(made), strict=True):
        assert old[3] == new[3], f"{document} quotes {old[2]!r} wrongly; rewrite it: RAMMER_BLESS=1 pytest {__file__}"


def test_every_quotation_is_used() -> None:
    used = {m[2] for name in DOCUMENTS for m in QUOTATION.finditer((ROOT / name).read_text())}
    assert used == set(QUOTED)


def test_the_readme_is_a_first_page() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= README_BYTES


def test_every_variable_stage_and_exit_code_is_explained() -> None:
    text = (ROOT / COMMANDS_PAGE).read_text()
    sources = "".join(p.read_text() for folder in ("core", "plugins") for p in (ROOT / folder).rglob("*.py"))
    assert set(re.findall(r"RAMMER_[A-Z]+", sources)) == set(re.findall(r"RAMMER_[A-Z]+", text))
    for name in STAGES:
        assert f"`{name}`" in text, f"{COMMANDS_PAGE} does not name stage {name}"
    for kind in (errors.Mismatch, errors.BadInput, errors.DeviceUnavailable, errors.DeviceFailure):
        assert re.search(rf"^\| {kind.exit_code} \| ", text, re.MULTILINE), f"no row for exit code {kind.exit_code}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_linked_files_exist(document: str) -> None:
    """Relative links and pictures; `make docs` also follows links to headings."""
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), f"{document} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_in_documents_exist(document: str) -> None:
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", (ROOT / document).read_text())) <= rules


@pytest.mark.parametrize("document", DOCUMENTS)
def test_modules_and_files_that_documents_name_exist(document: str) -> None:
    text = QUOTATION.sub("", (ROOT / document).read_text())
    for name in set(re.findall(r"(?<![\w./-])rammer(?:_cuda|_rocm|_ipu_sim)?(?:\.\w+)+", text)):
        assert found(name), f"{document} names {name}"
    for name, path in re.findall(r"`([\w.]+)` in `([a-z_/]+\.py)`", text):
        (file,) = [root / path for root in ROOTS if (root / path).exists()] or [None]
        text_there = file.read_text() if file else ""
        assert all(re.search(rf"\b{part}\b", text_there) for part in name.split(".")), f"{document}: {name} in {path}"
    for path in set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+(?:/|\.py)?)`", text)) - {"docs/_build/html"}:
        assert any((root / path).exists() for root in ROOTS), f"{document} names {path}"


def found(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            here: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            here = getattr(here, part, None)
        return here is not None
    return False


def test_every_result_file_is_on_the_results_page() -> None:
    linked = re.findall(r"\]\(\.\./(benchmarks/results/[^)]+)\)", (ROOT / "docs/results.md").read_text())
    assert set(linked) >= {str(p.relative_to(ROOT)) for p in (ROOT / "benchmarks/results").glob("*.md")}


def test_limits_are_those_of_the_program() -> None:
    text = (ROOT / "docs/files.md").read_text()
    said = re.findall(r"^\| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)[1:]
    assert [re.sub(r" \(.*", "", cell) for cell in said] == [
        f"{limits.MAX_RANK}",
        f"2^{(limits.MAX_EXTENT + 1).bit_length() - 1} - 1, and 2^{limits.MAX_ELEMENTS.bit_length() - 1}",
        f"2^{limits.MAX_TAPS.bit_length() - 1}",
        f"2^{limits.MAX_TABLE.bit_length() - 1}",
        f"{limits.MAX_NODES:,}",
        f"{limits.MAX_NESTING}",
        f"{limits.MAX_CALLS}",
        f"{limits.HOST_SECONDS:g}",
    ]


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "docs/index.md").read_text().splitlines()
    for page in PAGES:
        assert Path(page).stem in contents or page == "docs/index.md", f"docs/index.md does not list {page}"


@pytest.mark.parametrize("name", draw.PICTURES)
def test_pictures_are_what_is_drawn(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == draw.PICTURES[name](), "draw them again: python docs/draw.py"


def test_program_with_neutral_tiles_is_the_walkthroughs() -> None:
    """The walk-through's program reloads to an equal object, and the chip it was made for has 8 tiles."""
    text = str(program("ipu_sim"))
    assert RProgram.parse(text) == program("ipu_sim")
    assert program("ipu_sim").veus == 8 < GC2.tiles


def _said(node: ast.AST) -> str:
    """A string of the sources with ``...`` for what it fills in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "..."
    if isinstance(node, ast.JoinedStr):
        return "".join(_said(v) for v in node.values)
    return "..."


def test_messages_on_the_troubleshooting_page_are_the_programs() -> None:
    """Every message there is one that the sources can print, or its beginning."""
    sources = [p for folder in ("core", "plugins") for p in (ROOT / folder).rglob("*.py")]
    known = {_said(n) for p in sources for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, ast.Constant | ast.JoinedStr)}
    known |= {f"needs {name}" for name in known}  # MissingDependency says so
    plain = (re.sub(r"\s+", " ", text).removeprefix("rammer: warning: ") for text in known)
    said = {re.sub(r"%\.?\d*[sdf]", "...", text) for text in plain}
    lines = (ROOT / "docs/troubleshooting.md").read_text().splitlines()
    cells = [line.split(" | ")[0] for line in lines if line.startswith("| `")]
    messages = [m for cell in cells for m in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 60
    unknown = [m for m in messages if not any(text.startswith(m.removesuffix("...")) for text in said)]
    assert not unknown, unknown


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_documents_can_be_typed(document: str) -> None:
    """Commands and their options exist."""
    known = dict(walked(LazyGroup(), ""))
    text = (ROOT / document).read_text()
    for line in re.findall(r"(?:^\$ |`)rammer ([a-z][^`\n]*)", text, re.MULTILINE):
        words = line.split()
        name = next((n for n in (" ".join(words[:2]), words[0]) if n in known), None)
        assert name is not None, f"{document}: there is no rammer {line}"
        given = {o for p in known[name].params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        unknown = [w for w in words if re.fullmatch(r"--[a-z-]+", w) and w not in given]
        assert not unknown, f"{document}: rammer {name} has no {unknown}"
