"""Cost model of attention kernels: predicted cycles of each tiling, and the candidates in that order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final

from rammer.codegen import Choice, Forms, Unsuited, by_seconds
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.operator import ROperator

from rammer_cuda.attention.kernel import CHUNKS, ROWS, Block16, attention_kernel, block_of, copied_together
from rammer_cuda.attention.recognise import Attention, attention_of, tile_attention
from rammer_cuda.contraction.cost import F16_COST, TF32X3_COST
from rammer_cuda.family import size_keys
from rammer_cuda.gpu import Gpu
from rammer_cuda.rows.gemv import GEMV

#: Rows of warps, and warps that share a row's keys.
GROUPS, WARPS = (1, 2, 4), (1, 2, 4, 8, 16)
#: The maximum ratio to the best prediction at which a division into warps is measured early.
LEADING = 1.7
#: Cycles from a launch to the first copies, of a barrier, and of a reduction over warps; issue slots of an operation of the
#: row-wise Computes (divisions and exponentials as in OPS), and of a store with its maps. From ``contraction.cost``, which was
#: fitted on an H200, not to kernels of this family.
START, BARRIER, JOIN, OPERATION, STORE = 1900, 60, 160, 2.0, 20.0
#: Cycles of a thread's copy of one float16, which is no asynchronous copy: on an H200, blocks of squeeze-and-excitation in
#: EfficientNet-B0 took 12 to 25 us instead of the 2.5 to 3.3 predicted without it.
ELEMENT = 150.0
#: Bytes a cycle that an SM gets from L2, and registers of a thread: assumed, neither measured nor fitted.
L2_BYTES, THREAD_REGISTERS = 48.0, 128


def _leaders_first(choices: Iterable[Choice]) -> Sequence[Choice]:
    """Return the choices with the best of every promising division into warps first, so that early measurements differ."""
    ranked = by_seconds(choices)
    leaders = {o.config[:2]: o for seconds, o in reversed(ranked) if seconds <= LEADING * ranked[0].seconds}
    return sorted(ranked, key=lambda f: leaders.get(f.operator.config[:2]) is not f.operator)


def _enumerate_tilings(found: Attention, gpu: Gpu) -> Iterator[Attention]:
    """Yield tilings (groups, warps, chunks and buffers) that fit and are not wasteful."""
    for groups, warps, chunk, stages in product(GROUPS, WARPS, CHUNKS, (2, 3)):
        option = tile_attention(found, groups * ROWS, {"groups": groups, "warps": warps, "chunk": chunk, "stages": stages})
        try:
            block = block_of(found, dict(option.config))
        except Unsuited:
            continue
        wasteful = (groups > 1 and (groups - 1) * ROWS >= found.rows) or chunk >= 2 * max(found.depth.extent, found.width, 16)
        fits = block.shared(len(found.reductions)) <= gpu.shared
        if fits and not wasteful and block.stages == stages:
            yield replace(found, operator=option)


def _predict_seconds(found: Attention, binding: Binding, gpu: Gpu) -> float:
    """Return the predicted seconds of all tasks, without the launch."""
    block, share = block_of(found, dict(found.operator.config)), -(-found.operator.task_count // gpu.sms)
    room = gpu.shared // (block.shared(len(found.reductions)) + 1024)
    resident = max(1, min(room, gpu.registers // (block.threads * THREAD_REGISTERS), share))
    rounds = -(-share // resident)
    warps = -(-resident * block.groups * block.warps // 4)
    size = 2 if block.half else 4
    moved = size * block.chunk * (block.first * (block.keys + block.groups * ROWS) + block.second * block.keys)
    keys, values = (
        copied_together(o, a, 16 // size) for o, a in ((found.k, found.depth), (found.v, found.context.axes[found.column]))
    )
    single = block.chunk * block.keys * (block.first * (keys == 1) + block.second * (values == 1)) / block.threads
    waits = ELEMENT * single * block.half  # threads wait for them, four at a time
    waits += (block.first + block.second) * 2 * BARRIER + len(found.reductions) * (JOIN if block.warps > 1 else 40)
    cycles = resident * moved / L2_BYTES + warps * _warp_cycles(found, block) + waits
    return (START + rounds * cycles) / gpu.model_clock


def _warp_cycles(found: Attention, block: Block16) -> float:
    """Return the cycles of a scheduler for all computation of one warp."""
    cost, wide = (F16_COST if block.half else TF32X3_COST), block.chunk // 8
    depth, keys = block.first * block.chunk, block.fragments * 8
    first, second = cost.warp(depth, 1, block.fragments), cost.warp(keys, 1, wide)
    work = sum(ex.count_flops(c.body) + bool(c.reduce) for c in found.between if c.shape == found.scores.shape or c.reduce)
    rows = OPERATION * work * block.fragments * 4
    stores = STORE * block.second * block.chunk * ROWS / (32 * block.warps)
    return float(first + block.second * second + rows + stores)


def _has_many_rows(operator: ROperator, binding: Binding, gpu: Gpu) -> bool:
    """Return True if a head has more rows than the vectors of ``gemv``, which pads no rows to 16. On an H200 one row of 257 keys
    took this family 8 us, twice its prediction."""
    return not GEMV.candidates(operator, binding, gpu)


_FORMS: Final = Forms(attention_of, _enumerate_tilings, _predict_seconds, attention_kernel, _leaders_first)
ATTENTION: Final = replace(
    _FORMS.family("attention", size_keys("groups", "warps", "chunk", "stages")),
    supported_by=lambda gpu: gpu.tf32,
    max_candidates=14,
    exclusive=_has_many_rows,
    keeps_operand_on_chip=True,
    fused_forms=frozenset({"trailing maps", "further sums"}),
)
