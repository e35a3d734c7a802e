"""Resource limits of child processes, independent of the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rammer_testing import sandbox


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system ties no process to cores")
@pytest.mark.parametrize("cores", (1, 2))
def test_a_child_may_use_few_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Check the core limit. An OpenCL runtime starts a thread per core, which exhausted the memory on a large machine."""
    monkeypatch.setattr(sandbox, "CORES", cores)
    monkeypatch.setattr(sandbox, "command", lambda words: print(*sorted(os.sched_getaffinity(0))) or 0)
    before = os.sched_getaffinity(0)
    (tmp_path / "a").mkdir()
    seen = sandbox.caged(["run"], tmp_path / "a")
    allowed = set(map(int, seen.out.split()))
    assert not seen.fault and allowed <= before and len(allowed) == min(cores, len(before))
    assert os.sched_getaffinity(0) == before, "the parent keeps its own"


def test_bytecode_that_python_keeps_is_no_deed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_first.py").touch()
    (tmp_path / "a").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sandbox, "command", lambda words: print(__import__("imported_first").__name__) or 0)
    seen = sandbox.caged(["run"], tmp_path / "a")
    assert (seen.fault, seen.out) == ("", "imported_first\n")


#: A separate process: after thousands of tests this one has room in its freed memory.
RESERVING = """
import mmap, sys
from pathlib import Path
import numpy as np
from rammer_testing import sandbox as cage

def room_for(size):
    try:
        return np.zeros(size, np.uint8).nbytes
    except MemoryError:
        return 0

def command(words):
    assert room_for(1 << 30) == 1 << 30
    print(room_for(2_900_000_000))
    return 0

reserve = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, "prot": mmap.PROT_READ}
cage._opened = lambda device: mmap.mmap(-1, 8 << 30, **reserve)
cage.command = command
seen = cage.caged(["run"], Path(sys.argv[1]), ["--device", "large"])
assert (seen.code, seen.signal, seen.out) == (0, 0, "0\\n"), seen
"""


@pytest.mark.slow
def test_what_a_driver_reserves_is_not_the_files(tmp_path: Path) -> None:
    """Check that driver reservations do not count: 64 threads reserve more than a file may use. A file of 2.9 GB is still
    stopped."""
    ended = subprocess.run([sys.executable, "-c", RESERVING, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (lambda: np.zeros(1 << 60, np.uint8), "exit code 70"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (lambda: time.sleep(60), "it was late"),
    ],
)
def test_a_run_that_cannot_begin_is_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[], object], said: str
) -> None:
    monkeypatch.setattr(sandbox, "_opened", lambda device: start())
    with pytest.raises(sandbox.Machinery, match=f"a run did not start: .*{said}"):
        sandbox.caged(["run"], tmp_path, seconds=0.4 if said == "it was late" else 30)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("more", [[], ["--processes", "2"]])
def test_a_campaign_that_cannot_begin_says_so(more: list[str]) -> None:
    """Check the reported failure: this is not a campaign without faults."""
    words = [sys.executable, "-m", "rammer_testing.mutants", "--kind", "model", "--device", "nowhere", "--count", "4", *more]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == sandbox.Machinery.exit_code, done.stdout + done.stderr
    assert "nowhere" in done.stderr and "Traceback" not in done.stderr and " mutants, " not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("work", "late"), [(lambda: time.sleep(2), False), (lambda: all(iter(lambda: 1, 0)), True)])
def test_time_is_of_the_processor(tmp_path: Path, work: Callable[[], object], late: bool) -> None:
    """Check that processor time is limited: with wall time, a loaded machine would report waiting runs as findings. Late runs
    report their position."""
    seen = sandbox.forked(lambda: int(bool(work())), tmp_path / "out", tmp_path / "err", 0.5)
    assert seen[2] == late and ("test_cage.py" in (tmp_path / "err").read_text()) == late
