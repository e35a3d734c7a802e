"""Conv and ConvTranspose compared with onnx's node tests and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import check_node_case, check_random, node_cases

from rammer_testing.nonempty import some

Config = dict[str, Any]


def _data(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("case", node_cases("Conv", "ConvTranspose"))
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    check_node_case(rng, case)


CONVS: list[tuple[tuple[int, ...], tuple[int, ...], Config]] = [
    ((2, 6, 9, 11), (8, 6, 1, 1), {}),
    ((2, 6, 9, 11), (8, 6, 3, 3), {"pads": [1, 0, 2, 1], "strides": [2, 1]}),
    ((1, 6, 9, 11), (6, 1, 3, 3), {"group": 6, "pads": [1, 1, 1, 1]}),
    ((1, 6, 9, 11), (12, 1, 3, 3), {"group": 6, "strides": [2, 2]}),
    ((1, 6, 9, 11), (4, 3, 3, 2), {"group": 2, "dilations": [2, 3]}),
    ((2, 4, 17), (5, 4, 3), {"pads": [2, 1], "dilations": [2]}),
    ((1, 2, 5, 6, 7), (3, 2, 2, 3, 3), {"pads": [0, 1, 1, 1, 1, 1], "strides": [1, 2, 1]}),
    ((1, 3, 10, 7), (4, 3, 3, 4), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((1, 3, 10, 7), (4, 3, 3, 4), {"auto_pad": "SAME_LOWER", "strides": [3, 1]}),
    ((1, 3, 10, 7), (4, 3, 3, 4), {"auto_pad": "VALID"}),
    ((1, 1, 4, 4), (3, 1, 1, 1), {}),
    ((1, 2, 9, 5), (3, 2, 3, 3), {"dilations": [12, 4], "pads": [12, 4, 12, 4]}),
    ((1, 2, 9, 5), (3, 2, 3, 5), {"dilations": [4, 3], "pads": [9, 12, 3, 6], "strides": [2, 3]}),
    ((1, 2, 3, 3), (3, 2, 2, 2), {"dilations": [7, 1], "pads": [3, 1, 7, 0]}),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("x", "w", "config"), CONVS)
def test_conv(x: tuple[int, ...], w: tuple[int, ...], config: Config, bias: bool, rng: np.random.Generator) -> None:
    inputs = {"x": _data(rng, *x), "w": _data(rng, *w)} | ({"b": _data(rng, w[0])} if bias else {})
    graph = check_random("Conv", inputs, **config)
    kinds = [c.kind for c in graph.computes]
    product = "contraction" if w[1:] != (1,) * len(w[1:]) else "map"
    assert kinds == [product] + (["map"] if bias else [])


@pytest.mark.parametrize(("dilation", "taps"), [(1, 3), (12, 3), (27, 3), (28, 1), (36, 1)])
def test_taps_that_meet_only_padding_are_no_work(dilation: int, taps: int, rng: np.random.Generator) -> None:
    """Check DeepLab's widest dilations over a small image. Multiplying the zeros outside would cost nine times the work of one
    tap."""
    inputs = {"x": _data(rng, 1, 2, 28, 29), "w": _data(rng, 2, 2, 3, 3)}
    graph = check_random("Conv", inputs, dilations=[dilation, 28], pads=[dilation, 28] * 2)
    product = graph.computes[0]
    assert [r.extent for r in product.reduce if r.name != "c"] == [n for n in (taps, 3) if n > 1]


TRANSPOSED: list[tuple[tuple[int, ...], tuple[int, ...], Config]] = [
    ((2, 6, 5, 4), (6, 3, 2, 2), {"strides": [2, 2]}),
    ((1, 6, 5, 4), (6, 3, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    ((1, 6, 5, 4), (6, 3, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((1, 6, 5, 4), (6, 3, 3, 5), {"strides": [3, 2], "pads": [0, 2, 1, 0]}),
    ((1, 6, 5, 4), (6, 3, 3, 3), {}),
    ((1, 6, 5, 4), (6, 3, 3, 3), {"dilations": [2, 2], "strides": [2, 1]}),
    ((1, 6, 5, 4), (6, 2, 3, 3), {"group": 3, "strides": [2, 2]}),
    ((1, 6, 5, 4), (6, 1, 4, 4), {"group": 6, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((1, 6, 5, 4), (6, 3, 2, 2), {"strides": [3, 3]}),
    ((1, 6, 5, 4), (6, 3, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((1, 6, 5, 4), (6, 3, 3, 3), {"strides": [2, 2], "output_shape": [10, 8]}),
    ((2, 3, 7), (3, 2, 5), {"strides": [3], "pads": [2, 1]}),
    ((1, 2, 3, 4, 3), (2, 3, 2, 3, 2), {"strides": [2, 1, 2]}),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("x", "w", "config"), TRANSPOSED)
def test_conv_transpose(x: tuple[int, ...], w: tuple[int, ...], config: Config, bias: bool, rng: np.random.Generator) -> None:
    features = w[1] * config.get("group", 1)
    inputs = {"x": _data(rng, *x), "w": _data(rng, *w)} | ({"b": _data(rng, features)} if bias else {})
    graph = check_random("ConvTranspose", inputs, **config)
    assert sum(c.kind == "contraction" for c in graph.computes) == 1


def test_stride_phases_do_not_multiply_by_zero(rng: np.random.Generator) -> None:
    """Check a kernel equal to the stride, the usual upsampling: one tap per output pixel."""
    graph = check_random("ConvTranspose", {"x": _data(rng, 1, 8, 6, 6), "w": _data(rng, 8, 4, 2, 2)}, strides=[2, 2])
    contraction = next(c for c in graph.computes if c.kind == "contraction")
    assert contraction.points == 4 * 12 * 12 * 8
    assert all(load.fill is None for load in some(contraction.loads))
