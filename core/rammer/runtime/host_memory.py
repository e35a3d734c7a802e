"""A program's buffers in host memory, and its tasks evaluated by NumPy, for devices that compute on the host. The C-family
devices have separate implementations; this module is for simulators, plugin authors' first steps and tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from rammer.errors import DeviceFailure
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Box, Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.expr import Expr, Load
from rammer.ir.operator import ROperator
from rammer.ir.program import Buffer, RProgram, Storage
from rammer.ir.types import TensorType
from rammer.process_memory import available_bytes

__all__ = ["HostMemory", "buffer_image", "evaluate_task", "is_whole_buffer", "storage_view"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def program_bytes(program: RProgram) -> int:
    """Return the bytes of a program's buffers: the arena once, and all other buffers."""
    return program.arena_bytes + sum(b.nbytes for b in program.buffers if b.kind != "arena")


class HostMemory:
    """Flat buffers with the tensors of ``program`` as views; arena buffers share one allocation at their offsets. Unwritten
    elements are NaN (integers: all bits set), so that a missing wait is visible."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int = 0) -> None:
        """Allocate the buffers and write the constants. ``limit`` is in bytes (0 = the memory available to this process). Raises
        DeviceFailure before allocation if the program needs more."""
        need, limit = program_bytes(program), min(limit or available_bytes(), available_bytes())
        if need > limit:
            raise DeviceFailure(
                f"out of memory: program {program.name} needs {need} bytes, the limit is {limit}",
                hint="use a smaller batch or input, or a device with more memory",
            )
        self.program = program
        arena = np.full(program.arena_bytes, 0xFF, np.uint8)
        self.buffers = {
            b.name: (arena[b.offset : b.offset + b.nbytes] if b.kind == "arena" else np.full(b.nbytes, 0xFF, np.uint8)).view(
                b.dtype
            )
            for b in program.buffers
        }
        self.tensors = {s.tensor: storage_view(self.buffers[s.buffer], s) for s in program.storages}
        for name, value in constants.items():
            self.tensors[name][...] = value

    def write_inputs(self, inputs: Mapping[str, Array]) -> None:
        """Copy the program's inputs into their buffers, by ONNX name."""
        for port in self.program.inputs:
            self.tensors[port.tensor][...] = inputs[port.external]

    def read_outputs(self) -> dict[str, Array]:
        """Return copies of the program's outputs, by ONNX name."""
        return {p.external: self.tensors[p.tensor].copy() for p in self.program.outputs}

    def run_task(self, operator: ROperator, index: int) -> None:
        """Run one task: read its boxes, write its tile."""
        for name, (box, values) in evaluate_task(operator, index, self.tensors).items():
            self.tensors[name][tuple(slice(low, high) for low, high in box)] = values


def storage_view(flat: Array, storage: Storage) -> Array:
    """Return the elements of ``storage`` inside the flat array of its buffer, as a writable view."""
    if 0 in storage.shape:
        return np.empty(storage.shape, flat.dtype)
    strides = tuple(s * flat.itemsize for s in storage.strides)
    return as_strided(flat[storage.offset :], storage.shape, strides)


def is_whole_buffer(storage: Storage, buffer: Buffer) -> bool:
    """Return True if a tensor's elements are exactly those of its buffer, in order."""
    return storage.offset == 0 and storage.row_major and math.prod(storage.shape) == buffer.size


def buffer_image(storage: Storage, buffer: Buffer, values: Array) -> Array:
    """Return the flat contents of a tensor's buffer: ``values`` if they fill it, else with 0 between elements."""
    if is_whole_buffer(storage, buffer):
        return np.ascontiguousarray(values, buffer.dtype).reshape(-1)
    flat = np.zeros(buffer.size, buffer.dtype)
    storage_view(flat, storage)[...] = values
    return flat


def evaluate_task(operator: ROperator, index: int, tensors: Mapping[str, Array]) -> dict[str, tuple[Box, Array]]:
    """Return box and values of every output of one task, from whole ``tensors``; interior values stay in the task."""
    outside = {n: TensorType(str(tensors[n].dtype), tensors[n].shape) for n in operator.inputs}
    task = operator.task_box(index)
    boxes = operator.boxes(task, outside | {c.name: c.type for c in operator.computes})
    known: dict[str, Array] = {n: tensors[n] for n in operator.inputs}
    origins: dict[str, tuple[int, ...]] = {}
    for compute in operator.computes:
        if compute.name in boxes:
            box = boxes[compute.name]
            known[compute.name] = evaluate_compute(restrict_compute(compute, box, origins), known)
            origins[compute.name] = tuple(low for low, _ in box)
    result = dict[str, tuple[Box, Array]]()
    for name in operator.outputs:  # if later Computes also read it, the task may compute more than it writes
        own = operator.part(name, task)
        inside = tuple(slice(low - first, high - first) for (low, high), first in zip(own, origins[name], strict=True))
        result[name] = own, known[name][inside]
    return result


def restrict_compute(compute: Compute, box: Box, origins: Mapping[str, tuple[int, ...]]) -> Compute:
    """Return ``compute`` restricted to ``box`` of its output, with axes from 0. ``origins`` are the first elements of tensors
    that are present only as tiles; loads of these are shifted accordingly."""
    moved = {a.name: ex.make_add(a.name, low) for a, (low, _) in zip(compute.axes, box, strict=True) if low}
    axes = tuple(Axis(a.name, high - low) for a, (low, high) in zip(compute.axes, box, strict=True))
    body = _from_tiles(ex.substitute(compute.body, moved), origins)
    return Compute(compute.name, compute.dtype, axes, body, compute.reduce, compute.combiner)


def _from_tiles(body: Expr, origins: Mapping[str, tuple[int, ...]]) -> Expr:
    def rule(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.tensor in origins:
            inner = tuple(_from_tiles(i, origins) for i in e.indices)
            moved = tuple(ex.make_add(i, -low) for i, low in zip(inner, origins[e.tensor], strict=True))
            return Load(e.tensor, moved, e.fill)
        return None

    return ex.transform(body, rule)
