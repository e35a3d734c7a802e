"""Random inputs that are fresh in every run of tests and can be had again: a pytest plugin (``-p rammer.testing.seeds``).

A run draws one number, its seed, and says it in the end and with every failure; ``--seed N`` takes N instead. A test's fixtures
``rng`` and ``seed`` depend on that number and the test's own name alone: it gets the same values whatever ran before it, and in
whichever process. Of a test with the mark ``sampled(n)`` the run's seed draws n cases; the others get the mark ``large``. Where
there is hypothesis, its examples are the seed's, too: none is kept from an earlier run, and none may be too slow, since how long
one takes is the machine's load as much as the code's.
"""

from __future__ import annotations

from collections import defaultdict
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
    config.addinivalue_line("markers", "sampled(n, of=PARAMETER): n cases, of every value of a parameter, are not `large`")
    told = getattr(config, "workerinput", {}).get("seed", config.option.seed)
    config.option.seed = int(np.random.SeedSequence().generate_state(1)[0]) if told is None else told
    if config.pluginmanager.hasplugin("hypothesispytest"):
        _seed_hypothesis(config.option)


def _seed_hypothesis(option: Any) -> None:
    """The examples of ``given`` from the run's seed; options of hypothesis itself go before. Its plugin is configured after."""
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "seeds", deadline=None, database=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow]
    )
    option.hypothesis_profile = option.hypothesis_profile or "seeds"
    if option.hypothesis_seed is None:
        option.hypothesis_seed = option.seed


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases of ``sampled`` tests that the run's seed does not draw are ``large``. Whoever names cases gets them."""
    groups = defaultdict[tuple[str, int, str], list[pytest.Item]](list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark and not item.get_closest_marker("large"):
            values = item.callspec.params if isinstance(item, pytest.Function) else {}
            value = values[mark.kwargs["of"]] if mark.kwargs else ""
            of = getattr(value, "__name__", str(value))  # a function's text differs between processes: it has an address
            groups[item.nodeid.split("[")[0], mark.args[0], of].append(item)
    for (test, most, of), cases in groups.items():
        order = np.random.default_rng(seed_of(config.option.seed, f"{test} {of}")).permutation(len(cases))
        for n in order[most:]:
            cases[n].add_marker(pytest.mark.large)


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
