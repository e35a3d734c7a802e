"""Random Loops, Scans and branches on devices: ONNX Runtime's results in each iteration."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import BOOL, FLOAT, INT64, model, tensor
from random_loops import CONSTANTS, Feeds, RandomBody, drawn, random_values

import rammer
from rammer.frontend.loops import loop_chunk
from rammer.jit import control_flow
from rammer_testing.nonempty import some
from rammer_testing.peer_process import PeerSession

DEVICES = ["ipu_sim", "rocm", pytest.param("cuda", marks=pytest.mark.cuda)]
OPTIONS = {"ipu_sim": {"tiles": "16"}}


def opened(proto: onnx.ModelProto, device: str) -> tuple[PeerSession, Any]:
    session = PeerSession(proto)
    return session, rammer.compile(proto, device, options=OPTIONS.get(device))


def agrees(session: PeerSession, exe: Any, feeds: Feeds) -> None:
    names = [o.name for o in session.get_outputs()]
    wanted, found = dict(zip(names, session.run(names, feeds), strict=True)), exe.run(feeds)
    for name, want in some(wanted.items()):
        assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape), name
        np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.sampled(1, of="device")
@pytest.mark.parametrize("number", range(200))
@pytest.mark.parametrize("device", DEVICES)
def test_random_loops(device: str, number: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check 0 to 13 iterations, or up to 999. Programs of 2 to 8 iterations are compiled at once or after a few iterations."""
    monkeypatch.setattr(control_flow, "LONGEST", 1.0)
    monkeypatch.setattr(loop_chunk, "MOST_STEPS", int(rng.choice([2, 4, 8])))
    loop = drawn(rng, 1000 if rng.random() < 0.2 else 14)
    session, exe = opened(loop.proto, device)
    exe.bodies.warm = int(rng.choice([0, 3]))
    for _ in range(3):
        agrees(session, exe, loop.feeds(rng))
    exe.close()


@pytest.mark.sampled(3, of="device")
@pytest.mark.parametrize("number", range(200))
@pytest.mark.parametrize("device", DEVICES)
def test_random_branches(device: str, number: int, rng: np.random.Generator) -> None:
    """Check two or more branches on given or computed conditions, in the program or on the host."""
    kinds = [(int(rng.choice([FLOAT, INT64, BOOL])), shape) for shape in ((3,), (), (2, 3), (1,))]
    ports = {f"x{i}": kind for i, kind in enumerate(kinds)} | {"outside": (FLOAT, (3,)), "flag": (BOOL, ())}
    constants = {n: (helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in CONSTANTS.items()}
    body = RandomBody(rng, "v", constants | ports)
    while sum(n.op_type == "If" for n in body.nodes) < 2:
        body.step(1)
    ends = [body.add("Identity", [n.output[0]], body.values[n.output[0]]) for n in body.nodes if n.op_type == "If"]
    inputs = [tensor(n, list(shape), dtype) for n, (dtype, shape) in ports.items()]
    session, exe = opened(model(body.nodes, inputs, ends, opset=18, constants=CONSTANTS), device)
    for _ in range(4):
        agrees(session, exe, {n: random_values(rng, kind) for n, kind in ports.items()})
    exe.close()
