"""Sandboxed runs: one ``rammer`` command in a forked child with memory and time limits, and its outcome.

Forking a process that has imported everything costs about 10 ms, so thousands of runs are cheap. The memory limit applies to
address space (``RLIMIT_AS``), which the kernel enforces immediately and exactly. An allocation beyond it raises MemoryError at
the allocation and affects no other process. A parent that polls resident memory would detect an overrun too late. Drivers reserve
arbitrary address space when loaded, some per thread on each core. A child therefore opens its device first, and the limit applies
to later allocations. A child that fails before that point says nothing about its file.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from rammer.errors import RammerError
from rammer.process_memory import mapped_bytes

#: Limits of one run: bytes of address space in addition to those of its open device, and seconds.
MEMORY, SECONDS = 2 << 30, 20.0
#: Wall-clock limit as a multiple of the CPU seconds, since a loaded machine has few free processors.
WAITING = 6
#: Cores that one run may use.
CORES = 2
#: pyopencl unpickles its private cache, which would look like an action of the file.
ENVIRONMENT = {"PYOPENCL_NO_CACHE": "1"}
#: Constant of Linux's ``prctl``.
_PR_SET_PDEATHSIG = 1
#: Constant of glibc's ``mallopt``, and the number of arenas: otherwise each driver thread reserves 64 MB at its first allocation.
_M_ARENA_MAX, ARENAS = -8, 2
#: Audit events of code execution.
_EXECUTES = frozenset(
    {
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "subprocess.Popen",
        "pty.spawn",
        "socket.connect",
        "pickle.find_class",
        "ctypes.dlopen/from-file",
    }
)


class Machinery(RammerError):
    """An error in which a run could not start, or a valid file's run fails. It concerns the machine, not the file: the search
    ends."""


@dataclass(frozen=True)
class Outcome:
    """The end of one child: its exit code or signal, its output, and its forbidden actions."""

    code: int
    signal: int
    late: bool
    out: str
    err: str
    seconds: float
    deeds: tuple[str, ...] = ()

    @property
    def fault(self) -> str:
        """A short description of the fault; "" for a clear error or a successful run."""
        if self.deeds:
            return f"did something that a file must not cause: {self.deeds[0]}"
        if self.late:
            return "did not end, in " + _place(self.err)
        if self.signal:
            return f"ended by signal {signal.Signals(self.signal).name}"
        if "Traceback (most recent call last)" in self.err:
            said = [line for line in self.err.splitlines() if line.startswith("rammer: internal error: ")]
            return "traceback: " + (said[-1].removeprefix("rammer: internal error: ") if said else self.err.strip()[-200:])
        if self.err.startswith("rammer: error: out of memory on the host: "):
            return "took memory without a limit: " + self.err.splitlines()[0].removeprefix("rammer: error: ")
        if self.code and "rammer: error: " not in self.err and not self.err.startswith("Usage: "):
            return f"exit code {self.code} without an error message"
        return ""


def caged(
    words: Sequence[object], folder: Path, device: Sequence[str] = (), *, seconds: float = SECONDS, memory: int = MEMORY
) -> Outcome:
    """Run ``rammer WORDS...`` in a child that may write only below ``folder``; its cache is ``folder/cache``. ``device`` are the
    words that name the device to open first. Raises Machinery if opening it fails."""
    installed()
    _ready()
    out, err, told = (folder / name for name in ("stdout", "stderr", "deeds"))

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        end_with_parent()
        few_cores(os.getpid() * CORES, CORES)  # concurrent runs use different cores
        with contextlib.suppress(OSError, AttributeError):  # glibc only
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, ARENAS)
        sys.dont_write_bytecode = True  # bytecode caches are not an action of the file under test
        os.environ |= {**ENVIRONMENT, "RAMMER_CACHE": str(folder / "cache"), "XDG_CACHE_HOME": str(folder / "caches")}
        os.chdir(folder)
        try:
            _held.append(_opened(device))
        except RammerError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        limit_memory(memory)
        _watch(folder, told)
        return command(words)

    code, sign, late, spent = forked(work, out, err, seconds)
    if not told.exists():
        raise Machinery(f"a run did not start: {_ended(code, sign, late)}", hint=_text(err).strip()[-2000:])
    deeds = tuple(told.read_text().splitlines())
    told.unlink()
    return Outcome(code, sign, late, _text(out), _text(err), spent, deeds)


@cache
def _ready() -> None:
    """Load the imports of a run and ONNX's lazy state once here, which saves each child 0.1 s."""
    for module in ("numpy.random", "rammer.cli.run", "rammer.compiler.compiler", "rammer.jit.session"):
        importlib.import_module(module)
    importlib.import_module("onnx.defs").has("Relu")


#: Objects that a child opened, held until it exits: closing them would require opening them again.
_held: list[object] = []


def _opened(device: Sequence[str]) -> object:
    """Return the backend that the words of a command line name; None if they name no device."""
    from rammer.device.loader import Registry

    given = [(word, value) for word, value in pairwise(device) if word in ("--device", "--option")]
    options = dict(value.partition("=")[::2] for word, value in given if word == "--option")
    names = [value for word, value in given if word == "--device"]
    return Registry().open(names[-1], options=options) if names else None


def _ended(code: int, sign: int, late: bool) -> str:
    return "it was late" if late else f"signal {signal.Signals(sign).name}" if sign else f"exit code {code}"


def end_with_parent() -> None:
    """Kill this process when its parent dies, so that a search leaves no children."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def limit_memory(more: int) -> None:
    """Limit the address space of this process to its current size plus ``more`` bytes."""
    most, hard = mapped_bytes() + more, resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard),) * 2)


def few_cores(first: int, count: int) -> None:
    """Restrict this thread and its children to ``count`` cores from number ``first`` on, if the system supports it."""
    if hasattr(os, "sched_setaffinity"):  # Linux and a few others
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(first + i) % len(cores)] for i in range(count)})


def forked(work: Callable[[], int], out: Path, err: Path, seconds: float) -> tuple[int, int, bool, float]:
    """Run ``work`` in a forked child with these files as output. Return the exit code, the signal, a timeout flag, and the
    seconds. Raises Machinery if the child cannot be started."""
    sys.stdout.flush()
    sys.stderr.flush()
    begin = time.monotonic()
    try:
        child = os.fork()
    except OSError as problem:
        raise Machinery(f"no process can be made: {problem}") from problem
    if child == 0:
        code = 70
        try:
            os.setsid()
            for path, descriptor in ((out, 1), (err, 2)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
            faulthandler.register(signal.SIGUSR1, 2)
            sys.stdout, sys.stderr = (os.fdopen(d, "w", encoding="utf-8", errors="replace") for d in (1, 2))
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    handle = os.pidfd_open(child)
    try:
        late = False
        while not late and not select.select([handle], [], [], seconds / 8)[0]:
            late = _cpu(child) > seconds or time.monotonic() - begin > WAITING * seconds
        if late:
            _end(child)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(handle)
    sign = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return (os.WEXITSTATUS(status) if not sign else -1), sign, late, time.monotonic() - begin


def _cpu(child: int) -> float:
    """Return the CPU seconds of a process."""
    user, system = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _end(child: int) -> None:
    """Kill a process and its children after it dumps its stack to stderr."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGUSR1)
        time.sleep(0.5)
        os.killpg(child, signal.SIGKILL)


@cache
def installed() -> Callable[[], object]:
    """Return the installed command ``rammer``. Loaded before a fork, it costs the children nothing."""
    (found,) = entry_points(group="console_scripts", name="rammer")
    return cast("Callable[[], object]", found.load())


def command(words: Sequence[object]) -> int:
    """Run ``rammer WORDS...`` in this process and return the exit code."""
    sys.argv = ["rammer", *map(str, words)]
    try:
        installed()()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0


def _watch(folder: Path, told: Path) -> None:
    """Record in ``told`` every code execution, and every file written outside ``folder``, in this process."""
    root = str(folder.resolve())
    sink = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        deed = ""
        if event in _EXECUTES:
            deed = f"{event} {arguments[:1]!r:.200}"
        elif event == "open" and isinstance(arguments[0], str | bytes) and _writes(arguments):
            path = os.path.abspath(os.fsdecode(arguments[0]))
            if not path.startswith((root, "/dev/", "/proc/")):
                deed = f"writes {path}"
        if deed:
            os.write(sink, deed.replace("\n", "\\n").encode() + b"\n")

    sys.addaudithook(hook)


def _place(err: str) -> str:
    """Return the innermost frame of rammer in a stack dump."""
    frames = re.findall(r'File "[^"]*/(rammer\w*/[^"]+)", line (\d+) in (\S+)', err)
    return "{2} ({0}:{1})".format(*frames[0]) if frames else "an unknown place"


def _writes(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
