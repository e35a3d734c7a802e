"""Decoders with weights of a few bits against ONNX Runtime, for first and later tokens."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

import rammer
from rammer.device.loader import Registry
from rammer_testing.decoder import Decoder
from rammer_testing.peer_process import PeerSession


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_decoders_are_right(device: str, seed: int) -> None:
    """Check random bits, blocks, zero points and pasts; all but the smallest weights stay codes."""
    status = Registry().status(device)
    if status.state != "ok":
        pytest.skip(status.reason or status.state)
    random = Random(f"{seed} {device}")
    tokens, past = random.choice([(1, 5), (1, 40), (3, 9), (7, 0)])
    bits, block, moved = random.choice([2, 4, 4, 8]), random.choice([16, 32, 128]), random.random() < 0.5
    form = {"layers": 1, "hidden": 64, "heads": 4, "shared": 2, "inner": 96, "words": 70}
    d = Decoder(tokens, past, **form, bits=bits, block=block, moved=moved, seed=random.randrange(1000))
    model, feeds = d.model(), d.feeds(random.randrange(1000))
    session = PeerSession(model)
    names = [v.name for v in session.get_outputs()]
    exe = rammer.compile(model, device=device)
    try:
        have = exe.run(feeds)
        assert exe.hosted == []
        for name, want in zip(names, session.run(names, feeds), strict=True):
            np.testing.assert_allclose(have[name], want, rtol=0, atol=2e-5 * np.abs(want).max(), err_msg=f"{seed} {d} {name}")
        compiled = exe.compile_only({k: v.shape for k, v in feeds.items()})
        programs = [s.program for s in compiled.segments if hasattr(s, "program")]
        products = [o for p in programs for o in p.operators if o.main.decoded is not None]
        assert len(products) == 6  # keys and values have too few weights to stay codes
        assert device != "rocm" or {o.family for o in products} == {"codes"}
    finally:
        exe.close()
