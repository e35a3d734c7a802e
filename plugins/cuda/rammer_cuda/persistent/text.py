"""The text of the persistent kernel: a block a vEU, its row's runs one after another.

Before a task a block waits for the task's counters, afterwards it adds one to those that the task feeds. Counters only
grow: in run number ``epoch`` (from 0) a counter must reach ``epoch * total + threshold``. Each is on a cache line of its
own. A wait that lasts longer than the limit reports itself, once, and makes every block give up. Values may also be
their own flags (``dataflow``): a word is a float, or ``EMPTY`` until its value is there. Of a tensor's two sets of words odd
and even runs use one each, and whoever sends a word empties that of the other set, which nobody reads in this run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rammer_cuda.cell.kernel import PREAMBLE
from rammer_cuda.device import filled, source
from rammer_cuda.dialect import CUDA
from rammer_cuda.kernels.task import HeldKernel
from rammer_cuda.persistent.table import COPY, HEAD, EntryForm

#: 32-bit words from a counter to the next: one L2 line of 128 bytes.
LINE = 32
#: Polls between two looks at the clock and at whether another block gave up.
PATIENCE = 512
#: The word that says "not there yet": a NaN that no arithmetic gives (CUDA's canonical NaN is 0x7fffffff).
EMPTY = 0xFFFFDEAD
#: Entries of the table that a block has at hand: the one it works on, the next, and one that slow warps may still read.
SLOTS = 3
#: The control block by name; behind it is, for each row, one more than the entry that it gave up at.
CONTROL = ("epoch", "finished", "aborted")


@dataclass(frozen=True, slots=True)
class Body:
    """What one kernel number runs: a kernel that holds constants, or a generic function of so many pointers of the C types."""

    name: str
    text: str
    types: tuple[str, ...]
    held: HeldKernel | None = None


def kernel_text(bodies: Sequence[Body], form: EntryForm, threads: int, traced: bool = False) -> str:
    """The translation unit of the persistent kernel ``rm_persistent``, of blocks of ``threads``; ``traced``, every task
    leaves a record in ``rm_records[rm_begins[vEU] + order]``."""
    sizes = {
        "words": form.words,
        "copy": COPY,
        "line": LINE,
        "head": HEAD,
        "signal_at": form.signal_at,
        "slots": SLOTS,
        "pointer_at": form.pointer_at,
        "patience": PATIENCE,
        "control": ", ".join(CONTROL),
        "empty": EMPTY,
    }
    parts = [
        "#define RM_TRACE 1\n" if traced else "",
        CUDA.preamble,
        source("order", "record"),
        PREAMBLE,
        filled("persistent", **sizes),
        filled("words", **sizes),
    ]
    parts += dict.fromkeys(b.text for b in bodies)
    parts += [filled("persistent_run", **sizes, name=b.name, hold=_hold(b), step=_step(b)) for b in bodies]
    call = "alive = run_{}(walk, slots, run.y, run.z, begin, rm_scratch); break;"
    cases = "\n".join(f"      case {i}: {call.format(b.name)}" for i, b in enumerate(bodies))
    return "".join((*parts, filled("persistent_kernel", **sizes, threads=threads, cases=cases)))


def _pointers(body: Body, entry: str) -> str:
    return ", ".join(f"rm_pointer<{t}>({entry}, {i})" for i, t in enumerate(body.types))


def _hold(body: Body) -> str:
    if body.held is None:
        return ""
    plain = _pointers(replace(body, types=body.types[: len(body.held.arguments)]), "slots[0]")
    return f"float held[{body.held.held}];\n  {body.held.name}_hold({plain}, held, (int)slots[0][0]);"


def _step(body: Body) -> str:
    end = "RM_END(first + i - begin)"
    if body.held is None:
        return f"{body.name}({_pointers(body, 'entry')}, scratch, (int)entry[0]);\n    {end}\n    rm_done(walk, entry);"
    walk = ", walk, first + i - begin" if body.held.words else ""
    call = f"{body.held.name}_step({_pointers(body, 'entry')}{walk}, held, (float *)scratch, (int)entry[0])"
    # A step with words fetches the next entry before its own last barrier.
    done = "if (entry[2]) rm_done(walk, entry);" if body.held.words else "rm_done(walk, entry);"
    return f"if (!{call}) return false;\n    {end}\n    {done}"
