"""Cache folders that other users can write to: unused, since cached programs are executed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from cases import Capture, arrays, model, saved

import rammer
from rammer.cache import cache_location as folder
from rammer.cache.cache_location import cache_folder
from rammer_testing.cache_files import entries


def run(rng: np.random.Generator, path: Path) -> None:
    rammer.compile(path, device="toy").run(arrays(rng))


def test_the_folder_is_made_for_its_user_alone(tmp_path: Path, own_cache: Path, rng: np.random.Generator) -> None:
    old = os.umask(0)
    try:
        run(rng, saved(tmp_path / "m.onnx", model()))
    finally:
        os.umask(old)
    assert stat.S_IMODE(own_cache.stat().st_mode) == 0o700 and entries(own_cache, "programs")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_is_not_used(
    tmp_path: Path, own_cache: Path, capsys: Capture, mode: int, rng: np.random.Generator
) -> None:
    path = saved(tmp_path / "m.onnx", model())
    run(rng, path)
    (kept,) = entries(own_cache, "programs")
    kept.with_name("0" * 64).write_bytes(kept.read_bytes())
    kept.write_bytes(b"evil")
    own_cache.chmod(mode)
    folder.own_folder.cache_clear()
    for _ in range(2):
        run(rng, path)
    assert capsys.readouterr().err == (
        f"rammer: warning: cache folder {own_cache} is not used: other users may write there "
        "(remove it and its content, or set RAMMER_CACHE)\n"
    )
    assert kept.read_bytes() == b"evil" and stat.S_IMODE(cache_folder().stat().st_mode) == 0o700
    assert entries(cache_folder(), "programs")  # cached for this process
    own_cache.chmod(0o755)
    assert cache_folder() == own_cache


def test_a_folder_of_somebody_else_is_not_used(own_cache: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == own_cache
    monkeypatch.setattr(os, "geteuid", lambda: own_cache.stat().st_uid + 1)
    if own_cache.stat().st_uid == 0:  # root may write anywhere, so root accepts the folder of any user
        assert cache_folder() == own_cache
        os.chown(own_cache, 4711, -1)
    folder.own_folder.cache_clear()
    assert cache_folder() != own_cache and "it belongs to user" in capsys.readouterr().err
