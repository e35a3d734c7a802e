"""The small model of the tests of precisions."""

from __future__ import annotations

from rammer_testing.small_models import SmallModel

LITTLE = SmallModel(
    "little",
    """(float[1,3,8,8] x, int64[2] i, float[4,3,3,3] w_k, float[4] w_b)
    => (float[1,4,6,6] y, float[1,2,6,6] z, float[1,4,6,6] s) {
    c = Conv(x, w_k, w_b)
    y = Relu(c)
    z = Gather<axis=1>(y, i)
    s = Softmax<axis=-1>(c)
}""",
    below=4,
)
