"""Tables larger than a tile's memory, read at data-dependent indices."""

from __future__ import annotations

import numpy as np
import pytest

import rammer
from rammer_testing.small_models import SmallModel
from rammer_testing.weights import runner

#: Models by name, and the ranges of their indices.
CASES = {
    "rows": ("(float[1500,6] t, int64[2,5] at) => (float[2,5,6] y) { y = Gather(t, at) }", 1500),
    "columns": ("(float[6,1501] t, int32[5] at) => (float[6,5] y) { y = Gather<axis=1>(t, at) }", 1501),
    "elements": ("(float[1500,4] t, int64[3,4] at) => (float[3,4] y) { y = GatherElements<axis=0>(t, at) }", 1500),
    "points": ("(float[40,50] t, int64[7,2] at) => (float[7] y) { y = GatherND(t, at) }", 40),
    "codes": ("(uint8[9000,3] t, int64[5] at) => (uint8[5,3] y) { y = Gather(t, at) }", 9000),
    "summed": (
        "(float[1500,6] t, int64[5,9] at) => (float[5,6] y) <int64[1] along = {1}> "
        "{ v = Gather(t, at) y = ReduceSum<keepdims=0>(v, along) }",
        1500,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_table_larger_than_a_tile_is_read_in_pieces(name: str, rng: np.random.Generator) -> None:
    text, count = CASES[name]
    model, feeds = SmallModel(name, text).build(rng), dict[str, np.ndarray]()
    for port in model.graph.input:
        shape = tuple(d.dim_value for d in port.type.tensor_type.shape.dim)
        kind = {1: np.float32, 2: np.uint8, 6: np.int32, 7: np.int64}[port.type.tensor_type.elem_type]
        low, high = (-count, count) if port.name == "at" else (0, 250)
        feeds[port.name] = rng.integers(low, high, shape).astype(kind)
    exe = rammer.compile(model, device="ipu_sim", options={"tiles": "16", "sram": "8192"})
    found = exe.run(feeds)["y"]
    exe.close()
    np.testing.assert_array_equal(found, runner(model)(feeds)["y"])
