"""Kernel choices for the rows of a persistent kernel: operators of one wave are chosen together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from zoo import find

pytest.importorskip("cuda.bindings")

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import Compute
from rammer.ir.operator import RKernel, ROperator, Written
from rammer.schedule.ios import IOS
from rammer.schedule.policy import OperatorGraph
from rammer.schedule.task_placement import fastest_kernel, leanest_kernel, side_by_side
from rammer.schedule.wavefront import Wavefront
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some

from rammer_cuda.backend import open_backend
from rammer_cuda.families import family_of
from rammer_cuda.gpu import TARGETS
from rammer_cuda.persistent.fit_to_block import CROWD, SEARCH, choose_together, fit_program

DEVICE = TARGETS["sm_90a"].vdevice


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
    made, _ = choose_together(OperatorGraph(kernels, dict.fromkeys(kernels, ())), DEVICE)
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
    made, _ = choose_together(graph, DEVICE)
    assert {n: k[0].operator.task_count for n, k in made.kernels.items()} == {"long": 108, "short": 24}
    assert Wavefront()(made, DEVICE).predicted < Wavefront()(graph, DEVICE).predicted


@pytest.mark.slow
def test_stages_of_rows_placed_anew_are_searched_for_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_backend(OpenOptions(target="sm_90a"))
    compiler = Compiler(backend, CompileOptions(policy="ios{r=1,s=2}"), KernelStore(None))
    (segment,) = compiler.compile_model(read_model(find("squeezenet:small").build()), {}).segments
    assert isinstance(segment, ProgramSegment)
    asked, search = list[IOS](), IOS.search
    monkeypatch.setattr(IOS, "search", lambda self, *given: asked.append(self) or search(self, *given))
    fit_program(segment.program, Binding.of(segment.program, segment.constants), TARGETS["sm_90a"])
    assert all((policy.r, policy.s, policy.seconds) == (1, 2, SEARCH) for policy in some(asked))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_kernels_chosen_for_rows_round_operands_as_the_program_does(precision: str, seed: int) -> None:
    """Check that results depend on the executor only by the order of sums, since the fastest one is chosen by measurement."""
    backend = open_backend(OpenOptions(target="sm_90a"))
    model = read_model(find("resnext29_branches:small").build(seed))
    segment = Compiler(backend, CompileOptions(precision=precision), KernelStore(None)).compile_model(model, {}).segments[0]
    assert isinstance(segment, ProgramSegment)
    program = segment.program
    wanted = {c.name: family_of(o).operand_rounding for o in program.operators for c in o.computes if c.kind == "contraction"}
    assert any(wanted.values()) == (precision != "float32"), "no product was rounded"
    made = fit_program(program, Binding.of(program, segment.constants), TARGETS["sm_90a"]).program
    changed = {o.name for o in made.operators} - {o.name for o in program.operators}
    assert changed or made.operators != program.operators, "no kernel was chosen again"
    for o in some(o for o in made.operators if any(c.kind == "contraction" for c in o.computes)):
        (product,) = (c.name for c in o.computes if c.kind == "contraction")
        assert family_of(o).operand_rounding == wanted[product.partition("_parts")[0]], o.head()
