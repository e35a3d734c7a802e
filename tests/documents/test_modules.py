"""The page of all modules, by which a reader finds the file for a change. RAMMER_BLESS=1 writes it again."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs/modules.md"
#: Folders of the page with their titles, in order.
PARTS: Final = {
    "core/rammer": "The core",
    "plugins/cuda/rammer_cuda": "The plugin cuda",
    "plugins/rocm/rammer_rocm": "The plugin rocm",
    "plugins/ipu_sim/rammer_ipu_sim": "The plugin ipu_sim",
    "tests/kit/rammer_testing": "The test kit",
    "benchmarks": "The benchmarks",
}
#: Most modules that the page may miss or have too many: branches that add modules need not all change one page.
LAG: Final = 12
_LINE: Final = re.compile(r"^\| `([\w/]+\.py)` \| \S", re.MULTILINE)


def list_modules(part: str) -> list[tuple[str, str]]:
    """Return the modules below a folder with the first sentences of their docstrings; packages have none."""
    found = list[tuple[str, str]]()
    for path in sorted((ROOT / part).rglob("*.py"), key=lambda p: (p.parent.as_posix(), p.name)):
        if path.name != "__init__.py" and not {"plugin-template", ".venv", "build"} & {*path.parts}:
            text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0].split())
            sentence = re.split(r"(?<=\.) ", text)[0].replace("``", "`").replace("|", "/").replace("<", "&lt;")
            sentence = re.sub(r"`(rammer [\w-]+)`", r"\1", sentence)  # groups of commands cannot be typed
            found.append((path.relative_to(ROOT).as_posix(), sentence))
    return found


def write_page() -> str:
    """Return the text of the page."""
    lines = ["# Modules", "", "Every module with the first sentence of its docstring."]
    lines += ["[Architecture](architecture.md#the-folders) describes the folders, in the order of processing.", ""]
    for part, title in PARTS.items():
        lines += [f"## {title}: `{part}`", "", "| module | contents |", "|---|---|"]
        lines += [f"| `{name}` | {sentence} |" for name, sentence in list_modules(part)] + [""]
    return "\n".join(lines)


def test_the_page_lists_the_modules() -> None:
    if os.environ.get("RAMMER_BLESS"):
        PAGE.write_text(write_page())
    for part, text in zip(PARTS, PAGE.read_text().split("\n## ")[1:], strict=True):
        listed, there = set(_LINE.findall(text)), {name for name, sentence in list_modules(part) if sentence}
        assert there and len(listed ^ there) <= LAG, (part, sorted(listed ^ there), "RAMMER_BLESS=1 writes the page again")
