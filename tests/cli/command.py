"""Shared helpers of the command line tests: a model, and the results of a command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rammer.cli.main import main
from rammer_testing.small_models import SmallModel

MODEL = SmallModel(
    "little",
    """(float[1,3,8,8] x, int64[2] i, float[4,3,3,3] w_k, float[4] w_b)
    => (float[1,4,6,6] y, float[1,2,6,6] z) {
    c = Conv(x, w_k, w_b)
    y = Relu(c)
    z = Gather<axis=1>(y, i)
}""",
    below=4,
)


@dataclass(frozen=True)
class Done:
    """The results of a command."""

    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a separate cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("RAMMER_CACHE", str(folder))
    monkeypatch.delenv("RAMMER_DEBUG", raising=False)
    return folder


def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> Done:
    """Run ``rammer WORDS...`` in this process, as if typed; earlier output is dropped."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["rammer", *map(str, words)])
    code = 0
    try:
        main()
    except SystemExit as done:
        code = int(done.code or 0)
    text = capsys.readouterr()
    return Done(code, text.out, text.err)
