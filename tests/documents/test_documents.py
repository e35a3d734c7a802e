"""The README and the pages quote the program's own text; here every quotation is made again and compared.

A quotation stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``. ``RAMMER_BLESS=1`` rewrites them.
Nothing quoted depends on the machine: the simulator has 8 tiles here and the rocm plugin gets a fixed VDevice."""

from __future__ import annotations

import ast
import importlib
import os
import re
from collections.abc import Sequence
from typing import Any

import draw
import pytest
from quotations import CPU, QUOTED, ROOT, program, walked

from rammer import errors
from rammer.cli.group import LazyGroup
from rammer.codegen.kernel_family import KernelFamily
from rammer.frontend.bind.bind_state import MOST_UNROLLED
from rammer.frontend.read import limits
from rammer.ir.program import RProgram
from rammer.report.stage_text import STAGES
from rammer_testing.nonempty import some

from rammer_cuda.families import FAMILIES
from rammer_ipu_sim.chip import GC2
from rammer_rocm.families import families_of

QUOTATION = re.compile(r"(<!-- generated: ([^>]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PAGES = tuple(
    sorted(str(p.relative_to(ROOT)) for folder in ("", "design/", "howto/") for p in (ROOT / "docs").glob(f"{folder}*.md"))
)
#: One page per kernel family of cuda, and per kernel family of rocm.
FAMILY_PAGES = tuple(
    sorted(
        str(page.relative_to(ROOT))
        for folder in ("cuda/rammer_cuda", "rocm/rammer_rocm")
        for page in (ROOT / "plugins" / folder).glob("*/README.md")
    )
)
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *PAGES, *FAMILY_PAGES)
PLUGINS = sorted(p.name for p in (ROOT / "plugins").iterdir() if (p / "pyproject.toml").exists())
#: Folders to which file names in documents are relative.
ROOTS = (
    ROOT,
    ROOT / "core",
    ROOT / "core/rammer",
    *(ROOT / "plugins" / n for n in PLUGINS),
    ROOT / "docs",
    ROOT / "benchmarks",
    ROOT / "benchmarks/rammer_bench",
    ROOT / "tests/kit",
    ROOT / "tests/kit/rammer_testing",
    ROOT / "plugins/cuda/rammer_cuda",
    ROOT / "core/rammer/plugin-template",
    ROOT / "tests/c_plugin",
)
#: All code except the tests of plugins.
SOURCES = [
    p
    for root in ("core/rammer", "tests/kit", "benchmarks/rammer_bench", *(f"plugins/{n}/rammer_{n}" for n in PLUGINS))
    for p in sorted((ROOT / root).rglob("*.py"))
]
#: References in documents: linked files, modules, members, files and commands. Not every document has each kind.
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
MODULE = re.compile(r"(?<![\w./-])rammer(?:_cuda|_rocm|_ipu_sim|_testing|_bench)?(?:\.\w+)+")
MEMBER = re.compile(r"`([\w.]+)` in `([a-z_/]+\.py)`")
FILE = re.compile(r"`([a-z_]+(?:/[a-z_]+)+(?:/|\.py)?)`")
COMMAND = re.compile(r"(?:^\$ |`)rammer ([a-z][^`\n]*)", re.MULTILINE)
#: Modules of earlier versions that the changelog names.
MOVED = {
    "rammer_cuda.launches",
    "rammer.testing",
    "rammer.peers",
    "rammer.codegen.target",
    "rammer.codegen.vectors",
    "rammer.device.lazily",
    "rammer.device.operators",
    "rammer.frontend.lowering",
    "rammer.passes.pipeline",
    "rammer.profile.probe",
    "rammer.schedule.fold",
    "rammer.tile.search",
    "rammer.tile.traffic",
}
#: The page that explains every stage, variable and exit code.
COMMANDS_PAGE = "docs/commands.md"
#: Maximal size of the README as a first page.
README_BYTES = 10_000


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
    for old, new in some(zip(QUOTATION.finditer(text), QUOTATION.finditer(made), strict=True)):
        assert old[3] == new[3], f"{document} quotes {old[2]!r} wrongly; rewrite it: RAMMER_BLESS=1 pytest {__file__}"


def test_every_quotation_is_used() -> None:
    used = {m[2] for name in DOCUMENTS for m in QUOTATION.finditer((ROOT / name).read_text())}
    assert used == set(QUOTED)


def test_the_readme_is_a_first_page() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= README_BYTES


def test_every_variable_stage_and_exit_code_is_explained() -> None:
    text = (ROOT / COMMANDS_PAGE).read_text()
    sources = "".join(p.read_text() for p in SOURCES)
    assert set(re.findall(r"RAMMER_[A-Z]+", sources)) == set(re.findall(r"RAMMER_[A-Z]+", text))
    for name in some(STAGES):
        assert f"`{name}`" in text, f"{COMMANDS_PAGE} does not name stage {name}"
    for kind in (errors.Mismatch, errors.BadInput, errors.DeviceUnavailable, errors.DeviceFailure):
        assert re.search(rf"^\| {kind.exit_code} \| ", text, re.MULTILINE), f"no row for exit code {kind.exit_code}"


@pytest.mark.parametrize(("pattern", "most"), [(LINK, 40), (MODULE, 20), (MEMBER, 10), (FILE, 60), (COMMAND, 20)])
def test_what_is_looked_for_in_documents_is_there(pattern: re.Pattern[str], most: int) -> None:
    """Check that each pattern matches somewhere in all documents. An unmatched pattern would detect no fault."""
    assert sum(len(pattern.findall((ROOT / d).read_text())) for d in DOCUMENTS) > most


@pytest.mark.parametrize("document", DOCUMENTS)
def test_linked_files_exist(document: str) -> None:
    """Check relative links and pictures. `make docs` also follows links to headings."""
    path = ROOT / document
    for target in LINK.findall(path.read_text()):
        assert (path.parent / target).exists(), f"{document} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_in_documents_exist(document: str) -> None:
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", (ROOT / document).read_text())) <= rules


@pytest.mark.parametrize("document", DOCUMENTS)
def test_modules_and_files_that_documents_name_exist(document: str) -> None:
    text = QUOTATION.sub("", (ROOT / document).read_text())
    moved = MOVED if document == "CHANGELOG.md" else set[str]()
    for name in set(MODULE.findall(text)):
        assert found(name) or name in moved, f"{document} names {name}"
    for name, path in MEMBER.findall(text):
        (file,) = [root / path for root in ROOTS if (root / path).exists()] or [None]
        text_there = file.read_text() if file else ""
        assert all(re.search(rf"\b{part}\b", text_there) for part in name.split(".")), f"{document}: {name} in {path}"
    for path in set(FILE.findall(text)) - {"docs/_build/html"}:
        assert any((root / path).exists() for root in ROOTS), f"{document} names {path}"


def found(name: str) -> bool:
    """Return True if a dotted name is a module or a member of a module."""
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
        f"{MOST_UNROLLED:,}",
        f"{limits.HOST_SECONDS:g}",
    ]


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "docs/index.md").read_text().splitlines()
    for page in some(PAGES):
        assert page.removeprefix("docs/").removesuffix(".md") in contents or page == "docs/index.md", (
            f"docs/index.md does not list {page}"
        )
    for page in some(FAMILY_PAGES):
        assert f"../{page.removesuffix('.md')}" in contents, f"docs/index.md does not list {page}"


@pytest.mark.parametrize(("plugin", "families"), [("cuda", FAMILIES), ("rocm", families_of(CPU))])
def test_every_family_has_a_page(plugin: str, families: Sequence[KernelFamily[Any, Any, Any]]) -> None:
    # Families that share forms share the method that writes their kernels.
    writers = [getattr(getattr(f.kernel, "__self__", None), "write", f.kernel) for f in families]
    folders = {writer.__module__.split(".")[1] for writer in writers}
    assert len(folders) > 5
    assert {f"plugins/{plugin}/rammer_{plugin}/{folder}/README.md" for folder in folders} <= {*FAMILY_PAGES}


@pytest.mark.parametrize("name", draw.PICTURES)
def test_pictures_are_what_is_drawn(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == draw.PICTURES[name](), "draw them again: python docs/draw.py"


def test_program_with_neutral_tiles_is_the_walkthroughs() -> None:
    """Check that the walk-through's program reloads to an equal object and that its chip has 8 tiles."""
    text = str(program("ipu_sim"))
    assert RProgram.parse(text) == program("ipu_sim")
    assert program("ipu_sim").veus == 8 < GC2.tiles


def _said(node: ast.AST) -> str:
    """Return a string of the sources with ``...`` in place of formatted values."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "..."
    if isinstance(node, ast.JoinedStr):
        return "".join(_said(v) for v in node.values)
    return "..."


@pytest.mark.slow
def test_messages_on_the_troubleshooting_page_are_the_programs() -> None:
    """Check that every message on the page is one that the sources can print, or its beginning."""
    known = {_said(n) for p in SOURCES for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, ast.Constant | ast.JoinedStr)}
    known |= {f"needs {name}" for name in known}  # the text of MissingDependency
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
    """Check that commands and their options exist."""
    known = dict(walked(LazyGroup(), ""))
    text = (ROOT / document).read_text()
    for line in COMMAND.findall(text):
        words = line.split()
        name = next((n for n in (" ".join(words[:2]), words[0]) if n in known), None)
        assert name is not None, f"{document}: there is no rammer {line}"
        given = {o for p in known[name].params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        unknown = [w for w in words if re.fullmatch(r"--[a-z-]+", w) and w not in given]
        assert not unknown, f"{document}: rammer {name} has no {unknown}"
