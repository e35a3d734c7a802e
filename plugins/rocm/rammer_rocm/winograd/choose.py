"""The ``winograd`` family: convolutions of 3 x 3 with less than half of the multiplications.

Winograd's F(2x2, 3x3) (Lavin and Gray, arXiv 1509.09308) computes four outputs with 16 products instead of 36. Their factors are
sums of the 4 x 4 inputs and sums of the nine weights. For each channel, a task writes the sums of its inputs into 16 panels that
stay in the core's cache. It multiplies each panel by the weights of its position, like a panel product. The sums of the products
are computed on the way to memory. These sums only add and subtract, so inputs outside an output's window cancel out. The error
scales with the largest input times the largest weight instead of single products. Non-finite outputs are recomputed tap by tap,
because the difference of two infinities is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rammer.codegen import Forms
from rammer.device.manifest import Binding
from rammer.ir.device import VDevice

from rammer_rocm.image.cost import COPY, MEMORY, OUTPUT, operations
from rammer_rocm.kernels.task import Family
from rammer_rocm.winograd.kernel import winograd_function
from rammer_rocm.winograd.recognise import PLACES, SIDE, WinogradForm, winograd_form

#: Splits of rows of squares, of features and of images that are tried.
ROWS, PARTS = (1, 2, 3, 4, 6, 7, 8, 14, 16, 28), (1, 2, 3, 4, 6, 8)
CONFIGS = {"mr": range(1, 33), "nv": range(1, 9)}
#: Cycles of one core (fitted on a Zen 4): for the sums of a vector of squares' inputs, and of their products; to start a register
#: tile; to store one of its vectors.
INPUTS, PRODUCTS, TILE, STORE = 75.0, 70.0, 30.0, 2.0
#: Fraction of the peak that a long-running register tile reaches.
PEAK_SHARE = 0.93
#: Cycles for a vector of a panel that exceeds the core's cache.
FAR = 4.0


def cycles(form: WinogradForm, device: VDevice) -> float:
    """Return the cycles of one core for a full task."""
    lanes, features, channels = device.vector, form.tile[form.row], form.channels
    blocks, vectors = -(-features // form.mr), -(-form.squares // lanes)
    full, single = divmod(vectors, form.nv)
    rows = form.images * form.down * -(-form.across // lanes)
    copied = form.images * (SIDE * form.down + 2) * -(-form.wide.outputs // lanes)
    source = form.binding.types[form.x.tensor].nbytes > device.layer("veu").capacity
    taken = channels * (copied * COPY * (MEMORY if source else 1.0) + rows * INPUTS)
    tiles = sum(n * _tile_cycles(form, v) for n, v in ((full, form.nv), (single, 1)))
    held = 4 * PLACES * form.panel(lanes)
    far = FAR * PLACES * channels * vectors if held > device.layer("veu").capacity * 3 // 4 else 0.0
    weights = 4 * PLACES * channels * blocks * form.mr / (device.layer("device").bandwidth / device.veus)
    multiplied = max(blocks * (PLACES * tiles + far), weights * device.flops / (2 * lanes))
    epilogue = OUTPUT + sum(operations(c.body) for c in form.after)
    return taken + multiplied + features * (rows * (PRODUCTS + SIDE * SIDE * epilogue))


def _tile_cycles(form: WinogradForm, nv: int) -> float:
    """Return the cycles of a register tile at one position; too few sums do not hide their latency."""
    each = max(form.mr * nv, 8.0, 0.5 * (form.mr + nv)) / PEAK_SHARE
    return form.channels * each + TILE + STORE * form.mr * nv


def seconds(form: WinogradForm, binding: Binding, device: VDevice) -> float:
    """Return the predicted seconds of all tasks, without the launch."""
    clock = device.flops / (2 * device.vector)
    return -(-form.operator.task_count // device.veus) * (cycles(form, device) / clock + device.dispatch)


def _tilings(form: WinogradForm, device: VDevice) -> Iterator[WinogradForm]:
    """Yield splits of rows of squares, features and images, each with its best register tile."""
    down, rows = -(-form.high.outputs // SIDE), next(a.extent for a in form.main.axes if a.name == form.row)
    heights = {min(form.high.outputs, SIDE * -(-down // parts)) for parts in ROWS}
    features = {-(-rows // parts) for parts in PARTS if parts <= 2 * device.veus}
    last = next((a for a in form.main.axes if form.outer and a.name == form.outer[-1]), None)
    for high in sorted(heights):
        for some in sorted(features):
            for together in sorted({-(-last.extent // n) for n in (*PARTS, 16, 32)} | {1}) if last else (1,):
                tile = {a.name: 1 for a in form.main.axes} | {form.wide.axis: form.wide.outputs, form.high.axis: high}
                tile |= {form.row: some} | ({last.name: together} if last else {})
                if together == 1 or high == form.high.outputs:
                    yield _best(form, tile, device)


def _best(form: WinogradForm, tile: Mapping[str, int], device: VDevice) -> WinogradForm:
    registers = 32 if device.vector >= 16 else 16
    ways = [
        form.tiled(tile, mr, nv)
        for nv in (1, 2, 3)
        for mr in range(1, 29)
        if mr * nv + nv + 1 <= registers and mr <= tile[form.row]
    ]
    return min(ways, key=lambda way: (cycles(way, device), way.mr))


def make_winograd_family(device: VDevice) -> Family:
    """Return the ``winograd`` family for a device."""
    forms = Forms(winograd_form, _tilings, seconds, lambda form, binding: winograd_function(form, device.vector))
    made = forms.family("winograd", CONFIGS)
    return replace(made, supported_by=lambda unit: unit.threads == 1 and unit.vector in (4, 8, 16), product=True)
