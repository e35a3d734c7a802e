"""The text of the persistent kernel: one block per vEU, its row's runs one after another.

Before a task a block waits for the task's counters; afterwards it adds one to those that the task signals. Counters only grow: in
run number ``epoch`` (from 0) a counter must reach ``epoch * total + threshold``. Each counter has a separate cache line. A wait
past the limit reports itself, once, and makes every block give up. Values may also be their own flags (``dataflow``): a word is a
float, or ``EMPTY`` until its value is there. A tensor has two sets of words, for odd and even runs. The sender of a word empties
it in the other set, which is unread in this run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rammer_cuda.cell.kernel import PREAMBLE
from rammer_cuda.device import device_source, fill_template
from rammer_cuda.dialect import CUDA
from rammer_cuda.kernels.part import barrier_line, is_narrower, with_statics_at
from rammer_cuda.kernels.task import HeldKernel, TaskKernel
from rammer_cuda.persistent.task_table import COPY, HEAD, KERNEL_BITS, EntryForm

#: The declaration of a pointer to read-only data (``rammer_cuda.kernels.task.declare_parameter``).
_READ_ONLY = re.compile(r"const (.+) \*__restrict__ (\w+)")
#: 32-bit words from a counter to the next: one L2 line of 128 bytes.
LINE = 32
#: Polls between two checks of the clock and of other blocks giving up.
PATIENCE = 512
#: The word that marks a missing value: a NaN that no arithmetic gives (CUDA's canonical NaN is 0x7fffffff).
EMPTY = 0xFFFFDEAD
#: Table entries that a block holds: the current one, the next, and one that slow warps may still read.
SLOTS = 3
#: The control block by name. After it comes, for each row, one more than the entry at which it gave up.
CONTROL = ("epoch", "finished", "aborted")


@dataclass(frozen=True, slots=True)
class Body:
    """The function of one kernel number: a kernel that holds constants, a launchable kernel (``part``), or a generic function.
    ``types`` are the C types of its pointers."""

    name: str
    text: str
    types: tuple[str, ...]
    held: HeldKernel | None = None
    part: TaskKernel | None = None


def kernel_text(bodies: Sequence[Body], form: EntryForm, threads: int, traced: bool = False, blocks: int = 1) -> str:
    """Return the translation unit of the persistent kernel ``rm_persistent``, of ``blocks`` per SM of ``threads``. With
    ``traced``, every task leaves a record in ``rm_records[rm_begins[vEU] + order]``."""
    sizes = {
        "words": form.words,
        "copy": COPY,
        "line": LINE,
        "head": HEAD,
        "signal_at": form.signal_at,
        "signals": form.signals,
        "slots": SLOTS,
        "pointer_at": form.pointer_at,
        "patience": PATIENCE,
        "control": ", ".join(CONTROL),
        "empty": EMPTY,
        "kernel_bits": KERNEL_BITS,
    }
    parts = [
        "#define RM_TRACE 1\n" if traced else "",
        CUDA.preamble,
        device_source("order", "record"),
        PREAMBLE,
        fill_template("persistent", **sizes),
        fill_template("words", **sizes),
    ]
    if any(b.part for b in bodies):
        parts += [device_source("part", "constant"), fill_template("persistent_part", **sizes)]
    parts += dict.fromkeys(b.text for b in bodies)
    parts += [part_function(b.part, threads) for b in bodies if b.part]
    parts += [
        fill_template(
            "persistent_run",
            **sizes,
            name=b.name,
            hold=_hold_call(b),
            step=_step_text(b, threads),
            call=_inline_qualifier(b),
            after=_run_epilogue(b),
        )
        for b in bodies
    ]
    call = "alive = run_{}(walk, slots, row, first, slot, count, rm_scratch); break;"
    cases = "\n".join(f"      case {i}: {call.format(b.name)}" for i, b in enumerate(bodies))
    return "".join((*parts, fill_template("persistent_kernel", **sizes, threads=threads, blocks=blocks, cases=cases)))


def _pointer_arguments(body: Body, entry: str) -> str:
    return ", ".join(f"rm_pointer<{t}>({entry}, {i})" for i, t in enumerate(body.types))


def _hold_call(body: Body) -> str:
    if body.held is None:
        return ""
    plain = _pointer_arguments(replace(body, types=body.types[: len(body.held.arguments)]), "slots[slot]")
    return f"float held[{body.held.held}];\n  {body.held.name}_hold({plain}, held, (int)slots[slot][0]);"


#: The start of a task of a held kernel or a generic function: its waits.
WAIT = "if (entry[1] && rm_wait(walk, entry, first + i - row.begin)) return false;\n    RM_BEGIN(first + i - row.begin)\n    "


def _step_text(body: Body, threads: int) -> str:
    end = "RM_END(first + i - row.begin)"
    if body.part is not None:
        given = "nullptr, (int)entry[0], RmPart{0}, {walk, entry, first + i - row.begin}, scratch"
        call = f"{_part_name(body.part)}({''.join(f'{p}, ' for p in [_pointer_arguments(body, 'entry')] if p)}{given})"
        idle = is_narrower(body.part, threads)
        guard, says = (f"(int)threadIdx.x >= {body.part.threads} || ", body.part.threads) if idle else ("", "RM_SAYS")
        return f"const bool done = {guard}{call};\n    {end}\n    if (!rm_done_if<{says}>(walk, entry, done)) return false;"
    if body.held is None:
        call = f"{body.name}({_pointer_arguments(body, 'entry')}, scratch, (int)entry[0])"
        return f"{WAIT}{call};\n    {end}\n    rm_done(walk, entry);"
    walk = ", walk, first + i - row.begin" if body.held.words else ""
    call = f"{body.held.name}_step({_pointer_arguments(body, 'entry')}{walk}, held, (float *)scratch, (int)entry[0])"
    # A step with words fetches the next entry before its last barrier.
    done = "if (entry[2]) rm_done(walk, entry);" if body.held.words else "rm_done(walk, entry);"
    return f"{WAIT}if (!{call}) return false;\n    {end}\n    {done}"


def _run_epilogue(body: Body) -> str:
    """Return the end of a run: slow warps may still read on-chip values of a held kernel's last step."""
    return "__syncthreads();" if body.held is not None else ""


def _inline_qualifier(body: Body) -> str:
    """Return the inline qualifier of a body's function. Calls keep registers separate. But products of warpgroups would wait for
    each other there (ptxas C7510)."""
    return "__forceinline__" if body.part is not None and _has_divergent_waits(body.part) else "__noinline__"


def _has_divergent_waits(kernel: TaskKernel) -> bool:
    """Return True if threads of a kernel wait at different places."""
    return kernel.body.count("rm_after();") > 1


def _part_name(kernel: TaskKernel) -> str:
    return f"rm_part_{kernel.entry}"


def _declare_constant(parameter: str) -> str:
    """Return a pointer's declaration, as an ``rm_constant`` if it is read-only."""
    found = _READ_ONLY.fullmatch(parameter)
    return f"const rm_constant<{found[1]}> {found[2]}" if found else parameter


def part_function(kernel: TaskKernel, threads: int) -> str:
    """Return a kernel's statements as the function ``rm_part_{entry}`` of one task in blocks of ``threads``. It waits for the
    task's counters where a launch would wait for others, and returns false if the wait fails."""
    name = _part_name(kernel)
    shared = with_statics_at(kernel, f"{name}_shared", "rm_scratch")
    method = 2 if _has_divergent_waits(kernel) else 1 if is_narrower(kernel, threads) else 0
    after = f"#define rm_after() do {{ if (!rm_ready<{method}, {kernel.threads}>(rm_mine)) return false; }} while (0)\n"
    head = ", ".join(
        (
            *map(_declare_constant, kernel.parameters),
            "const int *order",
            "int first",
            "const RmPart blockIdx",
            "const rm_turn &rm_mine",
        )
    )
    count = kernel.threads if is_narrower(kernel, threads) else threads
    own = f"const RmPart threadIdx = rm_thread<{count}>();\n" + barrier_line(kernel, threads, "rm_turn_meet")
    return (
        f"{shared.text}{after}static __device__ __forceinline__ bool {name}({head}, char *rm_scratch) {{\n"
        f"{own}{shared.body}return true;\n}}\n#undef rm_after\n"
    )
