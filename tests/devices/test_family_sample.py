"""A small rotating sample of the search over kernels, on every available device."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from rammer.device.loader import Registry
from rammer_testing.cases import Sampler, pick_of
from rammer_testing.nets import KINDS
from rammer_testing.nonempty import some
from rammer_testing.search import Search
from rammer_testing.single import check, subjects, trial_of


@pytest.mark.slow
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_a_sample_of_every_kind_is_right(device: str, seed: int) -> None:
    """Check a few candidates of a fresh case of every kind: the full search runs for hours."""
    status = Registry().status(device)
    if status.state != "ok":
        pytest.skip(status.reason or status.state)
    search, random = Search(device, {}, 1), Random(seed)
    for kind in some(KINDS):
        case = Sampler(random, 20_000, tuple(search.backend.vdevice.precisions), (kind,)).next()
        for number, subject in enumerate(subjects(case, search.backend)[:1]):
            for tiled in search.candidates(subject, random):
                if search.possible(tiled, subject):
                    problem = check(search.backend, tiled, trial_of(subject, case.seed))
                    assert problem == "", f"--case '{replace(case, operator=number, pick=pick_of(tiled))}'"
