"""The cage's limits: what a run in a child may use, whatever machine it is on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rammer.testing import cage


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system ties no process to cores")
@pytest.mark.parametrize("cores", (1, 2))
def test_a_child_may_use_few_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """An OpenCL runtime starts a thread for every one of them, which on a large machine took more than the memory."""
    monkeypatch.setattr(cage, "CORES", cores)
    monkeypatch.setattr(cage, "_command", lambda words: print(*sorted(os.sched_getaffinity(0))) or 0)
    before = os.sched_getaffinity(0)
    (tmp_path / "a").mkdir()
    seen = cage.caged(["run"], tmp_path / "a", memory=1 << 40)  # not what is tested, and this process may be large
    allowed = set(map(int, seen.out.split()))
    assert not seen.fault and allowed <= before and len(allowed) == min(cores, len(before))
    assert os.sched_getaffinity(0) == before, "the parent keeps its own"
