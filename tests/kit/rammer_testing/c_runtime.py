"""The C loader and its examples, built with the sanitizers of this machine's C compiler, and run on a compiled file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.child_processes import find_program

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

ROOT: Final = Path(__file__).parents[3]
LOADER: Final = ROOT / "core/runtime_c"
EXAMPLES: Final = {"c": ROOT / "docs/examples/run_model.c", "cpp": ROOT / "docs/examples/run_model.cpp"}
COMPILERS: Final = {"c": find_program("gcc"), "cpp": find_program("g++")}
STANDARDS: Final = {"c": ("-std=c11", "-Wconversion"), "cpp": ("-std=c++17",)}
WARNINGS: Final = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
SANITIZERS: Final = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
#: An exit code of the C example: this number plus the status of ``rammer_open``.
REFUSED: Final = 10
#: Seconds that a run may take.
PATIENCE: Final = 120


def build_program(sources: Sequence[Path], output: Path, language: str = "c", flags: Sequence[str] = ()) -> None:
    """Build a program, or an object file with the flag ``-c``. Sources may be objects."""
    compiler = COMPILERS[language]
    assert compiler is not None
    words = [*STANDARDS[language], *WARNINGS, *SANITIZERS, f"-I{LOADER}", *flags, *map(str, sources), "-ldl", "-o", str(output)]
    subprocess.run([compiler, *words], check=True, timeout=PATIENCE)


def build_example(language: str, folder: Path) -> Path:
    """Return the example in a language (``c`` or ``cpp``), built with the loader into ``folder``."""
    made, loader = folder / f"run_{language}", folder / "rammer.o"
    build_program([LOADER / "rammer.c"], loader, flags=["-c"])
    build_program([EXAMPLES[language], loader], made, language)
    return made


def start(program: Path, *words: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program on a file. Leaks are not reported: drivers keep memory until the process ends."""
    leaks = {"ASAN_OPTIONS": "detect_leaks=0:protect_shadow_gap=0"}  # the gap: CUDA reserves addresses in it
    command = [str(program), *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", env={**os.environ, **(env or {}), **leaks}, timeout=PATIENCE
    )


def run_example(
    program: Path,
    model: Path,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
    env: Mapping[str, str] | None = None,
    lengths: Mapping[str, int] | None = None,
) -> dict[str, Array]:
    """Return the outputs of the C example. ``outputs`` have the expected types and shapes; both are in the model's order.
    ``lengths`` are those of a range. Arrays are files in the folder of the model."""
    folder = model.parent
    for number, value in enumerate(inputs.values()):
        (folder / f"{number}.in").write_bytes(np.ascontiguousarray(value).tobytes())
    done = start(program, model, folder, *(f"{name}={value}" for name, value in (lengths or {}).items()), env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return {
        name: np.frombuffer((folder / f"{number}.out").read_bytes(), like.dtype).reshape(like.shape)
        for number, (name, like) in enumerate(outputs.items())
    }
