"""Tests on a shared or incomplete machine: a pytest plugin (``-p rammer_testing.machine``).

A test with the mark ``alone`` measures time: it runs while other processes of the same run (``pytest -n N``) run no test. A test
of an unavailable model is skipped if ``RAMMER_MODELS`` names the folder of models. It serves machines without a network that have
only some models; the summary counts the missing ones. Without that variable the test fails.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest

from rammer_testing.models import CACHE_VARIABLE, ModelUnavailable
from rammer_testing.peer_process import PeerCrashed

#: User property in the report of a skipped test, with the model's name.
_MISSING = "missing model"
_missing: Counter[str] = Counter()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark of this plugin."""
    config.addinivalue_line("markers", "alone: measures time, so no other test runs concurrently")


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, how)
        yield


@contextmanager
def _admitted(run: str, alone: bool) -> Iterator[None]:
    """Hold the lock of the run ``run``: shared, or exclusively if ``alone``. A waiting test holds the gate, so that overlapping
    tests cannot starve one that runs alone."""
    folder = Path(tempfile.gettempdir())
    gate, room = (folder / f"rammer-tests-{os.getuid()}-{run}.{name}" for name in ("gate", "room"))
    with ExitStack() as held:
        with _locked(gate, fcntl.LOCK_EX):
            held.enter_context(_locked(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run tests concurrently unless they are marked ``alone``."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    with _admitted(run, item.get_closest_marker("alone") is not None) if run else nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test whose reference crashed, or whose model is neither in ``RAMMER_MODELS`` nor downloadable."""
    report = yield
    problem = call.excinfo.value if call.excinfo is not None else None
    missing = isinstance(problem, ModelUnavailable) and CACHE_VARIABLE in os.environ
    if report.failed and (missing or isinstance(problem, PeerCrashed)):
        path, line, _ = item.location
        report.outcome, report.longrepr = "skipped", (path, line or 0, f"Skipped: {problem}")
        report.user_properties += [(_MISSING, str(problem).partition(" is unavailable")[0])] if missing else []
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count the models that tests lack."""
    _missing.update(name for what, name in report.user_properties if what == _MISSING and isinstance(name, str))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the missing models and the number of their tests."""
    if _missing:
        models = ", ".join(f"{name} ({count})" for name, count in sorted(_missing.items()))
        terminalreporter.write_line(f"{_missing.total()} tests skipped, whose models are not in {CACHE_VARIABLE}: {models}")
