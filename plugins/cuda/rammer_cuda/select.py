"""The choice of a program's executor: a CUDA graph of launches, one persistent kernel, or a mix of both.

A kernel boundary inside a CUDA graph costs no more than a barrier inside a kernel. A persistent kernel therefore wins by keeping
constants on chip, and if independent operators have few tasks each. If rows run one task repeatedly with the same constants, both
are built and measured, and the faster one stays. Operators that are not between those tasks are then launched. Any other program
is fitted to rows (``persistent.fit_to_block``): kernels of one block per task, chosen together wave by wave, and deep sums in
parts. A graph of those kernels, and rows of them, are built if their prediction is little above the graph's measured time. Rows
of many kernels compile slowly, so they must be predicted clearly faster. The outcome is cached for the next process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from rammer.codegen.writer import kinds_of
from rammer.device.manifest import Array, Binding
from rammer.errors import BadInput, DeviceFailure
from rammer.ir.program import RProgram
from rammer.schedule.wavefront import Wavefront
from rammer.tuning.interleaved_timing import InterleavedTimes, Rounds, time_interleaved
from rammer.tuning.kernel_probe import random_inputs

from rammer_cuda.executor import CudaProgram, Room
from rammer_cuda.families import family_of
from rammer_cuda.gpu import Gpu
from rammer_cuda.kernel_cache import Cached
from rammer_cuda.persistent.bodies import callable_part
from rammer_cuda.persistent.fit_to_block import Fitted, partition_program
from rammer_cuda.persistent.form_cache import cached_fit
from rammer_cuda.persistent.persistent_executor import LIMIT, PersistentProgram
from rammer_cuda.source import Writer

#: Rounds in which executors are timed: consecutive runs keep constants in the caches.
RACE: Final = Rounds(burst=7, seconds=(0.1, 0.5), until_steady=True)
#: Values of ``--option executor=``.
CHOICES = ("auto", "graph", "wavewise", "persistent", "mixed")
#: A program without reused constants is built as rows if its predicted time is below this multiple of the graph's measured time.
#: On an H200 rows took 0.95 times (NASNet-A) to 1.24 times (ResNeXt-29 of 16 branches) their predicted time. NVRTC takes 0.2 s of
#: a core for each distinct kernel, in sequence: for more than ``MANY`` the second number applies.
NEAR, CLEARLY, MANY = 1.1, 0.9, 100
#: The same limit for a graph of those kernels, whose blocks share SMs, unlike those of rows: on an H100 it took 0.68 to 1.14
#: times the predicted time of rows. It is tried for programs of ``Wavefront``, whose kernels are then chosen wave by wave.
SHARED = 1.2
#: Minimum ratio of the predicted time of rows to that of the program, whose kernels are unrestricted: 1.07 to 2.5 for 17 models.
LEAST = 1.05
#: Predicting rows of many kernels also takes long (NASNet-A, the large one: 40 s of a core). It is done if operators have at most
#: this mean number of tasks per row. A row runs in sequence the tasks that launches run concurrently on its SM. The large model
#: has 1.3, and its predicted time of rows is 1.75 times the program's; the small one has 0.2.
TASKS = 0.5
#: Upper limit of the watchdog in seconds: the kernel counts nanoseconds in 64 bits, and longer waits have no use.
LONGEST = 86400.0

Executor: TypeAlias = CudaProgram | PersistentProgram


@dataclass(frozen=True, slots=True)
class Execution:
    """The execution options of programs: the executor, and the nanoseconds after which the persistent one reports a hang."""

    choice: str = "auto"
    limit: int = LIMIT

    @staticmethod
    def of(options: Mapping[str, str]) -> Execution:
        """Parse ``--option executor=auto|graph|wavewise|persistent|mixed`` and ``--option
        watchdog=SECONDS``, or raise BadInput."""
        unknown = sorted(set(options) - {"executor", "watchdog"})
        if unknown:
            raise BadInput(
                f"device cuda has no option {unknown[0]!r}",
                "--option",
                f"it takes executor={'|'.join(CHOICES)} and watchdog=SECONDS",
            )
        choice = options.get("executor", "auto")
        if choice not in CHOICES:
            raise BadInput(f"unknown executor {choice!r}", "--option executor", f"one of: {', '.join(CHOICES)}")
        return Execution(choice, _parse_timeout(options["watchdog"]) if "watchdog" in options else LIMIT)


def _parse_timeout(text: str) -> int:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < LONGEST:
        raise BadInput(f"{text!r} is not a valid timeout", "--option watchdog", f"seconds, above 0 and below {LONGEST:.0f}")
    return max(int(seconds * 1e9), 1)


def open_executor(
    program: RProgram,
    constants: Mapping[str, Array],
    gpu: Gpu,
    index: int,
    how: Execution = Execution(),
    writer: Writer | None = None,
) -> Executor:
    """Load the program for the requested executor; ``auto`` measures if a persistent kernel could win."""
    choice, binding = how.choice, Binding.of(program, constants)
    if choice == "auto" and not (keeps_constants(program) or could_call(program, binding)):
        choice = "graph"
    if choice == "auto":
        return _open_fastest(program, constants, gpu, index, how, writer)
    if choice == "mixed":
        return _open_mixed(program, constants, gpu, index, how, writer)
    if choice in ("graph", "wavewise"):
        of = program if choice == "graph" else cached_fit(program, binding, gpu).program
        return CudaProgram(of, constants, Room(gpu, index), 1, writer)
    return PersistentProgram(program, constants, gpu, index, how.limit)


def _open_mixed(
    program: RProgram, constants: Mapping[str, Array], gpu: Gpu, index: int, how: Execution, writer: Writer | None
) -> Executor:
    """Return one kernel for constant-holding operators between launches of the others. Falls back to the executor of one kind if
    that is all or none."""
    shape = partition_program(program, constants, gpu)
    if shape is not None:
        return PersistentProgram(program, constants, gpu, index, how.limit, True, shape)
    choice = "persistent" if keeps_constants(program) else "graph"
    loaded = open_executor(program, constants, gpu, index, replace(how, choice=choice), writer)
    loaded.notes = (f"executor {choice}, since all operators of this program suit one kind", *loaded.notes)
    return loaded


def _open_fastest(
    program: RProgram, constants: Mapping[str, Array], gpu: Gpu, index: int, how: Execution, writer: Writer | None
) -> Executor:
    """Return the executor that was measured to be faster, now or by an earlier process. Measurements disturbed by other processes
    are not cached."""
    cached = Cached(program, "executor", gpu.architecture)
    known = cached.read()
    if known in CHOICES[1:]:
        return open_executor(program, constants, gpu, index, replace(how, choice=known), writer)
    graph = CudaProgram(program, constants, Room(gpu, index), 1, writer)
    inputs = random_inputs(program, np.random.default_rng())
    graph.run(inputs)
    if keeps_constants(program):
        shape = partition_program(program, constants, gpu)
        kinds: tuple[str, ...] = ("mixed" if shape is not None else "persistent",)
    else:
        alone = _time_executors({"graph": graph})
        shape, kinds = _worth_building(program, Binding.of(program, constants), gpu, alone.best["graph"])
        if not kinds:
            if alone.steady:
                cached.write("graph")
            return graph
    of = program if shape is None else shape.program
    launches = partial(CudaProgram, of, constants, Room(gpu, index), 1, writer)
    rows = partial(PersistentProgram, program, constants, gpu, index, how.limit, True, shape)
    return _race_executors(graph, {kind: launches if kind == "wavewise" else rows for kind in kinds}, inputs, cached)


def _race_executors(
    graph: CudaProgram, rivals: Mapping[str, Callable[[], Executor]], inputs: Mapping[str, Array], cached: Cached
) -> Executor:
    """Return the fastest of a graph, which has run, and its rivals. A rival that cannot run is dropped."""
    options: dict[str, Executor] = {"graph": graph}
    lost: list[str] = []
    for kind, build in rivals.items():
        built = None
        try:  # it may lack co-residency or memory, or a wait may time out
            built = build()
            built.run(inputs)
            options[kind] = built
        except DeviceFailure as problem:
            if built is not None:
                built.close()
            lost.append(f"executor {kind} fails: {problem.what}")
    if len(options) == 1:
        graph.notes = (f"executor graph, since {' and '.join(lost)}",)
        return graph
    try:
        found = _time_executors(options)
    except DeviceFailure as problem:  # a wait that timed out only the second time
        _close_others(options, "graph")
        graph.notes = (f"executor graph, since another executor fails: {problem.what}", *lost)
        return graph
    best = min(found.best, key=lambda kind: found.best[kind])
    _close_others(options, best)
    times = " ".join(f"{kind} {s * 1e3:.3g} ms" for kind, s in found.best.items())
    others = "" if found.steady else ", while other processes used the GPU"
    options[best].notes = (f"executor {best}, by measurement: {times}{others}", *lost)
    if found.steady and not lost:
        cached.write(best)
    return options[best]


def _close_others(options: Mapping[str, Executor], kept: str) -> None:
    """Close all executors except the one of kind ``kept``."""
    for kind in options.keys() - {kept}:
        options[kind].close()


def could_call(program: RProgram, binding: Binding) -> bool:
    """Return True if a persistent kernel without on-chip constants may be tried.

    A loop program keeps its kernels and places, so a block must be able to call all of them. A block calls the generic kernel for
    operators of a range. It does not round operands, so their families must not either."""
    if any(o.skips and family_of(o).operand_rounding for o in program.operators):
        return False
    distinct = {binding.key(o): o for o in program.operators} if program.repeat is not None else {}
    return all(not family_of(o).name or callable_part(o, binding) is not None for o in distinct.values())


def _worth_building(program: RProgram, binding: Binding, gpu: Gpu, seconds: float) -> tuple[Fitted | None, tuple[str, ...]]:
    """Return the program fitted to rows, and its kinds of executors worth building besides a graph of ``seconds``. The time of
    loop programs is not predicted; they are tried if their kernels are few."""
    distinct = len(set(kinds_of(program.operators, binding).values()))
    if program.repeat is not None:
        return (cached_fit(program, binding, gpu), ("persistent",)) if distinct <= MANY else (None, ())
    most = {"wavewise": SHARED * _launched_too(program), "persistent": NEAR if distinct <= MANY else CLEARLY}
    tasks = sum(map(len, program.rows))
    if LEAST * program.predicted >= seconds * max(most.values()) or (
        distinct > MANY and tasks > TASKS * program.veus * len(program.operators)
    ):
        return None, ()
    shape = cached_fit(program, binding, gpu)
    kinds = tuple(kind for kind, times in most.items() if shape.program.predicted < times * seconds)
    return shape, tuple(k for k in kinds if k != "wavewise" or shape.program is not program)


def _launched_too(program: RProgram) -> bool:
    """Return True if kernels chosen for rows are also tried as launches: if they are chosen wave by wave. Kernels of ranges exit
    early only as launches, and rows get others."""
    return program.policy == str(Wavefront()) and program.repeat is None and not any(o.skips for o in program.operators)


def keeps_constants(program: RProgram) -> bool:
    """Return True if a row runs a task with held constants more than once, from which a persistent kernel benefits."""
    held = {o.name for o in program.operators if family_of(o).persistent}
    if not held:
        return False
    constants = {s.tensor for s in program.storages if program.buffer[s.buffer].kind == "constant"}
    static = {n: tuple(t for t in program.operator[n].inputs if t in constants) for n in held}
    for row in program.rows:
        keys = [(static[t.operator], t.index) for t in row if t.operator in held]
        if len(set(keys)) < len(keys):
            return True
    return False


def _time_executors(executors: Mapping[str, Executor]) -> InterleavedTimes[str]:
    """Return the interleaved times of executors by kind; all have run."""
    return time_interleaved({kind: executor.replay for kind, executor in executors.items()}, RACE).all_run()
