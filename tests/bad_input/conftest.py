"""Lets the tests of this folder import ``cases``, and gives each one a cache of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("RAMMER_CACHE", str(folder))
    monkeypatch.delenv("RAMMER_DEBUG", raising=False)
    return folder
