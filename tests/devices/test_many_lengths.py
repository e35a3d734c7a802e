"""Results, programs and memory at many lengths, over many tokens and from several threads."""

from __future__ import annotations

import pytest
from many_lengths import Asked, measured

from rammer_testing.nonempty import some

DEVICES = [pytest.param(d, marks=pytest.mark.large) for d in ("ipu_sim", "toy")]
DEVICES = ["rocm", *DEVICES, pytest.param("cuda", marks=pytest.mark.cuda)]


def problems(device: str, seed: int, **sizes: int) -> list[str]:
    """Return the measurements that exceed their limits."""
    options = ("tiles=16",) if device == "ipu_sim" else ()
    return [str(f) for f in some(measured(Asked(device, seed, options, **sizes))) if not f.fine]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_a_few_lengths_and_tokens_are_right(device: str, seed: int) -> None:
    assert problems(device, seed, hidden=64, layers=1, heads=2, most=40, lengths=8, tokens=6) == []


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_runs_from_threads_are_right(device: str, seed: int) -> None:
    assert problems(device, seed, hidden=32, layers=1, heads=2, most=16, runs=200) == []


@pytest.mark.large
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_a_hundred_lengths_and_64_tokens_are_right(device: str, seed: int) -> None:
    assert problems(device, seed, hidden=64, layers=1) == []


@pytest.mark.large
def test_ten_thousand_runs_from_threads_are_right(seed: int) -> None:
    assert problems("rocm", seed, hidden=32, layers=1, heads=2, most=64, runs=10_000) == []
