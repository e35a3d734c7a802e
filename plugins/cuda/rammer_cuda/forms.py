"""The execution forms of this device: a CUDA graph of launches, one persistent kernel, or a mix of both.

A kernel boundary inside a CUDA graph costs no more than a barrier inside a kernel. A persistent kernel therefore wins by keeping
constants on chip, and if independent operators have few tasks each. The core plans a program for each suitable form, measures
them if they are predicted to be near, and compiles the fastest one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, TypeAlias

from rammer.codegen.writer import kinds_of
from rammer.device.execution_forms import ExecutionForm, FormLimits
from rammer.device.manifest import Array, Binding
from rammer.errors import BadInput, DeviceFailure
from rammer.ir.program import RProgram

from rammer_cuda.executor import CudaProgram, Room
from rammer_cuda.families import family_of
from rammer_cuda.gpu import Gpu
from rammer_cuda.persistent.bodies import MOST_THREADS, callable_part
from rammer_cuda.persistent.persistent_executor import LIMIT, PersistentProgram
from rammer_cuda.source import Writer

#: Values of ``--option executor=``.
CHOICES: Final = ("auto", "graph", "wavewise", "persistent", "mixed")
#: Blocks that are tried: threads, and blocks per SM, each with a separate row. While one of an SM's rows waits, another works, as
#: blocks of several launches do. But they share its registers (of 65,536) and its shared memory.
SHAPES: Final = ((256, 1), (384, 1), (512, 1), (128, 2))
#: The first shape whose prediction is near the best is chosen: small blocks have more registers per thread, and rows that share
#: an SM gain less than predicted. On an H200 this is the fastest of six shapes for NASNet-A, SqueezeNet and ResNeXt-29 (16
#: branches).
SIMILAR: Final = 1.1
#: A program without reused constants is built as rows if its predicted time is below this multiple of the graph's measured time.
#: On an H200 rows took 0.95 times (NASNet-A) to 1.24 times (ResNeXt-29 of 16 branches) their predicted time. NVRTC takes 0.2 s of
#: a core for each distinct kernel, in sequence: for more than ``MANY`` the second number applies.
NEAR, CLEARLY, MANY = 1.1, 0.9, 100
#: The same limit for a graph of those kernels, whose blocks share SMs, unlike those of rows: on an H100 it took 0.68 to 1.14
#: times the predicted time of rows.
SHARED: Final = 1.2
#: Minimum ratio of the predicted time of rows to that of the program, whose kernels are unrestricted: 1.07 to 2.5 for 17 models.
LEAST: Final = 1.05
#: Predicting rows of many kernels also takes long (NASNet-A, the large one: 40 s of a core). It is done if operators have at most
#: this mean number of tasks per row. A row runs in sequence the tasks that launches run concurrently on its SM. The large model
#: has 1.3, and its predicted time of rows is 1.75 times the program's; the small one has 0.2.
TASKS: Final = 0.5
#: Minimum seconds on rows of a product whose sum is also offered in parts: one more wave costs more than half of a shorter one.
SPLIT: Final = 4.25e-6
#: Maximum bytes of buffers that share no memory; a larger program keeps its arena and its counters.
PRIVATE: Final = 1 << 30
#: Upper limit of the watchdog in seconds: the kernel counts nanoseconds in 64 bits, and longer waits have no use.
LONGEST: Final = 86400.0


def _shaped(group: str, like_first: bool, limits: FormLimits) -> tuple[ExecutionForm, ...]:
    """Return a form for each block shape."""
    return tuple(
        ExecutionForm(
            f"{group}_{threads}{f'x{rows}' if rows > 1 else ''}",
            group,
            threads,
            rows,
            similar=SIMILAR,
            like_first=like_first,
            split=SPLIT,
            limits=limits,
        )
        for threads, rows in SHAPES
    )


#: A graph of launches, each with its own block.
GRAPH: Final = ExecutionForm("graph")
#: Launches of the kernels that were chosen together for rows.
WAVEWISE: Final = _shaped("wavewise", True, FormLimits(SHARED, SHARED, MANY, LEAST, TASKS))
#: One persistent kernel. Its rows run operators without constants on chip.
ROWS: Final = _shaped("rows", False, FormLimits(NEAR, CLEARLY, MANY, LEAST, TASKS))
#: One persistent kernel that holds constants, perhaps between launches of the operators around it.
MIXED: Final = ExecutionForm(
    "mixed", "holding", MOST_THREADS, similar=inf, keeps=True, phases=True, private=PRIVATE, preferred=True
)
HOLDING: Final = ExecutionForm("holding", "holding", MOST_THREADS, similar=inf, keeps=True, private=PRIVATE, preferred=True)
#: One persistent kernel that calls the kernels of a loop program, which keeps its table.
CALLING: Final = ExecutionForm("calling", "calling", MOST_THREADS, keeps=True)

#: The forms by the choice of an executor. Programs without a form run in the first one.
FORMS: Final[Mapping[str, tuple[ExecutionForm, ...]]] = {
    "auto": (GRAPH, *WAVEWISE, *ROWS, MIXED, HOLDING, CALLING),
    "graph": (GRAPH,),
    "wavewise": (GRAPH, *WAVEWISE),
    "persistent": (CALLING, HOLDING, *ROWS),
    "mixed": (GRAPH, MIXED, HOLDING),
}
BY_NAME: Final = {f.name: f for f in FORMS["auto"]}

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

    @property
    def forms(self) -> tuple[ExecutionForm, ...]:
        """The forms of the chosen executor."""
        return FORMS[self.choice]

    @property
    def launched_forms(self) -> frozenset[str]:
        """The names of the forms that are graphs of launches."""
        return frozenset(form.name for form in (GRAPH, *WAVEWISE))

    def suitable_forms(self, program: RProgram, binding: Binding) -> Sequence[ExecutionForm]:
        """Return the forms of the chosen executor that may be the fastest for a program planned for the first one."""
        if self.choice != "auto":
            return self._requested_forms(program)
        if keeps_constants(program):
            return GRAPH, MIXED, HOLDING
        if not could_call(program, binding):
            return (GRAPH,)
        if program.repeat is not None:
            few = len({*kinds_of(program.operators, binding).values()}) <= MANY
            return (GRAPH, CALLING) if few else (GRAPH,)
        # Kernels of ranges exit early only as launches, and rows get others.
        return (GRAPH, *ROWS) if any(o.skips for o in program.operators) else (GRAPH, *WAVEWISE, *ROWS)

    def _requested_forms(self, program: RProgram) -> Sequence[ExecutionForm]:
        """Return the forms of an executor that the user chose. A program that does not suit it runs in the most similar one."""
        held = any(family_of(o).persistent for o in program.operators)
        if self.choice == "persistent":
            return (HOLDING,) if held else (CALLING,) if program.repeat is not None else ROWS
        if self.choice == "mixed" and keeps_constants(program):
            return MIXED, HOLDING
        return WAVEWISE if self.choice == "wavewise" and not held and program.repeat is None else (GRAPH,)


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
    """Load the program, which stays unchanged, for its form. Raises DeviceFailure for an unknown one."""
    form = BY_NAME.get(program.form) if program.form else how.forms[0]
    if form is None:
        raise DeviceFailure(
            f"program {program.name} is for the execution form {program.form}, which device cuda does not have",
            hint=f"it has {', '.join(BY_NAME)}: compile the model again",
        )
    if form == GRAPH or form in WAVEWISE:
        return CudaProgram(program, constants, Room(gpu, index), 1, writer)
    return PersistentProgram(program, constants, gpu, index, how.limit, True, form.threads, form.rows, form == MIXED)


def could_call(program: RProgram, binding: Binding) -> bool:
    """Return True if a persistent kernel without on-chip constants may be tried.

    A loop program keeps its kernels and places, so a block must be able to call all of them. A block calls the generic kernel for
    operators of a range. It does not round operands, so their families must not either."""
    if any(o.skips and family_of(o).operand_rounding for o in program.operators):
        return False
    distinct = {binding.key(o): o for o in program.operators} if program.repeat is not None else {}
    return all(not family_of(o).name or callable_part(o, binding) is not None for o in distinct.values())


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
