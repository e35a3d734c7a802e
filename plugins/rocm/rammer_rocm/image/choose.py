"""The ``image`` family: windows that slide over an image (depthwise convolutions and pools), one image after another.

Each output combines a few taps of one image without further reuse, so a matrix product does not apply. A task therefore copies an
image once, including padding, so that every tap of every output is a whole vector. Elements that strides skip are stored in
separate planes. Several rows of outputs are then computed at a time: a loaded vector is also a tap of neighbouring outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from rammer.codegen import Choice, Forms, by_seconds
from rammer.ir.device import VDevice

from rammer_rocm.image.cost import cycles, plain_cycles, seconds
from rammer_rocm.image.kernel import image_function
from rammer_rocm.image.recognise import CONFIGS, MOST_TERMS, ROWS, ImageForm, image_form
from rammer_rocm.kernels.task import Family

#: Maximum bytes of a copied image.
MOST_BYTES = 1 << 18
#: Numbers of tasks per vEU that are tried.
ROUNDS = (1, 2, 4, 8, 16, 32)


def _tilings(form: ImageForm, device: VDevice) -> Iterator[ImageForm]:
    """Yield tilings of whole images, split from the outer axes inwards, or of rows if the images are few."""
    found = set[tuple[tuple[str, int], ...]]()
    for rounds in ROUNDS:
        tile, want = dict[str, int](), device.veus * rounds
        for axis in (*form.outer, form.high.axis):
            extent = next((a.extent for a in form.main.axes if a.name == axis), 1)
            parts = min(want, extent)
            tile[axis] = -(-extent // parts)
            want = -(-want // -(-extent // tile[axis]))
        tile[form.wide.axis] = form.wide.outputs
        found.add(tuple(tile.items()))
        for part in (4, 8, 16):
            rows = 8 * -(-form.high.outputs // (8 * part))
            found.add(tuple({**tile, form.high.axis: min(rows, tile[form.high.axis])}.items()))
    for sizes in sorted(found):
        ways = [
            form.tiled(dict(sizes), rows) for rows in ROWS if rows * form.high.taps * form.wide.taps <= MOST_TERMS or rows == 1
        ]
        best = min(ways, key=lambda way: (cycles(way, device), way.rows))
        if best.scratch(device.vector) <= MOST_BYTES and cycles(best, device) < plain_cycles(best, device.vector):
            yield best


def make_image_family(device: VDevice) -> Family:
    """Return the ``image`` family for a device."""
    forms = Forms(image_form, _tilings, seconds, lambda form, binding: image_function(form, device.vector), _ordered)
    return replace(
        forms.family("image", CONFIGS),
        supported_by=lambda unit: unit.threads == 1 and unit.vector in (4, 8, 16),
        max_candidates=4,
    )


def _ordered(choices: Iterable[Choice]) -> list[Choice]:
    return list(by_seconds(choices))
