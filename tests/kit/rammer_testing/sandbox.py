"""One command of ``rammer`` in a forked child with limits of memory and time, and what became of it.

Forking a process that has imported everything costs about 10 ms, so thousands of runs are cheap. The limit of memory is
of address space (``RLIMIT_AS``), which the kernel refuses at once and exactly: an allocation beyond it is a MemoryError where
it is made, and no other process suffers. A parent that polls resident memory would see an overrun too late. Drivers reserve
address space as they like when they are loaded, some of them for a thread on each of the machine's cores: a child opens its
device first, and the limit is of what it takes beyond that. A child that does not come so far says nothing about its file.
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
from rammer.plan.process_memory import mapped_bytes

#: What one run may take: bytes of address space beyond what it has once its device is open, and seconds.
MEMORY, SECONDS = 2 << 30, 20.0
#: Seconds are of the processors, which a loaded machine has few of; of the clock, a run may take so many times as long.
WAITING = 6
#: Cores that one run may use.
CORES = 2
#: pyopencl unpickles what it has kept itself, which would look like a deed of the file's.
ENVIRONMENT = {"PYOPENCL_NO_CACHE": "1"}
#: Of Linux's ``prctl``.
_PR_SET_PDEATHSIG = 1
#: Of glibc's ``mallopt``, and how many arenas: each thread of a driver would else reserve 64 MB at its first allocation.
_M_ARENA_MAX, ARENAS = -8, 2
#: Audit events that mean that something was executed.
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
    """A run could not begin, or that of a right file fails: no finding about a file, but nothing can be searched here."""


@dataclass(frozen=True)
class Outcome:
    """The end of one child: its exit code, or the signal that ended it; what it printed; what it did and should not."""

    code: int
    signal: int
    late: bool
    out: str
    err: str
    seconds: float
    deeds: tuple[str, ...] = ()

    @property
    def fault(self) -> str:
        """What is wrong with this end, in a few words; "" for a clear error or a run that ended well."""
        if self.deeds:
            return f"did what a file must not make it do: {self.deeds[0]}"
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
    """``rammer WORDS...`` in a child that may write below ``folder`` only; its cache is ``folder/cache``. ``device`` are the
    words that name the device it opens first. Machinery where it does not come so far."""
    installed()
    _ready()
    out, err, told = (folder / name for name in ("stdout", "stderr", "deeds"))

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        end_with_parent()
        few_cores(os.getpid() * CORES, CORES)  # others beside it, so that many use all there are
        with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, ARENAS)
        sys.dont_write_bytecode = True  # what Python keeps of a module is no deed of the file under test
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
        raise Machinery(f"a run did not begin: {_ended(code, sign, late)}", hint=_text(err).strip()[-2000:])
    deeds = tuple(told.read_text().splitlines())
    told.unlink()
    return Outcome(code, sign, late, _text(out), _text(err), spent, deeds)


@cache
def _ready() -> None:
    """What a run imports and ONNX sets up when it is asked for the first time, once here instead of in every child: 0.1 s."""
    for module in ("numpy.random", "rammer.cli.run", "rammer.compiler.compiler", "rammer.runtime.session"):
        importlib.import_module(module)
    importlib.import_module("onnx.defs").has("Relu")


#: What a child opened, for as long as it lives: given back, it would have to be taken again.
_held: list[object] = []


def _opened(device: Sequence[str]) -> object:
    """The backend that the words of a command line name; None where they name none."""
    from rammer.device.loader import Registry

    given = [(word, value) for word, value in pairwise(device) if word in ("--device", "--option")]
    options = dict(value.partition("=")[::2] for word, value in given if word == "--option")
    names = [value for word, value in given if word == "--device"]
    return Registry().open(names[-1], options=options) if names else None


def _ended(code: int, sign: int, late: bool) -> str:
    return "it was late" if late else f"signal {signal.Signals(sign).name}" if sign else f"exit code {code}"


def end_with_parent() -> None:
    """This process is killed where its parent is: a search leaves no child behind."""
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def limit_memory(more: int) -> None:
    """So many bytes of address space beyond what this process has are the most it may take."""
    most, hard = mapped_bytes() + more, resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard),) * 2)


def few_cores(first: int, count: int) -> None:
    """This thread and what it starts see ``count`` of its cores from number ``first`` on, where the system ties them at all."""
    if hasattr(os, "sched_setaffinity"):  # Linux and a few others have it
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(first + i) % len(cores)] for i in range(count)})


def forked(work: Callable[[], int], out: Path, err: Path, seconds: float) -> tuple[int, int, bool, float]:
    """Exit code, signal, whether it was late, and the seconds of ``work`` in a forked child with these files as output. Machinery
    where there can be none."""
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
    """Seconds of the processors that a process has had."""
    user, system = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _end(child: int) -> None:
    """Kill a process and its own, which first says on stderr where it is."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGUSR1)
        time.sleep(0.5)
        os.killpg(child, signal.SIGKILL)


@cache
def installed() -> Callable[[], object]:
    """The command ``rammer`` as it was installed. Loaded before a fork, it costs the children nothing."""
    (found,) = entry_points(group="console_scripts", name="rammer")
    return cast("Callable[[], object]", found.load())


def command(words: Sequence[object]) -> int:
    """The exit code of ``rammer WORDS...`` in this process."""
    sys.argv = ["rammer", *map(str, words)]
    try:
        installed()()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0


def _watch(folder: Path, told: Path) -> None:
    """Note in ``told`` every execution of something, and every file written outside ``folder``, in this process."""
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
    """The innermost frame of rammer in a dump of the stack."""
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
