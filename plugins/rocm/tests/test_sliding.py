"""Depthwise convolutions and pools: results are right for every way in which a task copies and sums its images."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from rammer.codegen.task_parameters import Unsuited
from rammer.device.manifest import OpenOptions
from rammer.plan.image_layout import channels_last
from rammer_testing.cases import NetCase
from rammer_testing.nonempty import some

pytest.importorskip("pyopencl")
from rammer_testing.single import UntiledOperator, check, subjects, trial_of

from rammer_rocm.channels.kernel import COLUMNS, VECTORS, channels_form
from rammer_rocm.image.recognise import ROWS, ImageForm, image_form
from rammer_rocm.plugin import DEVICE

if not DEVICE.probe():
    pytest.skip("no OpenCL unit", allow_module_level=True)

#: Depthwise convolutions of EfficientNet, MobileNetV3 and ConvNeXt: formerly 1.9 to 4.4 times ONNX Runtime's time. Pools with
#: wide windows and strides: 2.2 to 3.4 times.
SLOW = (
    "depthwise n=1 c=672 h=14 w=14 k=5 s=2 d=1 p=2 off=0 +bias +relu",
    "depthwise n=1 c=384 h=14 w=14 k=7 s=1 d=1 p=3 off=0 +bias +relu",
    "depthwise n=1 c=96 h=80 w=80 k=7 s=2 d=2 p=6 off=0 +bias +relu",
    "pool n=1 c=48 h=14 w=14 k=5 s=2 p=2 off=0",
)
#: A case with 2.0 to 3.0 times that time, as a panel that is gathered for a single row.
WIDE = "depthwise n=4 c=16 h=112 w=112 k=3 s=1 d=1 p=1 off=0 +bias +relu"
#: Images narrower than a vector, wider than several, padded more than they are wide, on one side only; taps that are all outside;
#: strides with dilations; results and operands in slices of other tensors.
EDGES = (
    "depthwise n=2 c=5 h=7 w=7 k=5 s=2 d=1 p=2 off=0 +bias +relu",
    "depthwise n=1 c=3 h=9 w=33 k=3 s=1 d=4 p=4 off=3 +slice +concat",
    "depthwise n=2 c=2 h=5 w=4 k=5 s=1 d=2 p=4 q=2 off=1 +bias +add",
    "depthwise n=1 c=4 h=17 w=70 k=7 s=2 d=3 p=5 q=0 off=0 +half +relu",
    "depthwise n=1 c=6 h=31 w=18 k=4 s=2 d=1 p=0 q=3 off=0 +bn +swish",
    "pool n=2 c=3 h=13 w=35 k=3 s=2 p=1 off=0 +slice +concat",
    "pool n=1 c=7 h=8 w=17 k=5 s=1 p=2 q=4 off=1 +average +add",
    "pool n=3 c=2 h=21 w=9 k=2 s=2 p=1 off=0 +relu",
)


@pytest.fixture(scope="module")
def backend() -> Any:
    """Return the unit if it has kernels for CPUs."""
    made = DEVICE.open(OpenOptions())
    if made.vdevice.threads > 1 or made.vdevice.vector not in (4, 8, 16):
        pytest.skip("this unit has no such kernels")
    return made


def subject_of(text: str, backend: Any, random: Random) -> UntiledOperator:
    """Return the window of a case in float32 or float16."""
    # A mean of float16 converts each element first, so it is not a window of the image itself.
    kind = "float16" if "+half" in text else random.choice(("float32", "float32", "float16")[: 2 + ("+average" not in text)])
    # With element-wise fusion, a conversion of the image stays outside its window.
    case = NetCase.parse(f"{text.replace(' +half', '')} +elementwise @{kind}")
    return next(s for s in some(subjects(case, backend)) if s.operator.main.kind != "map")


@pytest.mark.parametrize("text", SLOW)
def test_what_was_slow_is_offered_as_images_first(backend: Any, text: str) -> None:
    one = subject_of(text, backend, Random(0))
    assert next(iter(backend.candidates(one.operator, one.binding))).family == "image"


def test_a_window_is_no_panel_where_the_generic_kernel_is_faster(backend: Any) -> None:
    one = subject_of(WIDE, backend, Random(0))
    assert "panel" not in {o.family for o in backend.candidates(one.operator, one.binding)}


def drawn_tile(form: ImageForm, random: Random) -> ImageForm:
    """Return a random task: any part of every axis except the columns, with any number of rows at a time."""
    sizes = {a.name: random.choice((1, a.extent, random.randint(1, a.extent))) for a in form.main.axes}
    return form.tiled({**sizes, form.wide.axis: form.wide.outputs}, random.choice(ROWS))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", EDGES)
def test_images_are_right_whatever_the_task(backend: Any, text: str, seed: int) -> None:
    random = Random(f"{seed} {text}")
    one = subject_of(text, backend, random)
    form = image_form(one.operator, one.binding)
    for _ in range(2):
        tiled = drawn_tile(form, random).operator
        problem = check(backend, tiled, trial_of(one, random.randrange(1 << 20)))
        assert problem == "", f"{seed}: {text} {tiled.tile} {tiled.config}: {problem}"


def drawn(random: Random) -> str:
    """Return a case of random sizes."""
    kind = random.choice(("depthwise", "pool"))
    k, d = random.randint(2, 7), random.choice((1, 1, 2, 3)) if kind == "depthwise" else 1
    p, q = (random.randint(0, k - 1) for _ in range(2))
    h, w = (max(k * d, random.choice((random.randint(1, 20), random.randint(1, 70)))) for _ in range(2))
    tags = random.choice(("", "+relu", "+add", "+slice +concat", "+swish"))
    reach = f"d={d} " if kind == "depthwise" else ""
    sizes = f"n={random.randint(1, 3)} c={random.randint(1, 5)} h={h} w={w} k={k} s={random.randint(1, 2)} {reach}p={p} q={q}"
    return f"{kind} {sizes} off={random.randint(0, 3)} {tags}"


@pytest.mark.slow
def test_images_of_random_shapes_are_right(backend: Any, seed: int) -> None:
    """Check random image shapes; ``--seed`` repeats them."""
    random, tried = Random(seed), 0
    for _ in range(8):
        text = drawn(random)
        try:
            one = subject_of(text, backend, random)
            form = image_form(one.operator, one.binding)
        except Unsuited:
            continue  # one column, or a pool without a window
        tiled = drawn_tile(form, random).operator
        problem = check(backend, tiled, trial_of(one, random.randrange(1 << 20)))
        assert problem == "", f"{text} {tiled.tile} {tiled.config}: {problem}"
        tried += 1
    assert tried >= 3


#: Channels last, as Keras exporters and ConvNeXt blocks leave them: 3.8 to 9.4 times ONNX Runtime's time, lane by lane.
LAST = (
    "depthwise n=1 c=768 h=7 w=7 k=7 s=1 d=1 p=3 off=0 +bias +relu",
    "depthwise n=1 c=72 h=56 w=56 k=5 s=2 d=1 p=2 off=0 +bias +swish",
    "depthwise n=4 c=480 h=14 w=14 k=3 s=1 d=1 p=1 off=0 +bias +relu",
)
#: Fewer channels than a vector, some that fill none, windows wider than the image, padding on one side, strides and dilations.
LAST_EDGES = (
    "depthwise n=2 c=5 h=7 w=9 k=5 s=2 d=1 p=2 off=0 +bias +relu",
    "depthwise n=1 c=37 h=9 w=23 k=3 s=1 d=4 p=4 off=3 +slice +concat",
    "depthwise n=1 c=70 h=6 w=5 k=7 s=1 d=1 p=3 q=1 off=0 +bias +add",
    "depthwise n=2 c=33 h=12 w=19 k=3 s=2 d=3 p=0 q=2 off=0 +half +swish",
    "pool n=2 c=19 h=13 w=15 k=3 s=2 p=1 off=0 +relu",
    "pool n=1 c=49 h=8 w=17 k=5 s=1 p=2 q=4 off=0 +average +add",
)


def with_channels_last(one: UntiledOperator, results: bool) -> UntiledOperator:
    """Return the same operator with channels last in its inputs, and in its ``results`` if set."""
    storages, names = dict(one.binding.storages), {*one.operator.inputs, *(one.operator.outputs if results else ())}
    for name in names - one.binding.constants:
        if len(storages[name].shape) == 4:
            storages[name] = replace(storages[name], strides=channels_last(storages[name].shape), offset=0)
    return replace(one, binding=replace(one.binding, storages=storages))


@pytest.mark.parametrize("results", [False, True])
@pytest.mark.parametrize("text", LAST)
def test_channels_that_lie_together_are_vectors(backend: Any, text: str, results: bool) -> None:
    one = with_channels_last(subject_of(text, backend, Random(0)), results)
    assert next(iter(backend.candidates(one.operator, one.binding))).family == "channels"


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", LAST_EDGES)
def test_channels_last_are_right_whatever_the_task(backend: Any, text: str, seed: int) -> None:
    random = Random(f"{seed} {text}")
    for results in (False, True):
        one = with_channels_last(subject_of(text, backend, random), results)
        form = channels_form(one.operator, one.binding)
        for _ in range(2):
            nv, columns = random.choice(VECTORS), random.choice(COLUMNS)
            sizes = {a.name: random.choice((1, a.extent, random.randint(1, a.extent))) for a in form.main.axes}
            channels, block = form.extent[form.lane], nv * backend.vdevice.vector
            sizes[form.lane] = random.choice((channels, min(channels, block)))
            tiled = form.tiled(sizes, nv, columns).operator
            problem = check(backend, tiled, trial_of(one, random.randrange(1 << 20)))
            assert problem == "", f"{seed}: {text} {tiled.tile} {tiled.config}: {problem}"
