"""Detection of the byte-product instruction of a processor: only definite answers are cached."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rammer_testing.cache_files import entries

pytest.importorskip("pyopencl")

from rammer_rocm import vnni
from rammer_rocm.opencl_runtime import kind_of, units
from rammer_rocm.plugin import DEVICE

if not DEVICE.probe():
    pytest.skip("no OpenCL unit", allow_module_level=True)

CPUS = [unit for unit in units() if kind_of(unit) == "cpu"]
if not CPUS:
    pytest.skip("no OpenCL CPU", allow_module_level=True)
LANES = 8


class Trials:
    """A replacement of the processes that try the instruction: each ends with ``code`` and is counted."""

    def __init__(self) -> None:
        self.code: int | Exception = 0
        self.count = 0

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.count += 1
        if isinstance(self.code, Exception):
            raise self.code
        return subprocess.CompletedProcess(command, self.code)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache, on a processor that reports the instruction."""
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(vnni, "_FLAGS", re.compile(""))
    return tmp_path / "cache"


@pytest.fixture
def trials(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Trials:
    made = Trials()
    monkeypatch.setattr(vnni, "run_program", made)
    return made


def asked() -> bool:
    return vnni.has_dots(CPUS[0], LANES)


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize("junk", [b"", b"\xff\xfe", b"works", b"does not", b"works\nworks", bytes(40)])
def test_damaged_answer_is_found_again(
    trials: Trials, cache: Path, works: bool, junk: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check the single warning, and that files of other programs are not answers."""
    trials.code = 0 if works else vnni.REFUSED
    assert (asked(), asked(), trials.count) == (works, works, 1)
    (path,) = entries(cache, "rocm-vnni")
    path.write_bytes(junk)
    assert capsys.readouterr().err == ""
    assert (asked(), trials.count) == (works, 2)
    assert str(path) in capsys.readouterr().err
    assert (asked(), trials.count, capsys.readouterr().err) == (works, 2, "")


@pytest.mark.parametrize(
    "end", [1, 127, -signal.SIGKILL, -signal.SIGTERM, OSError("no memory"), subprocess.TimeoutExpired("python", 60.0)], ids=repr
)
def test_unfinished_trial_is_no_answer(trials: Trials, cache: Path, end: int | Exception) -> None:
    """Check that a process that failed to start, was late or was killed does not disable the instruction."""
    trials.code = end
    assert not asked() and not entries(cache, "rocm-vnni")
    trials.code = 0
    assert (asked(), trials.count) == (True, 2)


def test_instruction_that_ends_the_process_is_an_answer(trials: Trials, cache: Path) -> None:
    trials.code = -signal.SIGILL
    assert not asked() and not asked() and trials.count == 1


def test_trial_finds_an_answer(cache: Path) -> None:
    """Check a real process on the actual processor."""
    found = asked()
    (path,) = entries(cache, "rocm-vnni")
    assert path.read_text().splitlines()[1] == ("works" if found else "does not")
