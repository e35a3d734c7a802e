"""Measurement shared by all tables: ways to compile a model, alternately timed programs, and their figures."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import onnx
from range_ahead import ahead
from zoo import SEED, SMALL, ZOO, Entry, find

from rammer.cache.cache_location import cache_folder
from rammer.cache.disk_cache import clear_cache
from rammer.compile_options import Request
from rammer.compiled.segments import ProgramSegment
from rammer.device.loader import Registry
from rammer.errors import DeviceFailure, RammerError
from rammer.fusion.tile_traffic import task_cost
from rammer.ir.device import VDevice
from rammer.ir.piecewise import piecewise_regions
from rammer.ir.program import RProgram
from rammer.ir.types import itemsize
from rammer.jit.session import open_executable
from rammer.passes.compute.batch_candidates import is_rearrangement
from rammer.report.bench import Effort, bound_call, sample_times
from rammer.runtime.executable import Executable
from rammer.runtime.loaded_model import LoadedModel
from rammer.schedule.policy import Policy
from rammer.tuning.interleaved_timing import Rounds, time_interleaved
from rammer_bench.graph import Array
from rammer_bench.prepare import delay, relative_error
from rammer_testing.weights import runner

#: Rounds of each program, and the runs of a round. Rounds are short and many, since other load lasts for tenths of a second.
ROUNDS: Final = 25
TURN: Final = Effort(1, 1, 0.04)
#: Choices that cuda makes by measuring when it loads a program, by file name.
DECIDED: Final = ("executor", "pdl")
#: Times of a simulator are equal in every run.
ONCE: Final = Effort(0, 1, 0.0)


@dataclass(frozen=True)
class Settings:
    """The options of the command line.

    ``say`` shows progress. No model starts once ``budget`` seconds have passed since ``begun``; ``skipped`` lists the omitted
    models. ``ahead`` is the number of processes that compile before the measurement. ``stages`` is a file of stages from earlier
    searches, which are not repeated. ``every`` are all models of a table that is measured model by model."""

    devices: tuple[str, ...]
    models: tuple[str, ...]
    tune: str = "off"
    precision: str = "float32"
    seed: int = SEED
    rounds: int = ROUNDS
    options: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = print
    budget: float = math.inf
    begun: float = field(default_factory=time.perf_counter)
    skipped: list[str] = field(default_factory=list)
    ahead: int = 0
    stages: Path | None = None
    every: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """The first device, for tables of a single device."""
        return self.devices[0]


@dataclass(frozen=True)
class Way:
    """One way to compile a model, with its name in tables. ``request`` holds the ``Request`` fields that differ from the command
    line; ``policy`` is an unregistered policy, for this program only."""

    name: str
    request: Mapping[str, Any] = field(default_factory=dict)
    device: str = ""
    policy: Policy | None = None


@dataclass(frozen=True)
class Measured:
    """The figures of one program. They are its size, the bytes of intermediate tensors in device memory, the predicted bytes that
    all tasks move to and from it, predicted and measured seconds, compile seconds, the relative L2 distance to the reference and
    a hash of its text. With a ``failure`` all numbers are 0."""

    way: Way
    operators: int = 0
    memory_bound: int = 0
    kernels: int = 0
    tasks: int = 0
    waits: int = 0
    moved: int = 0
    copies: int = 0
    intermediates: int = 0
    traffic: int = 0
    predicted: float = 0.0
    seconds: float = 0.0
    compiling: float = 0.0
    error: float = 0.0
    policy: str = ""
    program: str = ""
    failure: str = ""


@dataclass(frozen=True)
class Subject:
    """A model as a file, with its inputs and reference outputs."""

    entry: Entry
    path: Path
    feeds: Mapping[str, Array]
    reference: Mapping[str, Array] | None


def exported(key: str, folder: Path, seed: int, batch: int = 0) -> Path:
    """Return the model as a file, with ``batch`` if nonzero, built once per folder. The file name of a small form includes a hash
    of its arguments, since they define the model."""
    form = hashlib.sha256(repr(ZOO[key.removesuffix(SMALL)].small).encode()).hexdigest()[:8] if key.endswith(SMALL) else ""
    path = folder / f"{key.replace(':', '-')}{form}{f'-bs{batch}' if batch else ''}-{seed}.onnx"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")  # other processes may write the same file
        onnx.save(entry_of(key, batch).build(seed), str(partial))
        partial.replace(path)
    return path


def entry_of(key: str, batch: int) -> Entry:
    """Return the model of this key as published, or with ``batch`` if nonzero."""
    return find(key).of_batch(batch) if batch else find(key)


def subject(key: str, seed: int, checked: bool = True, batch: int = 0) -> Subject:
    """Return a model of the zoo with random inputs, with ``batch`` if nonzero. ``checked`` runs the reference (ONNX Runtime, or
    ONNX's evaluator)."""
    entry = entry_of(key, batch)
    path = exported(key, Path(tempfile.gettempdir()) / "rammer-zoo", seed, batch)
    feeds = entry.feeds(seed)
    return Subject(entry, path, feeds, runner(onnx.load(str(path)))(feeds) if checked else None)


@dataclass
class Opened:
    """A compiled model with its inputs bound on the device."""

    way: Way
    exe: Executable
    special: LoadedModel
    bound: Any
    compiling: float
    simulated: bool
    seconds: list[float] = field(default_factory=list)

    @property
    def segments(self) -> list[ProgramSegment]:
        """The program segments that run on the device."""
        return [s for s in self.special.compiled.segments if isinstance(s, ProgramSegment)]

    @property
    def programs(self) -> list[RProgram]:
        """The programs that the device runs."""
        return [s.program for s in self.segments]

    def turn(self) -> float:
        """Time one round of runs, and return the last one. All runs of a simulator are equal."""
        if not (self.simulated and self.seconds):
            self.seconds += sample_times(bound_call(self.bound, [delay]), ONCE if self.simulated else TURN)[1]
        return self.seconds[-1]

    def close(self) -> None:
        """Free the device's memory."""
        self.exe.close()


class WithPolicy(Registry):
    """A registry of all plugins with one additional policy."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def policies(self, device: str = "") -> list[Policy]:
        """Return the plugins' policies for ``device`` and the additional policy."""
        return [*super().policies(device), self.policy]


def session(model: Path | onnx.ModelProto, way: Way, settings: Settings) -> Executable:
    """Return the model opened on its device, to be compiled in one way."""
    asked = {"precision": settings.precision, "tune": settings.tune, "device_options": settings.options, **way.request}
    registry = Registry()
    if way.policy is not None:
        asked["policy"] = way.policy.name
        registry = WithPolicy(way.policy)
    exe = open_executable(model, way.device or settings.device, Request(**asked), registry=registry)
    exe.cache_root = cache_folder() if settings.ahead else None
    return exe


def opened(model: Path | onnx.ModelProto, feeds: Mapping[str, Array], way: Way, settings: Settings) -> Opened:
    """Compile in one way and bind. Raises DeviceFailure if a part runs on the host, since its times are not comparable."""
    begin = time.perf_counter()
    exe = session(model, way, settings)
    try:
        arrays = exe.checked(feeds)
        special = exe.prepare(arrays)
        seconds = time.perf_counter() - begin
        if special.host_nodes:
            raise DeviceFailure(f"{len(special.host_nodes)} operators run on the host")
        return Opened(way, exe, special, exe.bind(arrays), seconds, exe.backend.vdevice.simulated)
    except BaseException:
        exe.close()
        raise


def take_turns(programs: Sequence[Opened], rounds: int = ROUNDS) -> None:
    """Time programs alternately, so that changes on the machine affect all of them."""
    time_interleaved({i: program.turn for i, program in enumerate(programs)}, Rounds.exactly(rounds)).all_run()


def intermediate_bytes(program: RProgram) -> int:
    """Return the bytes of tensors that one operator writes to device memory and another reads."""
    read, types = {name for o in program.operators for name in o.inputs}, program.types
    return sum(types[n].size * itemsize(types[n].dtype) for o in program.operators for n in o.outputs if n in read)


def traffic(program: RProgram, device: VDevice) -> int:
    """Return the predicted bytes of one run to and from device memory, in whole transactions, without the effect of caches."""
    each = [task_cost(o, program.types, device, program.storage).traffic * o.task_count for o in program.operators]
    return sum(each) * program.turns


def figures(program: Opened, reference: Mapping[str, Array] | None) -> Measured:
    """Return the figures of a timed program."""
    have = program.bound.to_host()
    operators = [o for p in program.programs for o in p.operators]
    return Measured(
        program.way,
        operators=len(operators),
        memory_bound=sum(all(c.kind != "contraction" for c in o.computes) for o in operators),
        kernels=program.special.kernels,
        tasks=sum(p.task_count for p in program.programs),
        waits=sum(len(t.waits) for p in program.programs for row in p.rows for t in row),
        moved=sum(len(p.permuted) for p in program.programs),
        copies=sum(any(is_rearrangement(c) or piecewise_regions(c) for c in o.computes) for o in operators),
        intermediates=sum(intermediate_bytes(p) for p in program.programs),
        traffic=sum(traffic(p, program.exe.backend.vdevice) for p in program.programs),
        predicted=sum(p.predicted for p in program.programs),
        seconds=median(program.seconds) if program.seconds else 0.0,
        compiling=program.compiling,
        error=relative_error(have, reference) if reference is not None else 0.0,
        policy=", ".join(dict.fromkeys(p.policy for p in program.programs)),
        program=hashlib.sha256("\n".join(map(str, program.programs)).encode()).hexdigest(),
    )


def measured(
    model: Path | onnx.ModelProto,
    feeds: Mapping[str, Array],
    ways: Sequence[Way],
    settings: Settings,
    reference: Mapping[str, Array] | None = None,
) -> list[Measured]:
    """Measure all ways alternately in one process. Without ``reference`` errors are relative to the first way that works."""
    programs: list[Opened | Measured] = []
    try:
        for way in ways:
            settings.say(f"  compiling: {way.name}")
            try:
                programs.append(opened(model, feeds, way, settings))
            except RammerError as problem:
                programs.append(Measured(way, failure=problem.what.splitlines()[0]))
        turns = {i: p.turn for i, p in enumerate(programs) if isinstance(p, Opened)}
        settings.say(f"  running {len(turns)} programs in turns")
        lost = time_interleaved(turns, Rounds.exactly(settings.rounds)).lost
        for i, program in enumerate(programs):
            if reference is None and isinstance(program, Opened) and i not in lost:
                reference = program.bound.to_host()
        failed = {i: Measured(programs[i].way, failure=problem.what.splitlines()[0]) for i, problem in lost.items()}
        return [failed.get(i) or (figures(p, reference) if isinstance(p, Opened) else p) for i, p in enumerate(programs)]
    finally:
        for program in programs:
            if isinstance(program, Opened):
                program.close()


@dataclass(frozen=True)
class ModelWay:
    """A program to compile before the measurement."""

    key: str
    way: Way
    settings: Settings
    batch: int = 0


def kept_way(job: ModelWay) -> float:
    """Compile, load and bind, so that program and machine code are on disk; return the CPU seconds."""
    start, model = time.process_time(), subject(job.key, job.settings.seed, False, job.batch)
    opened(model.path, model.feeds, job.way, job.settings).close()
    return time.process_time() - start


def compile_ahead(settings: Settings, ways: Sequence[Way], batches: Sequence[int] = (0,)) -> None:
    """Compile the programs that ``measured`` needs, for all ``batches``, in ``settings.ahead`` processes. Device choices measured
    under this load are deleted."""
    plain = replace(settings, say=print)
    jobs = [ModelWay(key, way, plain, batch) for key in settings.models for batch in batches for way in ways]
    for job, took in ahead(jobs, settings.ahead, kept_way) if settings.ahead and jobs else ():
        settings.say(f"{job.key}: {job.way.name} ahead: {took if isinstance(took, str) else f'{took:.1f} CPU s'}")
    for decided in DECIDED if settings.ahead else ():
        clear_cache(cache_folder(), f"cuda-{decided}")


def each(settings: Settings, checked: bool = True) -> Iterator[Subject]:
    """Yield the selected models in order and report progress."""
    for number, key in enumerate(settings.models, 1):
        if time.perf_counter() - settings.begun > settings.budget:
            settings.skipped.append(key)
            settings.say(f"[{number}/{len(settings.models)}] {key}: not begun, {settings.budget:g} s have passed")
            continue
        settings.say(f"[{number}/{len(settings.models)}] {key}")
        yield subject(key, settings.seed, checked)
