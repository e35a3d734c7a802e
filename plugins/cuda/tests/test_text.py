"""How kernels are written: once, with what varies as fields; device code lies apart and says what it assumes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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
