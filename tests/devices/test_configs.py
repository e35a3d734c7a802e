"""Declared families and configurations of a device equal those that its search offers; files with others are refused."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer_testing.cases import Sampler
from rammer_testing.nonempty import some
from rammer_testing.single import subjects

#: Sampled cases, and the largest number of candidates examined of each operator.
CASES, MOST = 12, 60


def opened(device: str) -> Backend:
    if device == "cuda":
        pytest.importorskip("cuda.bindings")
        from rammer.device.manifest import OpenOptions

        from rammer_cuda.backend import open_backend

        return open_backend(OpenOptions(target="sm_90a"))
    return Registry().open(device)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["rocm", "ipu_sim", "cuda"])
def test_what_is_offered_is_declared(device: str, seed: int) -> None:
    backend = opened(device)
    assert backend.families is not None
    sampler = Sampler(Random(seed), precisions=tuple(p for p in backend.vdevice.precisions if p != "tf32") or ("float32",))
    seen = set[str]()
    for _ in range(CASES):
        for subject in some(subjects(sampler.next(), backend)):
            for tiled in islice(backend.all_candidates(subject.operator, subject.binding), MOST):
                keys = backend.families[tiled.family]
                assert all(value in keys[key] for key, value in tiled.config), tiled.head()
                seen.add(tiled.family)
    assert "" in seen or device == "cuda"
