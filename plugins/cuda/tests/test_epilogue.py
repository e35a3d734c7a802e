"""Epilogue loads of matrix products from tensors of other kernels: all precede the stores, and results are right."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

pytest.importorskip("cuda.bindings")

from rammer.ir.operator import ROperator
from rammer_testing.cases import NetCase
from rammer_testing.single import UntiledOperator, subjects, trial_of

from .cuda_on_host import HostSearch, planted, problem_of
from .emulator.launch import COMPILER
from rammer_cuda.contraction.choose import PRODUCTS
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.source import task_kernel

SMALL = "matmul b=1 m=35 depth=37 width=13 off=1 +add @float32 seed=5"
CASES = (
    SMALL,
    "matmul b=1 m=64 depth=64 width=64 off=1 +add @float16 seed=5",
    SMALL.replace("float32", "bfloat16"),
    "conv n=1 c=64 m=64 h=14 w=14 k=3 s=1 d=1 p=1 q=-1 g=1 off=1 +bias +add @tf32 seed=5",
    "conv n=1 c=64 m=64 h=14 w=14 k=1 s=1 d=1 p=0 q=-1 g=1 off=1 +bias +add @float32 seed=5",
    "imatmul b=1 m=128 depth=256 width=96 off=4 +codes +add @float32 seed=5",
)


def kernels(text: str, each: int = 10_000) -> Iterator[tuple[TaskKernel, ROperator, UntiledOperator]]:
    """Yield the kernels of every product of the case that a residual follows, at most ``each`` of a family."""
    search = HostSearch("sm_90a")
    for subject in subjects(NetCase.parse(text), search.backend):
        left = {f.name: each for f in PRODUCTS}
        for tiled in search.backend.all_candidates(subject.operator, subject.binding):
            if left.get(tiled.family) and search.backend.fits(tiled, subject.binding):
                made = task_kernel(tiled, subject.binding)
                left[tiled.family] -= 1
                if late(made, subject):
                    yield made, tiled, subject


def late(kernel: TaskKernel, subject: UntiledOperator) -> list[int]:
    """Return the indices of arguments after the operands that are read and that other kernels write."""
    return [k for k, a in enumerate(kernel.arguments) if k >= 2 and not a.written and a.tensor not in subject.binding.constants]


def innermost_loops(text: str) -> Iterator[str]:
    """Yield the body of each loop with braces, without its inner loops."""
    open_, inside = list[int](), list[list[str]]()
    for line in text.splitlines():
        if line.strip().startswith("}") and open_:
            open_[-1] -= 1
            if not open_[-1]:
                open_.pop()
                yield "\n".join(inside.pop())
        if re.search(r"\bfor \(.*\{$", line):
            open_.append(0)
            inside.append([])
        if line.endswith("{") and open_:
            open_[-1] += 1
        if inside:
            inside[-1].append(line)


def test_no_row_waits_for_memory_behind_the_store_of_another() -> None:
    """Check load order. The compiler must assume that a store may change the data of a later load."""
    seen = set[str]()
    for text in CASES:
        for kernel, tiled, subject in kernels(text, 2):
            seen.add(tiled.family)
            stored = [k for k, a in enumerate(kernel.arguments) if a.written]
            body = kernel.text[kernel.text.index("low + i0") :]
            assert all(re.search(rf"\bp{k}\b", body) for k in (*stored, *late(kernel, subject)))
            for loop in innermost_loops(kernel.text):
                both = [any(re.search(rf"\bp{k}\b", loop) for k in group) for group in (stored, late(kernel, subject))]
                assert both != [True, True], f"{tiled.head()}\n{loop}"
    assert seen == {f.name for f in PRODUCTS}


def chosen(whole: bool) -> tuple[TaskKernel, ROperator, UntiledOperator]:
    """Return a kernel for host threads whose threads load several rows, in whole groups or not."""
    for kernel, tiled, subject in kernels(SMALL):
        several = "float held0[1];" not in kernel.text and ("high - 1)" not in kernel.text) == whole
        if several and tiled.family == "gemm" and HostSearch("sm_90a").possible(tiled, subject):
            return kernel, tiled, subject
    raise AssertionError("no such kernel")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("whole, old, new", [(True, "+ held0[u]", "+ held0[0]"), (False, "high - 1)", "high - 2)")])
def test_residuals_of_several_rows(whole: bool, old: str, new: str) -> None:
    """Check right results, and wrong ones if all rows get one row's value or the last gets its predecessor's."""
    kernel, tiled, subject = chosen(whole)
    trial = trial_of(subject, 5)
    assert problem_of(kernel, tiled, trial) == ""
    assert old in kernel.text
    assert "wrong" in problem_of(planted(kernel, lambda text: text.replace(old, new)), tiled, trial)
