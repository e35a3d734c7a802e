"""Many lengths, tokens and threads: a sample of what ``benchmarks/lengths.py`` measures, and the whole."""

from __future__ import annotations

import pytest
from lengths import Found, measured, parser

from rammer_testing.some import some

DEVICES = [pytest.param(d, marks=pytest.mark.large) for d in ("ipu_sim", "toy")]
DEVICES = ["rocm", *DEVICES, pytest.param("cuda", marks=pytest.mark.cuda)]


def _found(device: str, seed: int, *more: str) -> list[Found]:
    options = ["--option", "tiles=16"] if device == "ipu_sim" else []
    return measured(parser().parse_args(["--device", device, "--seed", str(seed), *options, *more]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_a_few_lengths_and_tokens_are_right(device: str, seed: int) -> None:
    small = ("--hidden", "64", "--layers", "1", "--heads", "2", "--most", "40", "--lengths", "8", "--tokens", "6")
    assert [str(f) for f in some(_found(device, seed, *small)) if not f.fine] == []


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_runs_from_threads_are_right(device: str, seed: int) -> None:
    small = ("--hidden", "32", "--layers", "1", "--heads", "2", "--most", "16", "--runs", "200")
    assert [str(f) for f in some(_found(device, seed, *small)) if not f.fine] == []


@pytest.mark.large
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_a_hundred_lengths_and_64_tokens_are_right(device: str, seed: int) -> None:
    assert [str(f) for f in some(_found(device, seed, "--hidden", "64", "--layers", "1")) if not f.fine] == []


@pytest.mark.large
def test_ten_thousand_runs_from_threads_are_right(seed: int) -> None:
    small = ("--hidden", "32", "--layers", "1", "--heads", "2", "--most", "64", "--runs", "10000")
    assert [str(f) for f in some(_found("rocm", seed, *small)) if not f.fine] == []
