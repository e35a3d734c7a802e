"""Recurrent cells in any form: they become the same as ONNX's LSTM or GRU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from cell_forms import WRITTEN, CellForm, cell_form
from view_graphs import failure, opened

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.frontend.read.reader import read_model
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some

#: Orders of gates in exporters' weights: ONNX, Keras, PyTorch, TensorFlow 1; TensorFlow's GRU.
ORDERS = {"LSTM": ("iofc", "ifco", "ifoc", "icfo"), "GRU": ("zrn", "rzn")}
WIDTHS = (8, 13, 24, 48, 57, 64, 100, 128, 256)
BATCHES = (1, 1, 2, 8, 32)
DEVICES = ("cuda", "rocm", "ipu_sim")


def device_of(name: str) -> Backend:
    """Return a device that may be absent: programs are only predicted."""
    return Registry().open("cuda", target="sm_90a") if name == "cuda" else opened(name)


def made(proto: onnx.ModelProto, backend: Backend) -> ProgramSegment:
    (segment,) = Compiler(backend, CompileOptions(), KernelStore(None)).compile_model(read_model(proto), {}).segments
    assert isinstance(segment, ProgramSegment)
    return segment


def drawn(rng: np.random.Generator, written: str, steps: int, kind: str = "LSTM") -> CellForm:
    """Return a form without peepholes, of one or a few cells in a run."""
    width, order = int(rng.choice(WIDTHS)), str(rng.choice(ORDERS[kind]))
    linear = kind == "GRU" and written != "joint" and bool(rng.integers(2))
    bias = str(rng.choice(["", "first", "both"] if linear else ["", "first", "last", "both"]))
    together = kind == "LSTM" and written != "gates" and order in ("iofc", "ifoc") and bool(rng.integers(2))
    depth, batch, turned = int(rng.choice([width, rng.choice(WIDTHS)])), int(rng.choice(BATCHES)), bool(rng.integers(2))
    return CellForm(written, steps, width, depth, batch, order, bias, turned, together, False, linear, kind)


#: Forms of one size each, since drawn ones take long, with the largest allowed ratio to the predicted time of ONNX's layer.
FORMS = {
    **{f"lstm {w}": (CellForm(w, 2, 48, 48, bias="first", together=w == "hoisted"), 1.01) for w in WRITTEN if w != "gates"},
    **{f"gru {w}": (CellForm(w, 2, 24, 24, 1, "rzn", "first", True, kind="GRU"), 1.1) for w in ("whole", "joint")},
}


@pytest.mark.slow
@pytest.mark.sampled(2, of="device")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_cell_is_predicted_as_a_layer_however_it_is_written(device: str, name: str, rng: np.random.Generator) -> None:
    backend, (form, most) = device_of(device), FORMS[name]
    products, given = (made(proto, backend).program for proto in cell_form(rng, form))
    assert products.predicted <= given.predicted * most


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_cell_of_a_product_for_each_gate_is_predicted_as_an_lstm(device: str, rng: np.random.Generator) -> None:
    backend, form = device_of(device), drawn(rng, "gates", 3)
    # Sums of floats are not reassociated: a bias that is added last stays in every step, which may cost the simulator 9%.
    form = replace(form, batch=1, bias=form.bias and "first")
    products, given = (made(proto, backend).program for proto in cell_form(rng, form))
    # Names decide between kernels that are equally good.
    assert products.predicted <= given.predicted * 1.02, form


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_how_weights_lie_changes_nothing(device: str, rng: np.random.Generator) -> None:
    """Check that weights of [depth, columns] and of [columns, depth] give programs of equal predicted time. Only tiles of equal
    time may differ."""
    backend, form = device_of(device), replace(drawn(rng, "gates", 2), batch=1, bias="first")
    turned, straight = (made(cell_form(rng, replace(form, turned=t))[0], backend) for t in (True, False))
    assert turned.program.predicted == pytest.approx(straight.program.predicted, rel=1e-9), form
    for a, b in some(zip(turned.program.operators, straight.program.operators, strict=True)):
        assert a.family == b.family, form


@pytest.mark.slow
@pytest.mark.sampled(2, of="device")
@pytest.mark.parametrize("peepholes", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_what_a_cell_computes_in_any_form(
    device: str, written: str, kind: str, peepholes: bool, seed: int, rng: np.random.Generator
) -> None:
    form = drawn(rng, written, 2, kind)
    form = replace(form, peepholes=peepholes and kind == "LSTM" and not form.together)
    assert not (found := failure(opened(device), device, seed, cell_form(rng, form)[0], CompileOptions())), f"{form}: {found}"
