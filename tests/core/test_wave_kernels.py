"""Kernels chosen together for a wave, and sums of few tasks and many terms in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rammer.device.manifest import Binding
from rammer.ir.compute import Axis, Compute
from rammer.ir.operator import RKernel, ROperator, Written
from rammer.ir.program import dense
from rammer.ir.types import TensorType
from rammer.schedule.policy import OperatorGraph
from rammer.schedule.split_reductions import LEAST, PARTS, PartedSum, split_sums
from rammer.schedule.task_placement import fastest_kernel, leanest_kernel, side_by_side
from rammer.schedule.wavefront import CROWD, MOST_KINDS, Wavefront, choose_together
from rammer_testing.nonempty import some
from rammer_testing.programs import device

DEVICE = device(132, launch=0.55e-6)


def unwritten() -> Written:
    raise AssertionError("nobody asks for the text")


def choice(name: str, tasks: int, seconds: float) -> RKernel:
    """Return an operator of ``tasks`` tasks of ``seconds`` each."""
    compute = Compute.parse(f"{name}: f32[i:{tasks}] = max(x[i], 0.0)")
    return RKernel(ROperator(name, (compute,), (), (name,), (1,)), unwritten, seconds, seconds)


def cost(kernels: Sequence[RKernel]) -> float:
    return side_by_side(kernels, {}, DEVICE) + CROWD * sum(k.busy_time() for k in kernels) / DEVICE.veus


@pytest.mark.parametrize("members", [1, 2, 7])
def test_choices_of_a_wave_cost_no_more_than_the_fastest_or_the_leanest_of_all(members: int, rng: np.random.Generator) -> None:
    kernels = {
        f"o{m}": tuple(
            choice(f"o{m}", int(n), 1e-6 * float(s)) for n, s in zip(rng.integers(1, 300, 4), rng.random(4) + 0.1, strict=True)
        )
        for m in range(members)
    }
    made = choose_together(OperatorGraph(kernels, dict.fromkeys(kernels, ())), DEVICE)
    assert all(len(made.kernels[n]) == 1 and made.kernels[n][0] in kernels[n] for n in some(kernels))
    mine = cost([made.kernels[n][0] for n in kernels])
    assert mine <= cost([fastest_kernel(kernels[n], DEVICE) for n in kernels]) and mine <= cost(
        [leanest_kernel(kernels[n]) for n in kernels]
    )


def test_a_short_operator_is_few_tasks_beside_a_long_one() -> None:
    """Check that the short operator uses the 24 of 132 rows that the long one leaves. Thus no row has tasks of both."""
    long = (choice("long", 108, 5e-6), choice("long", 54, 9.5e-6))
    short = (choice("short", 108, 2e-6), choice("short", 24, 4.5e-6), choice("short", 6, 18e-6))
    graph = OperatorGraph({"long": long, "short": short}, {"long": (), "short": ()})
    made = choose_together(graph, DEVICE)
    assert {n: k[0].operator.task_count for n, k in made.kernels.items()} == {"long": 108, "short": 24}
    all_kernels, mine = Wavefront()(graph, DEVICE), Wavefront()(made, DEVICE)
    assert all_kernels == mine, "the policy itself chooses them together"
    assert mine.predicted < Wavefront()(replace(graph, kernels={n: ks[:2] for n, ks in graph.kernels.items()}), DEVICE).predicted


def test_a_wave_of_many_different_operators_is_not_searched() -> None:
    """Check that such a wave has the better one of the fastest and the leanest kernels of all."""
    kernels = {f"o{m}": (choice(f"o{m}", 90 + m, 1e-6), choice(f"o{m}", 9, 3e-6)) for m in range(MOST_KINDS + 1)}
    made = choose_together(OperatorGraph(kernels, dict.fromkeys(kernels, ())), DEVICE).kernels
    assert [ks[0] for ks in made.values()] == min(([ks[i] for ks in kernels.values()] for i in (0, 1)), key=cost)


def product(name: str) -> ROperator:
    compute = Compute.parse(f"{name}: f32[n:1, i:64, j:64] = sum[c:512] (x[n, i, c] * w[j, c])")
    return ROperator(name, (compute,), (), (name,), (1, 64, 64))


def kernel(operator: ROperator, tasks: int, seconds: float) -> RKernel:
    """Return a kernel of ``tasks`` tasks of ``seconds`` each."""
    shape = operator.anchor.shape
    tile = next(
        (*(1 for _ in shape[:-2]), a, b)
        for a in range(1, shape[-2] + 1)
        for b in range(1, shape[-1] + 1)
        if np.prod(shape[:-2]) * -(-shape[-2] // a) * -(-shape[-1] // b) == tasks
    )
    return RKernel(replace(operator, tile=tile), unwritten, seconds, seconds)


def known_of(operator: ROperator) -> Binding:
    (compute,) = operator.computes
    shapes = {"x": (1, 64, 512), "w": (64, 512), compute.name: compute.shape}
    return Binding({n: TensorType("float32", s) for n, s in shapes.items()}, {n: dense(n, n, s) for n, s in shapes.items()})


@pytest.mark.slow
@pytest.mark.parametrize("seconds, taken", [(20e-6, True), (1e-6, False)])
def test_branches_are_in_parts_where_two_waves_end_before_the_one(seconds: float, taken: bool) -> None:
    """Check that all sixteen equal branches are split, or none."""
    kernels, sums = dict[str, tuple[RKernel, ...]](), dict[str, list[PartedSum]]()
    for name in (f"o{i}" for i in range(16)):
        o = product(name)
        kernels[name] = (kernel(o, 4, seconds),)
        split = next(s for s in split_sums(o, known_of(o)) if s.partial.anchor.axes[1].extent == 2)
        sums[name] = [PartedSum(split, (kernel(split.partial, 8, seconds / 2),), (kernel(split.rest, 1, 1e-6),))]
    graph = OperatorGraph(kernels, dict.fromkeys(kernels, ()))
    made = choose_together(replace(graph, sums=lambda: sums), DEVICE)
    assert len(made.kernels) == 16 * (1 + taken)
    assert all(made.after[n] == ((f"{n}_parts",) if taken else ()) for n in some(kernels))
    assert Wavefront()(made, DEVICE).predicted <= Wavefront()(graph, DEVICE).predicted


def test_what_would_round_parts_or_has_none_stays_whole() -> None:
    o = product("o")
    (compute,) = o.computes
    assert [s.partial.anchor.axes[1].extent for s in split_sums(o, known_of(o))] == [*PARTS]
    half = replace(o, computes=(replace(compute, dtype="float16"),))
    prime = replace(o, computes=(replace(compute, reduce=(Axis("c", 509),)),))
    few = replace(o, computes=(replace(compute, reduce=(Axis("c", 2 * LEAST - 2),)),))
    assert not [s for other in some((half, prime, few)) for s in split_sums(other, known_of(o))]
