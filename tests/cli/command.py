"""What the tests of the command line share: a model, and what a command left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rammer.testing.small_models import SmallModel

MODEL = SmallModel("little", """(float[1,3,8,8] x, int64[2] i, float[4,3,3,3] w_k, float[4] w_b)
    => (float[1,4,6,6] y, float[1,2,6,6] z) {
    c = Conv(x, w_k, w_b)
    y = Relu(c)
    z = Gather<axis=1>(y, i)
}""", below=4)


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


Command = Callable[..., Done]
