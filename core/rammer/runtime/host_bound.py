"""Bound calls for devices that access host memory: simulators, and programs that run on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import numpy as np

from rammer.device.arrays import Array, host_view
from rammer.device.bound import Bound
from rammer.device.manifest import RunResult
from rammer.errors import BadInput
from rammer.ir.program import RProgram
from rammer.verify.in_place_state import state_ports

__all__ = ["HostBound", "HostRuns", "check_apart"]

#: Clock of bound calls that include reading the bound arrays and writing into them.
WHOLE: Final = "wall, NumPy in and out"


@dataclass(frozen=True)
class HostRuns:
    """Facts about the runs of a ``HostBound``: their clock, the notes before the first run, and True if the bound inputs are read
    in place."""

    clock: str = WHOLE
    notes: tuple[str, ...] = ()
    reads_in_place: bool = False


class HostBound(Bound):
    """A bound call of a program's ``run`` (NumPy in and out) on fixed host arrays. Runs are complete on return.

    ``copied`` are all arrays, or the outputs alone if inputs are read in place: ``run`` returns new arrays. ``notes`` are those
    of the last run. Raises BadInput for arrays elsewhere, outputs that overlap another bound array or are read-only, or a
    stream."""

    def __init__(
        self,
        program: RProgram,
        run: Callable[[Mapping[str, Array]], RunResult],
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        stream: Any = None,
        runs: HostRuns = HostRuns(),
    ) -> None:
        read, written = host_ports(program, inputs, outputs)
        if stream is not None:
            raise BadInput("runs of this device are synchronous: it has no stream to queue them on")
        copied = (() if runs.reads_in_place else tuple(read)), tuple(written)
        super().__init__(read, written, clock=runs.clock, notes=runs.notes, copied=copied)
        self._run = run

    def launch(self) -> None:
        """Run once with the current inputs."""
        self._copy_run()

    def measure(self) -> float:
        """Run once, and return its seconds by the device's clock."""
        return self._copy_run().seconds

    def _copy_run(self) -> RunResult:
        result = self._run(self.inputs)
        for name, values in result.outputs.items():
            np.copyto(self.outputs[name], values)
        self._notes = result.notes
        return result

    def release(self) -> None:
        """Release the program."""
        del self._run


def host_ports(
    program: RProgram, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the arrays of all ports as NumPy arrays; omitted outputs are allocated. Raises BadInput like ``HostBound``."""
    read = {p.external: host_view(f"input {p.external!r}", inputs[p.external]) for p in program.inputs}
    written, kept = dict[str, Array](), state_ports(program)
    for port in program.outputs:
        kind = program.types[port.tensor]
        if port.external in kept:
            written[port.external] = read[kept[port.external]]
        elif port.external in outputs:
            written[port.external] = host_view(f"output {port.external!r}", outputs[port.external])
        else:
            written[port.external] = np.zeros(kind.shape, kind.dtype)
        if not written[port.external].flags.writeable:
            raise BadInput(f"output {port.external!r} is an array that cannot be written")
    check_apart({n: a for n, a in read.items() if n not in kept.values()}, written, np.may_share_memory)
    return read, written


def check_apart(inputs: Mapping[str, Any], outputs: Mapping[str, Any], share: Callable[[Any, Any], bool]) -> None:
    """Raise BadInput if an output shares memory with an input or another output."""
    pairs = [
        *(((f"input {i!r}", a), (o, b)) for i, a in inputs.items() for o, b in outputs.items()),
        *(((f"output {p!r}", a), (o, b)) for (p, a), (o, b) in combinations(outputs.items(), 2)),
    ]
    for (what, a), (name, b) in pairs:
        if a.size and b.size and share(a, b):
            raise BadInput(f"output {name!r} shares memory with {what}", hint="bind separate arrays")
