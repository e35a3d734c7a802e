"""GridSample, AffineGrid and DeformConv compared with onnx's node tests, ONNX Runtime and plain loops in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from harness import check_node_case, check_random, lower_model, node_cases, node_model, ort_outputs, run_node_model

from rammer.errors import BadInput
from rammer_testing.nonempty import some


@pytest.mark.parametrize("case", node_cases("GridSample", "DeformConv"))
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    try:
        check_node_case(rng, case)
    except pytest.skip.Exception as reason:
        pytest.fail(f"every one has tensor expressions: {reason}")


@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_grid_sample(mode: str, padding: str, aligned: int, rng: np.random.Generator) -> None:
    for rank in some([2, 3] if mode != "cubic" else [2]):
        shape = (int(rng.integers(1, 3)), int(rng.integers(1, 4)), *(int(n) for n in rng.integers(1, 7, rank)))
        x = rng.standard_normal(shape).astype(np.float32)
        grid = rng.uniform(-2.5, 2.5, (shape[0], *(int(n) for n in rng.integers(1, 5, rank)), rank)).astype(np.float32)
        given = {"mode": mode, "padding_mode": padding, "align_corners": aligned}
        check_random("GridSample", {"x": x, "grid": grid}, rtol=1e-4, atol=2e-5, **given)


@pytest.mark.slow
@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("count", [2, 3])
def test_affine_grids_of_every_small_extent(count: int, aligned: int, rng: np.random.Generator) -> None:
    """Check that extents of 1 do not divide by zero, and that a batch of 1 keeps its axis."""
    for batch, *extents in some(itertools.product((1, 2), *[(1, 3)] * count)):
        theta = rng.standard_normal((batch, count, count + 1)).astype(np.float32)
        check_random("AffineGrid", {"theta": theta, "size": np.array([batch, 2, *extents])}, align_corners=aligned)


@pytest.mark.parametrize(
    ("theta", "size", "says"),
    [
        ((2, 2, 3), [2, 1, 3], "size has 3 elements, where"),
        ((2, 2, 3), [2, 1, 3, 3, 3], "theta has the shape [2, 2, 3], where size needs [2, 3, 4]"),
        ((1, 2, 3), [2, 1, 3, 3], "theta has the shape [1, 2, 3], where size needs [2, 2, 3]"),
        ((2, 2, 3), [2, 1, -3, 3], "a tensor has the negative extent -3"),
    ],
)
def test_bad_sizes_of_an_affine_grid_are_bad_input(theta: tuple[int, ...], size: list[int], says: str) -> None:
    inputs = {"theta": np.zeros(theta, np.float32), "size": np.array(size)}
    with pytest.raises(BadInput) as caught:
        lower_model(node_model("AffineGrid", inputs), inputs)
    assert says in str(caught.value)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_places_far_away_read_no_other_memory(padding: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, 1, 4, 4)).astype(np.float32)
    grid = np.array([1e9, -1e9, 3e38, 0.1, np.inf, -np.inf, np.nan, 0], np.float32).reshape(1, 2, 2, 2)
    for mode in some(["linear", "nearest", "cubic"]):
        inputs = {"x": x, "grid": grid}
        (y,) = run_node_model(node_model("GridSample", inputs, mode=mode, padding_mode=padding), inputs)
        if padding == "zeros":
            np.testing.assert_array_equal(y[0, 0, 0], 0)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types_are_computed_widely_enough(dtype: str, rng: np.random.Generator) -> None:
    x, grid = rng.standard_normal((2, 2, 5, 5)).astype(dtype), rng.uniform(-1, 1, (2, 3, 3, 2)).astype(np.float32)
    for mode in some(["linear", "cubic"]):
        model = node_model("GridSample", {"x": x, "grid": grid}, mode=mode)
        wide = {"x": x.astype(np.float32), "grid": grid}
        wanted = ort_outputs(node_model("GridSample", wide, mode=mode), wide)
        assert wanted is not None
        np.testing.assert_allclose(run_node_model(model, {"x": x, "grid": grid})[0], wanted[0], rtol=2e-3, atol=2e-3)


def _convolved(arrays: list[np.ndarray], group: int, given: dict[str, Any]) -> np.ndarray:
    """Return ONNX's definition, computed by loops in float64."""
    x, w, offset, mask = arrays
    n, channels, height, width = x.shape
    features, per_group, kh, kw = w.shape
    groups = mask.shape[1] // (kh * kw)
    strides, dilations, pads = given["strides"], given["dilations"], given["pads"]
    y = np.zeros((n, features, *offset.shape[2:]))
    padded = np.zeros((n, channels, height + 2, width + 2))
    padded[:, :, 1:-1, 1:-1] = x
    for b, m, i, j in np.ndindex(*y.shape):
        for c, (a, k) in itertools.product(range(per_group), np.ndindex(kh, kw)):
            channel = m // (features // group) * per_group + c
            tap = channel // (channels // groups) * kh * kw + a * kw + k
            top = i * strides[0] - pads[0] + a * dilations[0] + offset[b, 2 * tap, i, j]
            left = j * strides[1] - pads[1] + k * dilations[1] + offset[b, 2 * tap + 1, i, j]
            if -1 < top < height and -1 < left < width:
                p, q = int(np.floor(top)), int(np.floor(left))
                s, t = top - p, left - q
                near = padded[b, channel, p + 1 : p + 3, q + 1 : q + 3]
                read = np.array([1 - s, s]) @ near @ np.array([1 - t, t])
                y[b, m, i, j] += w[m, c, a, k] * mask[b, tap, i, j] * read
    return y


@pytest.mark.parametrize(("group", "offsets"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_deform_conv(group: int, offsets: int, rng: np.random.Generator) -> None:
    given = {
        "strides": [int(n) for n in rng.integers(1, 3, 2)],
        "dilations": [int(n) for n in rng.integers(1, 3, 2)],
        "pads": [int(n) for n in rng.integers(0, 3, 4)],
    }
    kernel, extents = [int(n) for n in rng.integers(1, 4, 2)], [int(n) for n in rng.integers(6, 9, 2)]
    outs = [
        (n + given["pads"][d] + given["pads"][2 + d] - (k - 1) * given["dilations"][d] - 1) // given["strides"][d] + 1
        for d, (n, k) in enumerate(zip(extents, kernel, strict=True))
    ]
    taps = kernel[0] * kernel[1]
    inputs = {
        "x": rng.standard_normal((2, 4, *extents)).astype(np.float32),
        "w": rng.standard_normal((4, 4 // group, *kernel)).astype(np.float32),
        "offset": rng.uniform(-3, 3, (2, offsets * taps * 2, *outs)).astype(np.float32),
        "bias": rng.standard_normal(4).astype(np.float32),
        "mask": rng.uniform(0, 1, (2, offsets * taps, *outs)).astype(np.float32),
    }
    graph = check_random("DeformConv", inputs, opset=19, rtol=1e-3, atol=1e-4, group=group, offset_group=offsets, **given)
    assert any(c.kind == "contraction" for c in graph.computes)
    arrays = [inputs[n].astype(np.float64) for n in ("x", "w", "offset", "mask")]
    model = node_model("DeformConv", inputs, opset=19, group=group, offset_group=offsets, **given)
    wanted = _convolved(arrays, group, given) + inputs["bias"].reshape(1, -1, 1, 1)
    np.testing.assert_allclose(run_node_model(model, inputs)[0], wanted, rtol=1e-3, atol=1e-4)
