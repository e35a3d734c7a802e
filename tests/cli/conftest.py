"""Fixtures that run the command line in this process: fast, with the exit codes of the installed command."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import MODEL, Command, own_cache, typed

__all__ = ["own_cache"]


@pytest.fixture
def rammer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return ``rammer("run", path)``, which runs as if typed."""
    return partial(typed, monkeypatch, capsys)


@pytest.fixture
def model(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Write a small model with random weights, a float and an integer input, and two outputs."""
    path = tmp_path / "little.onnx"
    onnx.save(MODEL.build(rng), path)
    return path
