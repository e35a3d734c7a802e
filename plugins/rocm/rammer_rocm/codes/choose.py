"""Selection of tiles and register tiles for products with quantised weights, by a small cost model of one CPU core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rammer.codegen import Forms, Unsuited
from rammer.device.manifest import Binding
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator

from rammer_rocm.codes.kernel import BARE, Words, check_codes, codes_product, has_staged_rows, words_of, write_codes_task
from rammer_rocm.kernels.task import Family
from rammer_rocm.panel.recognise import PanelProduct

#: Fraction of the peak that multiplications reach.
PEAK_SHARE = 0.9
#: Cost in multiplications to decode a vector of quantised values, and a vector of a block's scales and zero points. Fitted on Zen
#: 4: 8 and 12 rows by one vector, 4 by four, 5 by four, 6 and 8 by two.
DECODING, GRAINS = 1.9, 3.0
#: Independent multiplications that hide the latency of one.
INDEPENDENT = 4
#: Seconds per register tile outside its sums, and per block outside its sums: pointers, counters, stores.
TILE_OVERHEAD, BLOCK_OVERHEAD = 25e-9, 2e-9
#: Seconds to copy an element of a row, and per byte that exceeds the core's cache.
COPIED, SPILLED_BYTE = 0.1e-9, 3e-11
#: Splits of an axis that are tried.
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
#: Tasks below both 1 / MOST_ROUNDS of a vEU's work and SMALLEST_TASK FLOP are not worth their overhead.
MOST_ROUNDS, SMALLEST_TASK = 16, 200_000
#: Register tiles that are tried: rows and vectors.
ROWS, VECTORS = range(1, 15), (1, 2, 4, 8)
CONFIGS = {"mr": range(1, 65), "nv": range(1, 17)}


@dataclass(frozen=True)
class CodesForm:
    """A product with quantised weights, tiled (``product`` is set) or untiled."""

    operator: ROperator
    binding: Binding
    product: PanelProduct | None = None

    @property
    def tiled(self) -> PanelProduct:
        """The product of a tiled form."""
        assert self.product is not None
        return self.product


def make_codes_family(device: VDevice) -> Family:
    """Return the ``codes`` family of CPU cores."""
    forms = Forms(
        codes_form,
        _enumerate_tilings,
        _predict_seconds,
        lambda form, binding: write_codes_task(form.tiled, binding, device.vector),
    )
    return replace(forms.family("codes", CONFIGS), supported_by=lambda unit: unit.threads == 1, product=True)


def codes_form(operator: ROperator, binding: Binding) -> CodesForm:
    """Return the form of a tiled or untiled operator. Raises Unsuited."""
    check_codes(operator, binding)
    return CodesForm(operator, binding, codes_product(operator, binding) if operator.tile else None)


def _enumerate_tilings(form: CodesForm, device: VDevice) -> Iterator[CodesForm]:
    """Yield every tile that is worth its overhead, with its best register tile."""
    flops = form.operator.main.flops
    smallest = min(flops, max(flops // (device.veus * MOST_ROUNDS), SMALLEST_TASK))
    # Independent products may each be too small, but this family still outperforms the generic kernel.
    found = set(_enumerate_tiles(form.operator, device.vector, smallest)) or set(
        _enumerate_tiles(form.operator, device.vector, 0)
    )
    for tile in sorted(found):
        try:
            product = codes_product(replace(form.operator, tile=tile), form.binding)
        except Unsuited:
            continue
        words, staged = words_of(product, form.binding), has_staged_rows(product, form.binding)
        _, mr, nv = min(
            (predict_task_seconds(product, words, staged, device, m, v), m, v)
            for m, v in register_tiles(device.vector)
            if m <= product.rows and (v == 1 or (v - 1) * device.vector < product.width)
        )
        best = replace(product.operator, family="codes", config=(("mr", mr), ("nv", nv)))
        yield replace(form, operator=best, product=replace(product, operator=best))


def _enumerate_tiles(operator: ROperator, lanes: int, smallest: int) -> Iterator[tuple[int, ...]]:
    """Yield tiles of at least ``smallest`` FLOP: parts of one row axis, whole vectors of columns, and 1 elsewhere."""
    main = operator.main
    assert main.decoded is not None
    work = main.flops / max(1, main.points // main.reduce[0].extent)
    column = next(d for d, a in enumerate(main.axes) if a.name == main.decoded.column)
    width = main.shape[column]
    widths = {min(width, -(-width // n // lanes) * lanes) for n in PARTS}
    rows = [d for d, n in enumerate(main.shape) if d != column and n > 1] or [-1]
    for row in rows:
        counts = {-(-main.shape[row] // n) for n in PARTS} if row >= 0 else {1}
        for count in counts:
            for part in widths:
                if part and count * part * work >= smallest:
                    yield tuple(part if d == column else count if d == row else 1 for d in range(len(main.shape)))


def register_tiles(lanes: int) -> list[tuple[int, int]]:
    """Return (rows, vectors) pairs that fit the vector registers. The registers hold sums, words, numbers, zero points and
    scales, besides masks and exponents."""
    bare, scaled = (24, 20) if lanes >= 16 else (12, 12)
    return [(m, v) for v in VECTORS for m in ROWS if (m + 2) * v <= bare and (m <= BARE or (m + 4) * v <= scaled)]


def _predict_seconds(form: CodesForm, binding: Binding, device: VDevice) -> float:
    """Return the predicted seconds of all tasks of a tiled operator, without the launch."""
    p, config = form.tiled, dict(form.operator.config)
    each = predict_task_seconds(
        p, words_of(p, binding), has_staged_rows(p, binding), device, config.get("mr", 8), config.get("nv", 2)
    )
    return -(-form.operator.task_count // device.veus) * each


def predict_task_seconds(p: PanelProduct, words: Words, staged: bool, device: VDevice, mr: int, nv: int) -> float:
    """Return the predicted seconds of one task with a register tile of ``mr`` rows by ``nv`` vectors. ``staged``: rows are copied
    first."""
    multiplication = 2 * device.vector / (device.flops * PEAK_SHARE)
    vectors, blocks = -(-p.width // device.vector), -(-p.rows // mr)
    full, single = divmod(vectors, nv)
    computed = 0.0
    for count, v in ((full, nv), (single, 1)):
        bare = mr <= BARE
        products = mr * v + (0 if bare else v)
        step = max(products + DECODING * v, INDEPENDENT) * p.depth
        grains = words.blocks * v * (GRAINS + (mr if bare else 0))
        computed += count * blocks * ((step + grains) * multiplication + words.blocks * BLOCK_OVERHEAD + TILE_OVERHEAD)
    read = p.width * (words.line * 4 + words.blocks * 5) / (device.layer("device").bandwidth / device.veus)
    held = p.rows * p.depth * 4
    again = held * -(-vectors // nv) * SPILLED_BYTE if held > device.layer("veu").capacity // 2 else 0.0
    return max(computed + again, read) + (p.rows * p.depth * COPIED if staged else 0.0)
