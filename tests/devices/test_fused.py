"""Models whose operators meet on chip are computed right on every device."""

from __future__ import annotations

import pytest
from fused_models import attention, block, mlp

from rammer.testing.conformance import Subject, check_model
from rammer.testing.small_models import SmallModel


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", [mlp(4), attention(), attention(kept=True)], ids=["chain", "attention", "kept"])
@pytest.mark.parametrize("name", ["rocm", "ipu_sim", "toy"])
def test_devices_compute_models_with_chains(name: str, model: SmallModel) -> None:
    check_model(Subject(name), model)


@pytest.mark.parametrize("name", ["rocm", "ipu_sim", "toy"])
@pytest.mark.parametrize("kernel", [1, 3])
def test_devices_compute_models_with_prologues(name: str, kernel: int) -> None:
    check_model(Subject(name), block(kernel))
