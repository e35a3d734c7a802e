"""Line budgets: assignment of files to parts, and exceeded budgets."""

from __future__ import annotations

from pathlib import Path

import pytest
from line_budget import count_lines, distribution_of, exceeded_budgets, runtime_packages


def test_lines_are_counted_outside_of_built_folders(tmp_path: Path) -> None:
    for name in ("core/a.py", "core/build/a.py", ".venv/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\ny = 2\n")
    assert count_lines(tmp_path) == {"core/a.py": 2}


@pytest.mark.parametrize(("most", "over"), [(5, []), (4, ["tests has 5 lines of Python, its budget is 4"])])
def test_a_part_above_its_budget_is_named(most: int, over: list[str]) -> None:
    core = {"core/rammer/x.py": 1, "core/rammer/ir/constants/z.py": 4, "core/rammer/distributed/y.py": 2}
    budgets = {
        "core/rammer": 7,
        "rammer-runtime": 5,
        "rammer-core": 2,
        "core/rammer/distributed": 2,
        "tests": most,
        "tests/kit": 7,
    }
    rows, found = exceeded_budgets({**core, "tests/a.py": 5, "tests/kit/b.py": 7}, budgets, ["rammer", "rammer.ir*"])
    assert {part: have for part, have, _ in rows} == {**budgets, "tests": 5}
    assert found == over


def test_the_packages_of_the_runtime_are_those_of_its_distribution() -> None:
    patterns = runtime_packages()
    assert distribution_of("core/rammer/runtime/executable.py", patterns) == "rammer-runtime"
    assert distribution_of("core/rammer/ir/constants/recipes.py", patterns) == "rammer-runtime"
    assert distribution_of("core/rammer/errors.py", patterns) == "rammer-runtime"
    assert distribution_of("core/rammer/compiler/compiler.py", patterns) == "rammer-core"
