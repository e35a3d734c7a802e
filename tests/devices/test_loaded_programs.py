"""What is verified is what runs: every device loads the program that ``inspect`` prints, word for word."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import onnx
import pytest
from zoo.sequence import lstm_tc
from zoo.speech import deepspeech2

import rammer
from rammer.compiled.segments import ProgramSegment
from rammer.device.loader import Registry
from rammer.report.stage_text import program_text
from rammer.runtime.loaded_model import LoadedModel
from rammer_testing.nonempty import some
from rammer_testing.small_models import MODELS

DEVICES = ("toy", "ipu_sim", "rocm", pytest.param("cuda", marks=pytest.mark.cuda))
#: Models with recurrent layers, which have other execution forms on some devices.
RECURRENT: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "lstm": lambda: lstm_tc(0, layers=2, steps=4),
    "speech": lambda: deepspeech2(3, frames=12, bins=21, channels=4, layers=1, kernels=((5, 3), (3, 3))),
}


def prepared(device: str, name: str, rng: np.random.Generator) -> LoadedModel:
    """Return a model that is compiled and loaded for its first shapes."""
    if name in RECURRENT:
        model = RECURRENT[name]()
        (port,) = model.graph.input
        shape = tuple(d.dim_value for d in port.type.tensor_type.shape.dim)
        return rammer.compile(model, device=device).specialise({port.name: shape})
    exe = rammer.compile(MODELS[name].build(rng), device=device)
    return exe.prepare(exe.checked(MODELS[name].inputs(rng, MODELS[name].shapes[0])))


@pytest.mark.slow
@pytest.mark.sampled(3, of="device")
@pytest.mark.parametrize("name", [*MODELS, *RECURRENT])
@pytest.mark.parametrize("device", DEVICES)
def test_the_loaded_program_is_the_printed_one(device: str, name: str, rng: np.random.Generator) -> None:
    special = prepared(device, name, rng)
    printed = program_text(special.compiled, Registry().open(device).vdevice)
    segments = [s for s in special.compiled.segments if isinstance(s, ProgramSegment)]
    for segment, loaded in zip(some(segments), special.loaded.values(), strict=True):
        text = str(cast(Any, loaded).program)
        assert text == str(segment.program) and text in printed
