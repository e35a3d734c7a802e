"""Strided rows: predicted and actual memory accesses of threads, tiles, prices and results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from rammer.codegen.rowform import RowForm, address_step, can_join_axes, collect_accesses
from rammer.device.manifest import Binding, OpenOptions
from rammer.ir import expr as ex
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.expr import Load, Ref
from rammer.ir.operator import ROperator
from rammer_testing.cases import Sampler
from rammer_testing.nonempty import some
from rammer_testing.single import subjects

from .emulator.launch import COMPILER, HostKernel, run_on_host
from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.gpu import TARGETS
from rammer_cuda.rows.cost import row_traffic
from rammer_cuda.rows.rowshape import RowShape, rows_of, shape_of
from rammer_cuda.rows.rowwise import ROWWISE
from rammer_cuda.source import task_kernel

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
GPU, WARP = TARGETS["sm_90a"], 32
#: Number of an operator's tasks whose threads are simulated.
TASKS = 4


def target() -> CudaBackend:
    backend = open_backend(OpenOptions(target="sm_90a"))
    assert isinstance(backend, CudaBackend)
    return backend


def on_rows(random: Random, most: int) -> Iterator[tuple[ROperator, Binding]]:
    """Yield float32 row operators of random graphs with several results, up to about ``most`` elements per tensor."""
    sampler, backend = Sampler(random, 40 * most, ("float32",), ("stitched",)), target()
    while True:
        for s in subjects(sampler.next(), backend):
            kinds = {s.binding.types[n].dtype for n in (*s.operator.inputs, *s.operator.outputs)}
            if kinds == {"float32"} and ROWWISE.candidates(s.operator, s.binding, GPU):
                yield s.operator, s.binding


@dataclass(frozen=True)
class Threads:
    """The threads of one task of a tiled operator: their rows, first elements, and a mask of active threads."""

    form: RowForm
    shape: RowShape
    rows: list[Array]
    lane: Array
    there: Array

    @staticmethod
    def of(form: RowForm, task: int) -> Threads:
        operator, s = form.operator, shape_of(form)
        tid = np.arange(s.threads)
        lane, local = (tid // s.side, tid % s.side) if s.side else (tid % s.lanes, tid // s.lanes)
        places, left = np.unravel_index(task, operator.grid), np.minimum(local, s.rows - 1)
        dims = [form.row_of.index(k) for k in range(len(form.rows))]
        digits = np.unravel_index(left, [operator.tile[d] for d in dims]) if dims else ()
        rows = [places[d] * operator.tile[d] + digit for d, digit in zip(dims, digits, strict=True)]
        there = (local < s.rows) & np.all([r < a.extent for r, a in zip(rows, form.rows, strict=True)], axis=0)
        return Threads(form, s, [np.minimum(r, a.extent - 1) for r, a in zip(rows, form.rows, strict=True)], lane, there)

    def elements(self, chunk: int) -> tuple[Array, Array]:
        """Return the first element of every thread's chunk, and a mask of elements inside."""
        start = (self.lane + chunk * self.shape.lanes) * self.shape.vector
        return np.minimum(start, self.form.length - self.shape.vector), start < self.form.length


def at(load: Load, values: Mapping[str, Array], strides: tuple[int, ...]) -> Array:
    """Return element offsets of ``load`` from the start of the storage, per thread."""
    total = np.zeros(len(next(iter(values.values()))), np.int64)
    forms = [f for f in map(ex.affine_form, load.indices) if f is not None]
    assert len(forms) == len(load.indices)
    for stride, (steps, first) in zip(strides, forms, strict=True):
        total += stride * (first + sum((values[a] * n for a, n in steps.items()), np.zeros_like(total)))
    return total


def followed(operator: ROperator, binding: Binding, random: Random) -> tuple[float, float, float, float]:
    """Return lines and sectors of loads, then of stores, as ``row_traffic`` counts them, from the threads of some tasks."""
    form = rows_of(operator, binding).form
    strides = {n: binding.storages[n].strides for n in (*operator.inputs, *operator.outputs)}
    found, counts = collect_accesses(form), np.zeros(4)
    tasks = random.sample(range(operator.task_count), min(TASKS, operator.task_count))
    for task in tasks:
        for load in found.loads:
            threads, stored = Threads.of(form, task), load.tensor in operator.outputs
            own, block = access(threads, load, found.elements, found.rows, binding, can_join_axes(form, strides))
            kept = [a[m] for a, m in own] if stored else [a for a, _ in own]
            counts[2 * stored] += sum(len(np.unique(a // 128)) for a in kept if a.size)
            counts[2 * stored + 1] += (
                sum(len(np.unique(a // 32)) for a in kept if a.size) if stored else len(np.unique(block // 32))
            )
    lines, sectors, stored_lines, stored_sectors = counts * operator.task_count / len(tasks)
    return lines, sectors, stored_lines, stored_sectors


def access(
    threads: Threads, load: Load, element_axes: tuple[Ref, ...], row_axes: tuple[Ref, ...], binding: Binding, joined: bool
) -> tuple[list[tuple[Array, Array]], Array]:
    """Return byte addresses and active threads of each warp's accesses, and all addresses of the block."""
    form, s, storage = threads.form, threads.shape, binding.storages[load.tensor]
    axes, own, block = {e.axis for e in element_axes}, list[tuple[Array, Array]](), list[Array]()
    by_row = not any(ex.axes_of(i) & axes for i in load.indices)
    values = {r.axis: v for r, v in zip(row_axes, threads.rows, strict=True)} | {"": threads.lane}
    for chunk in range(1 if by_row else s.chunks):
        start, inside = threads.elements(chunk)
        there = threads.there & (threads.lane == 0 if by_row else inside)
        found = list[Array]()
        for v in range(1 if by_row else s.vector):
            digits = np.unravel_index(start + v, [a.extent for a in form.elements])
            place = at(load, values | dict(zip((e.axis for e in element_axes), digits, strict=True)), storage.strides)
            found.append((storage.offset + place) * 4)
        steps = [address_step(load, storage.strides, r) for r in row_axes]
        first = storage.offset + at(load, dict.fromkeys(values | dict.fromkeys(axes), np.zeros(1, np.int64)), storage.strides)[0]
        even = all(n is not None and n % 4 == 0 for n in (*steps, int(first)))
        wide = s.vector == 4 and joined and not by_row and even and address_step(load, storage.strides, element_axes[-1]) == 1
        for group in [np.stack(found, 1)] if wide else [f[:, None] for f in found]:
            for w in range(0, s.threads, WARP):
                there_too = np.repeat(there[w : w + WARP], group.shape[1])
                own.append((group[w : w + WARP].ravel(), there_too))
        block += [f[there] for f in found]
    return own, np.concatenate(block)


@pytest.mark.slow
def test_sectors_are_those_that_threads_touch(seed: int) -> None:
    """Check the price's closed form against every thread's addresses, for random candidates of random operators."""
    random, errors = Random(seed), list[float]()
    for operator, binding in some(on_rows(random, 100_000)):
        for choice in random.sample(list(ROWWISE.candidates(operator, binding, GPU)), 2):
            if shape_of(rows_of(choice.operator, binding).form).blocks > 1:
                continue
            loads, stores = row_traffic(rows_of(choice.operator, binding))
            said = np.array([loads.lines, loads.sectors / 32, stores.lines, stores.sectors / 32])
            real = np.array(followed(choice.operator, binding, random))
            few = 0.02 * real.max() + 64  # negligible amounts
            errors.append(float(np.abs(np.log((said + few) / (real + few))).max()))
            assert errors[-1] < math.log(3.5), (choice.operator.head(), said, real)
        if len(errors) >= 40:
            break
    assert np.median(errors) < 0.2 and np.quantile(errors, 0.9) < 0.8


@pytest.mark.slow
def test_tiles_of_rows_that_are_neighbours_are_whole_sectors(seed: int) -> None:
    """Check that tiles cut axes of adjacent rows between sectors, unless a tile has fewer rows."""
    random, seen = Random(seed), 0
    for operator, binding in some(on_rows(random, 100_000)):
        for choice in some(ROWWISE.candidates(operator, binding, GPU)):
            placed = rows_of(choice.operator, binding)
            if placed.unit > 1:
                d = placed.form.row_of.index(len(placed.form.rows) - 1)
                tile, extent = choice.operator.tile[d], choice.operator.anchor.axes[d].extent
                threads = shape_of(placed.form)
                assert tile == extent or tile % placed.unit == 0 or 256 // threads.lanes < placed.unit, choice.operator.head()
                seen += tile < extent
        if seen > 60:
            break


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_rows_side_by_side_agree_with_float64_on_the_host(seed: int) -> None:
    random, tried, backend = Random(seed), 0, target()
    for operator, binding in some(on_rows(random, 2_000)):
        sides = [c.operator for c in ROWWISE.candidates(operator, binding, GPU) if "side" in dict(c.operator.config)]
        sides = [o for o in sides if backend.fits(o, binding) and runs_on_the_host(o, binding)]
        for tiled in random.sample(sides, min(1, len(sides))):
            agrees_on_the_host(tiled, binding, seed + tried)
            tried += 1
        if tried >= 3:
            break


def runs_on_the_host(tiled: ROperator, binding: Binding) -> bool:
    """Return True if the emulator can run the kernel: it has no clusters, and many threads take long."""
    return "blocks" not in dict(tiled.config) and task_kernel(tiled, binding).threads <= 256


def agrees_on_the_host(tiled: ROperator, binding: Binding, seed: int) -> None:
    """Check every result of a tiled operator against float64, with its kernel on the emulator."""
    rng = np.random.default_rng(seed)
    given = {n: rng.standard_normal(binding.types[n].shape, np.float32) for n in tiled.inputs}
    have = run_on_host(HostKernel.of(task_kernel(tiled, binding), binding, given, blocks=tiled.task_count), given)
    values = {n: v.astype(np.float64) for n, v in given.items()}
    for c in tiled.computes:
        values[c.name] = evaluate_compute(c, values, precise=True)
    for name in some(tiled.outputs):
        want = values[name]
        assert np.linalg.norm(have[name] - want) <= 3e-6 * np.linalg.norm(want) + 1e-30, f"{name} of {tiled.head()}"


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_rows_kept_beside_what_they_are_reduced_to_agree_with_float64_on_the_host(seed: int) -> None:
    """Check results of several shapes in one kernel, for every owner of the task grid."""
    random, tried, backend = Random(seed), set[bool](), target()
    for operator, binding in some(on_rows(random, 2_000)):
        if not operator.even:
            found = [c.operator for c in ROWWISE.candidates(operator, binding, GPU)]
            found = [o for o in found if backend.fits(o, binding) and runs_on_the_host(o, binding)]
            for tiled in random.sample(found, min(1, len(found))):
                agrees_on_the_host(tiled, binding, seed + len(tried))
                tried.add(rows_of(operator, binding).form.whole(operator.anchor.name))
        if len(tried) == 2:
            break
