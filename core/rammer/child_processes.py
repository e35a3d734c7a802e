"""Child processes and external programs, started so that nothing in the current directory is executed.

``python -m`` and ``python -c`` put the current directory first on ``sys.path``. Relative entries of ``PATH`` and of the loader's
search paths also refer to it. Every child process is therefore started here. A Python child gets exactly the ``sys.path`` of its
parent, in safe-path mode. Every child gets an environment whose search paths have absolute entries only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from rammer.errors import DeviceUnavailable, print_warning

if TYPE_CHECKING:
    import subprocess
    from multiprocessing.context import SpawnProcess

__all__ = ["find_program", "python_command", "run_program"]

#: Search paths of the dynamic loader, which a process reads once, when it starts.
LOADER_PATHS: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "DYLD_FRAMEWORK_PATH")
#: Environment variables that hold search paths. Relative entries are dropped.
SEARCH_PATHS: Final = ("PATH", "PYTHONPATH", *LOADER_PATHS)
#: Python 3.11 and newer: ``-m`` and ``-c`` leave the current directory out of ``sys.path``.
SAFE_PATH: Final = "PYTHONSAFEPATH"


def _current_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # the directory was removed
        return os.sep


#: The directory that relative entries of ``sys.path`` refer to, as in ``multiprocessing``.
STARTED_IN: Final = _current_directory()
#: Run a module as ``__main__`` with the parent's ``sys.path``. ``sys`` is built in: importing it reads no file.
_BOOTSTRAP: Final = "import sys; sys.path[:] = {path!r}; import runpy; runpy.run_module({module!r}, None, '__main__', True)"

_spawning: Final = Lock()


def python_command(module: str, *arguments: object) -> list[str]:
    """Return the command line that runs ``module`` as ``python -m`` does, with the ``sys.path`` of this process.

    Interpreter flags that exclude environment variables or the user's site directory are passed on. Raises DeviceUnavailable if
    Python is embedded in another program, without a path of its interpreter."""
    if not sys.executable:
        raise DeviceUnavailable("no Python interpreter is known to start a child process", hint="set sys.executable")
    flags = ["-E"] * sys.flags.ignore_environment + ["-s"] * sys.flags.no_user_site
    text = _BOOTSTRAP.format(path=python_path(), module=module)
    return [sys.executable, *(["-I"] if sys.flags.isolated else [*flags, "-P"]), "-c", text, *map(str, arguments)]


def python_path() -> list[str]:
    """Return ``sys.path`` with absolute entries; relative entries refer to the directory in which this process started."""
    entries = (os.path.join(STARTED_IN, entry) if entry else STARTED_IN for entry in sys.path if isinstance(entry, str))
    return list(dict.fromkeys(entries))


def child_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a child process: that of this process without relative search paths, and ``more``."""
    found = {**os.environ, SAFE_PATH: "1", **(more or {})}
    for name in SEARCH_PATHS:
        if name in found:
            kept = os.pathsep.join(_absolute_entries(found.pop(name)))
            found |= {name: kept} if kept else {}
    return found


def find_program(name: str) -> str | None:
    """Return the path of an executable, or None. Relative entries of ``PATH`` are not searched."""
    import shutil

    path = os.environ.get("PATH", os.defpath)
    kept = os.pathsep.join(_absolute_entries(path))
    return shutil.which(name) if kept == path else shutil.which(name, path=kept)


def run_program(
    command: Sequence[str], *, timeout: float | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return its exit code and output. ``environment`` adds variables. Raises OSError or
    subprocess.SubprocessError if it cannot be run or exceeds ``timeout`` seconds."""
    import subprocess  # every command imports this module, and few start a process

    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        env=child_environment(environment),
        check=False,
    )


def start_python(module: str, *arguments: object, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start ``module`` in a Python process that inherits ``pass_fds`` and stderr; stdin and stdout are the null device."""
    import subprocess

    return subprocess.Popen(
        python_command(module, *arguments),
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=child_environment(),
    )


def spawn_process(target: Any, arguments: Sequence[Any], *, daemon: bool = False) -> SpawnProcess:
    """Start ``target(*arguments)`` in a fresh Python process (``multiprocessing``, method spawn)."""
    import multiprocessing

    process = multiprocessing.get_context("spawn").Process(target=target, args=tuple(arguments), daemon=daemon)
    with _safe_environment():
        process.start()
    return process


@contextmanager
def _safe_environment() -> Iterator[None]:
    """Replace the environment of this process by its children's, since ``multiprocessing`` cannot set it for a child."""
    with _spawning:
        before = dict(os.environ)
        safe = child_environment()
        try:
            _replace_environment(safe)
            yield
        finally:
            _replace_environment(before)


def _replace_environment(wanted: Mapping[str, str]) -> None:
    for name in [n for n in os.environ if n not in wanted]:
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@contextmanager
def isolate_environment() -> Iterator[None]:
    """Protect a command's process and its descendants from search paths that refer to the current directory.

    This includes processes that other packages start. Relative entries of the search paths are dropped; a warning names the
    non-empty ones. The loader reads its paths when a process starts, so the command is executed again if one of them has changed.
    """
    before, safe = dict(os.environ), child_environment()
    dropped = [f"{n}={e}" for n in SEARCH_PATHS for e in before.get(n, "").split(os.pathsep) if e and not os.path.isabs(e)]
    if dropped:
        print_warning(f"relative search paths are ignored: {', '.join(dropped)}")
    if _is_command() and any(before.get(name) != safe.get(name) for name in LOADER_PATHS if before.get(name)):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], safe)
    path = list(sys.path)
    _remove_relative(before.get("PYTHONPATH", ""))
    _replace_environment(safe)
    try:
        yield
    finally:
        _replace_environment(before)
        sys.path[:] = path


def _is_command() -> bool:
    """Return True if this process runs the command that ``sys.argv`` names, instead of calling its function."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return bool(sys.executable and file and os.path.abspath(file) == os.path.abspath(sys.argv[0]))


def _remove_relative(python_path: str) -> None:
    """Remove the entries of ``sys.path`` that come from relative entries of ``PYTHONPATH``. Python has made them absolute."""
    entries = python_path.split(os.pathsep) if python_path and not sys.flags.ignore_environment else []
    removed = {os.path.abspath(e) for e in entries if not os.path.isabs(e)} - {
        os.path.normpath(e) for e in _absolute_entries(python_path)
    }
    sys.path[1:] = [entry for entry in sys.path[1:] if entry not in removed]


def _absolute_entries(search_path: str) -> list[str]:
    return [entry for entry in search_path.split(os.pathsep) if os.path.isabs(entry)]
