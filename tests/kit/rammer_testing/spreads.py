"""Simulated execution of a distributed program and its joined program, independent of devices and transports."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import numpy as np

from rammer.device.manifest import Backend
from rammer.distributed.distributed_program import DistributedProgram
from rammer.distributed.link import joined_constants
from rammer.distributed.runtime.device_part import load_step
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram, Storage, Task
from rammer.verify.multi_device import CROSSING, FETCH, TRANSFER
from rammer.verify.writers import strided_view

Arrays = Mapping[str, np.ndarray]


class Stuck(Exception):
    """Error for rows whose waits are never satisfied."""


def run_whole(spread: DistributedProgram, inputs: Arrays, backend: Backend) -> dict[str, np.ndarray]:
    """Run the whole program on one device that simulates all devices, and return the outputs by the user's names."""
    loaded = backend.load(spread.whole, joined_constants(spread.parts))
    try:
        return dict(loaded.run(whole_inputs(spread, inputs)).outputs)
    finally:
        loaded.close()


def whole_inputs(spread: DistributedProgram, inputs: Arrays) -> dict[str, np.ndarray]:
    """Return the user's inputs under the names of the whole program's ports."""
    return {f"{i.name}@{device}": inputs[i.name] for i in spread.inputs for device in i.devices}


def run_steps(spread: DistributedProgram, inputs: Arrays, backends: list[Backend]) -> dict[str, np.ndarray]:
    """Run every step on its device, one at a time, with transfers as assignments. Return the outputs by the user's names."""
    held: list[dict[str, np.ndarray]] = [{} for _ in spread.parts]
    for given in spread.inputs:
        for device in given.devices:
            held[device][given.tensor] = inputs[given.name]
    at, gone, moved = [0] * len(held), set[str](), True
    while moved:
        moved = False
        for device, part in enumerate(spread.parts):
            while at[device] < len(part.steps) and gone.issuperset(part.steps[at[device]].arrivals):
                step, moved = part.steps[at[device]], True
                loaded = load_step(backends[device], step)
                made = loaded.run({name: held[device][name] for name in step.inputs}).outputs
                loaded.close()
                held[device].update(made)
                for name in step.frees:
                    del held[device][spread.transfer[name].tensor]
                for name in step.departures:
                    transfer = spread.transfer[name]
                    held[transfer.target][transfer.tensor] = made[transfer.tensor]
                gone.update(step.departures)
                at[device] += 1
    return {o.name: held[0][o.tensor] for o in spread.outputs}


class Play:
    """One run of a program over several devices, task by task, with rows in any order that waits allow.

    Each device has separate memory, as bytes that are NaN until written. A task that addresses another device's memory reads
    poison. A counter is visible on the device of its tasks; a transfer's counter also on the target device. A transfer reads and
    writes at any time between its start and the first wait for it: immediately or, if ``lazy``, as late as possible. So does a
    fetch, which reads the memory of two devices and whose completion is visible on both.
    """

    def __init__(self, program: RProgram, constants: Arrays, random: Random, lazy: bool) -> None:
        self.program, self.random, self.lazy = program, random, lazy
        homes = max(1, len(program.homes))
        self.memory = [np.full(-(-program.arena_bytes // 4), np.nan, np.float32).view(np.uint8) for _ in range(homes)]
        self.apart = {b.name: _poison(b.dtype, b.size) for b in program.buffers if b.kind != "arena"}
        for b in program.buffers:
            if b.kind == "constant":
                s = next(s for s in program.storages if s.buffer == b.name)
                strided_view(self.apart[b.name], s)[...] = constants[s.tensor]
        self.done: dict[int, dict[str, set[int]]] = {h: {} for h in range(homes)}
        self.late: dict[str, Task] = {}
        self.homes = {t.operator: program.row_homes[veu] for veu, row in enumerate(program.rows) for t in row}

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Return outputs by port. Raises Stuck."""
        program = self.program
        for port in program.inputs:
            self._view(program.storage[port.tensor], self._home(port.tensor))[...] = inputs[port.external]
        at = [0] * program.veus
        while True:
            ready = [v for v, row in enumerate(program.rows) if at[v] < len(row) and self._may(v, row[at[v]])]
            if not ready:
                break
            veu = self.random.choice(ready)
            task = program.rows[veu][at[veu]]
            self._meet(task, program.row_homes[veu])
            self._start(task, program.row_homes[veu])
            at[veu] += 1
        if any(n < len(row) for n, row in zip(at, program.rows, strict=True)):
            raise Stuck(str([v for v, row in enumerate(program.rows) if at[v] < len(row)]))
        for task in list(self.late.values()):
            self._compute(task)
        return {p.external: np.array(self._view(program.storage[p.tensor], self._home(p.tensor))) for p in program.outputs}

    def _home(self, tensor: str) -> int:
        return self.program.buffer[self.program.storage[tensor].buffer].home

    def _may(self, veu: int, task: Task) -> bool:
        known = self.done[self.program.row_homes[veu]]
        counters = (self.program.counter[w.counter] for w in task.waits)
        return all(known.get(c.operator, set()).issuperset(range(c.first, c.last)) for c in counters)

    def _meet(self, task: Task, home: int) -> None:
        """Complete the late transfers that the task waits for."""
        for wait in task.waits:
            late = self.late.pop(self.program.counter[wait.counter].operator, None)
            if late is not None:
                self._compute(late)

    def _start(self, task: Task, home: int) -> None:
        operator = self.program.operator[task.operator]
        known = [home]
        if operator.family == TRANSFER:
            known.append(self._home(operator.anchor.name))
        if operator.family == FETCH:
            known += [self._home(t) for t in operator.inputs]
        if operator.family in CROSSING and self.lazy:
            self.late[operator.name] = task
        else:
            self._compute(task)
        for h in known:
            self.done[h].setdefault(operator.name, set()).add(task.index)

    def _compute(self, task: Task) -> None:
        """Execute a task in its device's memory; a transfer writes to its target device."""
        operator = self.program.operator[task.operator]
        home = self.homes[task.operator]
        task_box = operator.task_box(task.index)
        target = self._home(operator.anchor.name) if operator.family == TRANSFER else home
        for name, value in self._values(operator, home).items():
            box = tuple(slice(lo, hi) for lo, hi in operator.part(name, task_box))
            self._view(self.program.storage[name], target)[box] = value[box]

    def _values(self, operator: ROperator, home: int) -> dict[str, np.ndarray]:
        far = operator.family == FETCH
        held = {t: np.array(self._view(self.program.storage[t], self._home(t) if far else home)) for t in operator.inputs}
        for compute in operator.computes:
            held[compute.name] = _evaluated(compute, held)
        return {t: held[t] for t in operator.outputs}

    def _view(self, storage: Storage, home: int) -> np.ndarray:
        """Return a tensor as ``home`` sees it: read-only poison if the buffer belongs to another device."""
        buffer = self.program.buffer[storage.buffer]
        if buffer.kind == "arena":
            flat = self.memory[home][buffer.offset : buffer.offset + buffer.nbytes].view(buffer.dtype)
        else:
            flat = self.apart[buffer.name] if buffer.home == home else _poison(buffer.dtype, buffer.size)
        return strided_view(flat, storage)


def _evaluated(compute: Compute, held: Arrays) -> np.ndarray:
    with np.errstate(all="ignore"):
        return evaluate_compute(compute, held)


def _poison(dtype: str, size: int) -> np.ndarray:
    made = np.zeros(size, dtype)
    made[...] = np.nan if made.dtype.kind == "f" else 77
    return made
