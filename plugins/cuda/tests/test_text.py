"""How kernels are written: once, with what varies as fields; device code lies apart and says what it assumes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rammer_testing.nonempty import some

import rammer_cuda

FOLDER = Path(rammer_cuda.__file__).parent
#: Where texts may be changed: templates of device code are filled in, and the host's emulator spells kernels anew.
TEMPLATES = ("device/__init__.py", "emulator/")


def edits(source: str) -> Iterator[int]:
    """Lines that put one text in another's place: ``text.replace(old, new)`` and ``re.sub``."""
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
    # ``a // b`` of a fragment's place, which Python spells otherwise than C, and is not text of a kernel.
    assert {n: len(lines) for n, lines in found.items()} == {"contraction/instruction.py": 1}


def opened(source: str) -> Iterator[int]:
    """Lines with a string, or the end of one with places in it, that opens a block which something else must close."""
    tree = ast.parse(source)
    parts = {id(v) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for v in node.values[:-1]}
    for node in ast.walk(tree):
        whole = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
        if whole and node.value.rstrip("\n").endswith("{"):  # type: ignore[attr-defined]
            yield node.lineno  # type: ignore[attr-defined]


def test_blocks_are_opened_and_closed_in_one_place() -> None:
    """By ``Text.block``, ``Block.nest`` or a frame's ``scope``, which writes one."""
    assert sorted(opened("a = 'for (;;) {'\nb = f'if ({x}) {{'\nc = f'{x} {{}}'\nd = '{'")) == [1, 2, 4]
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        name = path.relative_to(FOLDER).as_posix()
        if not name.startswith(TEMPLATES) and (lines := list(opened(path.read_text()))):
            found[name] = len(lines)
    assert found == {"kernels/frame.py": 1}


#: Lines of a file and of a function, and parameters, at most.
MOST_LINES, MOST_STATEMENTS, MOST_PARAMETERS = 800, 60, 6


def test_files_and_functions_are_short() -> None:
    """With few parameters, but for constructors, which take what there is to know."""
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
    """Of the sizes that they are given: a writer that breaks one fails in the compiler, not in results."""
    text = path.read_text()
    whole = re.findall(r"template <(?:bool \w+, )*((?:int \w+(?:, )?)+)", text)
    sized = [n for n in whole if re.search(r"\b(FN|FM|TM|BK|DEPTH|SIZE|LINE|SLICES|BLOCKS|ROWS|S)\b", n)]
    assert not sized or "static_assert" in text, path.name
