"""However a recurrent cell is written, it becomes what ONNX's LSTM becomes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from cell_forms import CellForm, cell_form
from view_graphs import failure, opened

from rammer.compiled.options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler import Compiler
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.frontend.reader import read_model
from rammer.profile.store import KernelStore
from rammer.testing.some import some

#: How gates lie in exporters' weights: ONNX, Keras, PyTorch, TensorFlow 1.
ORDERS = ("iofc", "ifco", "ifoc", "icfo")
WIDTHS = (8, 13, 24, 48, 57, 64, 100, 128, 256)


def device_of(name: str) -> Backend:
    """A device that need not be there: programs are only predicted."""
    return Registry().open("cuda", target="sm_90a") if name == "cuda" else opened(name)


def made(proto: onnx.ModelProto, backend: Backend) -> ProgramSegment:
    (segment,) = Compiler(backend, CompileOptions(), KernelStore(None)).compile_model(read_model(proto), {}).segments
    assert isinstance(segment, ProgramSegment)
    return segment


def drawn(rng: np.random.Generator, written: str, steps: int) -> CellForm:
    width, order, bias = rng.choice(WIDTHS), str(rng.choice(ORDERS)), str(rng.choice(["", "first", "last"]))
    return CellForm(written, steps, int(width), int(rng.choice([width, rng.choice(WIDTHS)])), order, bias, bool(rng.integers(2)))


@pytest.mark.parametrize("written", ["gates"])
@pytest.mark.parametrize("device", ["cuda", "rocm", "ipu_sim"])
def test_a_cell_is_predicted_as_an_lstm_however_it_is_written(device: str, written: str, rng: np.random.Generator) -> None:
    backend, form = device_of(device), drawn(rng, written, 3)
    # Sums of floats are not regrouped: a bias that is added last stays in every step, which may cost the simulator 9%.
    form = replace(form, bias=form.bias and "first")
    products, given = (made(proto, backend).program for proto in cell_form(rng, form))
    # Names decide between kernels that are equally good.
    assert products.predicted <= given.predicted * 1.02, form
    if len(products.operators) > len(given.operators):  # products of few weights stay apart on a GPU, only where that is faster
        assert products.predicted < given.predicted, form
        return
    for ours, theirs in some(zip(products.operators, given.operators, strict=True)):
        assert [c.kind for c in ours.computes if c.combiner] == [c.kind for c in theirs.computes if c.combiner], form


@pytest.mark.parametrize("device", ["cuda", "rocm", "ipu_sim"])
def test_how_weights_lie_changes_nothing(device: str, rng: np.random.Generator) -> None:
    """Weights of [depth, columns] and of [columns, depth] give one program."""
    backend, form = device_of(device), drawn(rng, "gates", 2)
    turned, straight = (made(cell_form(rng, replace(form, turned=t))[0], backend) for t in (True, False))
    assert turned.program.predicted == pytest.approx(straight.program.predicted, rel=1e-9), form
    for a, b in some(zip(turned.program.operators, straight.program.operators, strict=True)):
        assert (a.family, a.tile) == (b.family, b.tile), form


@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_what_a_cell_computes_in_any_form(device: str, seed: int, rng: np.random.Generator) -> None:
    form = drawn(rng, str(rng.choice(["gates", "whole", "joint"])), 2)
    assert not (found := failure(opened(device), device, seed, cell_form(rng, form)[0], CompileOptions())), f"{form}: {found}"
