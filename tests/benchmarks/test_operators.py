"""The search over single operators: drawn cases and rows of its table."""

from __future__ import annotations

import numpy as np
import pytest
from operator_space import KINDS, drawn
from operators import WRONG, How, line, measured

from rammer.device.loader import Registry
from rammer.errors import RammerError
from rammer_testing.nonempty import some


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_is_drawn_again_by_its_number(kind: str, seed: int) -> None:
    case = drawn(kind, seed, 3)
    assert case.model.SerializeToString() == drawn(kind, seed, 3).model.SerializeToString()
    assert some(case.model.graph.node) and some(case.model.graph.input)


def test_a_row_has_both_times_and_the_kernels(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        Registry().open("rocm", require="cpu")
    except RammerError as problem:
        pytest.skip(str(problem))
    monkeypatch.setattr("operators.BURST", 1e-3)
    monkeypatch.setattr("operators.BURSTS", 1)
    row = measured(drawn("pool", seed, 0), "pool", How("rocm", 1, False, False, 0.0, {}))
    assert row.error < WRONG and min(row.ours, row.theirs, row.floor, row.compile) > 0
    assert np.isclose(float(line(row)[0]), row.ratio, atol=0.01)
    assert row.kernels.startswith(("generic[", "image["))
