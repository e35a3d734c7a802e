"""Selection of panel tiles and register tiles, by a small cost model of one CPU core."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from rammer.codegen import Choice, Forms, Unsuited, quotient_divisors
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator

from rammer_rocm.image.cost import plain_seconds
from rammer_rocm.kernels.task import Family
from rammer_rocm.kernels.vector import check_maps
from rammer_rocm.panel.kernel import write_panel_task
from rammer_rocm.panel.last_columns import HEIGHTS, columns_across, cycles_across
from rammer_rocm.panel.padding_taps import WORTH, outside_taps, skips_of
from rammer_rocm.panel.recognise import (
    PanelProduct,
    check_operator,
    epilogue_accesses,
    has_contiguous_columns,
    load_access,
    panel_product,
    rows_together,
)
from rammer_rocm.panel.reduction_loops import PanelDepth
from rammer_rocm.panel.window_copy import PanelWindow, window_of

#: Fraction of the peak that a long-running register tile reaches (measured: 0.93 on two x86 runtimes).
PEAK_SHARE = 0.9
#: Fraction of PEAK_SHARE if columns are read from a window copy: unaligned loads, and rows stored one by one.
WINDOW_SHARE = 0.94
#: Seconds per register tile outside the innermost loop: pointers, epilogue, stores.
TILE_OVERHEAD = 25e-9
#: Seconds to gather one vector of columns, and to start one run of columns.
VECTOR_GATHER, RUN_GATHER = 1.5e-9, 1.2e-9
#: Seconds to gather one element that is not adjacent to the next: a transposition, lane by lane.
LANE_GATHER = 0.7e-9
#: Seconds to store a vector of sums, for every tensor that is written or read there with adjacent columns. Also the seconds per
#: lane if the columns are not adjacent, as for several images.
VECTOR_STORE, LANE_STORE = 1e-9, 0.9e-9
#: Fraction of the peak that generic contractions reach: 15 to 23 of 500 GFLOP/s on two Zen 5 cores.
GENERIC_RATE = 0.05
#: The same fraction if rows share no columns, as in depthwise convolutions: 13 to 18% of one such core.
GENERIC_ROW_RATE = 0.1
#: Slowdown of reading constants in place instead of packed: each of their rows is read in part.
SCATTERED = 2.0
#: Seconds per byte for panels that exceed the core's cache.
SPILLED_BYTE = 1e-10
#: Fused multiply-adds in flight that hide their latency (4 cycles, up to 2 units).
INDEPENDENT = 8
#: Rate of four-byte products in plain OpenCL C as a fraction of the float32 peak (measured: 99 GOP/s to 118 GFLOP/s, so 0.21).
PLAIN_SHARE = 0.2
#: Number of short column sizes that are tried, and the tolerance: the longest sizes whose remaining taps are within this factor
#: of the minimum.
SHORTEST, NEARLY = 2, 1.05
#: Cycles per element of rows that exceed the first-level cache (one line per row): the element comes from the second level.
MISSED = 2.4
#: Splits of an axis that are tried.
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
#: Tasks below both 1 / MOST_ROUNDS of a vEU's work and SMALLEST_TASK FLOP are not worth their overhead. Tasks of LARGE_TASK FLOP
#: (0.1 ms) are always worth it, such as one image of a batch.
MOST_ROUNDS, SMALLEST_TASK, LARGE_TASK = 16, 200_000, 10_000_000

#: Seconds to store a vector of sums between two chunks, and to load it again.
WAITING = 2e-9

#: Panel configurations: rows and vectors of the register tile, and whether one padded copy serves all taps.
CONFIGS = {"mr": range(1, 65), "nv": range(1, 17), "window": range(2)}
#: Steps of the outermost reduction axis that are gathered at a time (0: all).
CHUNKS = {"chunk": range(1 << 20)}


@dataclass(frozen=True)
class PanelForm:
    """A contraction that panels may compute.

    ``product`` is set if it is tiled; ``product_of`` builds it from a tiled operator."""

    operator: ROperator
    binding: Binding
    product: PanelProduct | None = None
    product_of: Callable[[ROperator, Binding], PanelProduct] = panel_product

    @property
    def tiled(self) -> PanelProduct:
        """The product of a tiled form."""
        assert self.product is not None
        return self.product


def make_panel_family(device: VDevice) -> Family:
    """Return the ``panel`` family of CPU cores."""
    forms = Forms(
        panel_form,
        enumerate_tilings,
        predict_seconds,
        lambda form, binding: write_panel_task(form.tiled, binding, device.vector),
        sort_choices,
        True,
    )
    return replace(
        forms.family("panel", CONFIGS | CHUNKS),
        supported_by=lambda unit: unit.threads == 1,
        product=True,
        fused_forms=frozenset({"trailing maps", "leading maps"}),
    )


def panel_form(operator: ROperator, binding: Binding) -> PanelForm:
    """Return the form of a float32 operator, tiled or not. Raises Unsuited."""
    check_operator(operator, binding)
    check_maps(operator)
    return PanelForm(operator, binding, panel_product(operator, binding) if operator.tile else None)


def enumerate_tilings(form: PanelForm, device: VDevice) -> Iterator[PanelForm]:
    """Yield every tile that is worth its overhead, with its best register tile. Tiles that gather columns for few rows are
    skipped if the generic kernel is faster."""
    found = list(_tiled_forms(form, device, _least_task_flops(form.operator, device.veus)))
    if form.product_of is panel_product:
        work = form.operator.main.flops / (device.flops * device.veus)
        plain = plain_seconds(form.operator, form.binding, device)
        most = {True: work / GENERIC_RATE, False: min(plain, work / GENERIC_ROW_RATE)}
        found = [
            f
            for f in found
            if _ready_seconds(f.tiled, form.binding, device) is not None
            or predict_seconds(f, form.binding, device) <= most[f.tiled.rows > 1]
        ]
    if not found and form.product_of is not panel_product:
        # Independent small products: for bytes the generic kernel is not better, because it is scalar.
        found = list(_tiled_forms(form, device, 0))
    yield from found


def _tiled_forms(form: PanelForm, device: VDevice, smallest: int) -> Iterator[PanelForm]:
    plain = set(_enumerate_tiles(form.operator, smallest))
    for tile in sorted(plain | set(_shorten_tiles(form, plain, smallest))):
        try:
            product = form.product_of(replace(form.operator, tile=tile), form.binding)
            best = _best_register_tile(product, form.binding, device)
        except Unsuited:  # not a product, or its columns have no affine address
            continue
        yield replace(form, operator=best, product=replace(product, operator=best))


def predict_seconds(form: PanelForm, binding: Binding, device: VDevice) -> float:
    """Return the predicted seconds of all tasks of a tiled operator, without the launch."""
    p, config = form.tiled, dict(form.operator.config)
    if config.get("window"):
        window_of(p)  # raises Unsuited with the reason
    window, chunk = config.get("window", 0), config.get("chunk", 0)
    variants = [v for v in _enumerate_variants(p, binding, device) if v.window == window]
    chosen = next((v for v in variants if bool(v.chunk) == bool(chunk)), variants[0])
    rounds = -(-form.operator.task_count // device.veus)
    return rounds * chosen.seconds(p, device, config.get("mr", 8), config.get("nv", 2))


def sort_choices(choices: Iterable[Choice]) -> list[Choice]:
    return sorted(choices, key=lambda c: (c.seconds, c.operator.task_count, c.operator.tile))


def _row_axes(operator: ROperator) -> list[tuple[int | None, set[int]]]:
    """Return the axis indices that can run over rows, with the group sizes that their tile must divide; None for no row axis. A
    row axis is read by one operand only, or by the other operand through ``axis // d``."""
    main, result = operator.main, list[tuple[int | None, set[int]]]([(None, set())])
    for d, axis in enumerate(main.axes):
        readers = [load for load in main.loads if axis.name in ex.axes_of(load)]
        divisors = [quotient_divisors(load, axis.name) for load in readers]
        if axis.extent > 1 and (len(readers) == 1 or (len(readers) == 2 and any(divisors))):
            result.append((d, set().union(*divisors)))
    return result


def _least_task_flops(operator: ROperator, veus: int) -> int:
    """Return the FLOP of the smallest task that is worth its overhead."""
    flops = operator.main.flops
    return min(flops, max(flops // (veus * MOST_ROUNDS), SMALLEST_TASK), LARGE_TASK)


def _axis_operands(operator: ROperator, axis: str) -> set[str]:
    """Return the operands that an axis of the contraction runs through."""
    return {str(load) for load in operator.main.loads if axis in ex.axes_of(load)}


def _enumerate_tiles(operator: ROperator, smallest: int) -> Iterator[tuple[int, ...]]:
    """Yield tiles of at least ``smallest`` FLOP: an optional row axis, a split suffix of column axes, and 1 elsewhere."""
    shape = operator.main.shape
    if not shape:  # a product of two vectors has neither rows nor columns
        return
    live = [d for d, n in enumerate(shape) if n > 1] or [len(shape) - 1]
    work = operator.main.flops / max(1, math.prod(shape))
    readers = [_axis_operands(operator, a.name) for a in operator.main.axes]
    for row, groups in _row_axes(operator):
        # Other axes of only the row operand are fixed in a task. An example is the phases of a transposed convolution next to
        # features.
        fixed = readers[row] if row is not None and len(readers[row]) == 1 else set()
        free = [d for d in live if d != row]
        through = [d for d in free if not (fixed and readers[d] == fixed)]
        rows = [{row: n} for n in _axis_splits(shape[row], groups)] if row is not None else [{}]
        over = _outer_rows(shape, row, [d for d in free if d not in through]) if row is not None and not groups else []
        for columns, tiles in ((free, rows), (through, over if through == free else rows + over)):
            for tile_rows, depth in product(tiles, range(1, len(columns) + 1)):
                whole = math.prod(shape[d] for d in columns[len(columns) - depth + 1 :])
                for tile in _axis_splits(shape[columns[-depth]], set()):
                    if math.prod(tile_rows.values()) * whole * tile * work >= smallest:
                        yield _tile_shape(shape, tile_rows, columns, depth, tile)


def _outer_rows(shape: tuple[int, ...], row: int, axes: Sequence[int]) -> list[dict[int, int]]:
    """Return tiles of whole rows, with splits of the neighbouring outer ones of ``axes``, which only the row operand has."""
    found, whole = list[dict[int, int]](), {row: shape[row]}
    for d in reversed([d for d in axes if d < row]):
        found += [whole | {d: n} for n in _axis_splits(shape[d], set()) if n > 1]
        whole[d] = shape[d]
    return found


def _shorten_tiles(form: PanelForm, tiles: Iterable[tuple[int, ...]], smallest: int) -> Iterator[tuple[int, ...]]:
    """Yield tiles with shorter innermost columns, so that whole taps can be skipped (``Skip``)."""
    main = form.operator.main
    try:
        whole = form.product_of(replace(form.operator, tile=main.shape), form.binding)
    except Unsuited:
        return
    skips = outside_taps(whole, form.binding)
    for skip in (s for s in skips if len(skips) > 1 and s.axis == whole.columns[-1]):
        d = [a.name for a in main.axes].index(skip.axis)
        shares = {n: skip.share(n) for n in _axis_splits(skip.columns, set())}
        fewest = min(shares.values())
        sizes = [n for n, share in shares.items() if share <= min(WORTH, fewest * NEARLY)][-SHORTEST:]
        for tile, size in product((t for t in tiles if t[d] == skip.columns), sizes):
            short = (*tile[:d], size, *tile[d + 1 :])
            if main.flops * math.prod(short) >= smallest * math.prod(main.shape):
                yield short


def _tile_shape(shape: tuple[int, ...], rows: Mapping[int, int], columns: list[int], depth: int, tile: int) -> tuple[int, ...]:
    whole = set(columns[len(columns) - depth + 1 :])
    return tuple({columns[-depth]: tile, **rows}.get(d, n if d in whole else 1) for d, n in enumerate(shape))


def _axis_splits(extent: int, groups: set[int]) -> list[int]:
    """Return tile sizes of an axis: whole, halves, thirds, ..., also as multiples of 8, but only divisors of the groups."""
    if groups:
        return sorted({g // n for g in groups for n in PARTS if g % n == 0})
    sizes = {-(-extent // n) for n in PARTS}
    sizes |= {-(-s // 8) * 8 for s in sizes if 8 < -(-s // 8) * 8 < extent}
    return sorted(s for s in sizes if 1 <= s <= extent)


def register_tiles(lanes: int, parts: bool = False) -> list[tuple[int, int]]:
    """Return (rows, vectors) pairs whose accumulators, column vectors and one broadcast fit the vector registers. ``parts``
    halves the available registers, because each operand is then split into four parts."""
    registers = (32 if lanes >= 16 else 16) // (2 if parts else 1)
    return [(m, v) for v in (1, 2, 3, 4, 8) for m in range(1, 15) if m * v + v + 1 <= registers]


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to supply columns to the multiplication.

    ``width`` columns are read in ``gather`` seconds and multiplied at ``share`` of the peak. ``window``: they are read from the
    window copy. ``chunk``: steps that are gathered at a time. ``left``: remaining fraction of the products. ``across``: last
    columns that are summed across rows. ``together``: rows with a line each in the first-level cache."""

    width: int
    gather: float
    share: float
    window: int = 0
    chunk: int = 0
    left: float = 1.0
    across: int = 0
    together: float = math.inf

    def seconds(self, p: PanelProduct, device: VDevice, mr: int, nv: int) -> float:
        """Return the seconds of one task with a register tile of ``mr`` rows by ``nv`` vectors."""
        return self.gather + _multiply_seconds(p, self, device, mr, nv)


def _enumerate_variants(p: PanelProduct, binding: Binding, device: VDevice) -> list[Variant]:
    """Return the variants: in place or gathered, with and without the window copy if possible, each whole and in chunks."""
    depth = PanelDepth(p, skips_of(p, binding))
    ready = _ready_seconds(p, binding, device)
    if ready is not None:
        found = [Variant(p.width, ready, PEAK_SHARE, left=depth.left)]
    else:
        run = p.tile[p.columns[-1]]
        each = _vector_seconds(p, binding, device)
        copied = _copy_seconds(p.depth * (p.width // max(run, 1)), run, device, each) * depth.left
        found = _chunk_variants(
            Variant(p.width, copied, PEAK_SHARE, left=depth.left), p, p.depth * (p.width + device.vector) * 4, device
        )
    window = _find_window(p) if ready != 0.0 else None
    if window is not None:
        copied = _copy_seconds(window.count * window.rows, window.pitch, device)
        whole = Variant(window.width, copied, PEAK_SHARE * WINDOW_SHARE, 1, left=depth.left)
        nbytes = window.count * window.block(device.vector) * 4
        found += (
            _chunk_variants(whole, p, nbytes, device)
            if depth.outer in window.channels
            else [_add_spill_cost(whole, nbytes, device)]
        )
    stored = _stored_seconds(p, binding, device)
    few = [0 if v.chunk or p.quads else columns_across(p, binding, v.width, device.vector) for v in found]
    held = rows_together(p, binding)
    return [replace(v, gather=v.gather + stored, across=n, together=held) for v, n in zip(found, few, strict=True)]


def _stored_seconds(p: PanelProduct, binding: Binding, device: VDevice) -> float:
    """Return the seconds to store the sums, including the tensors that the epilogue maps read and write."""
    vectors, each = p.rows * -(-p.width // device.vector), 0.0
    for load, _ in epilogue_accesses(p):
        try:
            steps = load_access(load, binding)
        except Unsuited:
            continue  # no kernel supports it either
        if any(steps.step(name) and p.tile[name] > 1 for name in p.columns):
            each += VECTOR_STORE if has_contiguous_columns(steps, p) else LANE_STORE * device.vector
    return vectors * each


def _add_spill_cost(variant: Variant, nbytes: int, device: VDevice) -> Variant:
    return replace(variant, gather=variant.gather + _spill_seconds(nbytes, device))


def _chunk_variants(whole: Variant, p: PanelProduct, nbytes: int, device: VDevice) -> list[Variant]:
    """Return a variant that gathers ``nbytes`` bytes, and a chunked variant if these exceed the core's cache."""
    extent, parts = p.extent.get(PanelDepth(p).outer, 1), -(-nbytes // (device.layer("veu").capacity // 2))
    if parts == 1 or extent == 1 or p.quads is not None:
        return [_add_spill_cost(whole, nbytes, device)]
    steps = -(-extent // min(parts, extent))
    waits = (-(-extent // steps) - 1) * p.rows * -(-whole.width // device.vector)
    chunks = replace(whole, gather=whole.gather + waits * WAITING, chunk=steps)
    return [_add_spill_cost(whole, nbytes, device), _add_spill_cost(chunks, nbytes * steps // extent, device)]


def _best_register_tile(p: PanelProduct, binding: Binding, device: VDevice) -> ROperator:
    """Return the operator with the cheapest register tile for a task."""
    variants = _enumerate_variants(p, binding, device)
    _, mr, nv, windowed, chunk = min(
        (v.seconds(p, device, m, n), -m, n, v.window, v.chunk)
        for m, n in register_tiles(device.vector, p.quads is not None and not device.dots)
        if m <= max(p.rows, 1)
        for v in variants
    )
    config = (("mr", -mr), ("nv", nv), *((("window", 1),) if windowed else ()), *((("chunk", chunk),) if chunk else ()))
    return replace(p.operator, family="dots" if p.quads else "panel", config=config)


def _find_window(p: PanelProduct) -> PanelWindow | None:
    try:
        return window_of(p)
    except Unsuited:
        return None


def _multiply_seconds(p: PanelProduct, variant: Variant, device: VDevice, mr: int, nv: int) -> float:
    """Return the seconds to multiply a variant's columns. The rate is the variant's fraction of the device's peak, reduced if the
    register tile is too small."""
    across = variant.across if mr in HEIGHTS else 0
    width, depth = variant.width - across, p.depth * variant.left
    vectors = -(-width // device.vector)
    full, single = divmod(vectors, nv)
    if single and nv * device.vector * (full + 1) - width < device.vector:
        full, single = full + 1, 0
    blocks = -(-p.rows // mr)
    cycle = 2.0 * device.vector / _peak_rate(p, device)
    seconds = blocks * (depth * cycles_across(across, mr, device.vector) * cycle + TILE_OVERHEAD) if across else 0.0
    for count, v in ((full, nv), (single, 1)):
        share = min(1.0, mr * v / INDEPENDENT) * min(1.0, mr * v / (1.25 * (mr + v)))
        flops = 2.0 * mr * v * device.vector * depth
        missed = depth * mr * MISSED * cycle if mr > variant.together else 0.0
        seconds += count * blocks * (max(flops / (_peak_rate(p, device) * variant.share * share), missed) + TILE_OVERHEAD)
    return seconds


def _peak_rate(p: PanelProduct, device: VDevice) -> float:
    """Return the multiplications and additions of panel elements per second; an element of bytes is four of them."""
    if p.quads is None:
        return device.flops
    return device.dots / 4 or device.flops * PLAIN_SHARE


def _ready_seconds(p: PanelProduct, binding: Binding, device: VDevice) -> float | None:
    """Return the seconds to read constant columns, or 0 for other columns in place; None if columns are gathered. A core's cache
    keeps columns for its next tasks if they fill at most half of it."""
    nbytes = p.depth * p.width * 4
    kept = nbytes <= device.layer("veu").capacity // 2
    often = max(1.0, _tasks_per_columns(p) / device.veus) if kept else 1.0
    seconds = nbytes / often / (device.layer("device").bandwidth / device.veus)
    if p.b.tensor in binding.constants and p.b.tensor not in p.before and len(p.columns) == 1:
        return seconds
    if p.b.tensor not in p.before and p.b.fill is None and has_contiguous_columns(load_access(p.b, binding), p):
        return SCATTERED * seconds if p.b.tensor in binding.constants else 0.0
    return None


def _tasks_per_columns(p: PanelProduct) -> int:
    """Return the number of tasks that read the same columns."""
    own = ex.axes_of(p.b)
    return math.prod(-(-a.extent // p.tile[a.name]) for a in p.main.axes if a.name not in own)


def _vector_seconds(p: PanelProduct, binding: Binding, device: VDevice) -> float:
    """Return the seconds to gather a vector of columns: as vectors for strides 0 to 2, otherwise lane by lane."""
    if p.b.tensor in p.before:
        return VECTOR_GATHER
    stride = load_access(replace(p.b, fill=None), binding).step(p.columns[-1])
    return VECTOR_GATHER * max(1, stride) if stride in (0, 1, 2) else LANE_GATHER * device.vector


def _copy_seconds(runs: int, length: int, device: VDevice, each: float = VECTOR_GATHER) -> float:
    return runs * (RUN_GATHER + -(-length // device.vector) * each)


def _spill_seconds(nbytes: int, device: VDevice) -> float:
    room = device.layer("veu").capacity // 2
    return max(0, nbytes - room) * SPILLED_BYTE * math.log2(max(2.0, nbytes / max(room, 1)))
