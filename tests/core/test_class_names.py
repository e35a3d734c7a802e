"""A class name means one thing in the core and the plugins of this repository."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((*ROOT.glob("core/rammer/**/*.py"), *ROOT.glob("plugins/*/rammer_*/**/*.py")))
#: The template of a plugin is a plugin of its own.
FILES = [f for f in FILES if "plugin-template" not in f.parts]


def doubled(trees: Iterable[tuple[str, ast.AST]]) -> dict[str, list[str]]:
    """Class name -> the files that have one, where they are several."""
    places = defaultdict(list)
    for file, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file)
    assert places
    return {name: files for name, files in places.items() if len(files) > 1}


def test_no_two_classes_have_one_name() -> None:
    assert len(FILES) > 300
    assert not doubled((str(f.relative_to(ROOT)), ast.parse(f.read_text())) for f in FILES)


def test_the_search_finds() -> None:
    trees = [
        ("a", ast.parse("class Stage: ...")),
        ("b", ast.parse("def f():\n    class Stage: ...")),
        ("c", ast.parse("Stage = 1")),
    ]
    assert doubled(trees) == {"Stage": ["a", "b"]}
