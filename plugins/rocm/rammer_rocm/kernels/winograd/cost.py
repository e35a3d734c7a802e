"""Predicted times of the family ``winograd``."""

from __future__ import annotations

from rammer.device.manifest import Binding
from rammer.ir.device import VDevice

from rammer_rocm.kernels.sliding.cost import COPY, MEMORY, OUTPUT, operations
from rammer_rocm.kernels.winograd.recognise import PLACES, SIDE, WinogradForm

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
    behind = OUTPUT + sum(operations(c.body) for c in form.after)
    return taken + multiplied + features * (rows * (PRODUCTS + SIDE * SIDE * behind))


def _tile_cycles(form: WinogradForm, nv: int) -> float:
    """Return the cycles of a register tile at one position; too few sums do not hide their latency."""
    each = max(form.mr * nv, 8.0, 0.5 * (form.mr + nv)) / PEAK_SHARE
    return form.channels * each + TILE + STORE * form.mr * nv


def seconds(form: WinogradForm, binding: Binding, device: VDevice) -> float:
    """Return the predicted seconds of all tasks, without the launch."""
    clock = device.flops / (2 * device.vector)
    return -(-form.operator.task_count // device.veus) * (cycles(form, device) / clock + device.dispatch)
