"""A runner of CUDA kernel text on the host: a block's threads alternate, with emulated shuffles and barriers.

It supports kernels without inline PTX. It checks index arithmetic, reductions and stores without a GPU, never speed. With
ThreadSanitizer, threads are POSIX threads, and accesses that no barrier orders are reported."""

from __future__ import annotations

import atexit
import ctypes
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rammer.child_processes import find_program, run_program
from rammer.codegen import Argument
from rammer.codegen.dialects import helper_functions
from rammer.device.manifest import Array, Binding
from rammer.errors import DeviceUnavailable
from rammer.ir.types import itemsize
from rammer_testing.host_c import GuardedBuffer
from rammer_testing.nonempty import some

from .block import HEAD, INCLUDES, TAIL
from rammer_cuda.dialect import CUDA
from rammer_cuda.kernels.task import TaskKernel

COMPILER = find_program("g++")
#: gold links in a third of the time of the usual linker.
LINKER = ("-fuse-ld=gold",) if find_program("ld.gold") else ()

#: The main function of a separate process, since ThreadSanitizer must be loaded first. Every buffer is filled with one float16 or
#: float32 value.
MAIN = """
int main() {
  @SWITCHES@
  const size_t bytes[] = {@BYTES@};
  void *pointers[sizeof bytes / sizeof *bytes];
  for (size_t k = 0; k < sizeof bytes / sizeof *bytes; ++k)
    memset(pointers[k] = aligned_alloc(64, (bytes[k] + 63) / 64 * 64), 0x3c, (bytes[k] + 63) / 64 * 64);
  rm_launch(pointers, @BLOCKS@, @THREADS@, 0);
}
"""
#: Seconds after which a kernel under ThreadSanitizer counts as hung, and the exit code that reports a race.
PATIENCE, RACE = 300, 66


@dataclass(frozen=True)
class HostArgument:
    """A pointer parameter: the tensor at its storage, or ``packed`` values instead."""

    tensor: str
    written: bool
    packed: Array | None = None


@dataclass(frozen=True)
class HostKernel:
    """A kernel to run on the host: ``blocks`` tasks, one per block, of ``entry`` in ``text``. ``text`` includes emulated
    instructions. ``switches`` are the initial values of ``rm_switches``."""

    text: str
    entry: str
    arguments: Sequence[HostArgument]
    blocks: int
    threads: int
    binding: Binding
    switches: Sequence[int] = ()

    @staticmethod
    def of(kernel: TaskKernel, binding: Binding, values: Mapping[str, Array], text: str = "", blocks: int = 1) -> HostKernel:
        """Return a kernel with emulated instructions in ``text`` ("": not needed) and the constants in ``values``."""
        arguments = host_arguments(kernel.arguments, values)
        return HostKernel(text or kernel.text, kernel.entry, arguments, blocks, kernel.threads, binding)

    @property
    def source(self) -> str:
        """The program whose ``rm_launch`` runs the kernel, except for the includes of ``_compile_flags``."""
        types = [CUDA.types[self.binding.types[a.tensor].dtype] for a in self.arguments]
        pointers = ", ".join(f"({t} *)rm_pointers[{k}]" for k, t in enumerate(types))
        return self.text + TAIL.replace("@NAME@", self.entry).replace("@POINTERS@", pointers)


def host_arguments(arguments: Iterable[Argument], values: Mapping[str, Array]) -> list[HostArgument]:
    """Return a kernel's arguments, with packed constants arranged from ``values``."""
    return [
        HostArgument(a.tensor, a.written, None if a.packing is None else np.array(a.packing.make(values[a.tensor]), order="C"))
        for a in arguments
    ]


def run_on_host(kernel: HostKernel, values: Mapping[str, Array], first: int = 0) -> dict[str, Array]:
    """Run tasks from ``first`` on and return the kernel's outputs by name.

    ``values`` may set the initial contents of outputs. Asserts that nothing else was written.

    Raises DeviceUnavailable without a C++ compiler.
    """
    if COMPILER is None:
        raise DeviceUnavailable("no C++ compiler on this machine", hint="install g++")
    library, arguments, binding = _load_library(kernel), kernel.arguments, kernel.binding
    rng = np.random.default_rng(0)
    tensors = {
        a.tensor: GuardedBuffer(binding.storages[a.tensor], values.get(a.tensor), binding.types[a.tensor].dtype, rng)
        for a in arguments
    }
    addresses = [ctypes.c_void_p(a.packed.ctypes.data) if a.packed is not None else tensors[a.tensor].pointer for a in arguments]
    stuck = library.rm_launch((ctypes.c_void_p * len(addresses))(*addresses), kernel.blocks, kernel.threads, first)
    assert not stuck, "threads wait for ever"
    for a in some(arguments):
        same = np.array_equal(tensors[a.tensor].buffer, tensors[a.tensor].before, equal_nan=True)
        assert tensors[a.tensor].untouched_outside() if a.written else same, a.tensor
    return {a.tensor: tensors[a.tensor].view.copy() for a in arguments if a.written}


def launch_on_host(kernel: HostKernel, addresses: Mapping[str, int], late: Sequence[Array]) -> None:
    """Run the tasks on tensors at ``addresses``.

    The buffers ``late`` hold NaN until all threads of a block have waited for earlier kernels (``rm_after``), and their values
    afterwards.

    Raises AssertionError if a thread never waits, and DeviceUnavailable without a C++ compiler.
    """
    if COMPILER is None:
        raise DeviceUnavailable("no C++ compiler on this machine", hint="install g++")
    library = _load_library(kernel)
    places = [a.packed.ctypes.data if a.packed is not None else addresses[a.tensor] for a in kernel.arguments]
    values = [buffer.copy() for buffer in late]

    def pointers(items: Sequence[int]) -> Any:
        return (ctypes.c_void_p * max(len(items), 1))(*items)

    sizes = (ctypes.c_long * max(len(late), 1))(*[buffer.nbytes for buffer in late])
    lost = library.rm_launch_after(
        pointers(places),
        kernel.blocks,
        kernel.threads,
        0,
        len(late),
        pointers([b.ctypes.data for b in late]),
        pointers([v.ctypes.data for v in values]),
        sizes,
    )
    assert not lost, "a thread ends without rm_after(), threads wait for ever, or a copy is misaligned"


def find_race(kernel: HostKernel) -> str:
    """Return ThreadSanitizer's report of unordered accesses by two threads, or "". All values are equal. Raises DeviceUnavailable
    without a C++ compiler, or if ThreadSanitizer does not start."""
    if COMPILER is None:
        raise DeviceUnavailable("no C++ compiler on this machine", hint="install g++")
    arguments, binding = kernel.arguments, kernel.binding
    ends = [binding.storages[a.tensor].span()[1] * itemsize(binding.types[a.tensor].dtype) for a in arguments]
    sizes = [end if a.packed is None else a.packed.nbytes for end, a in zip(ends, arguments, strict=True)]
    main = (
        MAIN.replace("@BYTES@", ", ".join(map(str, sizes)))
        .replace("@BLOCKS@", str(kernel.blocks))
        .replace("@THREADS@", str(kernel.threads))
    )
    main = main.replace("@SWITCHES@", "".join(f"rm_switches[{k}] = {int(on)}; " for k, on in enumerate(kernel.switches)))
    program = _compile_text(kernel.source + main, "-O1", "-g", "-fsanitize=thread")
    options = {"TSAN_OPTIONS": f"halt_on_error=1 exitcode={RACE}"}
    done = run_program([str(program)], environment=options, timeout=PATIENCE)
    if done.returncode not in (0, RACE) or "FATAL: ThreadSanitizer" in done.stderr:
        raise DeviceUnavailable(f"ThreadSanitizer does not run here: {done.stderr.strip()[:300]}")
    return done.stderr if done.returncode else ""


def _load_library(kernel: HostKernel) -> ctypes.CDLL:
    """Load the kernel's library under a unique name, so that state of an earlier run is dropped."""
    made = _compile_text(kernel.source, "-Og", "-shared", "-fPIC", *LINKER)
    with tempfile.NamedTemporaryFile(dir=_build_folder(), suffix=".so") as fresh:
        shutil.copyfile(made, fresh.name)
        library = ctypes.CDLL(fresh.name)
    places = (ctypes.c_int * 4).in_dll(library, "rm_switches")
    for k, on in enumerate(kernel.switches):
        places[k] = on
    return library


@cache
def _build_folder() -> Path:
    """Return the folder in which this process compiles; it is removed at exit."""
    folder = tempfile.TemporaryDirectory(prefix="rammer_cuda_")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def _compile_flags(*flags: str) -> tuple[str, ...]:
    """Return all flags of a compilation, including the header precompiled for these flags."""
    header = Path(tempfile.mkdtemp(dir=_build_folder())) / "all.h"
    header.write_text(INCLUDES + HEAD + helper_functions("static inline", CUDA.types, overloaded=False))
    made = ("-std=c++17", "-w", "-pthread", "-U_FORTIFY_SOURCE", *flags)
    _run_compiler(*made, "-x", "c++-header", "-o", f"{header}.gch", str(header))
    return (*made, "-include", str(header))


@lru_cache(64)
def _compile_text(text: str, *flags: str) -> Path:
    folder = Path(tempfile.mkdtemp(dir=_build_folder()))
    source, made = folder / "kernel.cpp", folder / "kernel"
    source.write_text(text)
    _run_compiler(*_compile_flags(*flags), "-o", str(made), str(source))
    return made


def _run_compiler(*words: str) -> None:
    done = run_program([str(COMPILER), *words])
    assert done.returncode == 0, f"{done.stderr}\n{Path(words[-1]).read_text()}"
