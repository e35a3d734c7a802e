"""A program with tables for shorter lengths on the device: each run takes the table for its length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from rammer.compiled.segments import Cases, ProgramSegment
from rammer.device.capabilities import Cased
from rammer.device.manifest import Backend, Bound, Loaded, RunResult

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def load_tables(backend: Backend, segment: ProgramSegment) -> Loaded:
    """A program with its cases; without them where the device takes none."""
    first = backend.load(segment.program, segment.constants)
    if segment.cases is None or not isinstance(backend, Cased):
        return first
    found = [first]
    try:
        found = [*(backend.load_case(table, segment.constants, first) for table in segment.cases.tables), first]
    except BaseException:
        first.close()
        raise
    port = next(p.external for p in segment.program.inputs if p.tensor == segment.cases.length)
    return CasedLoaded(segment.cases, port, tuple(found))


class CasedLoaded:
    """Tables of one program (``Loaded``), the program's own the last; the input ``port`` is the length that chooses."""

    def __init__(self, cases: Cases, port: str, tables: tuple[Loaded, ...]) -> None:
        self.cases, self.port, self.tables = cases, port, tables

    @property
    def kernels(self) -> int:
        """Of the table for the longest."""
        return self.tables[-1].kernels

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """One run by the table for its length."""
        return self.tables[self.cases.at(int(inputs[self.port]))].run(inputs)

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        """A bound call of each table over the same arrays. The length is in host memory."""
        return VariantCall(self, inputs, outputs, stream)

    def close(self) -> None:
        """Free all tables."""
        for table in self.tables:
            table.close()


class VariantCall:
    """Bound calls of all tables over the arrays of the longest's, one of which runs (``Bound``)."""

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
        """Of the tables: what the longest's does."""
        return self.whole.notes

    @property
    def _current_bound(self) -> Bound:
        return self._bounds[self._program.cases.at(self._length)]

    def run(self) -> None:
        """One run, queued where the device has a queue."""
        self._current_bound.run()

    def synchronize(self) -> None:
        """Wait for every queued run of all tables."""
        for bound in self._bounds:
            bound.synchronize()

    def seconds(self) -> float:
        """One run, waited for."""
        return self._current_bound.seconds()

    def write(self, inputs: Mapping[str, Any]) -> None:
        """Copy values into the arrays; a length is the host's number."""
        if self._program.port in inputs:
            self._length = int(np.asarray(inputs[self._program.port]))
        self.whole.write(inputs)

    def to_host(self, *names: str) -> dict[str, Array]:
        """Copies of the outputs."""
        self.synchronize()
        return self.whole.to_host(*names)

    def close(self) -> None:
        """Let go of the arrays."""
        for bound in self._bounds:
            bound.close()
