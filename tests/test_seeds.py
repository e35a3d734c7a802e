"""Seeded inputs: each run's seed is fixed or drawn, and no test draws from a generator without a seed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from reading import Search

from rammer_testing.nonempty import some

pytest_plugins = "pytester"
ROOT = Path(__file__).parents[1]
#: Tests and shared test modules, without the test kit.
FILES = sorted({*ROOT.glob("tests/**/*.py"), *ROOT.glob("plugins/*/tests/**/*.py")} - {*ROOT.glob("tests/kit/**/*.py")})
#: Callables that draw a seed if called without one, and modules whose functions share one generator.
MAKERS = {"default_rng", "Random", "SeedSequence", "RandomState"}
SHARED = re.compile(r"(np|numpy)\.random\.(?!default_rng|Generator|SeedSequence)\w+|random\.(?!Random\b)\w+")
#: A search that is run by hand and prints the seeds of its findings.
ALLOWED = {"tests/devices/view_graphs.py": 1}


def unseeded(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the calls whose random numbers no seed reproduces."""
    imported = {a.asname or a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = ast.unparse(node.func)
            shared = SHARED.fullmatch(name) and name.split(".")[0] in imported
            if shared or (name.split(".")[-1] in MAKERS and not node.args and not node.keywords):
                yield f"{node.lineno}: {ast.unparse(node)}"


UNSEEDED = Search(__file__, FILES, lambda file: list(unseeded(file.nodes)))


def test_no_generator_is_without_a_seed() -> None:
    assert len(FILES) > 150
    found = {str(p.relative_to(ROOT)): drawn for p, drawn in UNSEEDED.found().items()}
    assert {p: len(f) for p, f in found.items() if f} == ALLOWED, {p: f for p, f in found.items() if f}


@pytest.mark.parametrize(
    "code",
    [
        "import numpy as np\nrng = np.random.default_rng()",
        "from random import Random\nf(Random())",
        "import numpy as np\nx = np.random.rand(3)",
        "import random\nx = random.choice([1, 2])",
        "import numpy as np\nseed = np.random.SeedSequence().generate_state(1)",
    ],
)
def test_the_search_finds(code: str) -> None:
    assert len(list(unseeded([*ast.walk(ast.parse(code))]))) == 1


#: Pattern of the seed message of a failure: the number, and the test.
TOLD = r"^python -m pytest --seed (\d+) '.*::(.*)'$"


@pytest.mark.slow
def test_a_test_draws_the_same_under_one_seed_and_other_numbers_under_another(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("case", range(3))
        def test_it(case, rng, seed):
            assert 0 <= seed < 2**31
            print("drew", case, rng.integers(1 << 60))
            assert case != 1

        def test_no_numbers():
            assert False
        """
    )

    def run(*words: str) -> str:
        done = pytester.runpytest_subprocess(
            "-p", "rammer_testing.seeds", "-p", "xdist.plugin", "-p", "no:cacheprovider", "-v", "-rA", *words
        )
        done.assert_outcomes(passed=2, failed=2)
        return done.stdout.str()

    def drawn(text: str) -> dict[str, str]:
        found = dict(re.findall(r"drew (\d) (\d+)", text))
        assert len({*found.values()}) == len(found) == 3
        return found

    shared = run("-n", "2")  # all processes of the run share its seed
    assert {s for s, _ in re.findall(TOLD, shared, re.MULTILINE)} == {*re.findall(r"^seed (\d+)$", shared, re.MULTILINE)}
    first = run("--seed", "fresh")
    (seed,) = re.findall(r"^seed (\d+)$", first, re.MULTILINE)
    assert re.findall(r"^seed (\d+), drawn for this run$", first, re.MULTILINE) == [seed]
    assert re.findall(TOLD, first, re.MULTILINE) == [(seed, "test_it[1]")]
    assert drawn(run("--seed", seed, "-n", "1")) == drawn(first)
    assert drawn(run("--seed", str(int(seed) + 1))) != drawn(first)


def test_a_seed_of_the_project_is_everybodys(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nseed = 7")
    pytester.makepyfile("def test_it(seed):\n    assert not print('drew', seed)")

    def run(*words: str) -> list[tuple[str, str]]:
        done = pytester.runpytest_inprocess("-p", "rammer_testing.seeds", "-p", "no:cacheprovider", "-rA", *words)
        return re.findall(r"^drew (\d+)$|^seed (\d+)$", done.stdout.str(), re.MULTILINE)

    ours = run()
    assert ours[-1] == ("", "7") and ours == run("--seed", "7")
    assert run("--seed", "fresh")[0] != ours[0] != run("--seed", "8")[0]
    refused = pytester.runpytest_inprocess("-p", "rammer_testing.seeds", "--seed", "often")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR and "neither a number nor 'fresh'" in refused.stderr.str()


def test_this_project_has_a_seed(pytestconfig: pytest.Config) -> None:
    """Check that `make test` and the README's commands use the same tests and inputs everywhere."""
    assert int(pytestconfig.getini("seed")) >= 0
    commands = [line for file in ("Makefile", "README.md") for line in (ROOT / file).read_text().splitlines() if "pytest" in line]
    assert not [line for line in some(commands) if "--seed" in line and "$(SEED)" not in line]


@pytest.mark.slow
def test_tests_that_draw_are_chosen_by_the_seed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from hypothesis import given, strategies

        @pytest.mark.parametrize("case", range(6))
        def test_it(case, rng): pass

        @pytest.mark.sampled(1)
        @pytest.mark.parametrize("case", range(2))
        def test_sampled(case): pass

        @given(strategies.integers())
        def test_given(n): pass

        @pytest.mark.parametrize("case", range(9))
        def test_no_numbers(case): pass
        """
    )

    def ran(*words: str) -> list[str]:
        done = pytester.inline_run("-p", "rammer_testing.seeds", "-p", "no:cacheprovider", "-m", "not large", *words)
        return sorted(r.nodeid.split("::")[1] for r in done.listoutcomes()[0])

    every = ran("--seed", "1", "--drawn", "99")
    assert {name.split("[")[0] for name in every} == {"test_it", "test_sampled", "test_given"} and len(every) == 8
    chosen = [ran("--seed", str(seed), "--drawn", "3") for seed in (1, 1, 2, 3, 4)]
    assert chosen[0] == chosen[1] and len({*map(tuple, chosen)}) > 1 and {len(c) for c in chosen} == {3}


def test_a_sample_is_drawn_by_the_seed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        def one(): "Its text has an address, which is another in every run."

        @pytest.mark.sampled(2, of="device")
        @pytest.mark.parametrize("device", [one, "two"])
        @pytest.mark.parametrize("case", [*range(5), pytest.param(5, marks=pytest.mark.large)])
        def test_it(case, device):
            pass

        @pytest.mark.sampled(3)
        @pytest.mark.parametrize("case", range(2))
        def test_few(case):
            pass
        """
    )

    def ran(*words: str) -> list[str]:
        done = pytester.inline_run("-p", "rammer_testing.seeds", "-p", "no:cacheprovider", *words)
        passed, others, failed = done.listoutcomes()
        assert not others and not failed
        return sorted(r.nodeid.split("::")[1] for r in passed)

    drawn = [ran("-m", "not large", "--seed", str(seed)) for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]
    for names in some(drawn):
        assert [sum(n.startswith("test_few") for n in names), len(names)] == [2, 6]
        assert [sum(f"-{device}]" in n for n in names) for device in ("one", "two")] == [2, 2]
    assert len(ran("--seed", "1")) == 14


@pytest.mark.slow
def test_examples_of_hypothesis_are_the_seeds_and_may_be_slow(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import time
        from hypothesis import HealthCheck, given, settings, strategies as st

        drawn = []

        @settings(max_examples=100)
        @given(st.integers())
        def test_it(n):
            time.sleep(0.25 * (not drawn))  # more than hypothesis' own deadline
            drawn.append(n)

        def test_told():
            print("drew", *drawn)
            assert settings().deadline is settings().database is None
            assert settings().suppress_health_check == (HealthCheck.too_slow,)
        """
    )

    def drawn(*words: str) -> str:
        done = pytester.runpytest_subprocess("-p", "rammer_testing.seeds", "-p", "no:cacheprovider", "-rA", *words)
        done.assert_outcomes(passed=2)
        (found,) = re.findall(r"^drew (.*)$", done.stdout.str(), re.MULTILINE)
        return found

    pytester.makepyfile(constants="\n".join(f"a{n} = {n}" for n in range(7001, 7200)))
    loaded = "-p", "constants"  # examples do not depend on the loaded modules
    first, second = drawn("--seed", "1", "-p", "no:xdist"), drawn("--seed", "2", "-n", "1")
    assert first != second == drawn("--seed", "1", "--hypothesis-seed", "2", *loaded)
