"""Measurement programs: some tasks of one operator on random data, and the time of a task by a device's clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rammer.device.manifest import ALIGNED_ELEMENTS, Array, Binding, Loaded
from rammer.ir.operator import ROperator
from rammer.ir.program import Buffer, BufferKind, Counter, Port, RProgram, Storage, Task
from rammer.ir.types import TensorType, is_float

__all__ = ["OwnTensors", "own_buffer", "probe_program", "random_inputs", "random_values", "task_times", "usual_lengths"]

#: The minimum seconds of one timed run, so that its start takes about 1%; the number of runs; the maximum number of tasks in a
#: row.
SPAN, REPEATS, LONGEST_ROW = 5e-4, 8, 20_000
#: Approximate seconds that a caller waits for the runs of one measurement: a simulator takes longer than its simulated time.
PATIENCE = 2.0
#: The length at which a program for a range is measured, as a fraction of the longest: the middle of most buckets.
USUAL = 0.8


def own_buffer(storage: Storage, buffer: str) -> tuple[Storage, int]:
    """Return ``storage`` in a separate ``buffer`` with the same alignment, and the buffer's size in elements. So a kernel is
    measured as it will run."""
    low, high = storage.span()
    start = low - low % ALIGNED_ELEMENTS
    return replace(storage, buffer=buffer, offset=storage.offset - start), max(high - start, 1)


@dataclass(frozen=True, slots=True)
class OwnTensors:
    """The tensors of some operators, each in a separate buffer with the strides and the alignment of a binding.

    Tensors that the operators write are outputs, the rest inputs. Constants stay constants, with random values, so that kernels
    pack them as in the model."""

    storages: tuple[Storage, ...]
    buffers: tuple[Buffer, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    constants: dict[str, Array]

    @staticmethod
    def of(operators: Sequence[ROperator], binding: Binding) -> OwnTensors:
        """Return the tensors that ``operators`` read or write."""
        rng, constants = np.random.default_rng(), dict[str, Array]()
        storages, buffers, inputs, outputs = list[Storage](), list[Buffer](), list[Port](), list[Port]()
        made = {t for o in operators for t in o.outputs}
        for name in dict.fromkeys(t for o in operators for t in (*o.inputs, *o.lengths, *o.outputs)):
            moved, size = own_buffer(binding.storages[name], f"b_{name}")
            storages.append(moved)
            kind: BufferKind = "output" if name in made else "constant" if name in binding.constants else "input"
            buffers.append(Buffer(moved.buffer, binding.types[name].dtype, size, kind))
            if kind == "constant":
                constants[name] = random_values(binding.types[name], rng)
            else:
                (outputs if kind == "output" else inputs).append(Port(name, name))
        return OwnTensors(tuple(storages), tuple(buffers), tuple(inputs), tuple(outputs), constants)

    def program(
        self,
        name: str,
        operators: Sequence[ROperator],
        rows: tuple[tuple[Task, ...], ...],
        precision: str,
        counters: tuple[Counter, ...] = (),
    ) -> RProgram:
        """Return a program of the operators' tasks in ``rows``."""
        return RProgram(
            name,
            name,
            self.inputs,
            self.outputs,
            self.buffers,
            self.storages,
            tuple(operators),
            counters,
            rows,
            precision=precision,
        )


def probe_program(
    operator: ROperator, binding: Binding, rows: int, veus: int = 0, length: int = 1
) -> tuple[RProgram, dict[str, Array]]:
    """Return a program of ``operator`` alone on ``OwnTensors``, and its constants. Each of ``rows`` vEUs runs ``length`` tasks,
    distinct if possible. The rest of the ``veus`` vEUs are idle."""
    own, count = OwnTensors.of([operator], binding), operator.task_count
    tasks = range(length if count else 0)
    table = [tuple([Task(operator.name, (row + i * rows) % count) for i in tasks]) for row in range(rows)]
    return own.program("probe", [operator], (*table, *[()] * (veus - rows)), binding.precision), own.constants


def task_times(
    load: Callable[[RProgram, Mapping[str, Array]], Loaded], operator: ROperator, binding: Binding, veus: int
) -> tuple[float, float]:
    """Return the seconds of one task alone on a vEU, and with all ``veus`` running one. The clock is that of the programs that
    ``load`` returns. This is the ``task_time`` of a device that has a clock."""
    return _task_seconds(load, operator, binding, 1, veus), _task_seconds(load, operator, binding, veus, veus)


def _task_seconds(
    load: Callable[[RProgram, Mapping[str, Array]], Loaded], operator: ROperator, binding: Binding, rows: int, veus: int
) -> float:
    """Return the seconds of one task, with all tasks distributed over ``rows`` rows. Rows are extended if they are too short for
    a clock. The caller waits little longer than ``PATIENCE`` seconds, which matters for simulators."""
    tasks = max(1, -(-operator.task_count // rows))
    seconds, waited = _time_program(load, *probe_program(operator, binding, rows, veus, tasks))
    once = seconds / tasks
    affordable = int(PATIENCE / REPEATS * tasks / max(waited, 1e-9))
    longer = min(math.ceil(SPAN / max(once, 1e-9)), LONGEST_ROW, affordable)
    if seconds >= SPAN or longer <= tasks:
        return once
    return _time_program(load, *probe_program(operator, binding, rows, veus, longer))[0] / longer


def _time_program(
    load: Callable[[RProgram, Mapping[str, Array]], Loaded], program: RProgram, constants: Mapping[str, Array]
) -> tuple[float, float]:
    """Return the seconds of a run by the device's clock, and the seconds that the caller waits for it. Each is the best of a few
    runs, or of one run that takes ``PATIENCE``."""
    loaded = load(program, constants)
    said, waited = list[float](), list[float]()
    try:
        inputs = random_inputs(program, np.random.default_rng())
        while len(said) < REPEATS and sum(waited) < PATIENCE:
            start = time.perf_counter()
            said.append(loaded.run(inputs).seconds)
            waited.append(time.perf_counter() - start)
        return min(said), min(waited)
    finally:
        loaded.close()


def random_inputs(program: RProgram, rng: np.random.Generator) -> dict[str, Array]:
    """Return an array for every input, by ONNX name (see ``random_values``), with ``usual_lengths`` for a ranged program."""
    return {p.external: random_values(program.types[p.tensor], rng) for p in program.inputs} | usual_lengths(program)


def usual_lengths(program: RProgram) -> dict[str, Array]:
    """Return the length inputs at which a ranged program is measured: ``USUAL`` of their maxima."""
    most: dict[str, int] = {}
    for o in program.operators:
        axes = {(c.name, r.name): r.extent for c in o.computes for r in c.reduce}
        ends = [(e.extent, next(a.extent for a in o.anchor.axes if a.name == e.axis)) for e in o.skips if not e.before]
        for extent, bound in (*ends, *((s.extent, axes[s.compute, s.axis]) for s in o.reduce_bounds)):
            if len(extent.terms) == 1:
                (name, factor), *_ = extent.terms
                most[name] = max((bound - extent.offset) // factor, most.get(name, 0))
    ports = {p.tensor: p.external for p in program.inputs}
    return {ports[n]: np.array(math.ceil(most[n] * USUAL), np.int64) for n in most if n in ports}


def random_values(kind: TensorType, rng: np.random.Generator) -> Array:
    """Return floats N(0,1), bytes of all sizes, or zeros for other types, which are legal indices into any axis."""
    if is_float(kind.dtype):
        return rng.standard_normal(kind.shape, np.float32).astype(kind.dtype)
    if kind.dtype in ("int8", "uint8"):  # a chip multiplies zeros faster
        ends = np.iinfo(kind.dtype)
        return rng.integers(ends.min, ends.max, kind.shape, kind.dtype, endpoint=True)
    return np.zeros(kind.shape, kind.dtype)
