"""Predicted times of windows over images, for the family ``image`` and for the generic kernel."""

from __future__ import annotations

import math
from dataclasses import replace

from rammer.codegen import Unsuited
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.device import VDevice
from rammer.ir.expr import Expr, Load, Op
from rammer.ir.operator import ROperator

from rammer_rocm.image.recognise import ImageForm, image_form

#: Cycles of one core (fitted on a Zen 4): to start an image, to copy a vector of it, to start rows of sums, to load a shared
#: vector; per tap of a sum, and of a maximum that propagates NaN; to store a vector of outputs; per operation and per function
#: (exp) of its maps.
IMAGE, COPY, BLOCK, LOAD, SUM, MAXIMUM, OUTPUT, MAP, FUNCTION = 60.0, 7.0, 8.0, 1.5, 1.1, 3.0, 8.0, 1.5, 30.0
#: Slowdown of copies and loads that exceed most of the first-level cache (CACHE bytes), and of copies from memory.
FAR, CACHE, MEMORY = 1.5, 28 << 10, 2.0
#: Cycles of the generic kernel: per vector of outputs, to load a strided vector, and to mask a vector that overlaps padding.
PLAIN, STRIDED, MASKED = 10.0, 3.0, 2.0
#: Rows that the generic kernel computes together if windows slide by one.
PLAIN_ROWS = 8


def cycles(form: ImageForm, device: VDevice) -> float:
    """Return the cycles of one core for a full task."""
    high, wide, lanes = form.high, form.wide, form.lanes(device.vector)
    slow, far = lanes / device.vector, FAR if form.scratch(device.vector) > CACHE else 1.0
    source = form.binding.types[form.x.tensor].nbytes > device.layer("veu").capacity
    copy = COPY * far * (MEMORY if source else 1.0)
    copied = min(high.staged, high.extent) * -(-min(wide.staged, wide.extent) // (lanes * wide.step)) * wide.step
    across = -(-wide.tile // lanes)
    each = (SUM if form.main.combiner == "sum" else MAXIMUM) * form.rows * high.taps * wide.taps
    together = slow * (each + LOAD * far * len(high.shared(form.rows)) * wide.taps) + BLOCK + form.rows
    epilogue = OUTPUT + sum(operations(c.body) for c in form.after)
    one = IMAGE + copy * copied + form.height // form.rows * across * together + high.tile * across * epilogue
    return form.images * one


def plain_seconds(operator: ROperator, binding: Binding, device: VDevice) -> float:
    """Return the generic kernel's seconds for an untiled operator that slides over images; infinite for others."""
    try:
        form = image_form(replace(operator, tile=()), binding)
    except Unsuited:
        return math.inf
    whole = form.tiled({a.name: a.extent for a in form.main.axes}, 1)
    return plain_cycles(whole, device.vector) / (device.flops / (2 * device.vector) * device.veus)


def plain_cycles(form: ImageForm, most: int) -> float:
    """Return the generic kernel's cycles of one core for a task of this size. The generic kernel reads each tap from the image
    and masks it at the edges."""
    high, wide = form.high, form.wide
    lanes = max((n for n in (4, 8, 16) if n <= min(wide.tile, most)), default=1)
    across = -(-wide.tile // lanes)
    edges = (wide.first < 0) + (wide.first + wide.staged > wide.extent)
    rows = next((n for n in range(PLAIN_ROWS, 1, -1) if high.outputs % n == 0), 1) if high.step == 1 else 1
    loads = wide.taps * high.taps if rows == 1 else wide.taps * (high.taps + rows - 1) / rows
    load = (1.0 if wide.step == 1 else STRIDED) + MASKED * min(1.0, edges / across)
    each = (SUM if form.main.combiner == "sum" else MAXIMUM) * high.taps * wide.taps
    epilogue = sum(operations(c.body) for c in form.after)
    return form.images * high.tile * across * (PLAIN + loads * load + each + epilogue)


def operations(e: Expr) -> float:
    """Return the cycles of a map for a vector of outputs."""
    inner = sum(operations(k) for k in ex.children(e)) if not isinstance(e, Load) else 0.0
    return inner + (0.0 if not isinstance(e, Op) else FUNCTION if e.fn in ex.TRANSCENDENTAL else MAP)


def seconds(form: ImageForm, binding: Binding, device: VDevice) -> float:
    """Return the predicted seconds of all tasks, without the launch."""
    clock = device.flops / (2 * device.vector)
    lanes = device.vector
    task = (cycles(form, device) + form.scratch(lanes) / (4 * lanes)) / clock + device.dispatch
    return -(-form.operator.task_count // device.veus) * task
