"""Print the Python lines of each package and fail if a part exceeds its budget (budget.toml)."""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).parents[1]
#: Folders without source files of the project.
SKIPPED = {".venv", "build", "_build", "dist"}


def count_lines(root: Path) -> dict[str, int]:
    """Return the lines of each Python file below ``root``, by relative path."""
    files = (f for f in sorted(root.rglob("*.py")) if not SKIPPED & {*f.relative_to(root).parts})
    return {f.relative_to(root).as_posix(): f.read_text().count("\n") for f in files}


def runtime_packages() -> list[str]:
    """Return the patterns of the packages of rammer-runtime; all others of the core are those of rammer-core."""
    project = tomllib.loads((ROOT / "core/pyproject.toml").read_text())
    return list(project["tool"]["setuptools"]["packages"]["find"]["include"])


def distribution_of(file: str, runtime: Sequence[str]) -> str:
    """Return the distribution of a file of the core, by the patterns of the runtime's packages."""
    package = ".".join(Path(file).parent.parts[1:])
    return "rammer-runtime" if any(fnmatchcase(package, pattern) for pattern in runtime) else "rammer-core"


def exceeded_budgets(
    lines: Mapping[str, int], budgets: Mapping[str, int], runtime: Sequence[str]
) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Return each part with its lines and its budget, and a message for every exceeded budget. A file counts for the innermost
    part only. A file of the core counts for the core, for its distribution and for a part inside the core."""
    spent = Counter[str]()
    for file, count in lines.items():
        parts = sorted((p for p in budgets if file.startswith(f"{p}/")), key=len)
        if parts[:1] == ["core/rammer"]:
            spent.update(dict.fromkeys([*parts, distribution_of(file, runtime)], count))
        else:
            spent.update(dict.fromkeys(parts[-1:], count))
    rows = [(part, spent[part], most) for part, most in budgets.items()]
    over = [f"{part} has {have} lines of Python, its budget is {most}" for part, have, most in rows if have > most]
    return rows, over


def main() -> None:
    """Print the table; exit with 1 and a message for each exceeded budget."""
    budgets = tomllib.loads((ROOT / "budget.toml").read_text())["lines"]
    lines = count_lines(ROOT)
    packages = Counter[str]()
    for file, count in lines.items():
        if file.startswith("core/rammer/"):
            packages["/".join(file.split("/")[:3]) if file.count("/") > 2 else "core/rammer/*.py"] += count
    rows, over = exceeded_budgets(lines, budgets, runtime_packages())
    print(tabulate([*rows, *((p, n, None) for p, n in sorted(packages.items()))], ["part", "lines", "budget"]))
    if over:
        sys.exit("\n".join(over) + "\nDelete lines, or raise budget.toml and say why in the commit.")


if __name__ == "__main__":
    main()
