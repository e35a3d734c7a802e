"""Winograd convolutions of 3 x 3: results are right for every partition into tasks."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import rammer
from rammer.codegen.task_parameters import Unsuited
from rammer.compiled.segments import ProgramSegment
from rammer.device.manifest import Array, OpenOptions
from rammer.errors import BadInput
from rammer.runtime.executable import Executable
from rammer_testing.cases import NetCase
from rammer_testing.nonempty import some

pytest.importorskip("pyopencl")
from rammer_testing.single import UntiledOperator, check, subjects, trial_of

from rammer_rocm.plugin import DEVICE
from rammer_rocm.winograd.recognise import WinogradForm, winograd_form

if not DEVICE.probe():
    pytest.skip("no OpenCL unit", allow_module_level=True)


@pytest.fixture(scope="module")
def backend() -> Any:
    """Return the unit if it has kernels for CPUs."""
    made = DEVICE.open(OpenOptions())
    if made.vdevice.threads > 1 or made.vdevice.vector not in (4, 8, 16):
        pytest.skip("this unit has no such kernels")
    return made


def subject_of(text: str, backend: Any) -> UntiledOperator:
    """Return the convolution of a case."""
    return next(s for s in some(subjects(NetCase.parse(text), backend)) if s.operator.main.kind == "contraction")


def drawn(random: Random) -> str:
    """Return a case of random sizes: images narrower than a vector of squares, odd ones, padded on one side, in slices."""
    sizes = {"n": random.randint(1, 3), "c": random.choice((16, 17, 20, 33)), "m": random.choice((1, 3, 8, 17, 40))}
    sizes |= {
        "h": random.choice((2, 3, 7, 8, 14, 19)),
        "w": random.choice((2, 3, 7, 8, 14, 33, 70)),
        "k": 3,
        "s": 1,
        "d": 1,
        "g": 1,
    }
    sizes |= {"p": random.randint(0, 2), "q": random.randint(-1, 2), "off": random.randint(0, 3)}
    sizes |= {"h": max(3, sizes["h"]), "w": max(3, sizes["w"])} if sizes["p"] == 0 else {}
    tags = random.choice(("", "+relu", "+bias +relu", "+add", "+slice +concat", "+bn +swish"))
    views = f"views={''.join(random.choices('0123456789', k=3))}" if random.random() < 0.3 else ""
    words = " ".join(f"{k}={v}" for k, v in sizes.items())
    return f"conv {words} {tags} @{random.choice(('float32', 'float32', 'float16'))} {views}"


def tiled(form: WinogradForm, random: Random) -> WinogradForm:
    """Return a random task and a random register tile."""
    sizes = {a.name: random.choice((1, a.extent, random.randint(1, a.extent))) for a in form.main.axes}
    squares = random.randint(1, -(-form.high.outputs // 2))
    sizes |= {form.wide.axis: form.wide.outputs, form.high.axis: min(2 * squares, form.high.outputs)}
    return form.tiled(sizes, random.randint(1, 14), random.randint(1, 3))


@pytest.mark.slow
def test_convolutions_of_random_shapes_are_right_whatever_the_task(backend: Any, seed: int) -> None:
    """Check each element within an error bound, with infinities and NaN in place. ``--seed`` repeats it."""
    random, tried = Random(seed), 0
    for _ in range(12):
        text = drawn(random)
        try:
            one = subject_of(text, backend)
            form = winograd_form(one.operator, one.binding)
        except Unsuited:
            continue  # one row or column
        operator = tiled(form, random).operator
        problem = check(backend, operator, trial_of(one, random.randrange(1 << 20)))
        assert problem == "", f"{seed}: {text} {operator.tile} {operator.config}: {problem}"
        tried += 1
    assert tried > 3


def opened(channels: int, features: int, side: int, rng: np.random.Generator) -> onnx.ModelProto:
    """Return a convolution of an open batch ``n``."""
    weights = numpy_helper.from_array(rng.standard_normal((features, channels, 3, 3), np.float32), "w")
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    ports = [helper.make_tensor_value_info(n, 1, ["n", c, side, side]) for n, c in (("x", channels), ("y", features))]
    graph = helper.make_graph([node], "opened", ports[:1], ports[1:], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def families_in(exe: Executable, x: Array) -> set[str]:
    """Return the families of the program for ``x``."""
    programs = [s.program for s in exe.prepare({"x": x}).compiled.segments if isinstance(s, ProgramSegment)]
    return {o.family for p in programs for o in p.operators}


@pytest.mark.slow
def test_a_range_of_batches_has_these_kernels_and_writes_no_image_beyond(backend: Any, rng: np.random.Generator) -> None:
    model = opened(64, 64, 14, rng)
    weights = numpy_helper.to_array(model.graph.initializer[0]).astype(np.float64)
    families = set[str]()
    exe = rammer.compile(model, device="rocm", shapes={"n": (2, 12)})
    for n in some(rng.permutation(np.arange(2, 13))[:4]):
        x = rng.standard_normal((n, 64, 14, 14), np.float32)
        around = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(around, (3, 3), axis=(2, 3))
        wanted = np.einsum("nchwij,mcij->nmhw", windows, weights, optimize=True)
        assert np.abs(exe.run({"x": x})["y"] - wanted).max() < 1e-5 * np.abs(wanted).max()
        families |= families_in(exe, x)
    exe.close()
    assert families == {"winograd"}


@pytest.mark.slow
def test_who_asks_for_plain_sums_gets_them(rng: np.random.Generator) -> None:
    model, offered = opened(64, 64, 14, rng), dict[str, set[str]]()
    for asked in ("on", "off"):
        exe = rammer.compile(model, device="rocm", options={"winograd": asked})
        offered[asked] = families_in(exe, np.zeros((1, 64, 14, 14), np.float32))
        exe.close()
    assert offered == {"on": {"winograd"}, "off": {"panel"}}
    with pytest.raises(BadInput, match="option winograd=never: not one of on, off"):
        rammer.compile(model, device="rocm", options={"winograd": "never"})
