"""Which executor runs a program: a CUDA graph of launches, one persistent kernel, or both, one behind the other.

A kernel boundary inside a CUDA graph costs no more than a barrier inside a kernel, so a persistent kernel wins by what it keeps
on chip, and where independent operators have few tasks each. Where rows run one task again and again with the same constants
(what does not lie between such tasks is launched then), or the program is predicted to take little more than the graph was
measured to, both are built and measured, and the faster one stays. The outcome is cached for the next process.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rammer.codegen.writer import kinds_of
from rammer.device.manifest import Array, Binding
from rammer.errors import BadInput, DeviceFailure
from rammer.ir.program import RProgram
from rammer.ir.standing import states
from rammer.runtime.host_memory import random_inputs

from rammer_cuda.cache import Cached
from rammer_cuda.executor import CudaProgram, Room
from rammer_cuda.families import CALLED, family_of
from rammer_cuda.gpu import Gpu
from rammer_cuda.persistent.executor import LIMIT, PersistentProgram
from rammer_cuda.persistent.shape import fitted, parted
from rammer_cuda.source import Writer

#: Values of ``--option executor=``.
CHOICES = ("auto", "graph", "persistent", "mixed")
#: Executors take turns of so many runs, so that constants stay in the caches as they would; at least so many turns, and until
#: they took so many seconds together, since a GPU that had nothing to do begins at a sixth of its clock (345 of 1,980 MHz on an
#: H200). Never more turns than the last.
RUNS, TURNS, WARM, MOST_TURNS = 7, 2, 0.1, 1000
#: Distinct kernels of such a program at most: NVRTC takes 0.2 s of a core for each.
MOST_KERNELS = 100
#: Such a program is built where it is predicted to take less than so many times what the graph was measured to: on an H200 rows
#: took 0.95 times (NASNet-A) to 1.24 times (ResNeXt-29 of 16 branches) what they were predicted to.
NEAR = 1.1
#: Seconds that a watchdog can be set below: the kernel counts nanoseconds in 64 bits, and nobody waits for a day.
LONGEST = 86400.0

Executor = CudaProgram | PersistentProgram


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
        return Execution(choice, _nanoseconds(options["watchdog"]) if "watchdog" in options else LIMIT)


def _nanoseconds(text: str) -> int:
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
    choice = how.choice
    if choice == "auto" and (states(program) or not (keeps_constants(program) or could_call(program, constants))):
        choice = "graph"
    if choice == "auto":
        return _measured(program, constants, gpu, index, how, writer)
    if choice == "mixed":
        return _mixed(program, constants, gpu, index, how, writer)
    if choice == "graph":
        return CudaProgram(program, constants, Room(gpu, index), 1, writer)
    return PersistentProgram(program, constants, gpu, index, how.limit)


def _mixed(
    program: RProgram, constants: Mapping[str, Array], gpu: Gpu, index: int, how: Execution, writer: Writer | None
) -> Executor:
    """One kernel for what holds constants between launches of the others; the executor of one kind where that is all or none."""
    shape = parted(program, constants, gpu)
    if shape is not None:
        return PersistentProgram(program, constants, gpu, index, how.limit, True, shape)
    choice = "persistent" if keeps_constants(program) else "graph"
    loaded = open_executor(program, constants, gpu, index, replace(how, choice=choice), writer)
    loaded.notes = (f"executor {choice}, since this program has no part for each", *loaded.notes)
    return loaded


def _measured(
    program: RProgram, constants: Mapping[str, Array], gpu: Gpu, index: int, how: Execution, writer: Writer | None
) -> Executor:
    """The executor that was measured to be faster, now or by an earlier process."""
    cached = Cached(program, "executor", gpu.architecture)
    known = cached.read()
    if known in CHOICES[1:]:
        return open_executor(program, constants, gpu, index, replace(how, choice=known), writer)
    graph = CudaProgram(program, constants, Room(gpu, index), 1, writer)
    inputs = random_inputs(program, np.random.default_rng())
    kind = "persistent"
    if keeps_constants(program):
        shape = parted(program, constants, gpu)
        kind = "mixed" if shape is not None else kind
    else:
        shape = fitted(program, Binding.of(program, constants), gpu)
        if shape.program.predicted >= NEAR * _seconds({"graph": graph}, inputs)["graph"]:
            cached.write("graph")
            return graph
    persistent = None
    try:
        persistent = PersistentProgram(program, constants, gpu, index, how.limit, True, shape)
        best = _faster(inputs, {"graph": graph, kind: persistent})
    except DeviceFailure as problem:  # its blocks would not all run at once, its memory does not suffice, or a wait did not end
        if persistent is not None:
            persistent.close()
        graph.notes = (f"executor graph, since the {kind} one cannot: {problem.what}",)
        return graph
    cached.write("graph" if best is graph else kind)
    return best


def _faster(inputs: Mapping[str, Array], options: Mapping[str, Executor]) -> Executor:
    """The executor with the lower least time on random inputs, of several by their kinds; the others are closed."""
    seconds = _seconds(options, inputs)
    best = min(seconds, key=lambda kind: seconds[kind])
    for kind in seconds.keys() - {best}:
        options[kind].close()
    note = " ".join(f"{kind} {s * 1e3:.3g} ms" for kind, s in seconds.items())
    options[best].notes = (f"executor {best}, by measurement: {note}",)
    return options[best]


def could_call(program: RProgram, constants: Collection[str]) -> bool:
    """Whether a persistent kernel may be tried that holds nothing on chip: few kernels, all of families that it calls."""
    if program.repeat is not None or any(o.endings for o in program.operators):
        return False
    called = all(family_of(o) in CALLED for o in program.operators)
    return called and len(set(kinds_of(program.operators, Binding.of(program, constants)).values())) <= MOST_KERNELS


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


def _seconds(executors: Mapping[str, Executor], inputs: Mapping[str, Array]) -> dict[str, float]:
    """The least of some runs of each, by its kind: beside another process that uses the GPU the median may be what that one's
    turns take."""
    for executor in executors.values():
        executor.run(inputs)
    best, spent = dict.fromkeys(executors, math.inf), 0.0
    for turn in range(MOST_TURNS):
        for kind, executor in executors.items():
            runs = [executor.replay() for _ in range(RUNS)]
            best[kind], spent = min(best[kind], *runs), spent + sum(runs)
        if turn + 1 >= TURNS and spent >= WARM:
            break
    return best
