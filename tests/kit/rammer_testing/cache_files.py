"""Entries of the disk cache for tests that count or damage them. A module of its own, since tests of all packages use it."""

from __future__ import annotations

from pathlib import Path

from rammer.cache.disk_cache import Cache, list_entries


def entries(root: Path, kind: str = "") -> list[Path]:
    """Return the paths of the entries of a kind, or of all kinds, in a cache folder."""
    return sorted(e.path for e in list_entries(root) if kind in ("", e.kind))


def content(path: Path) -> str:
    """Return the text that ``Cache.put`` stored in an entry. Raises AssertionError if it is missing or damaged."""
    found = _of(path).get(path.name, bytes.decode)
    assert found is not None, path
    return found


def store(path: Path, text: str) -> None:
    """Replace the text of an entry, with a valid checksum."""
    _of(path).put(path.name, text.encode())


def _of(path: Path) -> Cache:
    return Cache(path.parts[-3], root=path.parents[3])
