"""Single operators over their attribute spaces: rammer, ONNX Runtime and onnx.reference agree unless a decision is recorded.
``python -m rammer_testing.operators OPERATOR --seconds 60 --seed 5`` searches further."""

from __future__ import annotations

import pytest

from rammer_testing.operators import DESCRIBED, drawn
from rammer_testing.operators.oracles import judge

#: Cases per operator, and the seed from which they are drawn.
COUNT, SEED = 3, 1
#: Operators that rammer may refuse: types of old opsets, or uses without a verified host implementation.
MAY_REFUSE = frozenset({"Erf", "MaxRoiPool", "GridSample"})


@pytest.mark.sampled(60)
@pytest.mark.parametrize("op", sorted(DESCRIBED))
def test_voices_agree(op: str) -> None:
    for number in range(COUNT):
        verdict = judge(drawn(op, SEED, number))
        allowed = {"ok", "alone", "runtime", "reference"} | ({"refused"} if op in MAY_REFUSE else set())
        assert verdict.kind in allowed, f"{verdict.kind} #{number}: {verdict.case}: {verdict.text}"
