"""Random models with random open dimensions, at random lengths of random ranges, against ONNX Runtime."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from drawn_models import DrawnModel, drawn
from drawn_ranges import RangeDraw

import rammer
from rammer_testing.peer_process import PeerCrashed, PeerRefused, PeerSession

DEVICES = ["ipu_sim", "rocm", pytest.param("cuda", marks=pytest.mark.cuda)]
OPTIONS = {"ipu_sim": {"tiles": "16"}}


def accepted(rng: np.random.Generator) -> tuple[DrawnModel, onnx.ModelProto, PeerSession]:
    """Return a model that ONNX Runtime supports: its kernels lack some operators over empty tensors."""
    while True:
        net = drawn(rng)
        model = net.model()
        try:
            session = PeerSession(model)
            for point in ({n: s[i] for n, s in net.spans.items()} for i in (0, 1)):
                session.run(None, net.inputs(point))
        except (PeerRefused, PeerCrashed):
            continue
        return net, model, session


@pytest.mark.slow
@pytest.mark.sampled(2, of="device")
@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("device", DEVICES)
def test_random_models_are_right_at_random_lengths(device: str, number: int, rng: np.random.Generator) -> None:
    """Check shapes and values, with one program for a range or one for each length, including empty tensors."""
    net, model, session = accepted(rng)
    exe = rammer.compile(model, device, shapes=net.spans, options=OPTIONS.get(device))
    points = [{n: int(rng.integers(low, high + 1)) for n, (low, high) in net.spans.items()} for _ in range(3)]
    points += [{n: s[i] for n, s in net.spans.items()} for i in (0, 1)]
    compared = 0
    for point in points:
        inputs = net.inputs(point)
        found, wanted = exe.run(inputs), session.run(None, inputs)
        for port, want in zip(session.get_outputs(), wanted, strict=True):
            have, scale = found[port.name], max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0)))
            assert have.shape == want.shape, f"{port.name} at {point} of {model}"
            np.testing.assert_allclose(
                have / scale, want / scale, atol=3e-4, rtol=1e-4, err_msg=f"{port.name} at {point} of {model}"
            )
            compared += 1
    assert compared >= len(points)
    exe.close()


def test_columns_that_end_within_others_lie_apart(rng: np.random.Generator) -> None:
    """Check a product over one element whose columns are two open axes. The random search found it; its rows were wrong from the
    second on."""
    made = RangeDraw(rng, {"a": (1, 9), "b": (4, 6)})
    x = made.port((("b", 1, 0), ("a", 1, 0), 1))
    made.node("MatMul", [x, made.weights(1, 4)], (("b", 1, 0), ("a", 1, 0), 4))
    exe, session = rammer.compile(made.model(), "rocm", shapes=made.spans), PeerSession(made.model())
    for a, b in itertools.product((1, 5, 9), (4, 5, 6)):
        inputs = made.inputs({"a": a, "b": b})
        (want,) = session.run(None, inputs)
        np.testing.assert_allclose(exe.run(inputs)["t0"], want, atol=1e-5, err_msg=f"{a} and {b}")
    exe.close()


@pytest.mark.sampled(4, of="device")
@pytest.mark.parametrize("number", range(24))
@pytest.mark.parametrize("device", ["ipu_sim", "rocm"])
def test_windows_longer_than_a_length_have_a_range(
    device: str, number: int, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check poolings and convolutions whose window covers more than a short length: counted elements, padding, ceil_mode."""
    op = ("AveragePool", "AveragePool", "MaxPool", "LpPool", "Conv")[number % 5]
    kernel, stride = int(rng.integers(2, 8)), int(rng.integers(1, 4))
    attributes: dict[str, object] = {"kernel_shape": [kernel], "strides": [stride]}
    if number % 4 == 0:
        attributes |= {"auto_pad": ("SAME_UPPER", "SAME_LOWER")[number % 8 // 4], "strides": [min(stride, 2)]}
    else:  # a window that fits over each length: the paddings have at least its elements but one
        begin = int(rng.integers(0, kernel))
        attributes |= {"pads": [begin, kernel - 1 - begin + int(rng.integers(0, begin + 1))]}
    if op != "Conv":
        attributes["ceil_mode"] = int(rng.integers(0, 2))
    if op == "AveragePool":
        attributes["count_include_pad"] = int(rng.integers(0, 2))
    made = RangeDraw(rng, {"a": (1, 14)})
    inputs = [made.port((2, 3, ("a", 1, 0))), *([made.weights(4, 3, kernel)] if op == "Conv" else [])]
    made.node(op, inputs, (2, 3, ("a", 1, 0)), **attributes)
    model = made.model()
    exe, session = rammer.compile(model, device, shapes=made.spans, options=OPTIONS.get(device)), PeerSession(model)
    for length in range(1, 15):
        arrays = made.inputs({"a": length})
        (want,) = session.run(None, arrays)
        np.testing.assert_allclose(exe.run(arrays)["t0"], want, atol=1e-4, err_msg=f"{op} {attributes} at {length}")
    assert len(exe.cache) <= 3 and not capsys.readouterr().err, f"{op} {attributes}"
    exe.close()
