"""Real models against ONNX Runtime on fresh random inputs, on every working device."""

from __future__ import annotations

import pytest

from rammer_testing.accuracy import LARGE, TOLERANCE, AccuracyCase, Result, cases, model_error

DEVICES = ("rocm", "ipu_sim")


def parameters() -> list[object]:
    """Return every case on every device. Large models, and second inputs of the others, have the mark ``large``."""
    found = []
    for case in cases():
        marks = [pytest.mark.large] if case.model in LARGE or case.inputs else []
        found += [pytest.param(case, device, marks=marks, id=f"{case}-{device}") for device in DEVICES]
    return found


@pytest.mark.slow
@pytest.mark.sampled(1, of="device")
@pytest.mark.parametrize(("case", "device"), parameters())
def test_model_agrees_with_onnxruntime(case: AccuracyCase, device: str, seed: int) -> None:
    result = model_error(case, device, seed)
    assert result.good, f"relative L2 error {result.error:.2e} with seed {seed}"
    assert result.host_nodes == 0


def test_nan_and_large_errors_are_not_good() -> None:
    def result(error: float, exact: float, other: float) -> Result:
        return Result(AccuracyCase("m", 0), error, exact, other, 0.0, 0.0, 0, 0)

    nan = float("nan")
    assert result(TOLERANCE, nan, nan).good
    assert not result(nan, nan, nan).good
    assert not result(2 * TOLERANCE, nan, nan).good
    assert not result(2 * TOLERANCE, 2 * TOLERANCE, 3 * TOLERANCE).good
    # ONNX Runtime is the inaccurate one by float64.
    assert result(2 * TOLERANCE, TOLERANCE / 9, 2 * TOLERANCE).good
    assert not result(2 * TOLERANCE, TOLERANCE / 2, TOLERANCE / 3).good
