"""Programs for measuring: one operator, some of its tasks, on random data."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator
from rammer.ir.program import Buffer, BufferKind, Port, RProgram, Storage, Task

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def probe_program(operator: ROperator, binding: Binding, veus: int) -> tuple[RProgram, dict[str, Array]]:
    """The first ``veus`` tasks of ``operator``, one a row; its outside tensors are inputs with the strides of
    ``binding``, its results outputs. There are no constants: every operand is an input."""
    storages: list[Storage] = []
    buffers: list[Buffer] = []
    inputs: list[Port] = []
    outputs: list[Port] = []
    for name in (*operator.inputs, *operator.outputs):
        storage = binding.storages[name]
        low, high = storage.span()
        moved = Storage(name, f"b_{name}", storage.offset - low, storage.shape, storage.strides)
        written = name in operator.outputs
        storages.append(moved)
        kind: BufferKind = "output" if written else "input"
        buffers.append(Buffer(moved.buffer, binding.types[name].dtype, max(high - low, 1), kind))
        (outputs if written else inputs).append(Port(name, name))
    rows = tuple((Task(operator.name, i),) for i in range(min(veus, operator.task_count)))
    program = RProgram("probe", "probe", tuple(inputs), tuple(outputs), tuple(buffers), tuple(storages),
                       (operator,), (), rows)  # fmt: skip
    return program, {}
