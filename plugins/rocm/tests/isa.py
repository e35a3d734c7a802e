"""The inner loop of a kernel in an AMD target's assembly, and its cycles by llvm-mca."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Final

from rammer.child_processes import find_program, run_program

from rammer_rocm.matrix.matrix_instruction import MatrixInstruction

MCA: Final = find_program("llvm-mca-19") or ""
MATRIX: Final = re.compile(r"\bv_(?:mfma|wmma)_\w+")
#: Respellings for llvm-mca 19, as (pattern, replacement):
#: - It counts each load of global memory as an access of local memory, too, so waits for local memory would include those loads.
#:   An instruction waits for its registers without them.
#: - It never ends if a loop has additions of 64 bits on gfx942: two instructions of 32 bits take their place.
_RESPELLED: Final = (
    (r"\ts_waitcnt\w* [^\n]*\n", ""),
    (r"v_lshl_add_u64 v\[(\d+):(\d+)\], [^\n]*", r"v_mov_b32 v\1, 1\n\tv_mov_b32 v\2, 1"),
)
#: Iterations that are simulated: the difference is without the start and the end.
_ITERATIONS: Final = (10, 30)


def inner_loop(assembly: str) -> str:
    """Return the instructions of the shortest loop with matrix instructions, without its branch."""
    lines = assembly.splitlines()
    labels = {m[1]: n for n, line in enumerate(lines) if (m := re.match(r"(\.LBB\w+):", line))}
    loops = list[list[str]]()
    for n, line in enumerate(lines):
        m = re.match(r"\ts_c?branch\w* (\.LBB\w+)", line)
        if m and labels[m[1]] < n:
            loops.append([one.split(";")[0].rstrip() for one in lines[labels[m[1]] + 1 : n] if re.match(r"\t[a-z]", one)])
    return "\n".join(min((body for body in loops if MATRIX.search("\n".join(body))), key=len)) + "\n"


def cycles_of(target: str, i: MatrixInstruction, loop: str) -> tuple[float, float]:
    """Return the cycles of an iteration of one wave on an idle unit, and those of its matrix instructions alone.

    A cycle of llvm-mca is four cycles of a unit that runs a wave of 64 in four parts. llvm-mca models the time of MFMA but not
    of WMMA. For WMMA the result is the sum of both, as if nothing overlapped."""
    for pattern, replacement in _RESPELLED:
        loop = re.sub(pattern, replacement, loop)
    part = 4 if i.lanes == 64 else 1
    matrix = len(MATRIX.findall(loop)) * i.cycles / i.steps / part
    few, many = (_total_cycles(target, loop, n) for n in _ITERATIONS)
    each = (many - few) / (_ITERATIONS[1] - _ITERATIONS[0])
    return each + matrix * (part == 1), matrix


def _total_cycles(target: str, loop: str, iterations: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "loop.s"
        source.write_text(loop)
        command = [MCA, "-mtriple=amdgcn-amd-amdhsa", f"-mcpu={target}", f"-iterations={iterations}", str(source)]
        done = run_program(command, timeout=60)
    return int(re.findall(r"Total Cycles: +(\d+)", done.stdout)[0])
