"""ONNX Runtime's process: equal answers, exceptions as text, and the cost of its death."""

from __future__ import annotations

import os
import signal

import numpy as np
import onnx
import onnxruntime
import pytest

from rammer_testing import peer_process
from rammer_testing.peer_process import PeerCrashed, PeerRefused, PeerSession


def product(scale: float) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[n, 3] x) => (float[n, 3] y, float[n, 3] z)
        <float s = {{{scale}}}> {{ y = Mul(x, s)
        z = Neg(y) }}"""
    )


def test_answers_are_onnxruntimes(rng: np.random.Generator) -> None:
    first, second = PeerSession(product(2.0)), PeerSession(product(3.0).SerializeToString(), optimised=False)
    ours = onnxruntime.InferenceSession(product(2.0).SerializeToString())
    x = rng.standard_normal((2, 3)).astype(np.float32)
    for have, want in ((first.get_inputs(), ours.get_inputs()), (first.get_outputs(), ours.get_outputs())):
        assert [tuple(p) for p in have] == [(p.name, p.shape, p.type) for p in want]
    np.testing.assert_array_equal(first.run(None, {"x": x}), ours.run(None, {"x": x}))
    np.testing.assert_array_equal(second.run(["z"], {"x": x})[0], x * np.float32(-3))
    with pytest.raises(PeerRefused, match="Required inputs"):
        first.run(None, {})
    with pytest.raises(PeerRefused, match="INVALID_PROTOBUF"):
        PeerSession(b"no model")


@pytest.mark.slow
def test_a_death_skips_one_test_and_sessions_are_opened_again(rng: np.random.Generator) -> None:
    session, x = PeerSession(product(2.0)), rng.standard_normal((1, 3)).astype(np.float32)
    session.run(None, {"x": x})
    os.kill(peer_process.SHARED.process.pid, signal.SIGFPE)
    with pytest.raises(PeerCrashed, match="SIGFPE"):
        peer_process.SHARED.ask(("run", session.key, None, {"x": x}))
    np.testing.assert_array_equal(session.run(["y"], {"x": x})[0], x * 2)


def test_closed_sessions_leave_the_process(rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, 3)).astype(np.float32)
    gone = PeerSession(product(2.0))
    key, kept = gone.key, PeerSession(product(3.0))
    del gone
    kept.run(None, {"x": x})
    with pytest.raises(PeerRefused, match="KeyError"):
        peer_process.SHARED.ask(("run", key, None, {"x": x}))
