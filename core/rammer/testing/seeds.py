"""Random inputs that are fresh in every run of tests and can be had again: a pytest plugin (``-p rammer.testing.seeds``).

A run draws one number, its seed, and says it in the end and with every failure; ``--seed N`` takes N instead. A test's fixtures
``rng`` and ``seed`` depend on that number and the test's own name alone: it gets the same values whatever ran before it, and in
whichever process.
"""

from __future__ import annotations

from collections.abc import Generator
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

__all__ = ["rng", "seed", "seed_of"]


def seed_of(run: int, test: str) -> int:
    """The seed, below 2^31, of a test (its node id) in a run."""
    return int.from_bytes(blake2b(f"{run} {test}".encode(), digest_size=4).digest(), "big") >> 1


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This test's seed, for what takes a number."""
    return seed_of(request.config.getoption("--seed"), request.node.nodeid)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """This test's generator, also where its parameters have a seed of their own. Helpers are given it."""
    return np.random.default_rng(seed_of(request.config.getoption("--seed"), request.node.nodeid))


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--seed N``."""
    parser.addoption("--seed", type=int, metavar="N", help="draw the inputs of all tests as the run that printed this number")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """The run's seed is drawn once; a process that shares its tests is told it."""
    told = getattr(config, "workerinput", {}).get("seed", config.option.seed)
    config.option.seed = int(np.random.SeedSequence().generate_state(1)[0]) if told is None else told


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist the run's seed: what it is given of options may not hold those of plugins."""
    node.workerinput["seed"] = node.config.option.seed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Every failure names the run's seed and how to have it again."""
    report = yield
    if report.failed and {"rng", "seed"} & {*getattr(item, "fixturenames", ())}:
        run = item.config.option.seed
        report.sections.append(("Seed", f"python -m pytest --seed {run} '{item.nodeid}'"))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The last lines of a run name its seed."""
    terminalreporter.write_line(f"seed {terminalreporter.config.option.seed}")
