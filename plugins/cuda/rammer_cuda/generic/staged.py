"""The cost of generic kernels that keep values on chip, by the stages that the core's emitter lays out.

These kernels are bound by latency, which bytes and operations do not predict. Their blocks have few threads, which iterate over a
stage's elements and wait for loads. All threads meet between stages. A recurrent cell with one task per column is an example."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from rammer.codegen import Layout, Stage, find_shared_reductions
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.operator import ROperator

from rammer_cuda.gpu import THREADS, Gpu

#: Cycles from a launch to the last store of an empty block, of a round of reads from memory and of one from chip, of a thread's
#: operation (the first and the last as fitted to maps, ``generic.cost``), and of one step of the tree in which threads add up
#: their partial sums. START, NEAR and JOIN are fitted to five kernels on an H200, a recurrent cell, two layer normalisations and
#: two means of images: the measured time over the predicted is 0.91 to 1.12.
START, ROUND, NEAR, CHAIN, JOIN = 1200, 364, 120, 19.0, 140
#: Scheduler cycles for an instruction of a warp, instructions of a load, and loads of a sum that are in flight together.
ISSUE, LOAD, UNROLLED = 2.5, 6, 4
#: Maximum warps and blocks resident on an SM.
WARPS, BLOCKS = 48, 32


def staged_cycles(operator: ROperator, binding: Binding, gpu: Gpu) -> tuple[float, float]:
    """Return the predicted cycles of one task of a tiled operator, bytes ignored, as (latency, SM time).

    The latency is from a launch to the last store. The SM time assumes maximum occupancy: blocks overlap waits and share issue
    slots. Raises ValueError if the operator is ill-formed."""
    layout, threads = Layout(operator, binding.types), dict(operator.config).get("threads", THREADS)
    waits = issues = 0.0
    for stage in layout.stages:
        wait, issue = _stage_cycles(layout, stage, threads)
        waits, issues = waits + wait, issues + issue
    kept = max(1, sum(math.prod(s.extents) * 4 for s in layout.stages if s.offset >= 0))
    resident = max(1, min(WARPS // -(-threads // 32), BLOCKS, gpu.shared // kept))
    return START + max(waits, issues / 4), max(waits / resident, issues / 4)


def _stage_cycles(layout: Layout, stage: Stage, threads: int) -> tuple[float, float]:
    """Return the cycles that a block waits in a stage, and the scheduler cycles of its warps."""
    computes = list(_inlined_computes(layout, stage.computes))
    summed = list(_inlined_computes(layout, [c for c in computes if c.reduce]))
    rest = [c for c in computes if c not in summed]
    count, parts = math.prod(stage.extents), max((s.parts for s in find_shared_reductions(layout.inlined, stage, 0)), default=1)
    deep = max((math.prod(r.extent for r in c.reduce) for c in summed), default=0)
    waits = issues = 0.0
    if summed:
        rounds, each = -(-count * parts // threads), -(-deep // parts)
        waits += rounds * (
            max(1.0, each / UNROLLED) * _read_cycles(layout, summed) + CHAIN * each / UNROLLED * _count_operations(summed)
        )
        waits += JOIN * math.log2(parts)
        issues += ISSUE * each * _count_instructions(summed) * (count * parts / 32)
    if rest:
        rounds = -(-count // threads)
        waits += rounds * (_read_cycles(layout, rest) + CHAIN * _count_operations(rest))
        issues += ISSUE * _count_instructions(rest) * (count / 32)
    return waits, issues


def _inlined_computes(layout: Layout, computes: Iterable[Compute]) -> Iterator[Compute]:
    """Yield the computes and those inlined into them, each once."""
    seen, open_ = set[str](), list(computes)
    while open_:
        c = open_.pop()
        if c.name not in seen:
            seen.add(c.name)
            open_ += [layout.inlined[n] for n in c.reads if n in layout.inlined]
            yield c


def _read_cycles(layout: Layout, computes: Iterable[Compute]) -> float:
    """Return the cycles of one round of the computes' reads."""
    return ROUND if any(n not in layout.computes for c in computes for n in c.reads) else NEAR


def _count_operations(computes: Iterable[Compute]) -> int:
    return sum(ex.count_flops(c.body) + 1 for c in computes)


def _count_instructions(computes: Iterable[Compute]) -> int:
    return sum(ex.count_flops(c.body) + LOAD * len(c.loads) + 2 for c in computes)
