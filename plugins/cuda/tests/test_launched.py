"""Launches of ranged programs: kernels after the length test, several kernels in one launch, and cached kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from rammer.device.manifest import Binding
from rammer.ir.launches import Launch, first_consecutive
from rammer.ir.operator import ROperator
from rammer.runtime.host_memory import HostMemory
from rammer_testing.nonempty import some

from .cuda_on_host import on_host, told
from .emulator.launch import COMPILER, HostKernel, run_on_host
from .ranged_on_host import MODELS, RangedSearch, Step, points, runs_here, searched
from rammer_cuda.compile import compile_all
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.launch_planning import plan_launches
from rammer_cuda.source import Writer, translation_unit

PROGRAMS = [
    *MODELS,
    *(f"{name} {how}" for name in ("products", "causal", "heads", "rows") for how in ("float16", "tf32", "bfloat16")),
]


class LaunchedRun:
    """A run of a program's launches on host threads. Unwritten memory is NaN, and readers see the values that kernels leave past
    the lengths."""

    def __init__(self, search: RangedSearch, lengths: Mapping[str, int]) -> None:
        given = search.inputs(lengths)
        self.search, self.program, self.memory = search, search.program, HostMemory(search.program, search.constants)
        self.memory.write_inputs(given[0])
        self.steps: dict[str, Step] = {s.operator.name: s for s in search.steps(lengths, given)}

    def problems(self, plan: Sequence[Launch], kernels: Mapping[str, TaskKernel]) -> list[str]:
        """Return the errors in the results of all operators, or an empty list."""
        parts = [(x, kernels[x.operator], self._operators(kernels[x.operator])) for x in plan]
        left, found = Counter(o.name for _, _, operators in parts for o in operators), list[str]()
        for launch, kernel, operators in parts:
            self._run(launch, kernel, operators)
            left.subtract(o.name for o in operators)
            for operator in (o for o in operators if not left[o.name]):
                found += [p] if (p := self._finished(operator)) else []
        return found

    def _operators(self, kernel: TaskKernel) -> list[ROperator]:
        """Return the operators whose tasks a kernel computes."""
        written = {a.tensor for a in kernel.arguments if a.written}
        return [o for o in self.program.operators if written & {*o.outputs}]

    def _run(self, launch: Launch, kernel: TaskKernel, operators: Sequence[ROperator]) -> None:
        tensors, first = self.memory.tensors, first_consecutive(launch.tasks)
        if first is not None and runs_here(kernel):
            host = HostKernel.of(kernel, self.search.binding, self.search.constants, on_host(kernel), len(launch.tasks))
            for name, values in run_on_host(host, {a.tensor: tensors[a.tensor].copy() for a in kernel.arguments}, first).items():
                tensors[name][...] = values
            return
        (alone,) = operators  # excludes clusters and blocks of many threads
        for index in launch.tasks:
            self.memory.run_task(alone, index)

    def _finished(self, operator: ROperator) -> str:
        """Return the error in an operator's results. Valid elements are then replaced by the exact values, by which later
        operators are judged."""
        step, have = self.steps[operator.name], {n: self.memory.tensors[n].copy() for n in operator.outputs}
        for number, name in enumerate(operator.outputs):
            counts, _ = step.regions(operator, number)
            clean = next((s.tensors[name] for s in self.steps.values() if name in s.tensors), have[name])
            self.memory.tensors[name][...] = np.where(counts, clean, have[name])
        return step.judged(operator, have, left=False)


class Restoring(Writer):
    """A writer that fails if kernels are written, since all are in the cache."""

    def all(self, operators: Iterable[ROperator], binding: Binding) -> dict[str, TaskKernel]:
        """Raise AssertionError: nothing is rewritten."""
        raise AssertionError("written again")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use an empty cache for the test."""
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", PROGRAMS)
def test_launches_of_a_range_are_right(case: str, rng: np.random.Generator) -> None:
    """Check both ends of the range and a length within, with kernels that the cache restores unchanged."""
    search = searched(case, rng)
    plan, kernels = plan_launches(search.program, search.binding, search.backend.gpu, Writer(), kept=True)
    _, again = plan_launches(search.program, search.binding, search.backend.gpu, Restoring(), kept=True)
    assert told(again) == told(kernels)
    compile_all({n: translation_unit([k]) for n, k in kernels.items()}, "sm_90a")
    for point in some(points(search, rng) if COMPILER else [{}]):
        assert not point or LaunchedRun(search, point).problems(plan, again) == []


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", PROGRAMS)
def test_candidates_come_from_the_cache_as_they_were_written(case: str, rng: np.random.Generator) -> None:
    """Check some candidates of every family for each operator, as separate programs."""
    search = searched(case, rng)
    for step in some(search.steps(points(search, rng)[0])):
        families: dict[str, list[ROperator]] = {}
        for tiled in some(search.backend.all_candidates(step.operator, step.binding)):
            if search.backend.fits(tiled, step.binding):
                families.setdefault(tiled.family, []).append(tiled)
        for tiled in some(listed[int(i)] for listed in families.values() for i in rng.permutation(len(listed))[:3]):
            program, constants = step.program(tiled)
            binding = Binding.of(program, constants)
            made, again = (plan_launches(program, binding, search.backend.gpu, w, kept=True) for w in (Writer(), Restoring()))
            assert told(again[1]) == told(made[1])
