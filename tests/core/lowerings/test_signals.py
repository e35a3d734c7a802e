"""DFT, STFT, Col2Im, MaxUnpool, Det, RoiAlign, LinearAttention and training operators. They are compared with onnx's node tests
and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import STATIC_INPUTS, check_node_case, check_random, lower_model, node_cases, node_model, run_node_model

from rammer.frontend.lower.lowering_registry import CannotLower
from rammer.frontend.lower.operators import adjoint, determinant, fourier
from rammer_testing.nonempty import some

OPS = ("STFT", "Col2Im", "MaxUnpool", "Det", "RoiAlign", "LinearAttention", "Adagrad", "Adam", "Momentum")


@pytest.mark.parametrize("case", node_cases(*OPS))
def test_node_case(case: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    for op, places in (("STFT", (1, 3)), ("Col2Im", (1, 2)), ("MaxUnpool", (2,))):
        monkeypatch.setitem(STATIC_INPUTS, op, places)
    if case.name == "test_maxunpool_export_with_output_shape":
        pytest.skip("ONNX infers no shape for it")
    try:
        check_node_case(rng, case)
    except pytest.skip.Exception as reason:
        pytest.fail(f"every one has tensor expressions: {reason}")


def _complex(x: np.ndarray) -> np.ndarray:
    return x[..., 0] + (1j * x[..., 1] if x.shape[-1] == 2 else 0)


def _parts(y: np.ndarray) -> np.ndarray:
    return np.stack([y.real, y.imag], axis=-1)


@pytest.mark.parametrize("direct", [fourier.DIRECT, 3])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("inverse", [0, 1])
def test_dft(inverse: int, parts: int, direct: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setitem(STATIC_INPUTS, "DFT", (1, 2))
    if direct < fourier.DIRECT:  # short lengths are split, too
        monkeypatch.setattr(fourier, "LEAST_FACTOR", 2)
        monkeypatch.setattr(fourier, "DIRECT", direct)
    for count in some([None, 1, 4, 7, 30, 264]):
        shape = (*(int(n) for n in rng.integers(1, 20, 3)), parts)
        axis = int(rng.integers(0, 3))
        x = rng.standard_normal(shape).astype(np.float32)
        inputs = {"x": x, "n": np.array(count), "axis": np.array(axis)} if count else {"x": x, "": x, "axis": np.array(axis)}
        model = node_model("DFT", inputs, inverse=inverse)
        given = {n: a for n, a in inputs.items() if n}
        fourier_of = np.fft.ifft if inverse else np.fft.fft
        wanted = _parts(fourier_of(_complex(x.astype(np.float64)), n=count, axis=axis))
        np.testing.assert_allclose(run_node_model(model, given)[0], wanted, rtol=1e-4, atol=1e-4)
        if parts == 1 and not inverse:
            model = node_model("DFT", inputs, onesided=1)
            half = _parts(np.fft.rfft(x[..., 0].astype(np.float64), n=count, axis=axis))
            np.testing.assert_allclose(run_node_model(model, given)[0], half, rtol=1e-4, atol=1e-4)


def test_long_transforms_keep_their_angles(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setitem(STATIC_INPUTS, "DFT", (1, 2))
    for length in some([1500, 1499]):  # by two products, and a prime by one
        x = rng.standard_normal((1, length, 1)).astype(np.float32)
        (y,) = run_node_model(node_model("DFT", {"x": x}, opset=20), {"x": x})
        np.testing.assert_allclose(y, _parts(np.fft.fft(x[..., 0].astype(np.float64), axis=1)), rtol=1e-4, atol=2e-4)
    monkeypatch.setattr(fourier, "MOST_TABLE", 1500)
    with pytest.raises(CannotLower, match="a table of"):
        lower_model(node_model("DFT", {"x": x}, opset=20), {"x": x})


def test_stft_with_a_window_of_the_run(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setitem(STATIC_INPUTS, "STFT", (1, 3))
    for parts, half in some([(1, 1), (1, 0), (2, 0)]):
        step, length, frames = (int(n) for n in rng.integers(2, 9, 3))
        x = rng.standard_normal((2, (frames - 1) * step + length, parts)).astype(np.float32)
        window = rng.uniform(0, 1, length).astype(np.float32)
        inputs = {"x": x, "step": np.array(step), "w": window, "n": np.array(length)}
        cut = np.stack([_complex(x.astype(np.float64))[:, f * step : f * step + length] for f in range(frames)], 1) * window
        wanted = _parts(np.fft.fft(cut, axis=-1)[..., : length // 2 + 1 if half else length])
        (y,) = run_node_model(node_model("STFT", inputs, onesided=half), inputs)
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)


def test_determinants(rng: np.random.Generator) -> None:
    for n in some([1, 2, 3, 7]):
        x = rng.uniform(-2, 2, (2, 3, n, n))
        x[0, 0, 0] = 0  # the first pivot is in another row or missing
        x[1, 1, :, 0] = 0
        (y,) = run_node_model(node_model("Det", {"x": x.astype(np.float32)}), {"x": x.astype(np.float32)})
        np.testing.assert_allclose(y, np.linalg.det(x), rtol=2e-4, atol=2e-4)
    wide = np.zeros((determinant.MOST_ROWS + 1,) * 2, np.float32)
    with pytest.raises(CannotLower, match="rows"):
        lower_model(node_model("Det", {"x": wide}), {"x": wide})


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("ratio", [0, 1, 3])
def test_roi_align(mode: str, ratio: int, rng: np.random.Generator) -> None:
    """Check boxes within, across and outside the image, and empty ones; a box chooses its samples if ``ratio`` is 0."""
    x = rng.standard_normal((2, 3, 9, 7)).astype(np.float32)
    corner = rng.uniform(-3, 8, (12, 2))
    boxes = np.concatenate([corner, corner + rng.choice([0, 0.51, 3.1, 29.3], (12, 2))], axis=1).astype(np.float32)
    inputs = {"x": x, "boxes": boxes, "at": rng.integers(0, 2, 12)}
    given = {"output_height": 2, "output_width": 3, "sampling_ratio": ratio, "spatial_scale": 0.7, "mode": mode}
    if mode == "max" and ratio == 0:
        with pytest.raises(CannotLower, match="depends on run-time data"):
            lower_model(node_model("RoiAlign", inputs, **given), inputs)
        return
    for place in some(["half_pixel", "output_half_pixel"]):
        check_random("RoiAlign", inputs, coordinate_transformation_mode=place, rtol=1e-3, atol=1e-4, **given)


def test_unpooling_names_places_of_the_whole(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 2, 3, 3)).astype(np.float32)
    places = rng.permutation(2 * 2 * 6 * 6)[: x.size].reshape(x.shape)
    inputs = {"x": x, "i": places}
    check_random("MaxUnpool", inputs, rtol=0, atol=0, kernel_shape=[2, 2], strides=[2, 2])
    monkeypatch.setattr(adjoint, "MOST_STEPS", 9)
    with pytest.raises(CannotLower, match="steps, more than"):
        lower_model(node_model("MaxUnpool", inputs, kernel_shape=[2, 2], strides=[2, 2]), inputs)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_linear_attention(rule: str, rng: np.random.Generator) -> None:
    """Check against ONNX's definition, step by step in float64."""
    batch, steps, heads, group, depth, width = (int(n) for n in rng.integers(1, 4, 6))
    q, k = rng.standard_normal((batch, steps, heads * group, depth)), rng.standard_normal((batch, steps, heads, depth))
    v, state = rng.standard_normal((batch, steps, heads, width)), rng.standard_normal((batch, heads, depth, width))
    decay, beta = rng.uniform(-2, 0, (batch, steps, heads, depth)), rng.uniform(0, 1, (batch, steps, heads, 1))
    operands = [a.reshape(batch, steps, -1) for a in (q, k, v)] + [state, decay.reshape(batch, steps, -1), beta[..., 0]]
    names = ["q", "k", "v", "s", "g" if rule.startswith("gated") else "", "b" if rule.endswith("delta") else ""]
    inputs = {
        n if n else "": np.asarray(a, np.float32) for n, a in zip(names, operands, strict=True) if n or names.index("") != 5
    }
    if names[4] == "" and names[5]:
        inputs = dict(list(inputs.items())[:4]) | {"": operands[4].astype(np.float32), "b": operands[5].astype(np.float32)}
    elif names[5] == "":
        inputs.pop("", None)
    model = node_model(
        "LinearAttention", inputs, 2, 27, q_num_heads=heads * group, kv_num_heads=heads, update_rule=rule, scale=0.5
    )
    shown = []
    for t in range(steps):
        state = state * np.exp(decay[:, t])[..., None] if rule.startswith("gated") else state
        had = np.einsum("bhdm,bhd->bhm", state, k[:, t])
        new = beta[:, t] * (v[:, t] - had) if rule.endswith("delta") else v[:, t]
        state = state + k[:, t][..., None] * new[:, :, None]
        shown.append(0.5 * np.einsum("bhd,bhdm->bhm", q[:, t], np.repeat(state, group, axis=1)).reshape(batch, -1))
    y, last = run_node_model(model, {n: a for n, a in inputs.items() if n})
    np.testing.assert_allclose(y, np.stack(shown, 1), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(last, state, rtol=1e-3, atol=1e-4)


def test_statistics_of_a_batch(rng: np.random.Generator) -> None:
    x, s, b, m, v = rng.standard_normal((4, 3, 5)), *rng.uniform(0.5, 2, (4, 3))
    inputs = {n: a.astype(np.float32) for n, a in zip("xsbmv", (x, s, b, m, v), strict=True)}
    y, mean, variance = run_node_model(node_model("BatchNormalization", inputs, 3, training_mode=1, momentum=0.7), inputs)
    centre, spread = x.mean((0, 2)), x.var((0, 2))
    column = [a[:, None] for a in (centre, spread, s, b)]
    np.testing.assert_allclose(y, (x - column[0]) / np.sqrt(column[1] + 1e-5) * column[2] + column[3], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mean, 0.7 * m + 0.3 * centre, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(variance, 0.7 * v + 0.3 * spread, rtol=1e-4, atol=1e-5)
