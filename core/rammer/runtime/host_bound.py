"""Bound calls for devices that access host memory: simulators, and programs that run on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any, Final

import numpy as np

from rammer.device.arrays import Array, check_names, check_type, dtype_of, host_view, shape_of
from rammer.device.manifest import Bound, RunResult
from rammer.errors import BadInput, DeviceFailure
from rammer.ir.program import RProgram
from rammer.ir.types import TensorType
from rammer.verify.in_place_state import state_ports

__all__ = ["HostBound", "check_apart", "check_values"]

#: Clock of bound calls that include reading the bound arrays and writing into them.
WHOLE: Final = "wall, NumPy in and out"


class HostBound(Bound):
    """A bound call of a program's ``run`` (NumPy in and out) on fixed host arrays. Runs are complete on return. Raises BadInput
    for arrays elsewhere, outputs that overlap another bound array or are read-only, or a stream."""

    def __init__(
        self,
        program: RProgram,
        run: Callable[[Mapping[str, Array]], RunResult],
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        stream: Any = None,
        clock: str = WHOLE,
    ) -> None:
        self.inputs, self.outputs = host_ports(program, inputs, outputs)
        if stream is not None:
            raise BadInput("runs of this device are synchronous: it has no stream to queue them on")
        self.clock, self.notes = clock, tuple[str, ...]()
        self._run: Callable[[Mapping[str, Array]], RunResult] | None = run

    def run(self) -> None:
        """Run once with the current inputs."""
        self.seconds()

    def synchronize(self) -> None:
        """Return at once, since runs are never queued."""

    def seconds(self) -> float:
        """Run once, and return its seconds by the device's clock."""
        result = self._require_run()(self.inputs)
        for name, values in result.outputs.items():
            np.copyto(self.outputs[name], values)
        self.notes = result.notes
        return result.seconds

    def write(self, inputs: Mapping[str, Any]) -> None:
        """Copy values into the bound arrays."""
        self._require_run()
        write_host(self.inputs, inputs)

    def to_host(self, *names: str) -> dict[str, Array]:
        """Return copies of the outputs."""
        self._require_run()
        return {n: self.outputs[n].copy() for n in names or self.outputs}

    def _require_run(self) -> Callable[[Mapping[str, Array]], RunResult]:
        """Return the program's run. Raises DeviceFailure once closed."""
        if self._run is None:
            raise DeviceFailure("the bound call was closed")
        return self._run

    def close(self) -> None:
        """Release the program, and reject further runs."""
        self._run = None


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


def write_host(arrays: Mapping[str, Array], values: Mapping[str, Any]) -> None:
    """Copy host values into host arrays of the same names. Raises BadInput for a wrong name, type, shape or memory."""
    check_names("input", values, arrays)
    for name, value in values.items():
        given, array = host_view(f"input {name!r}", value), arrays[name]
        check_values(name, given, array)
        if not array.flags.writeable:
            raise BadInput(f"input {name!r} was bound as an array that cannot be written")
        np.copyto(array, given)


def check_values(name: str, given: Any, array: Any) -> None:
    """Raise BadInput unless ``given`` has the type and shape of the bound ``array``."""
    check_type(f"input {name!r}", given, TensorType(dtype_of(array), shape_of(array)))
