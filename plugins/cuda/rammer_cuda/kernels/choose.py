"""Which tiles and block shapes are worth trying for a contraction, by a small model of one SM.

A block costs, for every block of products, the largest of its instruction issue, its shared-memory reads and its
share of L2 bandwidth; blocks on one SM add up; what no block hides (launch, first loads, epilogue, cluster
barriers) is a constant. The constants were fitted to single layers measured on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rammer.codegen.contraction import Roles, product_of, roles_of
from rammer.codegen.task import Unsuited
from rammer.device.manifest import Binding
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator

from rammer_cuda.kernels.depth import Depth, depth_of
from rammer_cuda.kernels.families import F16, FAMILIES, TensorCost, families_of
from rammer_cuda.kernels.gemm import Shape, shape_of

#: Row tiles that are tried (elements), and the range of column tiles.
ROWS = (8, 16, 32, 64, 128)
FEWEST_COLUMNS, MOST_COLUMNS = 12, 132
#: Splits that are tried; ``families`` has the block shapes.
SPLITS = (1, 2, 3, 4, 6, 8)
#: Buffers of a tensor-core kernel's ring, and the blocks an SM should have room for, at least by bytes an element: kernels
#: in float16 are so short that room beside them, for parallel branches and for dependents that start early, is worth
#: more than depth (BERT-base on an H200: 0.43 ms with rings of 3, 0.51 ms with rings of 8).
MOST_STAGES, LEAST_RESIDENT, MOST_RESIDENT = 8, {4: 2, 2: 4}, 6
#: Threads of a tensor-core block that hide latency without crowding shared memory.
BEST_THREADS = 192
#: Even parts of an axis that are tried.
PARTS = 24
#: Threads of a block.
THREADS = (64, 512)
#: Cycles of a launch: from its start to the first products, for convolutions' taps more, and for a cluster's barriers.
START, TAPS, CLUSTER = 1900, 850, 2100
#: Cycles per ring step, per product of the busiest scheduler, per 16-byte shared-memory read of a warp, per copy of a
#: thread, and per element of a thread in the epilogue. Fitted to 736 kernels of 47 layers on an H200; the measured
#: time over the predicted has a standard deviation of 0.18.
STEP, PRODUCT, READ, COPY, STORE = 160, 2.1, 0.1, 7.0, 6.0
#: SMs of the graphics processing clusters of an H200; which ones lack SMs differs from chip to chip.
GROUPS = (18, 18, 18, 18, 16, 16, 14, 14)
#: Bytes that L2 gives an SM in a cycle when all SMs read (measured on an H200: 5.5 TB/s).
L2_BYTES = 21.0
#: Bytes of shared memory and registers of an SM.
SM_SHARED, SM_REGISTERS = 227 << 10, 64 << 10


@dataclass(frozen=True, slots=True)
class Choice:
    """A tiled operator with its predicted seconds for all tasks, launch included."""

    operator: ROperator
    seconds: float


def gemm_candidates(operator: ROperator, binding: Binding, device: VDevice, count: int) -> list[Choice]:
    """Up to ``count`` gemm versions of ``operator``, best predicted first; [] where it is no matrix product."""
    try:
        narrow = any(binding.types[n].dtype == "float16" for n in operator.computes[0].reads)
        roles = roles_of(operator, binding, "float16" if narrow else "float32")
    except Unsuited:
        return []
    splits = SPLITS if _clusters(device) else (1,)
    families = families_of(roles, binding)
    depths = {bk: depth_of(roles.main.reduce, bk) for family in families for bk, _ in family.blocks}
    packed = _together(roles, binding)
    configs = [(family, config) for family in families for config in family.configs(splits)]
    found = list[Choice]()
    sliced: dict[tuple[object, ...], tuple[float, Choice]] = {}
    for tile in _tiles(roles):
        rows = math.prod(tile[d] for d in roles.rows)
        width = math.prod(tile[d] for d in roles.columns)
        tasks = math.prod(-(-a.extent // t) for a, t in zip(roles.main.axes, tile, strict=True))
        for family, config in configs:
            shape = shape_of(rows, width, dict(config), family.cost is not None)
            if family.cost is not None:
                per_sm = -(-tasks * shape.split // device.veus)
                shape = replace(shape, stages=ring(shape, 32 // family.cost.depth, depths[shape.bk], per_sm))
                config = (*config, ("stages", shape.stages))
            if not THREADS[0] // 2 < shape.works <= THREADS[1] or shape.split > max(1, depths[shape.bk].blocks // 2):
                continue
            seconds = predicted(shape, depths[shape.bk], tasks, rows * width, device, family.cost, packed)
            choice = Choice(replace(operator, tile=tile, family=family.name, config=config), seconds)
            if family.cost is None:
                found.append(choice)
                continue
            # Slices are nearly equals to the model; what they are for is warps that hide each other's latency.
            key = (tile, family.name, *((k, v) for k, v in config if k not in ("slices", "stages")))
            rank = abs(math.log2(shape.threads / BEST_THREADS))
            if key not in sliced or rank < sliced[key][0]:
                sliced[key] = rank, choice
    found += [choice for _, choice in sliced.values()]
    found.sort(key=lambda c: (c.seconds, c.operator.tile, c.operator.config))
    return _both_ways(_expressible(_diverse(found), binding, device, count))


def _together(roles: Roles, binding: Binding) -> bool:
    """Whether eight columns or eight products of ``b`` probably lie together: what 16-byte copies of float16 need."""
    columns = math.prod(roles.main.shape[d] for d in roles.columns)
    deep = roles.main.reduce[-1].extent
    return roles.b.tensor in binding.constants or (roles.b.fill is None and (columns % 8 == 0 or deep % 8 == 0))


def _both_ways(choices: list[Choice]) -> list[Choice]:
    """The best choice with and without a split sum first: what a cluster costs is what the model knows least."""
    split = [dict(c.operator.config)["split"] > 1 for c in choices]
    other = next((i for i, s in enumerate(split) if s != split[0]), 0)
    return [*choices[:1], choices[other], *choices[1:other], *choices[other + 1 :]] if other else choices


def ring(shape: Shape, item: int, depth: Depth, per_sm: int) -> int:
    """Buffers of the ring: what is in flight hides latency, as far as shared memory and the number of blocks go."""
    room = SM_SHARED // max(LEAST_RESIDENT[item], min(per_sm, MOST_RESIDENT)) - 1024
    steps = -(-depth.blocks // shape.split)
    return max(3, min(MOST_STAGES, steps + 1, room // (item * shape.bk * (shape.bm + shape.bn + 16))))


def _clusters(device: VDevice) -> bool:
    """Whether thread-block clusters exist: from compute capability 9.0 on, which has 227 KiB of shared memory."""
    return device.layer("veu").capacity > 200 << 10


def _diverse(choices: Sequence[Choice]) -> Iterator[Choice]:
    """The best few of every block shape and split: neighbours in the model's order are often equals."""
    seen: dict[tuple[object, ...], int] = {}
    for c in choices:
        config = dict(c.operator.config)
        key = (c.operator.family, math.prod(c.operator.tile), config["split"])
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 3:
            yield c


def _expressible(choices: Iterator[Choice], binding: Binding, device: VDevice, count: int) -> list[Choice]:
    result = list[Choice]()
    limit = device.layer("veu").capacity
    for choice in choices:
        try:
            if FAMILIES[choice.operator.family].make(choice.operator, binding).dynamic <= limit:
                result.append(choice)
        except Unsuited:
            continue
        if len(result) >= count:
            break
    return result


def _tiles(roles: Roles) -> list[tuple[int, ...]]:
    """Row tiles near ``ROWS`` by column tiles; axes of neither kind have tile 1."""
    shape, result = roles.main.shape, set[tuple[int, ...]]()
    for row in _parts([shape[d] for d in roles.rows], ROWS[0], ROWS[-1], roles.groups):
        for column in _parts([shape[d] for d in roles.columns], FEWEST_COLUMNS, MOST_COLUMNS, frozenset()):
            tile = [1] * len(shape)
            for d, t in (*zip(roles.rows, row, strict=True), *zip(roles.columns, column, strict=True)):
                tile[d] = t
            result.add(tuple(tile))
    return sorted(result)


def _parts(extents: Sequence[int], fewest: int, most: int, groups: frozenset[int]) -> list[tuple[int, ...]]:
    """Tiles of a flattened group of axes: inner axes whole, one axis split, the outer ones 1."""
    if not extents:
        return [()]
    found = set[tuple[int, ...]]()
    below = 1
    for k in range(len(extents) - 1, -1, -1):
        for size in _sizes(extents[k], groups if k == 0 else frozenset()):
            if below * size <= most and (below * size >= fewest or math.prod(extents) == below * size):
                found.add((*([1] * k), size, *extents[k + 1 :]))
        below *= extents[k]
    return sorted(found) or [tuple([1] * (len(extents) - 1) + [min(extents[-1], most)])]


def _sizes(extent: int, groups: frozenset[int]) -> list[int]:
    """Tile sizes along an axis: even parts (long axes in multiples of 8), powers of two; only divisors of ``groups``."""
    even = {-(-extent // n) for n in range(1, min(extent, PARTS) + 1)}
    if extent > MOST_COLUMNS and not groups:
        even = {-(-s // 8) * 8 for s in even}
    return sorted(s for s in even | {s for s in ROWS if s < extent} if all(g % s == 0 for g in groups))


def gemm_seconds(operator: ROperator, binding: Binding, device: VDevice) -> float:
    """Predicted seconds of all tasks of a tiled gemm operator, without its launch."""
    family = FAMILIES[operator.family]
    p = product_of(operator, binding, "float16" if family is F16 else "float32")
    shape = shape_of(p.row_count, p.width, dict(operator.config), family.cost is not None)
    depth = depth_of(p.main.reduce, shape.bk)
    return predicted(shape, depth, operator.task_count, p.row_count * p.width, device, family.cost,
                     not p.b.guards) - device.launch  # fmt: skip


def predicted(shape: Shape, depth: Depth, tasks: int, cells: int, device: VDevice, cost: TensorCost | None = None,
              together: bool = True) -> float:  # fmt: skip
    """Seconds for all ``tasks`` of one launch; ``together`` says that 16 bytes of columns are copied at a time where
    elements are float16."""
    clock = device.flops / 256.0
    warps = shape.threads / 32
    steps = -(-depth.blocks // shape.split)
    vectors = (shape.tm + shape.tn) / 4
    part = shape.bk / shape.slices
    narrow = cost is not None and cost.depth == 16
    copies = (shape.bm / 8 + shape.bn / (8 if together else 1) if narrow else shape.bm / 4 + shape.bn) * shape.bk / shape.threads
    per_sm = -(-tasks * shape.split // _usable(shape.split, device.veus))
    resident = min(per_sm, _resident(shape, 2 if narrow else 4))
    busiest = math.ceil(resident * warps / 4)
    elements = resident * cells / shape.threads * shape.slices
    moved = busiest * copies * (2.5 if depth.flat else 1)
    if cost is not None:
        work = cost.matrix * cost.instructions(part, shape.tm, shape.tn) + cost.read * cost.reads(part, shape.tm, shape.tn)
        step = cost.step + busiest * work + cost.copy * moved
        store = cost.store * elements + (cost.peer * 4 * resident * cells if shape.split > 1 else 0)
    else:
        reads = resident * warps * part * vectors
        step = STEP + PRODUCT * busiest * part * shape.tm * shape.tn + READ * reads + COPY * moved
        store = STORE * elements
    start, taps, cluster = (cost.start, cost.taps, cost.cluster) if cost else (START, TAPS, CLUSTER)
    cycles: float = start + (taps if depth.outer else 0) + (cluster if shape.split > 1 else 0)
    cycles += -(-per_sm // resident) * (steps * step + store)
    if cost is not None:
        staged = tasks * shape.split * steps * shape.bk * (shape.bm + shape.bn) * (2 if narrow else 4)
        cycles += cost.l2 * staged / (L2_BYTES * device.veus)
    return cycles / clock + device.launch


def _usable(split: int, sms: int) -> int:
    """SMs that clusters of ``split`` blocks can fill at once: a cluster stays inside one processing cluster."""
    groups = [g * sms // sum(GROUPS) for g in GROUPS]
    return max(split, sum(g // split * split for g in groups))


def _resident(shape: Shape, item: int) -> int:
    """Blocks that fit an SM together; ``item`` bytes an element of the operands."""
    shared = max(item * shape.stages * shape.bk * (shape.bm + shape.bn), 4 * shape.bm * shape.bn * shape.slices)
    each = 4 * shape.tm * shape.tn + 8 * shape.tm + 40 if shape.tensor else shape.tm * shape.tn + shape.tm + shape.tn + 40
    registers = shape.threads * each
    return max(1, min(SM_SHARED // (shared + 1024), SM_REGISTERS // registers, 2048 // shape.threads))
