"""The project's files, read and parsed once for all searching tests of a folder: parsing costs two seconds."""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Parsed:
    """A file, its text, its tree and all nodes of the tree."""

    path: Path
    text: str
    tree: ast.Module
    nodes: Sequence[ast.AST]


class Search(Generic[T]):
    """A query over some files. ``asker`` is the test's file: all queries of its folder are answered in one walk. Only the answers
    are stored, since all trees together would be a million objects."""

    def __init__(self, asker: str, files: Iterable[Path], ask: Callable[[Parsed], T]) -> None:
        self.folder, self.files, self.ask = Path(asker).parent, dict.fromkeys(files), ask
        self.answers = dict[Path, T]()
        SEARCHES.append(self)

    def found(self) -> dict[Path, T]:
        """Return the answers, by file."""
        if not self.answers:
            _walk([s for s in SEARCHES if s.folder == self.folder])
        assert len(self.answers) == len(self.files)
        return self.answers


#: Queries of all test files that this process has imported.
SEARCHES: Final = list[Search[Any]]()


def _walk(searches: Sequence[Search[Any]]) -> None:
    gc.disable()
    try:
        for path in dict.fromkeys(f for s in searches for f in s.files):
            text = path.read_text()
            tree = ast.parse(text)
            parsed = Parsed(path, text, tree, [*ast.walk(tree)])
            for search in searches:
                if path in search.files:
                    search.answers[path] = search.ask(parsed)
    finally:
        gc.enable()
