"""Selection of the fastest of several programs for one graph, by whole runs on the device.

The programs are on the device together, and share prepared constants. Their runs are interleaved, so that other load on the
machine slows all of them alike. The best run of each counts. The results are cached for all programs together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from rammer.cache.cache_keys import key_of, unit_key
from rammer.device.guard import opening_of
from rammer.device.manifest import Array, Backend
from rammer.errors import DeviceFailure, DeviceUnavailable, print_warning
from rammer.ir.program import RProgram
from rammer.tuning.interleaved_timing import Rounds, time_interleaved
from rammer.tuning.kernel_probe import random_inputs
from rammer.tuning.kernel_store import KernelStore

__all__ = ["Opener", "TimeCache", "Times", "fastest_program", "program_opener", "time_programs"]

#: Rounds in which all programs run. Other load on the machine makes some runs up to half longer, and lasts some tenths of a
#: second. Programs are dropped only after ``settled`` seconds: another process may occupy a GPU for some milliseconds, in which
#: short programs have several rounds.
RACE: Final = Rounds(least=20, most=400, seconds=(0.3, 4.0), drop=((8, 1.1), (3, 1.5)), settled=0.05)
#: Times within this ratio are equal: the better prediction then decides, so that the choice does not depend on chance.
SAME: Final = 1.005

#: A function that loads a program on the device within a context, which returns the seconds of a run.
Opener: TypeAlias = "Callable[[RProgram], AbstractContextManager[Callable[[], float]]]"


@dataclass(frozen=True)
class TimeCache:
    """Cached times (seconds) of programs that were measured together."""

    backend: Backend
    store: KernelStore

    def get(self, programs: Sequence[RProgram]) -> dict[int, float] | None:
        """Return the seconds by program index, or None unless all programs were measured."""
        found = [self.store.seconds(key) for key in self._cache_keys(programs)]
        return {i: s for i, s in enumerate(found) if s is not None} if None not in found else None

    def put(self, programs: Sequence[RProgram], seconds: Mapping[int, float]) -> None:
        """Store the seconds of all programs."""
        for key, place in zip(self._cache_keys(programs), sorted(seconds), strict=True):
            self.store.put_seconds(key, seconds[place])

    def _cache_keys(self, programs: Sequence[RProgram]) -> list[str]:
        opening, texts = opening_of(self.backend), [str(p) for p in programs]
        options = sorted(opening.options.options.items()) if opening is not None else []
        whole = key_of(unit_key(self.backend), "programs", str(options), *texts)
        return [key_of(whole, str(i)) for i in range(len(texts))]


@dataclass(frozen=True)
class Times:
    """The measured ``seconds`` of programs by index, the reasons why others are ``lost``, and the origin of the times. ``absent``
    is the reason if the device is absent."""

    seconds: Mapping[int, float]
    lost: Mapping[int, DeviceFailure] = field(default_factory=dict)
    origin: str = "by measurement"
    absent: str = ""

    def fastest(self, names: Sequence[str], what: str = "") -> tuple[int, str]:
        """Return the index of the fastest program and a line with the reason, with warnings for the lost ones. It is the first
        program if none ran."""
        if self.absent:
            return 0, f"{names[0]}, by prediction: {self.absent}"
        for place, lost in self.lost.items():
            print_warning(f"{what}{names[place]} is left out: {lost.what}")
        if not self.seconds:
            return 0, f"{names[0]}, by prediction: no program ran ({self.lost[0].what})"
        best = next(i for i, s in sorted(self.seconds.items()) if s <= SAME * min(self.seconds.values()))
        said = [f"{names[i]} {s * 1e3:.4g} ms" for i, s in sorted(self.seconds.items())]
        said += [f"{names[i]} left out ({lost.what})" for i, lost in self.lost.items()]
        return best, f"{names[best]}, {self.origin}: {', '.join(said)}"


def time_programs(programs: Sequence[RProgram], opened: Opener, kept: TimeCache | None = None) -> Times:
    """Return the times of programs that run interleaved, or those that were cached for all of them together."""
    known = kept.get(programs) if kept is not None else None
    if known is not None:
        return Times(known, origin="by measurement before")
    race = Race(opened)
    try:
        seconds = race.run(programs)
    except DeviceUnavailable as problem:
        return Times({}, absent=problem.what)
    if kept is not None and seconds and not race.lost:
        kept.put(programs, seconds)
    return Times(seconds, race.lost)


def fastest_program(
    programs: Sequence[RProgram], opened: Opener, kept: TimeCache | None = None, names: Sequence[str] = ()
) -> tuple[RProgram, str]:
    """Return the fastest program and a line with the reason.

    The line names programs by ``names`` (default: their policies). A program that does not run is dropped, with a warning. The
    first program is returned if the device is absent or all programs fail."""
    best, why = time_programs(programs, opened, kept).fastest(names or [p.policy for p in programs], "" if names else "policy ")
    return programs[best], why


@dataclass
class Race:
    """An interleaved timing of programs; ``lost`` has the failed programs by index."""

    opened: Opener
    lost: dict[int, DeviceFailure] = field(default_factory=dict)

    def run(self, programs: Sequence[RProgram]) -> dict[int, float]:
        """Return the seconds by program index. Programs that fail together, for lack of memory, run again alone."""
        seconds = self._time(dict(enumerate(programs)))
        for place in [*self.lost] if len(programs) > 1 else ():
            del self.lost[place]
            seconds |= self._time({place: programs[place]})
        return seconds

    def _time(self, programs: Mapping[int, RProgram]) -> dict[int, float]:
        with ExitStack() as stack:
            clocks = dict[int, Callable[[], float]]()
            for place, program in programs.items():
                try:
                    clocks[place] = stack.enter_context(self.opened(program))
                except DeviceFailure as problem:
                    self.lost[place] = problem
            times = time_interleaved(clocks, RACE)
        self.lost |= times.lost
        return times.best


def program_opener(backend: Backend, constants_of: Callable[[RProgram], Mapping[str, Array]]) -> Opener:
    """Return an opener for programs on ``backend``, with random inputs and one warm-up run. A simulated program runs once,
    because its time repeats exactly. Programs of one model may have different constants of one name."""

    @contextmanager
    def opened(program: RProgram) -> Iterator[Callable[[], float]]:
        values = {n: v for n, v in constants_of(program).items() if n in program.storage}
        if backend.vdevice.simulated:
            seconds = backend.profiler.program_time(program, values, 1)
            yield lambda: seconds
            return
        loaded = backend.load(program, values)
        try:
            inputs = random_inputs(program, np.random.default_rng(0))
            loaded.run(inputs)
            yield lambda: loaded.run(inputs).seconds
        finally:
            loaded.close()

    return opened
