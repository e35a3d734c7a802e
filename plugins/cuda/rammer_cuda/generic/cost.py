"""Tiles for the generic kernel: maps, windows and short reductions, one or a few elements a thread.

A GPU hides memory latency by many threads with little work each, which a model of bytes alone ignores. Tiles are therefore small
and contiguous, and the block has as many threads as the tile has elements."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from rammer.codegen import Choice
from rammer.codegen.products import contiguous_tile, moved_bytes
from rammer.device.manifest import FUSED_FORMS, Binding
from rammer.fusion.tile_traffic import task_cost
from rammer.ir import expr as ex
from rammer.ir.at_length import shrink_to_parts
from rammer.ir.operator import ROperator
from rammer.ir.types import itemsize

from rammer_cuda.family import Family
from rammer_cuda.generic.kernel import generic_kernel
from rammer_cuda.generic.staged import staged_cycles
from rammer_cuda.gpu import THREADS as BLOCK_THREADS
from rammer_cuda.gpu import Gpu

#: Task sizes (elements) that are tried, and the maximum threads of a block.
SIZES = (32, 64, 128, 256, 512, 1024)
THREADS = 256
#: Cycles from a launch to its first result, of one dependent round of loads, and of issuing one load or operation.
START, ROUND, ISSUE = 2200, 700, 2.5
#: For operators without a reduction, cycles from a launch to the last store, of launching one more block, of a round of elements,
#: of an operation of one thread, and of a load and an operation of a warp on its scheduler. Fitted to 368 kernels of the zoo's
#: models on an H200: the measured time over the predicted has a standard deviation of 0.03.
MAP_START, BLOCK, MAP_ROUND, CHAIN, LOAD, OPERATION = 467, 1.19, 364, 19.0, 0.5, 1.2
#: Loads of a reduction that the compiler keeps in flight together.
UNROLLED = 4
#: Bytes of a sector of memory.
SECTOR = 32
#: Threads that share a long reduction of a small tile (the emitter's rule), and the minimum values that each combines.
SHARED, LEAST = 256, 4
#: Fraction of the peak that kernels reach if they stage tiles on chip (measured on an H200: 0.03 to 0.1).
SHARE = 0.06
#: Warps of an SM that hide each other's latency.
WARPS = 48


def plain_candidates(operator: ROperator, binding: Binding, gpu: Gpu) -> list[Choice]:
    """Return tiled copies, best first, or [] if the family is unsuited."""
    if not is_suitable(operator):
        return []
    found = []
    for tile in sorted({contiguous_tile(operator.anchor.shape, size) for size in SIZES}):
        tiled = replace(operator, tile=tile)
        elements = math.prod(tile)
        parts = _reduction_threads(operator, elements)
        wanted = max(elements * parts, 32)
        threads = min(THREADS, -(-wanted // 32) * 32)
        tiled = replace(tiled, config=(("threads", threads),))
        lengths = [plain_seconds(o, binding, gpu, parts) for o in shrink_to_parts(tiled, binding.parts)]
        found.append(Choice(sum(lengths) / len(lengths) + gpu.launch, tiled))
    found.sort(key=lambda f: (f[0], f[1].tile))
    return found


def is_suitable(operator: ROperator) -> bool:
    """Return True if tiles may be cut anywhere, none is staged on chip and reductions are not chained. Elements would repeat
    chained reductions."""
    staged = any(c.layer == "veu" for c in operator.connections)
    return not staged and sum(bool(c.reduce) for c in operator.computes) <= 1 and 0 not in operator.anchor.shape and operator.even


def plain_seconds(operator: ROperator, binding: Binding, gpu: Gpu, parts: int = 0) -> float:
    """Return the predicted seconds of all tasks of a tiled operator, without its launch. ``parts`` threads share a reduction; 0
    selects the kernel's number."""
    clock = gpu.model_clock
    elements, tasks = math.prod(operator.tile), operator.task_count
    threads = dict(operator.config).get("threads", BLOCK_THREADS)
    parts = parts or _reduction_threads(operator, elements)
    rounds = -(-elements * parts // threads)
    if not any(c.reduce for c in operator.computes):
        own = sum(ex.count_flops(c.body) + 1 for c in operator.computes)
        read = sum(len(c.loads) for c in operator.computes)
        busy = -(-threads // 32) * tasks / gpu.sms / 4
        cycles = MAP_START + BLOCK * tasks + rounds * (MAP_ROUND + CHAIN * own + busy * (LOAD * read + OPERATION * own))
        return max(cycles / clock, moved_bytes(operator, binding) / gpu.bandwidth) * _partial_sectors(operator, binding)
    traffic = task_cost(operator, binding.types, gpu.vdevice, binding.storages).traffic * tasks
    loads, work = 0.0, 0.0
    before = operator.prologue  # recomputed at every read
    for c in operator.computes:
        deep = operator.main.reduce if c in before else c.reduce
        repeat = math.prod(r.extent for r in deep) / (parts if deep else 1)
        loads += max(1.0, repeat / UNROLLED) if c.loads else 0.0
        work += repeat * (ex.count_flops(c.body) + 6 * len(c.loads) + 2)
    warps = -(-threads // 32)
    per_sm = -(-tasks // gpu.sms)
    resident = max(1, min(per_sm, WARPS // warps))
    latency = rounds * loads * ROUND
    issue = rounds * work * ISSUE * resident * warps / 4
    cycles = START + -(-per_sm // resident) * (max(latency, issue) + 300 + (300 if parts > 1 else 0))
    return max(cycles / clock, traffic / gpu.bandwidth)


def _partial_sectors(operator: ROperator, binding: Binding) -> float:
    """Return the factor by which stores of neighbouring threads touch more sectors than elements need: above 1 if the result is
    not contiguous along its last axis, as in a channels-last image. Maps of ResNet-50 and EfficientNet-B0 in float16 measured 14
    to 15 times as slow as contiguous ones on an H200, of 16 elements in a sector."""
    axes, storage = operator.anchor.axes, binding.storages[operator.anchor.name]
    live = [d for d, a in enumerate(axes) if a.extent > 1]
    size = itemsize(binding.types[operator.anchor.name].dtype)
    return min(SECTOR / size, abs(storage.strides[live[-1]])) if live and storage.strides[live[-1]] else 1.0


def _reduction_threads(operator: ROperator, elements: int) -> int:
    """Return the number of threads that share each element's reduction in the generic kernel."""
    deep = max((math.prod(r.extent for r in c.reduce) for c in operator.computes), default=1)
    most = min(SHARED // elements, deep // LEAST) if elements <= SHARED // 2 else 1
    return 1 << (most.bit_length() - 1) if most >= 2 else 1


def generic_seconds(operator: ROperator, binding: Binding, gpu: Gpu) -> float:
    """Return the predicted seconds of all tasks of a tiled operator, without its launch."""
    alone, crowded = predict_times(operator, binding, gpu)
    return max(alone, crowded * -(-operator.task_count // gpu.sms)) if operator.task_count else 0.0


def predict_times(operator: ROperator, binding: Binding, gpu: Gpu) -> tuple[float, float]:
    """Return the predicted seconds of one round of tasks, alone and crowded. Operators without a suitable plain tile are priced
    by stages (``generic.staged``), with their bytes and product as a lower bound."""
    if is_suitable(operator):
        return (plain_seconds(operator, binding, gpu) / -(-operator.task_count // gpu.sms),) * 2
    cost = task_cost(operator, binding.types, gpu.vdevice, binding.storages)
    products = sum(c.flops for c in operator.computes if c.kind == "contraction") or operator.main.flops
    product = products / max(operator.task_count, 1) / gpu.flops / SHARE
    alone, crowded = staged_cycles(operator, binding, gpu) if operator.task_count else (0.0, 0.0)
    return max(cost.alone, product, alone / gpu.model_clock), max(cost.crowded, product, crowded / gpu.model_clock)


GENERIC: Final = Family(
    "",
    {"threads": range(32, 1025)},
    plain_candidates,
    generic_seconds,
    generic_kernel,
    times=predict_times,
    packable=True,
    fused_forms=FUSED_FORMS,
)
