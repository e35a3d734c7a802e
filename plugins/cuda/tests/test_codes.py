"""Products with codes on host threads: every code width, vectors of both types, blocks and range ends."""

from __future__ import annotations

from random import Random

import pytest

pytest.importorskip("cuda.bindings")

from families import operator

from rammer_testing.cases import NetCase, pick_of
from rammer_testing.single import subjects, trial_of

from .cuda_on_host import HostSearch, problem_of
from .emulator.launch import COMPILER
from rammer_cuda.source import task_kernel

#: Codes of 4 bits in blocks of 32.
CODE = "and_(shr(cast(int32, w[n, k // 2]), cast(int32, (k % 2) * 4)), const(int32, 15))"
STORED = operator(
    [f"y: f32[i:2, n:64] = sum[k:128] x[i, k] * (cast(float32, {CODE}) * s[n, k // 32])"],
    {"x": (2, 128), "w": (64, 64), "s": (64, 4)},
    "ws",
    dtypes={"w": "uint8"},
)
CASES = (
    "stored b=1 m=1 depth=1028 width=37 bits=4 block=32 off=1 +moved +signed +relu",
    "stored b=2 m=5 depth=192 width=33 bits=2 block=64 off=1 +moved +turnb +half",
    "stored b=1 m=9 depth=512 width=40 bits=8 block=128 off=1 +column +signed +moved +bias",
    "stored b=1 m=2 depth=2048 width=20 bits=4 block=20 off=3 +moved +half +add +slice",
)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", CASES)
def test_products_with_codes_are_right(text: str, seed: int) -> None:
    """Check one random candidate of each. A refused candidate is replaced by another."""
    search, random, case = HostSearch("sm_90a"), Random(f"{seed} {text}"), NetCase.parse(text)
    subject = next(s for s in subjects(case, search.backend) if s.operator.main.decoded is not None)
    offered = [o for o in search.backend.all_candidates(subject.operator, subject.binding) if o.family == "codes"]
    random.shuffle(offered)
    tiled = next(o for o in offered if search.possible(o, subject))
    problem = problem_of(task_kernel(tiled, subject.binding), tiled, trial_of(subject, random.randrange(1 << 20)))
    assert problem == "", f"{seed}: {text} {pick_of(tiled)}: {problem}"


@pytest.mark.parametrize("rows", [1, 8, 128])
def test_codes_are_what_is_offered_first(rows: int) -> None:
    """Check that the kernel that reads single codes is not first."""
    backend = HostSearch("sm_90a").backend
    case = NetCase.parse(f"stored b=1 m={rows} depth=4096 width=1024 bits=4 block=32 off=1")
    (one,) = subjects(case, backend)
    assert next(iter(backend.candidates(one.operator, one.binding))).family == "codes"
