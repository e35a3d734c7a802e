"""Models with strides behind open lengths at 40 drawn sizes: right, with few programs, and without slow starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rammer_testing.many_sizes import MODELS, PROGRAMS, run_sizes
from rammer_testing.models import ModelUnavailable, fetch


@pytest.mark.large
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_sizes_of_a_range_share_few_programs(name: str, device: str, rng: np.random.Generator) -> None:
    path = Path(__file__).parent / "exports" / f"{name}_dynamo.onnx"
    try:
        found = run_sizes(name, path if path.is_file() else fetch(name), device, rng)
    except ModelUnavailable as problem:
        pytest.skip(str(problem))
    assert not found.wrong and not found.slow and found.programs <= PROGRAMS, found
