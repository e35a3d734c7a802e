"""The errors that people see: what went wrong, where, and what to do about it.

Three kinds, told apart by exit code: the user's input (2), an unavailable device (3), a failing device
or plugin (4). Exit code 1 is a numerical mismatch. Anything else that escapes is our own bug.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar, Final

__all__ = ["BadInput", "DeviceFailure", "DeviceUnavailable", "Mismatch", "MissingDependency", "RammerError", "TooLong"]

#: Modules of Python whose errors are those of a file, a database or another program.
_OUTSIDE: Final = frozenset({"sqlite3", "subprocess"})
#: Whose errors are ours where they escape: our own, Python's and those of what we compute with.
_OURS: Final = (frozenset(sys.stdlib_module_names) - _OUTSIDE) | {"rammer", "numpy", "onnx", "google"}


#: Most characters of a word, of a line and of a part of a message: names in files of others may have megabytes.
WORD, LINE, MESSAGE = 400, 2000, 5000
_LONG_WORD: Final = re.compile(rf"\S{{{WORD + 1},}}")


def bound_text(text: str) -> str:
    """``text`` with the middle of very long words, lines and texts left out."""
    if len(text) <= WORD:
        return text
    text = _LONG_WORD.sub(
        lambda word: _shorten_text(word.group(), WORD), text[: 4 * MESSAGE] + text[4 * MESSAGE :][-4 * MESSAGE :]
    )
    return _shorten_text("\n".join(_shorten_text(line, LINE) for line in text.split("\n")), MESSAGE)


def _shorten_text(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2 - 10
    return f"{text[:half]}...{text[-half:]}"


def to_printable(text: str) -> str:
    """``text`` without what a terminal would obey: names of files and models are in it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def print_warning(message: str) -> None:
    """One line on stderr."""
    sys.stderr.write(to_printable(bound_text(f"rammer: warning: {message}") + "\n"))


class RammerError(Exception):
    """Base of all expected errors. Prints as ``what``, then ``  at: where``, then ``  hint: ...``."""

    exit_code: ClassVar[int] = 4

    def __init__(self, what: str, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = bound_text(what), bound_text(where), bound_text(hint)
        super().__init__(self.what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  at: {self.where}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return to_printable("\n".join(lines))


class Mismatch(RammerError):
    """Outputs differ from the reference by more than the tolerance."""

    exit_code = 1


class BadInput(RammerError):
    """The model, an input array or an option is wrong."""

    exit_code = 2


class TooLong(BadInput):
    """A loop on the host has taken more seconds than it may: to run it in another way would take as many."""


class DeviceUnavailable(RammerError):
    """No such device, or its hardware or a dependency is missing."""

    exit_code = 3


class DeviceFailure(RammerError):
    """A device or plugin failed, memory exhaustion included."""

    exit_code = 4


class MissingDependency(DeviceUnavailable):
    """A package, driver or library is not there; ``name`` says which, ``hint`` what to install."""

    def __init__(self, name: str, hint: str = "") -> None:
        super().__init__(f"needs {name}", hint=hint)
        self.name = name

    @property
    def reason(self) -> str:
        """What is needed and what to install, in one line."""
        return ": ".join(filter(None, (self.what, self.hint)))


@contextmanager
def attribute_errors(culprit: object) -> Iterator[None]:
    """What is raised here, and is no error of the user's, is the fault of ``culprit``, which a plugin may have given:
    ``Registry.blaming`` names the plugin."""
    try:
        yield
    except Exception as problem:
        if not isinstance(problem, (BadInput, DeviceUnavailable)) and not hasattr(problem, "culprit"):
            with suppress(AttributeError):
                problem.culprit = culprit  # type: ignore[attr-defined]
        raise


def of_system(problem: Exception, who: str) -> RammerError | None:
    """What ``problem`` says where Python, a file, a database or a package that is not there made it; None for any other, which
    is our own bug or a clear error already. ``who`` begins the message."""
    if isinstance(problem, MissingDependency):
        return DeviceUnavailable(f"{who} {problem.what}", hint=problem.hint)
    if isinstance(problem, ImportError):
        package = (problem.name or "").partition(".")[0]
        if not package or package.startswith("rammer"):
            return None
        return DeviceUnavailable(
            f"{who} needs the package {package}", _error_message(problem), "install it, or another version of it"
        )
    if isinstance(problem, OSError) or type(problem).__module__ in _OUTSIDE:
        return DeviceFailure(f"{who} failed: {_error_message(problem)}", hint="the system or a file is at fault, not the model")
    return None


def of_driver(problem: Exception, who: str) -> RammerError | None:
    """As ``of_system``, and for errors of a class that is neither Python's nor ours: those are a driver's or a plugin's."""
    if isinstance(problem, RammerError) and not isinstance(problem, MissingDependency):
        return None
    found = of_system(problem, who)
    if found is None and not isinstance(problem, ImportError):
        package = type(problem).__module__.partition(".")[0]
        if package not in _OURS and not package.startswith("rammer_"):
            return DeviceFailure(f"{who} failed: {_error_message(problem)}", where=f"{package}.{type(problem).__name__}")
    return found


def _error_message(problem: Exception) -> str:
    """What an error says, or its class where it says nothing."""
    return str(problem).strip() or type(problem).__name__
