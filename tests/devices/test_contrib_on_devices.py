"""ONNX Runtime's contrib operators on devices, against their bodies in NumPy; other tests compare these with ONNX Runtime."""

from __future__ import annotations

import pytest

from rammer_testing.operators import DESCRIBED, drawn
from rammer_testing.operators.oracles import judge_device


@pytest.mark.sampled(12)
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
@pytest.mark.parametrize("op", sorted(op for op in DESCRIBED if op.startswith("com.microsoft.")))
def test_devices_compute_what_bodies_say(op: str, device: str, seed: int) -> None:
    verdict = judge_device(drawn(op, seed, 0), device)
    assert verdict.kind == "ok", f"{verdict.kind}: {verdict.case}: {verdict.text}"
