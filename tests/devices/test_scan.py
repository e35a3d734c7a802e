"""Long running sums on every device: cut in blocks, in as few operations as that takes, and right."""

from __future__ import annotations

import math

import numpy as np
import pytest

import rammer
from rammer.testing.net import Net
from rammer.testing.some import some

DEVICES = ["ipu_sim", "rocm", "toy", pytest.param("cuda", marks=pytest.mark.cuda)]
SHAPES = [((3, 1009), 1), ((130, 5), 0), ((2, 96, 7), 1)]


@pytest.mark.parametrize("device", DEVICES)
def test_long_running_sums_are_right_and_not_quadratic(device: str, rng: np.random.Generator) -> None:
    net, expected, inputs = Net((), rng), {}, {}
    for shape, axis in SHAPES:
        for reverse in (0, 1):
            exclusive = int(rng.integers(2))
            x = net.input(*shape)
            y = net.node("CumSum", x, net.constant(np.array(axis, np.int64)), reverse=reverse, exclusive=exclusive)
            net.outputs.append(y)
            inputs[x] = rng.standard_normal(shape).astype(np.float32)
            row = np.flip(inputs[x], axis) if reverse else inputs[x]
            total = np.cumsum(row.astype(np.float64), axis)
            total = total - row if exclusive else total
            expected[y] = np.flip(total, axis) if reverse else total
    exe = rammer.compile(net.model(net.node("Neg", next(iter(expected)))), device)
    found = exe.run(inputs)
    for name, total in some(expected.items()):
        assert np.linalg.norm(found[name] - total) <= 1e-5 * np.linalg.norm(total), name
    (special,) = exe.cache.values()
    programs = [s.program for s in special.compiled.segments]
    points = sum(c.points for p in programs for o in p.operators for c in o.computes)
    assert points < 2 * 60 * sum(math.prod(shape) for shape, _ in SHAPES)  # a row of 1009 alone is 1009 times as many
