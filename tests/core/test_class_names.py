"""A class name means one thing in the core and the plugins of this repository."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from reading import Search

ROOT = Path(__file__).parents[2]
FILES = sorted((*ROOT.glob("core/rammer/**/*.py"), *ROOT.glob("plugins/*/rammer_*/**/*.py")))
#: The template of a plugin is a plugin of its own.
FILES = [f for f in FILES if "plugin-template" not in f.parts]


def classes(nodes: Iterable[ast.AST]) -> list[str]:
    """Names of the classes in a file."""
    return [node.name for node in nodes if isinstance(node, ast.ClassDef)]


NAMES = Search(__file__, FILES, lambda file: classes(file.nodes))


def doubled(found: Iterable[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Class name -> the files that have one, where they are several; of the names in each file."""
    places = defaultdict(list)
    for file, names in found:
        for name in names:
            places[name].append(file)
    assert places
    return {name: files for name, files in places.items() if len(files) > 1}


def test_no_two_classes_have_one_name() -> None:
    assert len(FILES) > 300
    assert not doubled((str(f.relative_to(ROOT)), names) for f, names in NAMES.found().items())


def test_the_search_finds() -> None:
    found = [
        ("a", classes(ast.walk(ast.parse("class Stage: ...")))),
        ("b", classes(ast.walk(ast.parse("def f():\n    class Stage: ...")))),
        ("c", classes(ast.walk(ast.parse("Stage = 1")))),
    ]
    assert doubled(found) == {"Stage": ["a", "b"]}
