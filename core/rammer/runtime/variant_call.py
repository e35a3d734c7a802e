"""Loaded programs with length variants: each run uses the table for its length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rammer.compiled.segments import Cases, ProgramSegment
from rammer.device.manifest import Array, Backend, Bound, Loaded, RunResult


def load_tables(backend: Backend, segment: ProgramSegment) -> Loaded:
    """Load a program with its length variants, or without them if the device does not support them."""
    first = backend.load(segment.program, segment.constants)
    if segment.cases is None or not backend.cases:
        return first
    found = [first]
    try:
        found = [*(backend.load_case(table, segment.constants, first) for table in segment.cases.tables), first]
    except BaseException:
        first.close()
        raise
    port = next(p.external for p in segment.program.inputs if p.tensor == segment.cases.length)
    return CasedLoaded(segment.cases, port, tuple(found))


class CasedLoaded(Loaded):
    """A loaded program (``Loaded``) with its length variants. The program's main table is the last in ``tables``. The input
    ``port`` is the length that selects a table."""

    def __init__(self, cases: Cases, port: str, tables: tuple[Loaded, ...]) -> None:
        self.cases, self.port, self.tables, self.kernels = cases, port, tables, tables[-1].kernels

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """Run the table for the length in ``inputs``."""
        return self.tables[self.cases.at(int(inputs[self.port]))].run(inputs)

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        """Bind each table to the same arrays. The length is in host memory."""
        return VariantCall(self, inputs, outputs, stream)

    def close(self) -> None:
        """Free all tables of the program."""
        for table in self.tables:
            table.close()


class VariantCall(Bound):
    """A bound call (``Bound``) of all tables over the arrays of the longest, one of which runs."""

    def __init__(self, program: CasedLoaded, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any) -> None:
        self._program, self._length = program, int(np.asarray(inputs[program.port]))
        *others, last = program.tables
        self.whole = last.bind(inputs, outputs, stream)
        self._bounds = [self.whole]
        try:
            for table in reversed(others):
                self._bounds.insert(0, table.bind(self.whole.inputs, self.whole.outputs, self.whole.stream))
        except BaseException:
            self.close()
            raise
        self.inputs, self.outputs = self.whole.inputs, self.whole.outputs
        self.clock, self.stream = self.whole.clock, self.whole.stream

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the longest table."""
        return self.whole.notes

    @property
    def _current_bound(self) -> Bound:
        return self._bounds[self._program.cases.at(self._length)]

    def run(self) -> None:
        """Run once, queued if the device has a queue."""
        self._current_bound.run()

    def synchronize(self) -> None:
        """Wait for every queued run of all tables."""
        for bound in self._bounds:
            bound.synchronize()

    def seconds(self) -> float:
        """Run once, wait, and return the seconds."""
        return self._current_bound.seconds()

    def write(self, inputs: Mapping[str, Any]) -> None:
        """Copy values into the arrays. The length is a host number."""
        if self._program.port in inputs:
            self._length = int(np.asarray(inputs[self._program.port]))
        self.whole.write(inputs)

    def to_host(self, *names: str) -> dict[str, Array]:
        """Return copies of the outputs."""
        self.synchronize()
        return self.whole.to_host(*names)

    def close(self) -> None:
        """Release the bound arrays of all tables."""
        for bound in self._bounds:
            bound.close()
