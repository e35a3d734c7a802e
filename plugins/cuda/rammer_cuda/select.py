"""Which executor runs a program: a CUDA graph of launches, one persistent kernel, or both, one behind the other.

A kernel boundary inside a CUDA graph costs no more than a barrier inside a kernel, so a persistent kernel wins by what it keeps
on chip, and where independent operators have few tasks each. Where rows run one task again and again with the same constants
(what does not lie between such tasks is launched then), both are built and measured, and the faster one stays. Any other program
is fitted to rows (``persistent.shape``): kernels of one block a task, chosen together wave by wave, and deep sums in parts. A
graph of those kernels, and rows of them, are built where they are predicted to take little more than the program's own graph was
measured to; rows of many kernels, which take long to compile, where they are predicted to take clearly less. The outcome is
cached for the next process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from rammer.codegen.writer import kinds_of
from rammer.device.manifest import Array, Binding
from rammer.errors import BadInput, DeviceFailure
from rammer.ir.program import RProgram
from rammer.schedule.wavefront import Wavefront
from rammer.tuning.kernel_probe import random_inputs

from rammer_cuda.executor import CudaProgram, Room
from rammer_cuda.families import family_of
from rammer_cuda.gpu import Gpu
from rammer_cuda.interleaved_timing import TurnTimes, in_turns
from rammer_cuda.kernel_cache import Cached
from rammer_cuda.persistent.bodies import callable_part
from rammer_cuda.persistent.fit_to_block import Fitted, partition_program
from rammer_cuda.persistent.form_cache import cached_fit
from rammer_cuda.persistent.persistent_executor import LIMIT, PersistentProgram
from rammer_cuda.source import Writer

#: Values of ``--option executor=``.
CHOICES = ("auto", "graph", "wavewise", "persistent", "mixed")
#: A program without such constants is built as rows where it is predicted to take less than so many times what the graph was
#: measured to: on an H200 rows took 0.95 times (NASNet-A) to 1.24 times (ResNeXt-29 of 16 branches) what they were predicted to.
#: NVRTC takes 0.2 s of a core for each distinct kernel, one after the other: of more than ``MANY`` the second number counts.
NEAR, CLEARLY, MANY = 1.1, 0.9, 100
#: The same of a graph of those kernels, whose blocks share SMs as those of rows do not: on an H100 it took 0.68 to 1.14 times
#: what rows are predicted to. It is tried for programs of ``Wavefront``, whose kernels are then chosen wave by wave.
SHARED = 1.2
#: Rows are predicted to take at least so many times what the program is, whose kernels may be any: of 17 models 1.07 to 2.5.
LEAST = 1.05
#: To predict rows of many kernels takes long, too (NASNet-A, the large one: 40 s of a core). It is done where operators have at
#: most so many tasks a row in the mean: a row runs one after the other what launches have side by side on its SM (there 1.3, and
#: rows are predicted to take 1.75 times what the program is; the small one has 0.2).
TASKS = 0.5
#: Seconds that a watchdog can be set below: the kernel counts nanoseconds in 64 bits, and nobody waits for a day.
LONGEST = 86400.0

Executor: TypeAlias = CudaProgram | PersistentProgram


@dataclass(frozen=True, slots=True)
class Execution:
    """How programs are to be run: by which executor, and the nanoseconds after which a wait of the persistent one is
    reported as a hang."""

    choice: str = "auto"
    limit: int = LIMIT

    @staticmethod
    def of(options: Mapping[str, str]) -> Execution:
        """From ``--option executor=auto|graph|persistent|mixed`` and ``--option watchdog=SECONDS``; else BadInput."""
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
        raise BadInput(f"{text!r} is no time to wait", "--option watchdog", f"seconds, above 0 and below {LONGEST:.0f}")
    return max(int(seconds * 1e9), 1)


def open_executor(
    program: RProgram,
    constants: Mapping[str, Array],
    gpu: Gpu,
    index: int,
    how: Execution = Execution(),
    writer: Writer | None = None,
) -> Executor:
    """The program, loaded for the executor asked for; ``auto`` measures where a persistent kernel could win."""
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
    """One kernel for what holds constants between launches of the others; the executor of one kind where that is all or none."""
    shape = partition_program(program, constants, gpu)
    if shape is not None:
        return PersistentProgram(program, constants, gpu, index, how.limit, True, shape)
    choice = "persistent" if keeps_constants(program) else "graph"
    loaded = open_executor(program, constants, gpu, index, replace(how, choice=choice), writer)
    loaded.notes = (f"executor {choice}, since this program has no part for each", *loaded.notes)
    return loaded


def _open_fastest(
    program: RProgram, constants: Mapping[str, Array], gpu: Gpu, index: int, how: Execution, writer: Writer | None
) -> Executor:
    """The executor that was measured to be faster, now or by an earlier process. What others disturbed is measured anew by the
    next one."""
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
        shape, kinds = _worth_building(program, Binding.of(program, constants), gpu, alone.seconds["graph"])
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
    """The fastest of a graph, which has run, and what is built beside it, which is left out where it cannot run."""
    options: dict[str, Executor] = {"graph": graph}
    lost: list[str] = []
    for kind, build in rivals.items():
        built = None
        try:  # its blocks would not all run at once, its memory does not suffice, or a wait does not end
            built = build()
            built.run(inputs)
            options[kind] = built
        except DeviceFailure as problem:
            if built is not None:
                built.close()
            lost.append(f"the {kind} one cannot: {problem.what}")
    if len(options) == 1:
        graph.notes = (f"executor graph, since {' and '.join(lost)}",)
        return graph
    try:
        found = _time_executors(options)
    except DeviceFailure as problem:  # a wait that ended once and not again
        _close_others(options, "graph")
        graph.notes = (f"executor graph, since another one cannot: {problem.what}", *lost)
        return graph
    best = min(found.seconds, key=lambda kind: found.seconds[kind])
    _close_others(options, best)
    times = " ".join(f"{kind} {s * 1e3:.3g} ms" for kind, s in found.seconds.items())
    others = "" if found.steady else ", where others used the GPU"
    options[best].notes = (f"executor {best}, by measurement: {times}{others}", *lost)
    if found.steady and not lost:
        cached.write(best)
    return options[best]


def _close_others(options: Mapping[str, Executor], kept: str) -> None:
    """Close all executors but the one of a kind."""
    for kind in options.keys() - {kept}:
        options[kind].close()


def could_call(program: RProgram, binding: Binding) -> bool:
    """Whether a persistent kernel may be tried that holds nothing on chip. Turns keep their kernels and places, so that a block
    must be able to call all of them. A block calls the generic kernel for operators of a range, which must round their operands
    as it does: not at all."""
    if any(o.endings and family_of(o).operand_rounding for o in program.operators):
        return False
    distinct = {binding.key(o): o for o in program.operators} if program.repeat is not None else {}
    return all(not family_of(o).name or callable_part(o, binding) is not None for o in distinct.values())


def _worth_building(program: RProgram, binding: Binding, gpu: Gpu, seconds: float) -> tuple[Fitted | None, tuple[str, ...]]:
    """The program fitted to rows, and the kinds of its executors that are worth building beside a graph that takes so many
    ``seconds``. What turns take is not predicted: few kernels are tried."""
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
    """Whether kernels chosen for rows are tried as launches, too: where they are chosen wave by wave. Those of ranges leave early
    as launches alone, and rows get others."""
    return program.policy == str(Wavefront()) and program.repeat is None and not any(o.endings for o in program.operators)


def keeps_constants(program: RProgram) -> bool:
    """Whether a row runs a task with held constants more than once: what a persistent kernel can make use of."""
    held = {o.name for o in program.operators if family_of(o).own}
    if not held:
        return False
    constants = {s.tensor for s in program.storages if program.buffer[s.buffer].kind == "constant"}
    static = {n: tuple(t for t in program.operator[n].inputs if t in constants) for n in held}
    for row in program.rows:
        keys = [(static[t.operator], t.index) for t in row if t.operator in held]
        if len(set(keys)) < len(keys):
            return True
    return False


def _time_executors(executors: Mapping[str, Executor]) -> TurnTimes:
    """Seconds of each, in turns, by its kind; all have run."""
    return in_turns({kind: executor.replay for kind, executor in executors.items()})
