"""Resize compared with onnx's node tests and ONNX Runtime."""

from __future__ import annotations

import math
import tracemalloc
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from harness import (
    check_node_case,
    check_random,
    compare,
    lower_model,
    node_cases,
    node_model,
    onnx_outputs,
    ort_outputs,
    run_node_model,
)

from rammer.errors import BadInput
from rammer.frontend.lower.resize_coordinates import Resampling
from rammer.ir import expr as ex
from rammer_testing.nonempty import some

MODES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")


def _data(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


#: Node tests that divide by a fractional length, where PyTorch and ONNX Runtime divide by the integer length.
FRACTIONAL = ("test_resize_downsample_scales_linear_align_corners", "test_resize_downsample_scales_cubic_align_corners")


@pytest.mark.parametrize("case", node_cases("Resize", "Upsample", "DepthToSpace", "SpaceToDepth"))
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    if case.name not in FRACTIONAL:
        check_node_case(rng, case, onnx_outputs)
        return
    inputs = {v.name: a for v, a in zip(case.model.graph.input, case.data_sets[0][0], strict=True)}
    expected = ort_outputs(case.model, inputs)
    assert expected is not None
    compare(run_node_model(case.model, inputs), expected, case.rtol, case.atol)
    with pytest.raises(AssertionError):
        compare(expected, case.data_sets[0][1], case.rtol, case.atol)


def _inputs(x: np.ndarray, **given: list[float] | list[int]) -> dict[str, np.ndarray]:
    result = {"x": x, "roi": np.zeros(0, np.float32)}
    result["scales"] = np.asarray(given.get("scales", []), np.float32)
    return result | ({"sizes": np.asarray(given["sizes"], np.int64)} if "sizes" in given else {})


def _check(inputs: dict[str, np.ndarray], **attributes: Any) -> None:
    """Compare with ONNX Runtime, or with the reference where ONNX Runtime lacks ``exclude_outside`` (all but cubic)."""
    if attributes["mode"] == "cubic" or not attributes.get("exclude_outside"):
        check_random("Resize", inputs, **attributes)
        return
    model = node_model("Resize", inputs, **attributes)
    expected = onnx_outputs(model, inputs)
    for precise in (False, True):
        compare(run_node_model(model, inputs, precise), expected, 1e-4, 1e-5)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("transformation", MODES)
@pytest.mark.parametrize("scales", [[1, 1, 2, 3], [1, 1, 0.5, 0.6], [1, 1, 1.7, 0.4]])
def test_scales(mode: str, transformation: str, scales: list[float], rng: np.random.Generator) -> None:
    _check(_inputs(_data(rng, 1, 2, 7, 8), scales=scales), mode=mode, coordinate_transformation_mode=transformation)


@pytest.mark.parametrize("scale", [0.3, 0.6, 0.75, 1.7, 2.3, 3.0])
@pytest.mark.parametrize("length", [1, 4, 9])
def test_align_corners_keeps_both_ends(length: int, scale: float, rng: np.random.Generator) -> None:
    """Check PyTorch's formula: position i of m maps to i * (n - 1) / (m - 1). A single position maps to 0."""
    out = int(length * np.float32(scale))
    x = _data(rng, 1, 1, length)
    if not out:
        return
    places = np.arange(out) * (length - 1) / max(out - 1, 1)
    below = np.minimum(places.astype(np.int64), max(length - 2, 0))
    part = places - below
    want = x[0, 0, below] * (1 - part) + x[0, 0, np.minimum(below + 1, length - 1)] * part
    model = node_model(
        "Resize", given := _inputs(x, scales=[1, 1, scale]), mode="linear", coordinate_transformation_mode="align_corners"
    )
    compare(run_node_model(model, given), [want[None, None].astype(np.float32)], 1e-5, 1e-6)


@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("scales", [[1, 1, 2, 2], [1, 1, 0.5, 1.5], [1, 1, 0.6, 1.3], [1, 1, 0.7, 2.7]])
def test_nearest_modes(rounding: str, scales: list[float], rng: np.random.Generator) -> None:
    _check(_inputs(_data(rng, 1, 1, 6, 6), scales=scales), mode="nearest", nearest_mode=rounding)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("antialias", [0, 1])
@pytest.mark.parametrize("exclude", [0, 1])
def test_antialias_and_exclusion(mode: str, antialias: int, exclude: int, rng: np.random.Generator) -> None:
    _check(_inputs(_data(rng, 1, 1, 9, 8), scales=[1, 1, 0.4, 0.7]), mode=mode, antialias=antialias, exclude_outside=exclude)


@pytest.mark.parametrize(("shape", "sizes"), [((1, 2, 7), [1, 2, 12]), ((1, 1, 3, 4, 5), [1, 1, 6, 5, 9])])
def test_one_and_three_dimensions(shape: tuple[int, ...], sizes: list[int], rng: np.random.Generator) -> None:
    inputs = _inputs(_data(rng, *shape), sizes=sizes)
    model = node_model("Resize", inputs, mode="linear")
    reference = node_model("Resize", inputs, mode="linear")
    reference.graph.node[0].input[2] = ""
    del reference.graph.input[2]
    expected = onnx_outputs(reference, {n: a for n, a in inputs.items() if n != "scales"})
    compare(run_node_model(model, inputs), expected, 1e-4, 1e-5)


def test_doubling_nearest_divides_the_index(rng: np.random.Generator) -> None:
    """Check that the common upsampling needs no table, so tiles propagate through it exactly."""
    inputs = _inputs(_data(rng, 1, 2, 4, 4), scales=[1, 1, 2, 2])
    graph = lower_model(node_model("Resize", inputs, mode="nearest"), inputs)
    assert not any(isinstance(e, ex.Table) for c in some(graph.computes) for e in ex.walk(c.body))
    _check(inputs, mode="nearest")


def test_linear_is_one_map(rng: np.random.Generator) -> None:
    inputs = _inputs(_data(rng, 1, 2, 4, 4), scales=[1, 1, 2, 2])
    assert [c.kind for c in lower_model(node_model("Resize", inputs, mode="linear"), inputs).computes] == ["map"]


def test_bytes_resize_linearly(rng: np.random.Generator) -> None:
    x = rng.integers(0, 255, (1, 1, 4, 4)).astype(np.uint8)
    inputs = _inputs(x, scales=[1, 1, 2, 2])
    check_random("Resize", inputs, rtol=0, atol=0, mode="linear")


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
@pytest.mark.parametrize("block", [2, 3])
def test_depth_to_space(mode: str, block: int, rng: np.random.Generator) -> None:
    check_random("DepthToSpace", {"x": _data(rng, 2, 4 * block * block, 3, 5)}, blocksize=block, mode=mode)


@pytest.mark.parametrize("block", [2, 3])
def test_space_to_depth(block: int, rng: np.random.Generator) -> None:
    check_random("SpaceToDepth", {"x": _data(rng, 2, 4, 3 * block, 2 * block)}, blocksize=block)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("antialias", [0, 1])
def test_corners_do_not_multiply_with_every_dimension(mode: str, antialias: int, rng: np.random.Generator) -> None:
    # 16 dimensions have 65,536 corners; sequential passes are 16 short sums.
    inputs = _inputs(_data(rng, *[2] * 4, *[1] * 12), scales=[1.5] * 4 + [2.0] * 12)
    graph = lower_model(node_model("Resize", inputs, mode=mode, antialias=antialias), inputs)
    assert len(graph.computes) <= 17 and sum(ex.count_flops(c.body) for c in graph.computes) < 200


def test_five_dimensions_interpolate_as_the_reference_does(rng: np.random.Generator) -> None:
    _check(_inputs(_data(rng, 2, 3, 4, 3, 2), scales=[1.5, 2, 0.75, 1, 1.5]), mode="linear", exclude_outside=1)


@pytest.mark.parametrize(
    ("shape", "given", "says"),
    [
        ((1, 2, 4, 6), {"scales": [1, 1, 0, 2]}, "the scales of Resize are 1, 1, 0, 2, where numbers above 0 are needed"),
        ((1, 2, 4, 6), {"scales": [1, 1, -1, 2]}, "the scales of Resize are 1, 1, -1, 2, where numbers above 0 are needed"),
        ((1, 2, 4, 6), {"scales": [1, 1, np.nan, 2]}, "the scales of Resize are 1, 1, nan, 2, where"),
        ((1, 2, 4, 6), {"scales": [1, 1, np.inf, 2]}, "the scales of Resize are 1, 1, inf, 2, where"),
        ((1, 2, 4, 6), {"sizes": [1, 2, 0, 6]}, "input 3 of Resize is 0, where 1 to"),
        ((1, 2, 0, 6), {"sizes": [1, 2, 4, 6]}, "Resize of a tensor of [1, 2, 0, 6], which has no elements, to [1, 2, 4, 6]"),
        ((1, 2, 4, 6), {"scales": [1, 1, 2, 2], "roi": [0, 0, 1, 1]}, "Resize of 4 axes has a roi of 4 elements"),
    ],
)
def test_bad_sizes_are_bad_input(
    shape: tuple[int, ...], given: dict[str, list[float]], says: str, rng: np.random.Generator
) -> None:
    roi = given.get("roi", [])
    inputs = _inputs(_data(rng, *shape), **{k: v for k, v in given.items() if k != "roi"}) | {"roi": np.asarray(roi, np.float32)}
    if "sizes" in given:
        inputs["scales"] = np.zeros(0, np.float32)
    with pytest.raises(BadInput) as caught:
        lower_model(node_model("Resize", inputs, coordinate_transformation_mode="tf_crop_and_resize"), inputs)
    assert str(caught.value).startswith(says)


def test_tables_that_would_be_huge_are_refused_before_they_are_made() -> None:
    x = np.zeros((1, 1, 1, 1 << 24), np.float32)
    inputs = _inputs(x, scales=[1, 1, 1, 1 / 4096])
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match="only 262144 can be listed"):
            lower_model(node_model("Resize", inputs, mode="cubic", antialias=1), inputs)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_half_pixels_of_tensorflow(rng: np.random.Generator) -> None:
    inputs = _inputs(_data(rng, 1, 2, 5, 3), scales=[1, 1, 1.5, 2.0])
    check_random("Resize", inputs, opset=11, mode="nearest", coordinate_transformation_mode="tf_half_pixel_for_nn")


@pytest.mark.parametrize("length", range(5, 17))
@pytest.mark.parametrize("mode", ["half_pixel_symmetric", "half_pixel", "asymmetric"])
def test_coordinates_that_cancel_are_zero(mode: str, length: int) -> None:
    """Check against fractions: 1/6 + 1/3 - 1/2 must be 0, since ``ceil`` of 6e-17 is 1."""
    out, scale = length * 3 // 2, Fraction(3, 2)
    got = Resampling(length, out, 1.5)
    offset = Fraction(length, 2) * (1 - out / (scale * length)) if mode == "half_pixel_symmetric" else Fraction(0)
    half = Fraction(0) if mode == "asymmetric" else Fraction(1, 2)
    exact = [offset + (y + half) / scale - half for y in range(out)]
    want = [min(max(math.ceil(x), 0), length - 1) for x in exact]
    assert got.nearest(got.coordinates(mode), "ceil").tolist() == want
