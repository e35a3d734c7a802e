"""Search for operators whose results leave float16's range although ``value_bounds`` says that they fit.

Operands of a run are activations of up to ``ACTIVATION``. Results that are weighed by constants may be larger: the analysis
assumes that weights keep the size of activations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rammer.errors import RammerError
from rammer.frontend.bind.binder import bind
from rammer.frontend.read.reader import read_model
from rammer.passes.graph.convert_to_float16 import TYPED
from rammer.passes.graph.value_bounds import ACTIVATION, LIMIT, Magnitudes
from rammer_testing.graphs.perturbed_reference import Tracker
from rammer_testing.nonempty import some
from rammer_testing.operators import DESCRIBED, drawn
from rammer_testing.operators.case import OperatorCase

#: Operators that multiply several operands, which had no rule once; the others are drawn.
PRODUCTS = ("BatchNormalization", "DeformConv", "LinearAttention")
#: Operators whose reference takes seconds at large operands.
LONG = {"AffineGrid", "com.microsoft.LinearAttention", "com.microsoft.NGramHashMapping"}


def enlarged(case: OperatorCase, rng: np.random.Generator) -> OperatorCase:
    """Return ``case`` with finite float32 operands of up to ``ACTIVATION`` in random channels, and constants of up to 8."""

    def changed(i: int, x: np.ndarray | None) -> np.ndarray | None:
        if x is None or x.dtype != np.float32 or not x.size:
            return x
        x = np.clip(np.where(np.isfinite(x), x, 0), *((-8, 8) if i in case.static else (-ACTIVATION, ACTIVATION)))
        if i in case.static or x.ndim == 0:
            return x.astype(np.float32)
        factor = ACTIVATION / max(float(np.abs(x).max()), 1e-6)
        return (x * np.where(rng.random(x.shape[-1]) < 0.5, factor, 1)).astype(np.float32)

    return replace(case, operands=tuple(changed(i, x) for i, x in enumerate(case.operands)))


def excess(case: OperatorCase, rng: np.random.Generator) -> list[str]:
    """Return the results beyond float16's range that the analysis calls narrow, as messages."""
    graph = bind(read_model(case.model()), {n: x.shape for n, x in case.feeds.items()})
    sizes, found = Magnitudes(graph), list[str]()
    results = Tracker(graph, rng, trajectories=1).run(case.feeds)
    for value in graph.outputs:
        node, size = sizes.made.get(value.name), sizes.of(value.name)
        have = np.abs(np.asarray(results[value.external or value.name].value))
        if node is None or graph.types[value.name].dtype != "float32" or size.weighed:
            continue
        largest = float(have[np.isfinite(have)].max(initial=0))
        if largest > LIMIT and not size.open:
            found.append(f"{case.op} reaches {largest:.3g}, bound {size.bound:.3g}")
    return found


def searched(ops: list[str], seed: int, count: int, rng: np.random.Generator) -> int:
    """Check ``count`` cases of each operator; return how many ran."""
    ran = 0
    for op in some(ops):
        for number in range(count):
            try:
                case = enlarged(drawn(op, seed, number), rng)
                found = excess(case, rng)
            except RammerError:  # operands that the operator refuses
                continue
            assert not found, f"{found}\n{case}"
            ran += 1
    return ran


def test_products_of_operands_leave_float16s_range(seed: int, rng: np.random.Generator) -> None:
    assert searched(list(PRODUCTS), seed, 12, rng) > 12


@pytest.mark.slow
def test_results_that_leave_float16s_range_are_known(seed: int, rng: np.random.Generator) -> None:
    # Scales of dynamic quantisation are statistics of what is quantised, not activations.
    ops = sorted(op for op in set(DESCRIBED) - LONG if op.rpartition(".")[2] not in TYPED)
    assert searched([str(op) for op in rng.choice(ops, 60, replace=False)], seed, 4, rng) > 100
