"""The kernel search in one process: its cases and candidates, in order, until the time limit.

The first cases have one feature each. Of their candidates it runs those with features not covered by this process or by reports
of others. Random cases follow. ``rammer_testing.families`` runs it in a crew of processes."""

from __future__ import annotations

import math
import resource
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from random import Random
from typing import Any

from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.errors import DeviceFailure, RammerError
from rammer.ir.operator import ROperator
from rammer_testing.cases import NetCase, Sampler, pick_of, picked, smaller
from rammer_testing.coverage import Coverage, features, ways
from rammer_testing.single import Trial, UntiledOperator, check, subjects, trial_of
from rammer_testing.worker_pool import BROKEN, Line, Member, leave

#: Seconds for shrinking one failure.
SHRINKING = 20.0
#: Operators per case, and candidates of a family that are searched for a new feature.
OPERATORS, LOOKED = 5, 40
#: The share of candidates that run in families with more runs than average.
SELDOM = 0.25
#: Lifetime in seconds and memory in bytes of a process before a fresh one replaces it; this bounds leaks.
LIFE, LARGE = 300.0, 6 << 30


class Search:
    """A runner of cases on one opened device."""

    def __init__(self, device: str, options: dict[str, str], each: int) -> None:
        self.backend: Backend = Registry().open(device, options=options)
        self.each = each

    def offered(self, subject: UntiledOperator, random: Random) -> dict[str, list[ROperator]]:
        """Return all candidates by family, in random order."""
        backend, families = self.backend, dict[str, list[ROperator]]()
        for tiled in dict.fromkeys(backend.all_candidates(subject.operator, subject.binding)):
            families.setdefault(tiled.family, []).append(tiled)
        return {n: random.sample(f, len(f)) for n, f in families.items()}

    def candidates(self, subject: UntiledOperator, random: Random) -> list[ROperator]:
        """Return up to ``each`` random candidates of every family."""
        # Maps and copies are in every model and use the core's kernels, so contractions deserve more of the time.
        each = self.each if any(c.kind == "contraction" for c in subject.operator.computes) else -(-self.each // 3)
        return [o for f in self.offered(subject, random).values() for o in f[:each]]

    def fresh(self, subject: UntiledOperator, precision: str, random: Random, coverage: Coverage) -> Iterator[ROperator]:
        """Yield candidates with features or late operands that ``coverage`` lacks at that moment."""
        later = ways(subject)
        for family, listed in self.offered(subject, random).items():
            name = family or "generic"
            for tiled in listed[:LOOKED]:
                cells = ((name, precision, f) for f in (*features(tiled, subject), *later))
                if not all(coverage.cells[c] for c in cells):
                    yield tiled

    def possible(self, tiled: ROperator, subject: UntiledOperator) -> bool:
        """Return True if the device can build this kernel."""
        capacity = self.backend.vdevice.layer("veu").capacity
        try:
            needs = self.backend.kernel(tiled, subject.binding).resources
        except DeviceFailure:
            return False
        return not capacity or needs.local_bytes <= capacity

    def problem(self, case: NetCase) -> str:
        """Return the fault of the candidate that ``case`` names, in any of its operators; "" if it passes or is absent."""
        for subject in subjects(replace(case, operator=-1), self.backend):
            try:
                tiled = picked(subject.operator, case.pick)
            except ValueError:
                continue
            if self.possible(tiled, subject) and (found := check(self.backend, tiled, trial_of(subject, case.seed, case.late))):
                return found
        return ""

    def shrunk(self, case: NetCase, end: float) -> NetCase:
        """Return the smallest failing case that is reached by time ``end``."""
        again = True
        while again and time.monotonic() < end:
            again = False
            for option in smaller(case):
                if time.monotonic() > end:
                    break
                try:
                    failed = bool(self.problem(option))
                except RammerError:
                    failed = False
                if failed:
                    case, again = option, True
                    break
        return case


def partial_tiles(search: Search, sampler: Sampler, each: int, tries: int) -> Iterator[NetCase]:
    """Yield up to ``each`` cases per family and precision with partial last tiles, out of ``tries`` samples."""
    seen: Counter[tuple[str, str]] = Counter()
    for _ in range(tries):
        case = sampler.next()
        for number, subject in enumerate(subjects(case, search.backend)):
            for tiled in search.candidates(subject, sampler.random):
                key = tiled.family, case.precision
                if seen[key] < each and "partial" in features(tiled, subject) and search.possible(tiled, subject):
                    seen[key] += 1
                    yield replace(case, operator=number, pick=pick_of(tiled))


class Hunt:
    """The part of a search in one process."""

    def __init__(self, search: Search, sampler: Sampler, member: Member) -> None:
        self.search, self.sampler, self.member = search, sampler, member
        self.line: Line | None = None
        self.coverage = Coverage()
        self.begin, self.end = time.monotonic(), math.inf
        self.shrunk = set[tuple[str, ...]]()

    def __call__(self, end: float, line: Line) -> None:
        """Run cases until ``end``, or until a fresh process is due. Exits with ``BROKEN`` after a device failure, since a wrong
        kernel can corrupt later runs."""
        self.end, self.line = end, line
        backend = self.search.backend
        families = sorted(f or "generic" for f in backend.families or ())
        self.emit({"families": families, "ready": True})
        directed = islice(self.sampler.first(), self.member.number, None, self.member.size)
        cases = ((c, True) for c in directed)
        for case, first in chain(cases, ((self.sampler.next(), False) for _ in iter(int, 1))):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            if self.over or time.monotonic() > self.begin + LIFE or peak > LARGE:
                leave()
            self.emit({"start": str(case), "peak": peak})
            self.case(case, first)

    @property
    def over(self) -> bool:
        """True if the time limit has passed."""
        return time.monotonic() > self.end

    def case(self, case: NetCase, first: bool) -> None:
        """Run candidates of the case's operators: those with new features if ``first``, else random ones."""
        self.hear()
        random = self.sampler.random
        numbered = list(enumerate(subjects(case, self.search.backend)))
        for number, subject in random.sample(numbered, min(OPERATORS, len(numbered))):
            trial = None
            fresh = self.search.fresh(subject, case.precision, random, self.coverage)
            for tiled in fresh if first else self.balanced(subject, case.precision):
                if self.over:
                    return
                late = self.coverage.late(tiled.family or "generic", case.precision, ways(subject))
                one = replace(case, operator=number, pick=pick_of(tiled), late=late)
                if not self.search.possible(tiled, subject):
                    self.count(tiled, case.precision, ("refused",), ())
                    continue
                trial = trial or trial_of(subject, case.seed)
                self.emit({"start": str(one)})
                self.candidate(one, tiled, subject, replace(trial, late=late))

    def balanced(self, subject: UntiledOperator, precision: str) -> list[ROperator]:
        """Return random candidates, with fewer from families that have more runs than average."""
        random, runs = self.sampler.random, self.coverage.runs()
        usual = sum(runs.values()) / max(len(runs), 1)
        often = {f for (f, p), n in runs.items() if p == precision and n > usual}
        found = self.search.candidates(subject, random)
        return [o for o in found if (o.family or "generic") not in often or random.random() < SELDOM]

    def candidate(self, one: NetCase, tiled: ROperator, subject: UntiledOperator, trial: Trial) -> None:
        """Run and count one candidate, and report its fault."""
        later = ways(subject)
        found = (*features(tiled, subject), *(f for f, late in later.items() if late == trial.late))
        try:
            problem, broken = check(self.search.backend, tiled, trial), False
        except DeviceFailure as failure:
            problem, broken = f"{failure}".replace("\n", " ")[:300], True
        self.offer(tiled, one.precision, later)
        self.count(tiled, one.precision, ("run", "failed") if problem else ("run",), found)
        if not problem:
            return
        kind = f"{tiled.family or 'generic'} {one.precision} {one.kind}"
        self.emit({"kind": kind, "failure": f"{one}\n    {problem}"})
        if broken:
            leave(BROKEN)
        if (key := (tiled.family, one.precision, one.kind)) not in self.shrunk:
            self.shrunk.add(key)
            self.emit({"start": str(one)})
            least = self.search.shrunk(replace(one, operator=-1), min(self.end, time.monotonic() + SHRINKING))
            self.emit({"kind": f"{kind} (shrunk)", "failure": f"{least}\n    {self.search.problem(least)}"})

    def offer(self, tiled: ROperator, precision: str, later: Iterable[str]) -> None:
        """Record and report the late operands that this candidate's family supports."""
        cells = {(tiled.family or "generic", precision, w) for w in later} - self.coverage.offered
        if cells:
            self.coverage.offered |= cells
            self.emit({"offered": sorted(cells)})

    def count(self, tiled: ROperator, precision: str, fates: Iterable[str], found: Iterable[str]) -> None:
        """Count one candidate and report the count."""
        family = tiled.family or "generic"
        event = {"fates": [(family, precision, f, 1) for f in fates], "cells": [(family, precision, f, 1) for f in found]}
        self.coverage.add(event)
        self.emit(event)

    def emit(self, event: dict[str, Any]) -> None:
        """Report an event to the parent process."""
        if self.line is not None:
            self.line.tell(event)

    def hear(self) -> None:
        """Count the cells that other processes have covered."""
        for cell in (c for cells in self.line.news() for c in cells) if self.line is not None else ():
            self.coverage.cells[cell] = max(1, self.coverage.cells[cell])


def again(search: Search, case: NetCase) -> str:
    """Run one case, with all candidates or the named one, and return its fault."""
    found = list[str]()
    if case.pick and case.operator < 0:
        return search.problem(case)
    for subject in subjects(case, search.backend):
        options = [picked(subject.operator, case.pick)] if case.pick else search.candidates(subject, Random(case.seed))
        for tiled in options:
            if search.possible(tiled, subject):
                problem = check(search.backend, tiled, trial_of(subject, case.seed, case.late))
                found += [f"{tiled.name} {pick_of(tiled)}: {problem}"] if problem else []
    return "\n".join(found)
