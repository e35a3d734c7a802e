"""Words of the field mean one thing in the core and the plugins of this repository."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@cache
def classes() -> dict[str, list[str]]:
    """The files of every class, by its name."""
    places = defaultdict(list)
    for file in (*ROOT.glob("core/rammer/**/*.py"), *ROOT.glob("plugins/*/rammer_*/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(file.relative_to(ROOT)))
    return places


@pytest.mark.parametrize("name", ["Stage", "Span", "StoragePlan", "Window", "Choice", "Unit", "FunctionContext"])
def test_one_class_of_a_name(name: str) -> None:
    places = classes()
    assert len(places) > 300 and len(places.get(name, ())) <= 1, places[name]
