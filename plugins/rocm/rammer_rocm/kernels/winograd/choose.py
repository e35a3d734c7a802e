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
from rammer.ir.device import VDevice

from rammer_rocm.kernels.task import Family
from rammer_rocm.kernels.winograd.cost import cycles, seconds
from rammer_rocm.kernels.winograd.kernel import winograd_function
from rammer_rocm.kernels.winograd.recognise import SIDE, WinogradForm, winograd_form

#: Splits of rows of squares, of features and of images that are tried.
ROWS, PARTS = (1, 2, 3, 4, 6, 7, 8, 14, 16, 28), (1, 2, 3, 4, 6, 8)
CONFIGS = {"mr": range(1, 33), "nv": range(1, 9)}


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
