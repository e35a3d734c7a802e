"""The answer whether a processor multiplies bytes by one instruction: cached as it was found, and only where it was found."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

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
    """In place of the processes that try the instruction: they end with ``code``, and are counted."""

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
    """An empty cache, on a processor that says that it has the instruction."""
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
    """With a warning, once; nothing that another program wrote is an answer."""
    trials.code = 0 if works else vnni.REFUSED
    assert (asked(), asked(), trials.count) == (works, works, 1)
    (path,) = cache.rglob("*.dots.txt")
    path.write_bytes(junk)
    assert capsys.readouterr().err == ""
    assert (asked(), trials.count) == (works, 2)
    assert str(path) in capsys.readouterr().err
    assert (asked(), trials.count, capsys.readouterr().err) == (works, 2, "")


@pytest.mark.parametrize(
    "end", [1, 127, -signal.SIGKILL, -signal.SIGTERM, OSError("no memory"), subprocess.TimeoutExpired("python", 60.0)], ids=repr
)
def test_unfinished_trial_is_no_answer(trials: Trials, cache: Path, end: int | Exception) -> None:
    """A process that could not start, was late or was killed does not switch the instruction off."""
    trials.code = end
    assert not asked() and not list(cache.rglob("*.dots.txt"))
    trials.code = 0
    assert (asked(), trials.count) == (True, 2)


def test_instruction_that_ends_the_process_is_an_answer(trials: Trials, cache: Path) -> None:
    trials.code = -signal.SIGILL
    assert not asked() and not asked() and trials.count == 1


def test_trial_finds_an_answer(cache: Path) -> None:
    """In a real process, on whatever processor this is."""
    found = asked()
    (path,) = cache.rglob("*.dots.txt")
    assert path.read_text().splitlines()[1] == ("works" if found else "does not")
