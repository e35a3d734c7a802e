"""Reductions of several types over the same elements, which share a loop if both are vectorised."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

import rammer

#: The last update (a maximum of int64) and the added updates (a sum of floats) reduce over the same elements.
MODEL = """<ir_version: 9, opset_import: ["" : 21]> shared (TYPE[4,24] x, int64[4,3] at, TYPE[4,3] u)
    => (TYPE[4,24] y, TYPE[4,24] z) {
    y = ScatterElements<axis=1>(x, at, u)
    z = ScatterElements<axis=1, reduction="add">(x, at, u)
}"""


@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
@pytest.mark.parametrize("kind", ["float", "int32", "uint8", "int64", "double"])
def test_types_of_reductions_that_share_a_loop(device: str, kind: str, rng: np.random.Generator) -> None:
    dtype = {"float": "float32", "double": "float64"}.get(kind, kind)
    exe = rammer.compile(parser.parse_model(MODEL.replace("TYPE", kind)), device)
    at = np.stack([rng.permutation(24)[:3] for _ in range(4)])
    x, u = (rng.integers(0, 50, shape).astype(dtype) for shape in ((4, 24), (4, 3)))
    have = exe.run({"x": x, "at": at - 24 * (rng.random(at.shape) < 0.5), "u": u})
    exe.close()
    replaced, added = x.copy(), x.copy()
    np.put_along_axis(replaced, at, u, 1)
    np.put_along_axis(added, at, u + np.take_along_axis(x, at, 1), 1)
    np.testing.assert_array_equal(have["y"], replaced)
    np.testing.assert_array_equal(have["z"], added)
