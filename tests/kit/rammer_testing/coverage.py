"""Coverage of a kernel search: counts by family, precision and feature, and the missing combinations.

A feature is a property of one candidate that has caused wrong kernels. Examples are a partial tile, an operand that is aligned
nowhere, a non-constant operand, and the operand written last. Counts of several processes and runs add up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rammer.ir.operator import ROperator
from rammer.ir.types import itemsize
from rammer.report.text_table import markdown_table
from rammer_testing.cases import LATE
from rammer_testing.single import UntiledOperator

#: Family, precision and feature.
Cell: TypeAlias = tuple[str, str, str]
#: Alignment in bytes of the widest loads and copies, and the number of products in a long sum.
WIDEST, DEEP = 16, 256
#: Features of the computation and of the storage of its tensors. Further features name the late operands: "free 2" is the second
#: operand of a product of two non-constant tensors.
SHAPES = (
    "whole",
    "partial",
    "batch",
    "bare",
    "before",
    "behind",
    "several",
    "constant",
    "free",
    "odd",
    "deep",
    "offset",
    "ragged",
    "strided",
    "placed",
)
FEATURES = (*SHAPES, *(f"{kind} {w or 'direct'}" for kind in ("late", "free") for w in LATE))
#: Results of candidates.
FATES = ("run", "failed", "refused")


def features(tiled: ROperator, subject: UntiledOperator) -> frozenset[str]:
    """Return the features of a candidate, except those of late operands."""
    return frozenset((*_computed(tiled, subject), *_stored(tiled, subject)))


def _computed(tiled: ROperator, subject: UntiledOperator) -> Iterator[str]:
    partial = any(a.extent % t for a, t in zip(tiled.anchor.axes, tiled.tile, strict=True))
    yield "partial" if partial else "whole"
    yield from ["batch"] if len(tiled.anchor.axes) > 2 and tiled.anchor.axes[0].extent > 1 else []
    before = len(tiled.prologue)
    behind = len(tiled.computes) - 1 - tiled.computes.index(tiled.main)
    yield from [n for n, is_so in (("bare", not before + behind), ("before", before), ("behind", behind)) if is_so]
    yield from ["several"] if len(tiled.outputs) > 1 else []
    if tiled.main.kind == "contraction":
        yield "constant" if any(n in subject.binding.constants for n in tiled.main.reads) else "free"
    yield from ["odd"] if any(r.extent % 8 for r in tiled.main.reduce) else []
    yield from ["deep"] if math.prod(r.extent for r in tiled.main.reduce) >= DEEP else []


def _stored(tiled: ROperator, subject: UntiledOperator) -> Iterator[str]:
    types, storages = subject.binding.types, subject.binding.storages
    for name in dict.fromkeys((*tiled.inputs, *tiled.outputs)):
        if name in subject.binding.constants:
            continue
        storage, item = storages[name], itemsize(types[name].dtype)
        rows = [s for s, n in zip(storage.strides[:-1], storage.shape[:-1], strict=True) if n > 1]
        if storage.offset * item % WIDEST:
            yield "offset"
        elif any(s * item % WIDEST for s in rows):
            yield "ragged"
        if not storage.row_major:
            yield "strided"
        if name in tiled.outputs and (storage.offset or not storage.row_major):
            yield "placed"


def ways(subject: UntiledOperator) -> dict[str, str]:
    """Return the values of ``LATE`` that apply to an operator's operands, by feature."""
    operator, constants = subject.operator, subject.binding.constants
    count = min(len(LATE) - 3, sum(n not in constants for n in operator.inputs))
    free = operator.main.kind == "contraction" and not constants & {*operator.main.reads}
    known = (*LATE[1 : 3 + count], "") if count else ("",)
    return {f"{'free' if free else 'late'} {w or 'direct'}": w for w in known}


@dataclass
class Coverage:
    """Counts of candidates per cell, the cells that the device offered, and the results of candidates."""

    cells: Counter[Cell] = field(default_factory=Counter)
    offered: set[Cell] = field(default_factory=set)
    fates: Counter[Cell] = field(default_factory=Counter)

    def missing(self) -> list[Cell]:
        """Return the cells that were offered and never run."""
        return sorted(c for c in self.offered if not self.cells[c])

    def late(self, family: str, precision: str, ways: Mapping[str, str]) -> str:
        """Return the value in ``ways`` (values of ``LATE`` by feature) that was run least for this family."""
        return ways[min(ways, key=lambda w: self.cells[family, precision, w])]

    def add(self, event: Mapping[str, Any]) -> None:
        """Add the counts of ``event`` or of a report."""
        for family, precision, what, count in event.get("cells", ()):
            self.cells[family, precision, what] += count
            self.offered.add((family, precision, what))
        for family, precision, what, count in event.get("fates", ()):
            self.fates[family, precision, what] += count
        self.offered |= {(f, p, w) for f, p, w in event.get("offered", ())}

    def listed(self) -> dict[str, Any]:
        """Return the counts as JSON data for ``add``."""
        counts = {"cells": self.cells, "fates": self.fates}
        return {n: [[*c, k] for c, k in sorted(found.items())] for n, found in counts.items()} | {"offered": sorted(self.offered)}

    def runs(self) -> dict[tuple[str, str], int]:
        """Return the number of candidates run, by family and precision."""
        return {(f, p): n for (f, p, what), n in self.fates.items() if what == "run"}

    @property
    def candidates(self) -> int:
        """The number of candidates run."""
        return sum(self.runs().values())

    def table(self) -> str:
        """Return a table of candidates by family, precision and feature. A dash marks cells that were never offered. The lines
        below list the cells that were offered but never run."""
        rows = [self._row(f, p) for f, p in sorted({c[:2] for c in self.offered} | {c[:2] for c in self.fates})]
        return "\n".join([markdown_table(rows, ("family", "precision", *FATES, *FEATURES)), *self._lacking()])

    def _row(self, family: str, precision: str) -> list[str]:
        fates = [str(self.fates[family, precision, w]) for w in FATES]
        cells = [(family, precision, w) for w in FEATURES]
        return [family, precision, *fates, *(str(self.cells[c]) if c in self.offered else "-" for c in cells)]

    def _lacking(self) -> Iterator[str]:
        missing, pairs = self.missing(), sorted({c[:2] for c in self.offered})
        never = [(*pair, w) for pair in pairs for w in FEATURES if (*pair, w) not in self.offered]
        yield f"offered and not run: {_grouped(missing) or 'nothing'}"
        yield f"never offered: {_grouped(never) or 'nothing'}"


def _grouped(cells: Iterable[Cell]) -> str:
    """Return the text of cells, grouped by family and precision."""
    found: dict[tuple[str, str], list[str]] = {}
    for family, precision, what in cells:
        found.setdefault((family, precision), []).append(what)
    return "; ".join(f"{f} {p}: {', '.join(what)}" for (f, p), what in found.items())
