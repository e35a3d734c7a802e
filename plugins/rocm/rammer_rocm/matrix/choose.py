"""The family of products by matrix instructions: tiles, shapes, and a cost counted from the instruction's figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product, repeat
from typing import Final

from rammer.codegen import Choice, Unsuited
from rammer.codegen.products import Config, Depth, alike_tiles, at_lengths, depth_of, end_bytes, find_roles
from rammer.device.manifest import Binding
from rammer.ir.compute import Compute
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator

from rammer_rocm.kernels.task import Family
from rammer_rocm.kernels.units import SPLITS, Units
from rammer_rocm.matrix.kernel import matrix_kernel
from rammer_rocm.matrix.matrix_instruction import DEPTH, INSTRUCTIONS, ROUNDING, THREADS, MatrixInstruction, instruction_of
from rammer_rocm.matrix.shape import MatrixShape, shape_of

#: Fragments of a wave along either side.
FRAGMENTS: Final = (1, 2, 4)
#: Groups of a unit up to which sums are shared, and choices of one tile size and split that are offered.
FULL, ALIKE = 2, 3
KEYS: Final = ("tm", "tn", "bk", "split_k")
#: Cycles of a launch until the first products, of a step besides its products (barrier, addresses), and from a load of global
#: memory until its data are stored (CDNA 2 and RDNA 3: 500 to 800 cycles of latency). Counted or published, not measured.
START, STEP, LATENCY = 2000.0, 60.0, 700.0
#: Instructions of a wave in a step besides products and reads, and for each copy of 16 bytes. Counted in assembly.
ADDRESSES, COPY = 60, 10
#: Bytes of local memory per cycle of a unit, and cycles of a work-item for each element of the epilogue.
LOCAL, END = 128.0, 12.0
#: FLOP per cycle of a unit without matrix instructions: 64 lanes of float32.
FLOP: Final = 128
#: Bytes of registers that a wave's lane reads for 16 products of a row.
ROW: Final = 2 * DEPTH


def task_cycles(s: MatrixShape, depth: Depth, cells: int, shared: int) -> tuple[float, float, int]:
    """Return the cycles of a round of groups that a unit holds, of the groups' epilogue, and the groups of a round."""
    i, resident = s.instruction, max(1, s.resident(shared))
    part = s.bk // DEPTH
    waves, staged = -(-s.waves // i.simds), (s.bm + s.bn) * s.bk * i.item
    matrix, fragments = waves * part * s.tm * s.tn * i.cycles, part * (s.tm + s.tn)
    others = waves * i.issue * (ADDRESSES + fragments * 2 / i.groups + COPY * staged * i.source / i.item / (16 * THREADS))
    local = (fragments * s.waves * i.side * ROW + staged) / LOCAL
    busy = matrix if i.overlapped else matrix + others
    step = max(resident * max(busy, local), matrix + others, LATENCY) + STEP
    return -(-depth.blocks // s.split_k) * step, resident * (END * cells / THREADS), resident


def seconds_of(s: MatrixShape, main: Compute, cells: int, tasks: int, ends: int, unit: Units) -> float:
    """Return the predicted seconds of all ``tasks`` of ``cells`` results each, without the launch."""
    depth = depth_of(main.reduce, s.bk)
    groups = tasks * min(s.split_k, depth.blocks)
    cycles, end, resident = task_cycles(s, depth, cells, unit.device.layer("veu").capacity)
    rounds = -(-groups // (unit.sms * resident))
    clock = unit.device.flops / FLOP
    moved = groups * -(-depth.blocks // s.split_k) * s.bk * (s.bm + s.bn) * s.instruction.source
    partials = 8 * cells * groups * (s.split_k > 1)
    compute = (START + rounds * (cycles + end)) / clock
    return max(compute, moved / (unit.delivered * unit.sms * clock)) + (ends + partials) / unit.bandwidth


def _shapes(i: MatrixInstruction, rows: int, width: int, most: int, room: tuple[int, int]) -> Iterator[MatrixShape]:
    """Yield the possible shapes of a task of ``rows x width`` that use more than half of the group's waves. At most ``most``
    groups share a sum. ``room`` is a unit's local memory, and the groups for which it must suffice."""
    for tm, tn, bk in product(FRAGMENTS, FRAGMENTS, i.blocks):
        s = shape_of(i, rows, width, {"tm": tm, "tn": tn, "bk": bk})
        if i.waves < 2 * s.waves <= 2 * i.waves and s.registers <= i.most and s.resident(room[0]) >= room[1]:
            yield from (replace(s, split_k=split) for split in SPLITS if split <= most)


def matrix_choices(i: MatrixInstruction, operator: ROperator, binding: Binding, unit: Units, resident: int) -> Iterator[Choice]:
    """Yield the best few choices of every tile size and split, best predicted first; some have no kernel. A unit has room for
    ``resident`` groups."""
    roles = find_roles(i, operator, binding)
    if roles is None:
        return
    mains = at_lengths(roles.main, operator, binding.parts)
    alike = alike_tiles(roles.main.shape, roles.rows, roles.columns, roles.groups, tuple(c.shape for c in mains))
    ends = [end_bytes(c, roles.after, operator, binding) for c in mains]
    room, ranked = (unit.device.layer("veu").capacity, max(1, resident)), list[tuple[float, tuple[int, ...], Config]]()
    for key in alike:
        rows, width, *tasks = key
        for s in _shapes(i, rows, width, max(1, FULL * unit.sms // max(tasks)), room):
            if s.split_k > max(1, depth_of(roles.main.reduce, s.bk).blocks // 2):
                continue
            each = [seconds_of(s, *one, unit) for one in zip(mains, repeat(rows * width), tasks, ends)]
            ranked.append((sum(each) / len(each), key, (("tm", s.tm), ("tn", s.tn), ("bk", s.bk), ("split_k", s.split_k))))
    seen = Counter[tuple[int, int]]()
    for seconds, key, config in sorted(ranked):
        for tile in alike[key]:
            about = math.prod(tile), dict(config)["split_k"]
            seen[about] += 1
            if seen[about] <= ALIKE:
                yield Choice(seconds, replace(operator, tile=tile, family=i.name, config=config))


def make_matrix_families(device: VDevice, resident: int = 0) -> tuple[Family, ...]:
    """Return the families for float16, and for float32 that is rounded to bfloat16. A unit runs ``resident`` groups at a time (0:
    as many as fit)."""
    return tuple(_make_family(device, among, resident) for among in (INSTRUCTIONS, ROUNDING))


def _make_family(device: VDevice, among: Mapping[str, MatrixInstruction], resident: int) -> Family:
    """Return the family for the matrix instruction of ``device`` in ``among``; devices without one do not support it."""
    instruction, any_ = instruction_of(device, among), next(iter(among.values()))
    shared = device.layer("veu").capacity

    def needed() -> MatrixInstruction:
        if instruction is None:
            raise Unsuited(f"{device.name} has no matrix instruction")
        return instruction

    def candidates(operator: ROperator, binding: Binding, unit: VDevice) -> Iterable[Choice]:
        return matrix_choices(needed(), operator, binding, Units(unit), resident)

    def seconds(operator: ROperator, binding: Binding, unit: VDevice) -> float:
        p = needed().product(operator, binding)
        s = shape_of(needed(), p.row_count, p.width, dict(operator.config))
        ends = end_bytes(p.main, p.after, operator, binding)
        return seconds_of(s, p.main, p.row_count * p.width, operator.task_count, ends, Units(unit))

    return Family(
        any_.name,
        dict.fromkeys(KEYS, range(0, 1025)),
        candidates,
        seconds,
        lambda operator, binding: matrix_kernel(operator, binding, needed(), shared),
        lambda unit: instruction_of(unit, among) is not None,
        product=True,
        spread=lambda operator: max(1, dict(operator.config).get("split_k", 1)),
        operand_rounding=any_.rounding,
    )
