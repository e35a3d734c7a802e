"""Bound calls: outputs that are inputs or constants, operators on the host, and existing contents of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bound_calls import Foreign, executable, normal

from rammer.device.arrays import host_view, on_host
from rammer.errors import BadInput, DeviceFailure
from rammer_testing.bound_checks import HOSTED
from rammer_testing.small_models import SmallModel

import rammer_toy

THROUGH = SmallModel(
    "through",
    """(float[3] x, float[2] w_c) => (float[3] y, float[3] x, float[2] w_c) {
    y = Neg(x)
}""",
)


def test_lists_are_taken_as_they_are_then() -> None:
    exe = executable("toy", SmallModel("one", "(double[2] x) => (double[2] y) { y = Neg(x) }"))
    values = [1.0, 2.0]
    bound = exe.bind({"x": values})
    values[0] = 5.0
    bound.run()
    assert bound.to_host()["y"].tolist() == [-1.0, -2.0]
    exe.close()


def test_outputs_that_are_inputs_or_constants(rng: np.random.Generator) -> None:
    exe = executable("toy", THROUGH)
    x = normal(rng, 3)
    bound = exe.bind({"x": x})
    bound.run()
    found = bound.to_host()
    assert np.array_equal(found["y"], -x) and np.array_equal(found["x"], x) and found["w_c"].shape == (2,)
    exe.close()


def near_one(rng: np.random.Generator, size: int) -> np.ndarray:
    """Draw a matrix near the identity: its determinant is near 1 and well conditioned."""
    return (np.eye(size) + 0.05 * normal(rng, size, size)).astype(np.float32)


def test_operators_on_the_host_read_the_callers_arrays(rng: np.random.Generator) -> None:
    exe = executable("toy", SmallModel("first", "(float[65,65] x) => (float y, float d) { d = Det(x)\n y = Neg(d) }"))
    x, d = near_one(rng, 65), np.zeros((), np.float32)
    bound = exe.bind({"x": x}, {"d": d})
    for _ in range(2):
        x[...] = near_one(rng, 65)
        bound.run()
        assert np.isclose(d, np.linalg.det(x), rtol=1e-4) and bound.to_host()["y"] == -d
    assert "host" in bound.clock and bound.seconds() > 0
    with pytest.raises(BadInput, match="input 'x' is on the device, but an operator on the host reads it"):
        exe.bind({"x": Foreign(x, device=2)})
    exe.close()


def test_hosted_values_are_fresh_in_every_run(rng: np.random.Generator) -> None:
    exe = executable("toy", HOSTED)
    x, w = normal(rng, 65, 65), normal(rng, 65, 65)
    bound = exe.bind({"x": x, "w": w})
    for _ in range(3):
        x[...] = normal(rng, 65, 65)
        bound.run()
        want = exe.run({"x": x, "w": w})
        assert all(np.array_equal(bound.outputs[n], want[n]) for n in want)
    exe.close()


def test_what_lies_on_the_host(rng: np.random.Generator) -> None:
    assert on_host(np.float32(1)) and on_host(Foreign(normal(rng, 1), 3)) and not on_host(Foreign(normal(rng, 1), 2))
    with pytest.raises(BadInput, match="it cannot be read: no gradient"):
        host_view("it", Gradient())


class Gradient:
    """A tensor that refuses access to its memory."""

    dtype, shape = "float32", (1,)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise RuntimeError("no gradient")


COUNTED = SmallModel(
    "counted",
    """(int64 n, float[4] x) => (float[4] y) {
    yes = Constant<value = int64 {1}>()
    going = Cast<to = 9>(yes)
    y = Loop(n, going, x) <body = step (int64 i, bool on, float[4] s) => (bool still, float[4] t) {
        still = Identity(on)
        t = Add(s, s)
    }>
}""",
)


def test_bodies_of_a_bound_call_run_on_the_device(rng: np.random.Generator) -> None:
    exe = executable("toy", COUNTED)
    x = normal(rng, 4)
    bound = exe.bind({"n": np.array(3), "x": x})
    for count in (3, 5, 0):
        bound.write({"n": np.array(count)})
        bound.run()
        assert np.array_equal(bound.to_host()["y"], x * 2**count)
    assert exe.bodies.residents.held and not exe.bodies.on_host
    exe.close()


def test_a_call_of_fixed_shapes_refuses_lengths(rng: np.random.Generator) -> None:
    exe = executable("toy", THROUGH)
    bound = exe.bind({"x": normal(rng, 3)})
    assert bound.lengths == {}
    for call in (bound.run, bound.seconds):
        with pytest.raises(BadInput, match="the bound call has no length 'past'") as found:
            call(past=3)
        assert found.value.hint == "all of its shapes are fixed"
    exe.close()


def test_a_plugin_returns_a_bound(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    exe = executable("toy", THROUGH)
    monkeypatch.setattr(rammer_toy.ToyProgram, "bind", lambda self, inputs, outputs, stream=None: object())
    with pytest.raises(DeviceFailure, match="device toy returned an object of class object as bound call, not a Bound"):
        exe.bind({"x": normal(rng, 3)})
    exe.close()
