"""The order of choices on random families, against a plain specification."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rammer.codegen.family_backend import LEADING, NEAR, Queue, leaders_first
from rammer.codegen.kernel_family import Choice
from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Const
from rammer.ir.operator import ROperator

SEED = 20_261_122


def plainly(groups: list[list[Choice]], refused: set[str], most: list[int]) -> list[str]:
    """Return the expected order, computed with full knowledge of which choices fit."""
    fitting = [[c for c in g if c.operator.name not in refused][:n] for g, n in zip(groups, most, strict=True)]
    ranked = sorted((c for g in fitting for c in g), key=lambda c: c.seconds)
    best: dict[str, Choice] = {}
    for c in ranked:
        if c.seconds <= LEADING * ranked[0].seconds + NEAR:
            best.setdefault(c.operator.family, c)
    leaders = {c.operator.name for c in best.values()}
    return [c.operator.name for c in sorted(ranked, key=lambda c: (c.operator.name not in leaders, c.seconds))]


@pytest.mark.parametrize("seed", range(SEED, SEED + 60))
def test_leaders_come_first_and_refused_ones_count_for_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    point = Compute("y", "float32", (Axis("i", 4),), Const(0.0, "float32"))
    groups, refused, written = list[list[Choice]](), set[str](), list[str]()
    for g in range(int(rng.integers(1, 5))):
        seconds = np.sort(rng.choice(400, int(rng.integers(0, 30)), replace=False) + 400 * 0.001 * (g + 1)) * 1e-7
        mine = [
            Choice(float(s), ROperator(f"g{g}n{n}", (point,), (), ("y",), family=f"f{g}_{rng.integers(1, 4)}"))
            for n, s in enumerate(seconds)
        ]
        groups.append(mine)
        refused |= {c.operator.name for c in mine if seed % 2 and rng.random() < 0.3}
    most = [int(rng.integers(1, 8)) for _ in groups]

    def possible(operator: ROperator) -> bool:
        written.append(operator.name)
        return operator.name not in refused

    def offered(count: int) -> list[str]:
        queues = [Queue(iter(g), possible, n) for g, n in zip(groups, most, strict=True)]
        found: Iterator[Choice] = leaders_first(queues)
        return [c.operator.name for _, c in zip(range(count), found, strict=False)]

    whole = offered(1000)
    assert len(written) == len(set(written)), "nothing is written twice"
    want = plainly(groups, refused, most)
    assert sorted(whole) == sorted(want)
    assert refused or whole == want, "a family's best behind many refused ones may come later"
    written.clear()
    first = offered(1)
    assert first == whole[:1] and len(written) <= len(refused) + 1, "one that fits, and what was refused before it"
