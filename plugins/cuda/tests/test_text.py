"""Kernel text generation: texts are written once with fields for variable parts, and separate device
code states its assumptions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rammer_testing.nonempty import some

import rammer_cuda

FOLDER = Path(rammer_cuda.__file__).parent
#: Folders that may edit texts: templates of device code are filled in, and the host emulator redefines kernels.
TEMPLATES = ("device/__init__.py", "emulator/")


def edits(source: str) -> Iterator[int]:
    """Yield lines that replace text: ``text.replace(old, new)`` and ``re.sub``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            named = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
            if (node.func.attr == "replace" and len(node.args) > 1) or (named and node.func.attr == "sub"):
                yield node.lineno


def test_finished_text_is_not_edited() -> None:
    files = sorted(FOLDER.rglob("*.py"))
    assert len(files) > 40
    assert list(edits("text = text.replace(bounds, more)\nmade = replace(made, text=text)\ntext = re.sub('a', 'b', text)")) == [
        1,
        3,
    ]
    found = {}
    for path in files:
        name = path.relative_to(FOLDER).as_posix()
        if not name.startswith(TEMPLATES) and (lines := list(edits(path.read_text()))):
            found[name] = lines
    # ``a // b`` of a fragment's index, which Python and C spell differently, and which is not kernel text.
    assert {n: len(lines) for n, lines in found.items()} == {"contraction/instruction.py": 1}


def opened(source: str) -> Iterator[int]:
    """Yield lines with a string, or the end of a formatted one, that opens a block which other code must close."""
    tree = ast.parse(source)
    parts = {id(v) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for v in node.values[:-1]}
    for node in ast.walk(tree):
        whole = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
        if whole and node.value.rstrip("\n").endswith("{"):  # type: ignore[attr-defined]
            yield node.lineno  # type: ignore[attr-defined]


def test_blocks_are_opened_and_closed_in_one_place() -> None:
    """Check that only ``Text.block``, ``Block.nest`` or a frame's ``scope`` writes blocks."""
    assert sorted(opened("a = 'for (;;) {'\nb = f'if ({x}) {{'\nc = f'{x} {{}}'\nd = '{'")) == [1, 2, 4]
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        name = path.relative_to(FOLDER).as_posix()
        if not name.startswith(TEMPLATES) and (lines := list(opened(path.read_text()))):
            found[name] = len(lines)
    assert found == {"kernels/frame.py": 1}


#: Maximal lines of a file and of a function, and parameters.
MOST_LINES, MOST_STATEMENTS, MOST_PARAMETERS = 800, 60, 6


def test_files_and_functions_are_short() -> None:
    """Check parameter counts, too, except for constructors, which receive all necessary data."""
    functions = 0
    for path in some(sorted(FOLDER.rglob("*.py"))):
        text = path.read_text()
        assert text.count("\n") <= MOST_LINES, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                functions += 1
                taken = [
                    a.arg
                    for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                    if a.arg not in ("self", "cls")
                ]
                assert node.end_lineno is not None and node.end_lineno - node.lineno < MOST_STATEMENTS, (path, node.name)
                assert len(taken) <= MOST_PARAMETERS or node.name == "__init__", (path, node.name, taken)
    assert functions > 400


@pytest.mark.parametrize("path", sorted((FOLDER / "device").glob("*.cuh")), ids=lambda p: p.stem)
def test_templates_say_what_they_assume(path: Path) -> None:
    """Check the size assertions of templates: a writer that violates one fails in the compiler, not in results."""
    text = path.read_text()
    whole = re.findall(r"template <(?:bool \w+, )*((?:int \w+(?:, )?)+)", text)
    sized = [n for n in whole if re.search(r"\b(FN|FM|TM|BK|DEPTH|SIZE|LINE|SLICES|BLOCKS|ROWS|S)\b", n)]
    assert not sized or "static_assert" in text, path.name
