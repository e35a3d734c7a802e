"""Devices with one planted mistake each, and the check of the conformance kit that finds it. ``python
tests/devices/broken_devices.py [MISTAKE ...]`` runs the whole kit on them and prints all checks that find each."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import broken_backends as backends
import broken_calls as calls
import broken_rows as rows
import broken_values as values

from rammer.device.manifest import Array, Device, OpenOptions
from rammer.ir.program import RProgram
from rammer_testing.conformance import CHECKS, Subject, registry_of

import rammer_toy
from rammer_ipu_sim.device import SimulatorBackend


@dataclass(frozen=True)
class Mistake:
    """A broken program or Backend, the check that finds it, and the text of that check's message."""

    broken: type[Any]
    check: str
    says: str


MISTAKES = {
    # waits and signals
    "signals before tasks": Mistake(rows.SignalsFirst, "waits", "long tasks and their readers"),
    "the first wait counts": Mistake(rows.FirstWait, "waits", "long tasks and their readers"),
    "the last wait counts": Mistake(rows.LastWait, "waits", "long tasks and their readers"),
    "waits once a row": Mistake(rows.WaitsOnce, "tables", "dealt at random"),
    "one task short": Mistake(rows.OneShort, "bands", "counters of bands"),
    "a counter is a flag": Mistake(rows.AnyOne, "bands", "counters of bands"),
    "counters are not reset": Mistake(rows.NoReset, "waits", "long tasks and their readers"),
    "bands are ignored": Mistake(rows.NoBands, "bands", "counters of bands"),
    "rows in turn": Mistake(rows.RowsInTurn, "waits", "on 3 rows has not ended"),
    # rows and tensors
    "rows beyond the units": Mistake(rows.DroppedRows, "waits", "on 3 rows"),
    "up to an empty row": Mistake(rows.UpToAnEmptyRow, "tables", "and an empty one"),
    "rows as ranges": Mistake(rows.Ranges, "tables", "dealt at random"),
    "the first wave only": Mistake(rows.FirstWave, "policies", "relative L2 error"),
    "whole tiles only": Mistake(rows.WholeTiles, "model product", "relative L2 error"),
    "one element too far": Mistake(rows.Spills, "guards", "elements outside were written"),
    "no strides": Mistake(rows.NoStrides, "guards", "wrong"),
    "a lost transfer": Mistake(rows.LostTransfer, "model product", "relative L2 error"),
    "ports by identifiers": Mistake(rows.OutputsByName, "names", "outputs named"),
    # arithmetic
    "fmax drops NaN": Mistake(values.FMax, "special values", "of NaN and infinities gives"),
    "a reduction drops NaN": Mistake(values.FMaxReduced, "special values", "of NaN and infinities gives"),
    "inputs drop NaN": Mistake(values.DropsNaN, "special values", "of NaN and infinities gives"),
    "caps infinity": Mistake(values.CapsInfinity, "special values", "of NaN and infinities gives"),
    "fast-math": Mistake(values.FastMath, "special values", "of NaN and infinities gives"),
    "fast functions": Mistake(values.FastFunctions, "functions", "wrong"),
    "powers by logarithms": Mistake(values.FastPower, "functions", "pow"),
    "halves up": Mistake(values.HalfUp, "functions", "round"),
    "integers divide like Python": Mistake(values.FloorDivision, "integers", "wrong"),
    "casts round": Mistake(values.RoundingCasts, "integers", "cast"),
    "64 bits in 32": Mistake(values.ShortIntegers, "integers", "wrong"),
    "float16 is bfloat16": Mistake(values.CoarseHalf, "half precision", "wrong"),
    "float16 without small numbers": Mistake(values.FlushedHalf, "half precision", "wrong"),
    "float16 without infinity": Mistake(values.CappedHalf, "half precision", "wrong"),
    "float16 sums": Mistake(values.HalfSums, "half precision", "wrong"),
    "tf32 unasked": Mistake(values.Tf32, "model product", "relative L2 error"),
    "no tails": Mistake(values.Tails, "model product", "relative L2 error"),
    "a ten-thousandth": Mistake(values.OneUlp, "model product", "relative L2 error"),
    "remembers": Mistake(values.Remembers, "model product", "other bits in a later run"),
    "small integers saturate": Mistake(values.Saturates, "integers", "wrong"),
    "float64 in float32": Mistake(values.ShortDoubles, "functions", "f64"),
    "products without the last": Mistake(values.ShortProducts, "special values", "prod"),
    "tables from one": Mistake(values.TablesFromOne, "integers", "table"),
    "indices from the tile": Mistake(values.TilesFromZero, "integers", "cast"),
    # arrays of the caller
    "dense inputs": Mistake(calls.DenseInputs, "strided arrays", "an input with gaps"),
    "dense outputs": Mistake(calls.DenseOutputs, "strided arrays", "an output with gaps"),
    "dense runs": Mistake(calls.DenseRuns, "two programs", "program 0"),
    "dense constants": Mistake(calls.DenseConstants, "two programs", "program 0"),
    "borrowed constants": Mistake(calls.BorrowsConstants, "two programs", "program 0"),
    "one set of constants": Mistake(rows.Shared, "two programs", "program 0"),
    "one arena": Mistake(calls.OneArena, "two programs", "program"),
    "stale inputs": Mistake(calls.Stale, "bind", "product: written: output 'y' differs from run's"),
    "outputs elsewhere": Mistake(calls.Shadow, "queue", "the bound arrays after synchronize"),
    "overtaken by a write": Mistake(calls.Overtaken, "queue", "a run before a write"),
    "synchronize waits for nothing": Mistake(calls.Impatient, "queue", "the bound arrays after synchronize"),
    "one array for all outputs": Mistake(calls.OneOutput, "queue", "another bound call"),
    "shown as they are": Mistake(calls.ShownAsTheyAre, "queue", "what to_host gave"),
    "a write clears the others": Mistake(calls.WritesAll, "queue", "a run before a write"),
    "inputs by position": Mistake(calls.ByPosition, "names", "wrong values"),
    "outputs are views": Mistake(calls.Views, "own outputs", "share memory"),
    # memory
    "close frees nothing": Mistake(calls.Kept, "freed", "bytes have stayed"),
    "no limit": Mistake(calls.NoLimit, "memory limit", "was loaded into"),
    "an arena for free": Mistake(calls.ArenaForFree, "memory limit", "in its arena was loaded"),
    "what did not fit counts": Mistake(calls.Exhausted, "after a failure", "out of memory"),
    "nothing empty": Mistake(calls.NothingEmpty, "empty tensors", "invalid buffer size"),
    # clocks
    "tasks take 2,500 times as long": Mistake(backends.off(2500), "clocks", "a task by the profiler"),
    "tasks take a 2,500th": Mistake(backends.off(1 / 2500), "clocks", "a task by the profiler"),
    "programs in milliseconds": Mistake(backends.off(1, 1000), "clocks", "the long chain by the profiler"),
    "runs in milliseconds": Mistake(backends.Milliseconds, "clocks", "a run of a chain"),
    "runs in cycles": Mistake(rows.Cycles, "clocks", "the long chain by the profiler"),
    "the clock stops when queued": Mistake(backends.Queued, "clocks", "a run of the long chain"),
    "spans of first tasks": Mistake(backends.TracedFirst, "trace", "tasks without a span"),
    "a program of first tasks": Mistake(backends.TracedShort, "trace", "is on no row"),
    "spans end before they start": Mistake(backends.TracedBackwards, "trace", "a span from"),
    "a formula": Mistake(backends.Predicts, "profiler", "is it a formula"),
    "no threads": Mistake(backends.NoThreads, "profiler", "threads=0"),
    # kernels and opening
    "a default policy that does not exist": Mistake(backends.NoSuchPolicy, "policies", "unknown policy 'fastest'"),
    "another tile": Mistake(backends.OwnTile, "kernels", "a kernel for"),
    "names matter": Mistake(backends.NamesMatter, "kernels", "other candidates"),
    "the worst first": Mistake(backends.WorstFirst, "kernels", "the first candidate is priced at"),
    "no candidates": Mistake(backends.Nothing, "model softmax", "no tile of operator"),
    "no time": Mistake(backends.NoTime, "kernels", "a task takes 0"),
    "unknown families": Mistake(backends.NoFamilies, "unknown family", "relative L2 error"),
    "any kind": Mistake(backends.AnyKind, "opening", "abacus"),
    "another unit": Mistake(backends.AnotherUnit, "manifest", "another one"),
    "closing one stops all": Mistake(backends.StopsAll, "device closed", "the queue has gone"),
    "a thread stays": Mistake(backends.KeepsThread, "device closed", "threads have stayed"),
    "a file stays open": Mistake(backends.KeepsFile, "device closed", "open files have stayed"),
    "no close": Mistake(backends.NoClose, "manifest", "has no method close"),
    "closing fails": Mistake(backends.CannotClose, "device closed", "queue"),
    "opens once": Mistake(backends.OpensOnce, "device closed", "in use"),
    "new fingerprints": Mistake(backends.NewFingerprint, "manifest", "the fingerprint changes"),
}

#: Mistakes that the core makes harmless: it admits one call at a time, and none after ``close``. The check passes on all of them.
HARMLESS = {
    "two calls spoil each other": Mistake(calls.NeedsTurns, "threads: runs", ""),
    "runs when closed": Mistake(calls.RunsWhenClosed, "closed", ""),
}


def subject(broken: type[Any]) -> Subject:
    """Return the toy or the simulator with the mistake ``broken``. It has float16, which the toy does not offer."""
    device = Device("bad", "a mistake", rammer_toy.probe, _backend(broken), options=(rammer_toy.MEMORY,), api=5)
    return Subject("bad", registry_of(device))


def _backend(broken: type[Any]) -> type[Any]:
    if issubclass(broken, rammer_toy.ToyBackend):
        return broken
    if not issubclass(broken, rammer_toy.ToyProgram):
        return type("Simulator", (SimulatorBackend,), {"load": lambda self, p, c: broken(p, c, self.chip, self.stream)})

    class Backend(rammer_toy.ToyBackend):
        def __init__(self, options: OpenOptions) -> None:
            super().__init__(options)
            self.vdevice = replace(self.vdevice, precisions=("float32", "float16"))

        def load(self, program: RProgram, constants: Mapping[str, Array]) -> Any:
            return broken(program, constants, self.limit)

    return Backend


def main(names: list[str]) -> None:
    """Run every check on every device, and print the number and names of the checks that find it."""
    right = {"nothing": Mistake(rows.Rows, "", "")}
    for name, mistake in ({**right, **MISTAKES, **HARMLESS}).items():
        if names and name not in names:
            continue
        found = list[str]()
        for check in CHECKS:
            try:
                CHECKS[check](subject(mistake.broken))
            except Exception:
                found.append(check)
        print(f"{name}: {len(found)} of {len(CHECKS)}: {', '.join(found)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
