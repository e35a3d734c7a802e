"""Reproducible random inputs of tests: a pytest plugin (``-p rammer_testing.seeds``).

A run has one number, its seed. It comes from ``--seed N``, else from the ini option ``seed``, which makes a project's tests
reproducible. With ``--seed fresh``, or without either, the run draws it. The last line of a run prints its seed. So do the first
line, if the seed is fresh, and every failure, with the command that repeats it. The fixtures ``rng`` and ``seed`` depend only on
that number and the test's name, not on earlier tests or the process. The run's seed selects n cases of a test with the mark
``sampled(n)``; the others get the mark ``large``. ``--drawn N`` runs N of the tests that depend on the seed.

Examples of hypothesis depend on the seed, too. Examples of earlier runs and constants of loaded modules are not used. The
deadline is disabled, since times depend on the load of the machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import pytest

__all__ = ["rng", "seed", "seed_of"]

#: The value of ``--seed`` that draws a seed.
FRESH: Final = "fresh"
#: True if the run drew its seed.
DRAWN: Final = pytest.StashKey[bool]()


def seed_of(run: int, test: str) -> int:
    """Return the seed, below 2^31, of a test (its node id) in a run."""
    return int.from_bytes(blake2b(f"{run} {test}".encode(), digest_size=4).digest(), "big") >> 1


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return this test's seed, for functions that need a number."""
    return seed_of(request.config.getoption("--seed"), request.node.nodeid)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Return this test's generator, even if its parameters include a seed. Tests pass it to their helpers."""
    return np.random.default_rng(seed_of(request.config.getoption("--seed"), request.node.nodeid))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--seed``, ``--drawn`` and the ini option ``seed``."""
    parser.addini("seed", "the seed of a run without --seed; none draws a fresh one", default="")
    parser.addoption("--seed", metavar="N", help="draw the inputs of all tests as the run that printed this number, or 'fresh'")
    parser.addoption("--drawn", type=int, metavar="N", help="run N of the tests that depend on the seed, chosen by it")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Determine the run's seed once; worker processes receive it."""
    config.addinivalue_line("markers", "sampled(n, of=PARAMETER): n cases, of every value of a parameter, are not `large`")
    shared = getattr(config, "workerinput", {}).get("seed")
    asked = str(shared if shared is not None else config.option.seed or config.getini("seed") or FRESH)
    if not (asked == FRESH or asked.isdecimal()):
        raise pytest.UsageError(f"--seed {asked} is neither a number nor '{FRESH}'")
    config.stash[DRAWN] = asked == FRESH
    config.option.seed = int(np.random.SeedSequence().generate_state(1)[0]) if asked == FRESH else int(asked)
    if config.pluginmanager.hasplugin("hypothesispytest"):
        _seed_hypothesis(config.option)


def _seed_hypothesis(option: Any) -> None:
    """Draw the examples of ``given`` by the run's seed. Hypothesis's command-line options take precedence; its plugin is
    configured later."""
    from hypothesis import HealthCheck, settings
    from hypothesis.internal.conjecture import providers

    settings.register_profile(
        "seeds", deadline=None, database=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow]
    )
    option.hypothesis_profile = option.hypothesis_profile or "seeds"
    if option.hypothesis_seed is None:
        option.hypothesis_seed = option.seed
    if hasattr(providers, "is_local_module_file"):  # newer versions draw constants from loaded sources
        providers.is_local_module_file = lambda path: False


def pytest_sessionstart(session: pytest.Session) -> None:
    """Print a fresh seed before any test can end the process."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.stash[DRAWN] and reporter is not None:
        reporter.write_line(f"seed {session.config.option.seed}, drawn for this run")


def _draws(item: pytest.Item) -> bool:
    """Return True if a test's inputs, or its selection, depend on the seed."""
    used = {"rng", "seed"} & {*getattr(item, "fixturenames", ())}
    return bool(used or item.get_closest_marker("sampled") or item.get_closest_marker("hypothesis"))


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    """Mark cases of ``sampled`` tests, and retain ``--drawn`` tests of those that all other options select."""
    _mark_samples(config, items)
    result = yield
    if config.option.drawn is not None:
        found = [k for k, item in enumerate(items) if _draws(item)]
        order = np.random.default_rng(seed_of(config.option.seed, "--drawn")).permutation(len(found))
        chosen = {found[k] for k in order[: config.option.drawn]}
        config.hook.pytest_deselected(items=[item for k, item in enumerate(items) if k not in chosen])
        items[:] = [item for k, item in enumerate(items) if k in chosen]
    return result


def _mark_samples(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases of ``sampled`` tests that the run's seed does not draw as ``large``."""
    groups = defaultdict[tuple[str, int, str], list[pytest.Item]](list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark and not item.get_closest_marker("large"):
            values = item.callspec.params if isinstance(item, pytest.Function) else {}
            value = values[mark.kwargs["of"]] if mark.kwargs else ""
            of = getattr(value, "__name__", str(value))  # a function's text contains an address, which differs between processes
            groups[item.nodeid.split("[")[0], mark.args[0], of].append(item)
    for (test, most, of), cases in groups.items():
        order = np.random.default_rng(seed_of(config.option.seed, f"{test} {of}")).permutation(len(cases))
        for n in order[most:]:
            cases[n].add_marker(pytest.mark.large)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the run's seed to a process of pytest-xdist: its options may lack those of plugins."""
    node.workerinput["seed"] = node.config.option.seed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the run's seed and the command that repeats it to every failure."""
    report = yield
    if report.failed and _draws(item):
        run = item.config.option.seed
        report.sections.append(("Seed", f"python -m pytest --seed {run} '{item.nodeid}'"))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the run's seed in the last lines."""
    terminalreporter.write_line(f"seed {terminalreporter.config.option.seed}")
