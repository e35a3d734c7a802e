"""The command line in this process: fast, with the same exit codes as the installed command."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from rammer.cli.main import main

sys.path.insert(0, str(Path(__file__).parent))

from command import MODEL, Command, Done


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a cache of its own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("RAMMER_CACHE", str(folder))
    monkeypatch.delenv("RAMMER_DEBUG", raising=False)
    return folder


@pytest.fixture
def rammer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """``rammer("run", path)`` as if typed; anything printed before is dropped."""

    def call(*words: object) -> Done:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["rammer", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as done:
            code = int(done.code or 0)
        text = capsys.readouterr()
        return Done(code, text.out, text.err)

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model with fresh weights, a float and an integer input, and two outputs."""
    path = tmp_path / "little.onnx"
    onnx.save(MODEL.build(np.random.default_rng()), path)
    return path
