"""Programs for measuring: one operator, some of its tasks, on random data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from rammer.device.manifest import ALIGNED_ELEMENTS, Binding
from rammer.ir.operator import ROperator
from rammer.ir.program import Buffer, BufferKind, Port, RProgram, Storage, Task

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def own_buffer(storage: Storage, buffer: str) -> tuple[Storage, int]:
    """``storage`` in a ``buffer`` of its own, aligned as it was, and the elements that this buffer needs: a kernel is to be
    measured as it will run."""
    low, high = storage.span()
    start = low - low % ALIGNED_ELEMENTS
    return replace(storage, buffer=buffer, offset=storage.offset - start), max(high - start, 1)


def probe_program(operator: ROperator, binding: Binding, veus: int) -> tuple[RProgram, dict[str, Array]]:
    """The first ``veus`` tasks of ``operator``, one a row; its outside tensors are inputs with the strides of
    ``binding``, its results outputs. There are no constants: every operand is an input."""
    storages: list[Storage] = []
    buffers: list[Buffer] = []
    inputs: list[Port] = []
    outputs: list[Port] = []
    for name in (*operator.inputs, *operator.outputs):
        moved, size = own_buffer(binding.storages[name], f"b_{name}")
        written = name in operator.outputs
        storages.append(moved)
        kind: BufferKind = "output" if written else "input"
        buffers.append(Buffer(moved.buffer, binding.types[name].dtype, size, kind))
        (outputs if written else inputs).append(Port(name, name))
    rows = tuple((Task(operator.name, i),) for i in range(min(veus, operator.task_count)))
    program = RProgram(
        "probe",
        "probe",
        tuple(inputs),
        tuple(outputs),
        tuple(buffers),
        tuple(storages),
        (operator,),
        (),
        rows,
        precision=binding.precision,
    )
    return program, {}
