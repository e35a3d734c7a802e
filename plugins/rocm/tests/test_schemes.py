"""CPU execution of operators that cannot be fused: one kernel for the whole program, whose waves synchronise at counters."""

from __future__ import annotations

import numpy as np
import pytest

import rammer
from rammer.ir.program import waves
from rammer_testing.net import Net


def one_launch(net: Net, values: dict[str, np.ndarray]) -> tuple[int, int, dict[str, np.ndarray]]:
    """Return the numbers of operators and waves of the model's only launch, and its results."""
    exe = rammer.compile(net.model(net.outputs.pop()), "rocm")
    found = exe.run(values)
    (special,) = exe.cache.values()
    (loaded,) = special.loaded.values()
    if not loaded.single:
        pytest.skip("a GPU's waves are launches")
    assert len(loaded.launches) == 1
    return len(loaded.program.operators), len(waves(loaded.program)), found


def test_small_operators_that_share_nothing_are_side_by_side_in_one_launch(rng: np.random.Generator) -> None:
    """Check FusionStitching's packing, without waits between the operators."""
    net = Net((), rng)
    sizes = ((3, 5), (7,), (2, 2, 9), (31,))
    names = [net.input(*size) for size in sizes]
    net.outputs += [net.node(op, name) for op, name in zip(("Tanh", "Exp", "Relu", "Neg"), names, strict=True)]
    values = {n: rng.standard_normal(size).astype(np.float32) for n, size in zip(names, sizes, strict=True)}
    operators, meetings, found = one_launch(net, values)
    assert (operators, meetings) == (4, 1)
    a, b, c, d = (values[n] for n in names)
    for wanted in (np.tanh(a), np.exp(b), np.maximum(c, 0), -d):
        (result,) = (r for r in found.values() if r.shape == wanted.shape)
        assert np.allclose(result, wanted, atol=1e-6)


def test_rows_that_every_task_needs_meet_at_a_counter_within_one_launch(rng: np.random.Generator) -> None:
    """Check FusionStitching's global scheme: a maximum over columns, which rows need. All tasks of one precede those of the
    other."""
    net = Net((), rng)
    x = net.input(1024, 2048)
    high = net.node("ReduceMax", x, net.constant(np.array([0], np.int64)))
    net.outputs.append(net.node("ReduceSum", net.node("Exp", net.node("Sub", x, high)), net.constant(np.array([1], np.int64))))
    values = rng.standard_normal((1024, 2048)).astype(np.float32)
    operators, meetings, found = one_launch(net, {x: values})
    assert operators == meetings == 2
    (result,) = found.values()
    assert np.allclose(result, np.exp(values - values.max(0)).sum(1, keepdims=True), rtol=1e-5)
