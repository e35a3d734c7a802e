"""The kernel search with cuda's kernels on host threads: it detects planted faults, and a rotating sample is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

import pytest

pytest.importorskip("cuda.bindings")

from rammer.ir.operator import ROperator
from rammer_testing.cases import NetCase, Sampler
from rammer_testing.single import Trial, subjects, trial_of

from .cuda_on_host import HostSearch, on_host, planted, problem_of, run_cases
from .emulator.launch import COMPILER
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.source import task_kernel

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
ROWS = "matmul b=1 m=20 depth=37 width=13 off=1 @float32 seed=5"
ODD = "matmul b=2 m=33 depth=77 width=21 off=1 +free @float16 seed=5"
WIDE = "matmul b=1 m=64 depth=64 width=64 off=1 @float16 seed=5"


def found(text: str, family: str, partial: bool = True, **config: int) -> tuple[TaskKernel, ROperator, Trial]:
    """Return the first kernel of a family for a case that can run here, with these values in its config."""
    case, search = NetCase.parse(text), HostSearch("sm_90a")
    for subject in subjects(case, search.backend):
        for tiled in search.backend.all_candidates(subject.operator, subject.binding):
            ends = any(a.extent % t for a, t in zip(tiled.anchor.axes, tiled.tile, strict=True))
            asked = tiled.family == family and (ends or not partial) and config.items() <= dict(tiled.config).items()
            if asked and search.possible(tiled, subject):
                return task_kernel(tiled, subject.binding), tiled, trial_of(subject, case.seed)
    raise AssertionError(f"no {family} for {text}")


def edited(text: str, old: str, new: str, last: bool = False) -> str:
    """Return ``text`` with every ``old`` replaced, or only the last."""
    before, found, after = text.rpartition(old)
    return before + new + after if last and found else text.replace(old, new)


def too_early(text: str) -> str:
    """Return the text in which the operand that is not constant is fetched before the wait."""
    wait, last = r"rm_after\(\);\n", r"(rm_copies_arrive\(full \+ 8 \* slot\);\s*}\n)"
    return re.sub(last, r"\1rm_after();\n", re.sub(wait, "", text, count=1))


#: Case, family and config of a kernel, and a flag that requires a partial last tile.
Kind = tuple[str, str, bool, dict[str, int]]
GEMM: Kind = (ROWS, "gemm", True, {"bk": 32, "slice_k": 4})
HALF: Kind = (ODD, "gemm_f16", True, {"bk": 64})
BFLOAT: Kind = (ROWS.replace("float32", "bfloat16"), "gemm_bf16", True, {"bk": 32})
DEEP: Kind = (WIDE, "gemm_f16", False, {"bk": 64})
FIXED: Kind = (WIDE, "gemm_wgmma_f16", False, {"down": 0})
RELU: Kind = ("matmul b=1 m=20 depth=37 width=13 off=1 +relu @float32 seed=6", *GEMM[1:])
CELL: Kind = ("gemv t=1 depth=128 width=3 off=1 @float32 seed=1", "cell", False, {})
PART: Kind = ("gemv t=3 depth=52 width=37 off=1 @float32 seed=1", "cell", True, {})
GATES: Kind = ("recurrent t=3 b=1 depth=64 width=36 @float16 seed=1", "cell", False, {})
BYTE: Kind = ("imatmul b=1 m=20 depth=77 width=21 off=1 +signed +bare seed=5", "gemm_i8", True, {})
PADDED: Kind = ("iconv n=1 c=8 m=8 h=5 w=5 k=3 s=1 d=1 p=1 q=-1 g=1 off=1 +moved +bare seed=5", "gemm_i8", False, {})
#: A kernel, the edit of its text, and the expected error.
PLANTS: dict[str, tuple[Kind, Callable[[str], str], str]] = {
    "a dropped barrier": (GEMM, lambda t: edited(t, "__syncthreads();", "", last=True), "wrong"),
    "an off-by-one bound": (GEMM, lambda t: edited(t, "+ ak) < 37", "+ ak) <= 37"), "wrong"),
    "a row too many": (GEMM, lambda t: edited(t, "if (x0 < 20)", "if (x0 <= 20)"), "outside"),
    "a wrong zero fill": (HALF, lambda t: edited(t, " < 77);", " < 177);"), "wrong"),
    "an unaligned copy": (DEEP, lambda t: edited(t, "rm_copy16(ato0_0", "rm_copy16(1 + ato0_0"), "misaligned"),
    "a missed NaN": (RELU, lambda t: edited(t, "rm_max_f32(", "fmaxf("), "wrong"),
    "an early fetch": (FIXED, too_early, "wrong"),
    "a sign too few": (BYTE, lambda t: edited(t, ", true, true>(", ", false, true>("), "wrong"),
    "padding with 0": (PADDED, lambda t: edited(t, "286331153u", "0u"), "wrong"),
    "a vector too short": (PART, lambda t: edited(t, "% 128 < 52 ?", "% 128 < 48 ?"), "wrong"),
    "no wait": (GEMM, lambda t: edited(t, "rm_after();", ""), "wrong"),
}


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize("fault", PLANTS)
def test_planted_faults_are_found(fault: str) -> None:
    (text, family, partial, config), edit, says = PLANTS[fault]
    kernel, tiled, trial = found(text, family, partial, **config)
    try:
        problem = problem_of(planted(kernel, edit), tiled, trial)
    except AssertionError as stuck:
        problem = str(stuck)
    assert says in problem


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "kind",
    [GEMM, HALF, BFLOAT, FIXED, BYTE, PADDED, CELL, PART, GATES],
    ids=lambda k: k[0].split()[0] + " " + k[1],
)
def test_they_are_right_without_the_faults(kind: Kind) -> None:
    """Check the unmodified kernels. In ``FIXED``, the faulty order fetches the operand that is not constant before the wait. The
    cell is one bare product, whose sums no map stores, and its lanes multiply zeros in ``PART``."""
    text, family, partial, config = kind
    kernel, tiled, trial = found(text, family, partial, **config)
    assert problem_of(kernel, tiled, trial) == ""
    assert "rm_after" in on_host(kernel)


@pytest.mark.slow
def test_a_sample_is_right(seed: int) -> None:
    """Check a small fresh case, one candidate of each family."""
    search, random = HostSearch("sm_90a"), Random(seed)
    case = Sampler(random, 1_000, ("float32", "tf32", "float16", "bfloat16"), ("matmul", "gemv", "rows", "imatmul")).next()
    assert run_cases(search, case, random)[1] == []
