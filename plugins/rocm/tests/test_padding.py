"""Convolutions with much padding, and sums deeper than the core's cache: chosen kernels, and results of all kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import pytest

from rammer.codegen.task_parameters import Unsuited
from rammer.device.manifest import OpenOptions
from rammer_testing.cases import NetCase
from rammer_testing.nonempty import some

pytest.importorskip("pyopencl")
from rammer_testing.single import UntiledOperator, check, subjects, trial_of

from rammer_rocm.panel.choose import panel_form
from rammer_rocm.panel.padding_taps import Skip, outside_taps, skips_of
from rammer_rocm.panel.recognise import panel_product
from rammer_rocm.plugin import DEVICE

if not DEVICE.probe():
    pytest.skip("no OpenCL unit", allow_module_level=True)

#: Dilations with taps in the padding, along both axes, with strides, one-sided padding, groups and a second reader.
DILATED = (
    "conv n=1 c=37 m=20 h=17 w=13 k=3 s=1 d=6 p=6 g=1 off=0 +bias +relu",
    "conv n=2 c=16 m=33 h=14 w=28 k=3 s=2 d=5 p=7 q=3 g=1 off=0 +bias",
    "conv n=1 c=24 m=16 h=9 w=9 k=5 s=1 d=4 p=8 g=2 off=0 +relu +add",
    "conv n=1 c=20 m=31 h=33 w=7 k=3 s=1 d=12 p=12 g=1 off=3 +slice +concat",
)
#: More than half a megabyte of columns, with a window and without.
DEEP = (
    "conv n=1 c=260 m=24 h=28 w=28 k=3 s=1 d=1 p=1 g=1 off=0 +bias +relu",
    "conv n=1 c=131 m=12 h=33 w=33 k=3 s=2 d=6 p=6 g=1 off=0 +bias",
)


#: Cases without padding to cut: columns in place, and a window over taps alone.
UNCUT = (
    ("conv n=1 c=16 m=9 h=16 w=16 k=1 s=1 d=1 p=0 g=1 off=0", "not gathered", 0),
    ("conv n=1 c=1 m=9 h=16 w=16 k=3 s=1 d=1 p=1 g=1 off=0", "chunks of taps", 1),
)


@pytest.fixture(scope="module")
def backend() -> Any:
    """Return the unit if it has kernels for CPUs."""
    made = DEVICE.open(OpenOptions())
    if made.vdevice.threads > 1:
        pytest.skip("this unit has no such kernels")
    return made


def subject_of(text: str, backend: Any) -> UntiledOperator:
    """Return the contraction of a case."""
    case = NetCase.parse(f"{text} @float32")
    return next(s for s in some(subjects(case, backend)) if s.operator.main.kind != "map")


def test_the_taps_left_are_those_that_read_the_image(rng: np.random.Generator) -> None:
    seen = Counter[bool]()
    for _ in range(400):
        taps, step, reach, size = (int(rng.integers(1, n)) for n in (8, 4, 14, 40))
        before = int(rng.integers(0, 20))
        columns = max(1, (size + 2 * before - reach * (taps - 1) - 1) // step + 1)
        skip = Skip("k", taps, "x", columns, step, reach, -before, size)
        origin = int(rng.integers(columns))
        count = int(rng.integers(1, columns - origin + 1))
        low, high = skip.left(origin, count)
        read = [k for k in range(taps) if any(0 <= step * x + reach * k - before < size for x in range(origin, origin + count))]
        assert {*read} <= {*range(low, high)}
        assert step > 1 or (low, high) == ((read[0], read[-1] + 1) if read else (low, low))
        seen[low > 0 or high < taps] += 1
    assert min(seen.values()) > 30


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", [*DILATED, *DEEP])
def test_candidates_that_leave_taps_out_or_go_in_chunks_compute_the_same(text: str, backend: Any, seed: int) -> None:
    subject = subject_of(text, backend)
    family = next(f for f in backend.usable if f.name == "panel")
    choices = [c.operator for c in family.candidates(subject.operator, subject.binding, backend.vdevice)]

    def kind(tiled: Any) -> tuple[bool, bool, bool]:
        skips = skips_of(panel_product(tiled, subject.binding), subject.binding)
        return bool(skips), "chunk" in dict(tiled.config), "window" in dict(tiled.config)

    kinds: dict[tuple[bool, bool, bool], list[Any]] = {}
    for tiled in Random(seed).sample(choices, len(choices)):
        kinds.setdefault(kind(tiled), []).append(tiled)
    assert any(k[0] for k in kinds) == (text in DILATED) or text in DEEP
    assert any(k[1] for k in kinds) or text in DILATED
    trial = trial_of(subject, seed)
    for tiled in some([t for listed in kinds.values() for t in islice(listed, 2)]):
        assert not (found := check(backend, tiled, trial)), f"{tiled.tile} {dict(tiled.config)}: {found}"


@pytest.mark.slow
def test_any_number_of_steps_a_chunk_computes_the_same(backend: Any, seed: int) -> None:
    subject = subject_of("conv n=1 c=7 m=9 h=9 w=14 k=3 s=1 d=1 p=1 g=1 off=0 +bias", backend)
    trial = trial_of(subject, seed)
    for window in (0, 1):
        for chunk in (1, 2, 3, 7, 9):
            config = (("mr", 4), ("nv", 2), ("window", window), ("chunk", chunk))
            tiled = replace(subject.operator, tile=(1, 9, 4, 14), family="panel", config=config)
            assert not (found := check(backend, tiled, trial)), f"{dict(config)}: {found}"


@pytest.mark.parametrize(("text", "why", "window"), UNCUT)
def test_chunks_of_what_cannot_be_cut_are_refused(text: str, why: str, window: int, backend: Any) -> None:
    subject = subject_of(text, backend)
    config = (("mr", 4), ("nv", 2), ("window", window), ("chunk", 4))
    tiled = replace(subject.operator, tile=subject.operator.main.shape, family="panel", config=config)
    assert not backend.fits(tiled, subject.binding)
    with pytest.raises(Unsuited, match=why):
        next(f for f in backend.usable if f.name == "panel").kernel(tiled, subject.binding)


@pytest.mark.slow
def test_deeplabs_deepest_convolution_multiplies_no_padding(backend: Any) -> None:
    """Check 3 x 3 with dilation 12 over 2048 channels of 33 x 33: 6.6 times ONNX Runtime's time when padding was multiplied."""
    subject = subject_of("conv n=1 c=2048 m=256 h=33 w=33 k=3 s=1 d=12 p=12 g=1 off=0 +bias +relu", backend)
    best = next(iter(backend.candidates(subject.operator, subject.binding)))
    product = panel_form(best, subject.binding).tiled
    left = np.prod([s.share(product.tile[s.axis]) for s in skips_of(product, subject.binding)])
    assert len(outside_taps(product, subject.binding)) == 2 and left < 0.8
    assert dict(best.config)["chunk"] * product.width * 9 * 4 < backend.vdevice.layer("veu").capacity


@pytest.mark.parametrize(
    "text", ["matmul b=1 m=100 depth=4096 width=1 off=0 +free", "depthwise n=8 c=16 h=80 w=80 k=7 s=2 d=1 p=3 off=0"]
)
def test_what_is_gathered_for_one_row_is_no_panel(text: str, backend: Any) -> None:
    """Check a product with one column. With rows transposed like columns it had 10 times ONNX Runtime's time."""
    subject = subject_of(text, backend)
    offered = {o.family for o in backend.all_candidates(subject.operator, subject.binding)}
    assert "" in offered and "panel" not in offered
