"""Kernels of ranged programs on host threads: every candidate of every operator at several lengths. Operands are NaN past the
length wherever a kernel must not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from ranged_models import RANGED, RangedModel, parsed

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.frontend.read.reader import read_model
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.expr import Ref
from rammer.ir.extent import AffineExtent, Point
from rammer.ir.fold_rows import fold
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram, Task
from rammer.runtime.host_memory import HostMemory
from rammer.runtime.shape_buckets import pad_inputs
from rammer.tuning.kernel_probe import OwnTensors
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.bounds import bounded_results
from rammer_testing.nonempty import some

from .cuda_on_host import MOST_THREADS, on_host
from .emulator.launch import HostKernel, run_on_host
from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.kernels.lengths import ended
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.source import task_kernel

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: Bytes of one copy or load. Elements in the same group as the last valid element are read, too.
LOT = 16
#: Initial value of results.
BEFORE = 77


def sums(rng: np.random.Generator) -> RangedModel:
    """Return a matrix times one vector and times two, along an open axis."""
    text = """sums (float[40, seq] x, float[seq] v, float[seq, 2] w) => (float[40] y, float[40, 2] z) {
        y = MatMul(x, v)  u = MatMul(x, w)  z = Relu(u) }"""
    return RangedModel(parsed(text), {"seq": (1, 300)})


def rows(rng: np.random.Generator) -> RangedModel:
    """Return a softmax and a normalisation of open rows, and their sums."""
    text = """rows (float[6, seq] x) => (float[6, seq] y, float[6, seq] z, float[6] s, float[6] t) {
        y = Softmax<axis = -1>(x)  m = ReduceMean<keepdims = 1>(x, last)  c = Sub(x, m)  q = Mul(c, c)
        n = ReduceMean<keepdims = 1>(q, last)  d = Sqrt(n)  e = Add(d, one)  z = Div(c, e)
        s = ReduceSum<keepdims = 0>(z, last)  t = ReduceMax<keepdims = 0>(y, last) }"""
    return RangedModel(parsed(text, last=np.array([1]), one=np.float32(1)), {"seq": (1, 300)})


def heads(rng: np.random.Generator) -> RangedModel:
    """Return attention over open keys, with a mask."""
    text = """heads (float[2, seq, 16] q, float[2, 16, seq] k, float[2, seq, 16] v, float[1, 1, seq] mask)
        => (float[2, seq, 16] y) {
        s = MatMul(q, k)  t = Add(s, mask)  p = Softmax<axis = -1>(t)  y = MatMul(p, v) }"""
    return RangedModel(parsed(text), {"seq": (1, 90)})


def deep(rng: np.random.Generator) -> RangedModel:
    """Return sums over an open axis and another axis, in both orders."""
    text = """deep (float[5, seq, 24] x, float[5, seq, 20] w, float[seq, 3, 16] a, float[seq, 3, 20] b)
        => (float[24, 20] y, float[16, 20] z) {
        y = Einsum<equation = "bsk,bsn->kn">(x, w)  z = Einsum<equation = "sbk,sbn->kn">(a, b) }"""
    return RangedModel(parsed(text), {"seq": (1, 70)})


def weights(rng: np.random.Generator) -> RangedModel:
    """Return operators with constants that fill no tile or block: a product, and convolutions with taps and with few channels."""
    text = """weights (float[seq, 70] x, float[seq, 36, 4, 4] i)
        => (float[seq, 90] y, float[seq, 20, 2, 2] z, float[seq, 12, 3, 3] t) {
        p = MatMul(x, a)  y = Add(p, b)  z = Conv(i, c)  q = Conv(i, d)  t = Relu(q) }"""
    shapes = {"a": (70, 90), "b": (90,), "c": (20, 36, 3, 3), "d": (12, 36, 2, 2)}
    return RangedModel(parsed(text, **{n: rng.standard_normal(s, np.float32) / 6 for n, s in shapes.items()}), {"seq": (1, 150)})


#: Models for this device's kernels, in addition to those for every device.
MODELS: dict[str, Callable[[np.random.Generator], RangedModel]] = {
    **RANGED,
    "sums": sums,
    "rows": rows,
    "heads": heads,
    "deep": deep,
    "weights": weights,
}


@dataclass(frozen=True)
class Step:
    """An untiled operator of a program, and its operands at the lengths of ``point``, by scalar tensor."""

    operator: ROperator
    binding: Binding
    constants: Mapping[str, Array]
    tensors: Mapping[str, Array]
    point: Point

    def program(self, tiled: ROperator) -> tuple[RProgram, dict[str, Array]]:
        """Return a program of ``tiled`` alone, and its constants."""
        own = OwnTensors.of([tiled], self.binding)
        row = tuple(Task(tiled.name, i) for i in range(tiled.task_count))
        made = own.program("alone", [tiled], (row,), self.binding.precision)
        return made, {n: self.constants.get(n, self.tensors[n]) for n in own.constants}

    @cached_property
    def wanted(self) -> dict[str, Any]:
        """Return its results at the maximal length, with error bounds."""
        return bounded_results(self.operator, {n: self.tensors[n] for n in self.operator.inputs}, self.binding.precision)

    def spoilt(self, lot: int) -> dict[str, Array]:
        """Return the operands with NaN past the last group of ``lot`` elements."""
        made = {n: self.tensors[n].copy() for n in (*self.operator.inputs, *self.operator.lengths)}
        for tensor, places in unread(self.operator).items():
            for d, extent in enumerate(places):
                if extent is not None and tensor not in self.constants and made[tensor].dtype.kind == "f":
                    end = -(-max(extent.at(self.point), 1) // lot) * lot
                    made[tensor][(*[slice(None)] * d, slice(end, None))] = np.nan
        return made

    def problem(self, kernel: TaskKernel, tiled: ROperator, lot: int, ending: ROperator | None = None) -> str:
        """Return the error of ``kernel`` of ``tiled``, or "". Tasks are masked as those of ``ending``."""
        whole = ended(ending or tiled, kernel, self.binding)
        host = HostKernel.of(whole, self.binding, self.constants, on_host(whole), tiled.task_count)
        before = {n: np.full(self.binding.types[n].shape, BEFORE, self.binding.types[n].dtype) for n in tiled.outputs}
        return self.judged(tiled, run_on_host(host, {**self.spoilt(lot), **before}))

    def judged(self, tiled: ROperator, have: Mapping[str, Array], left: bool = True) -> str:
        """Return the error in results, or "". With ``left``, tasks past the lengths must leave the previous values."""
        for number, (name, want) in enumerate(self.wanted.items()):
            counts, beyond = self.regions(tiled, number)
            with np.errstate(invalid="ignore"):  # infinite values have no bound
                error = np.nan_to_num(0.0 if want.error is None else want.error, nan=1e-4, posinf=1e-4)
                same = (have[name] == want.value) | (np.abs(have[name] - want.value) <= error)
            if not same[counts].all():
                place = tuple(int(x) for x in np.argwhere(counts & ~same)[0])
                return f"{name}{list(place)} is {have[name][place]}, not {want.value[place]}, at {dict(self.point)}"
            if left and (have[name][beyond] != BEFORE).any():
                return f"{name}: a task beyond the length did not end at {dict(self.point)}"
        return ""

    def regions(self, tiled: ROperator, number: int) -> tuple[Array, Array]:
        """Return masks of a result: the valid elements, and those of tasks that leave the previous values."""
        counts, beyond = (np.full(tiled.anchor.shape, value) for value in (True, False))
        for e in tiled.skips:
            d = next(i for i, a in enumerate(tiled.anchor.axes) if a.name == e.axis)
            end, tile = e.extent.at(self.point), tiled.tile[d]
            unwritten = slice(0, end) if e.before else slice(end, None)
            left = slice(0, end // tile * tile) if e.before else slice(-(-end // tile) * tile, None)
            if e.fills[number] is None:
                counts[(*[slice(None)] * d, unwritten)] = False
                beyond[(*[slice(None)] * d, left)] = True
        for e in tiled.skips:  # an ending before it may have written there
            d = next(i for i, a in enumerate(tiled.anchor.axes) if a.name == e.axis)
            if e.fills[number] is not None:
                end, tile = e.extent.at(self.point), tiled.tile[d]
                beyond[(*[slice(None)] * d, slice(-(-end // tile) * tile, None))] = False
        return counts, beyond


def unread(operator: ROperator) -> dict[str, list[AffineExtent | None]]:
    """Return for each axis of every operand the extent from which elements affect no valid result."""
    stops = {(s.compute, s.axis): s.extent for s in operator.reduce_bounds}
    found: dict[str, list[set[AffineExtent | None]]] = {}
    ends = {e.axis: e.extent for e in operator.skips if not e.before}
    place = {a.name: d for d, a in enumerate(operator.anchor.axes)}
    for c in reversed(operator.computes):
        own: dict[str, AffineExtent | None] = {r.name: stops.get((c.name, r.name)) for r in c.reduce}
        for d, a in enumerate(c.axes):
            seen = set(found[c.name][d]) if c.name in found else set()
            if c.name in operator.outputs:
                seen.add(next((x for n, x in ends.items() if place[n] == d), None))
            own[a.name] = seen.pop() if len(seen) == 1 else None
        for load in c.loads:
            sides = found.setdefault(load.tensor, [set() for _ in load.indices])
            for side, index in zip(sides, load.indices, strict=True):
                side.add(own.get(index.axis) if isinstance(index, Ref) else None)
    return {n: [next(iter(s)) if len(s) == 1 else None for s in sides] for n, sides in found.items() if n in operator.inputs}


class RangedSearch:
    """The candidates of all operators of a model's ranged program, and their errors at some lengths."""

    def __init__(self, name: str, rng: np.random.Generator, precision: str = "float32") -> None:
        backend = open_backend(OpenOptions(target="sm_90a"))
        assert isinstance(backend, CudaBackend)
        self.model, self.backend, self.rng = MODELS[name](rng), backend, rng
        high = {n: span[1] for n, span in self.model.spans.items()}
        shapes = {n: a.shape for n, a in self.model.inputs(high, rng).items()}
        compiler = Compiler(backend, CompileOptions(precision=precision), KernelStore(None))
        self.compiled = compiler.compile_range(read_model(self.model.proto), shapes, self.model.spans)
        (segment,) = self.compiled.segments
        assert isinstance(segment, ProgramSegment)
        self.program: RProgram = segment.program
        self.constants = segment.constants
        self.binding = Binding.of(self.program, self.constants)

    def inputs(self, lengths: Mapping[str, int]) -> tuple[dict[str, Array], Point]:
        """Return fresh inputs of these lengths, padded as a run pads them, and the lengths."""
        assert self.compiled.ranged is not None
        return pad_inputs(self.compiled.ranged, self.compiled.graph.inputs, self.model.inputs(lengths, self.rng))

    def steps(self, lengths: Mapping[str, int], given: tuple[dict[str, Array], Point] | None = None) -> Iterator[Step]:
        """Yield the operators in a legal order, each with the results of the preceding ones, on fresh inputs or on ``given``."""
        assert self.compiled.ranged is not None
        memory = HostMemory(self.program, self.constants)
        wide, point = given or self.inputs(lengths)
        memory.write_inputs(wide)
        point = {self.compiled.ranged.lengths[n]: v for n, v in point.items() if n in self.compiled.ranged.lengths}
        last = {t.operator: i for i, t in enumerate(fold(self.program, 1).rows[0])}
        for name in sorted(last, key=lambda n: last[n]):
            operator = self.program.operator[name]
            tensors = {n: memory.tensors[n].copy() for n in (*operator.inputs, *operator.lengths)}
            bare = replace(operator, tile=(), family="", config=())
            yield Step(bare, self.binding, self.constants, tensors, point)
            for c in operator.computes:
                tensors[c.name] = evaluate_compute(c, tensors)
            for output in operator.outputs:
                memory.tensors[output][...] = tensors[output]

    def problems(self, lengths: Mapping[str, int], each: int) -> Iterator[tuple[str, str]]:
        """Yield family and error ("" if none) of ``each`` candidates per family, for operators with masks or stops."""
        steps = list(self.steps(lengths))
        for step in (steps[i] for i in self.rng.permutation(len(steps))):
            families: dict[str, list[tuple[ROperator, TaskKernel]]] = {}
            for tiled, kernel in self.candidates(step) if step.operator.lengths else ():
                families.setdefault(tiled.family, []).append((tiled, kernel))
            for family, listed in families.items():
                for i in self.rng.permutation(len(listed))[:each]:
                    tiled, kernel = listed[i]
                    problem = step.problem(kernel, tiled, lot_of(tiled, step.binding))
                    yield family, f"{tiled.head()}: {problem}" if problem else ""

    def candidates(self, step: Step) -> Iterator[tuple[ROperator, TaskKernel]]:
        """Yield every tile of every family that host threads can run."""
        for tiled in some(self.backend.all_candidates(step.operator, step.binding)):
            if self.backend.fits(tiled, step.binding):
                kernel = task_kernel(tiled, step.binding)
                assert stops_as_it_should(tiled, kernel), tiled.head()
                if runs_here(kernel):
                    yield tiled, kernel


def searched(case: str, rng: np.random.Generator) -> RangedSearch:
    name, _, precision = case.partition(" ")
    return RangedSearch(name, rng, precision or "float32")


def points(search: RangedSearch, rng: np.random.Generator) -> list[dict[str, int]]:
    """Return the ends of the range, and a length in between."""
    spans = search.model.spans.items()
    ends = [{n: span[k] for n, span in spans} for k in (0, 1)]
    return [{n: int(rng.integers(low, high)) for n, (low, high) in spans}, *ends]


def runs_here(kernel: TaskKernel) -> bool:
    return kernel.blocks == 1 and kernel.threads <= MOST_THREADS and "bulk" not in kernel.text


def lot_of(tiled: ROperator, binding: Binding) -> int:
    """Return the number of elements that kernels of its family read at a time."""
    if tiled.family in ("", "attention"):
        return 1
    return LOT // min(np.dtype(binding.types[n].dtype).itemsize for n in tiled.inputs)


def stops_as_it_should(tiled: ROperator, kernel: TaskKernel) -> bool:
    """Return True if a kernel reads exactly the lengths at which its reductions stop."""
    return {a.tensor for a in kernel.arguments} >= set(stop_lengths(tiled)) and (
        bool(tiled.reduce_bounds) or "stop0" not in kernel.body
    )


def stop_lengths(operator: ROperator) -> list[str]:
    """Return the scalar tensors that bound its reductions."""
    return [n for s in operator.reduce_bounds for n, _ in s.extent.terms]
