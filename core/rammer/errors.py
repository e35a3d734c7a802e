"""Errors for users: the problem, its location, and a remedy.

Three kinds, distinguished by exit code: the user's input (2), an unavailable device (3), a failing device or plugin (4). Exit
code 1 is a numerical mismatch. Any other exception that escapes is our bug."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    import logging

__all__ = [
    "BadInput",
    "DeviceFailure",
    "DeviceUnavailable",
    "Mismatch",
    "MissingDependency",
    "NoMachineCode",
    "RammerError",
    "TooLong",
]

#: Modules of Python whose errors stem from a file, a database or another program.
_OUTSIDE: Final = frozenset({"sqlite3", "subprocess"})
#: Modules whose escaping errors are our bugs: ours, Python's and those of our numeric libraries.
_OURS: Final = (frozenset(sys.stdlib_module_names) - _OUTSIDE) | {"rammer", "numpy", "onnx", "google"}


#: Maximum characters of a word, a line and a part of a message: names in foreign files may have megabytes.
WORD, LINE, MESSAGE = 400, 2000, 5000
_LONG_WORD: Final = re.compile(rf"\S{{{WORD + 1},}}")


def bound_text(text: str) -> str:
    """Return ``text`` with the middle of very long words, lines and texts omitted."""
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
    """Return ``text`` without control characters, since it may contain names from files and models."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


@cache
def logger() -> logging.Logger:
    """Return the logger ``rammer``. Its handler prints one line per record on stderr, unless the root logger prints there."""
    import logging  # a warm start has nothing to report

    class OneLine(logging.Handler):
        """Prints ``rammer: warning: ...`` on the current stderr."""

        def emit(self, record: logging.LogRecord) -> None:
            if all(getattr(h, "stream", None) is not sys.stderr for h in logging.getLogger().handlers):
                sys.stderr.write(to_printable(bound_text(f"rammer: {record.levelname.lower()}: {record.getMessage()}") + "\n"))

    found = logging.getLogger("rammer")
    found.addHandler(OneLine())
    return found


def print_warning(message: str) -> None:
    """Report one line as a warning of the logger ``rammer``."""
    logger().warning("%s", message)


class RammerError(Exception):
    """The base class of all expected errors. Prints as ``what``, then ``  at: where``, then ``  hint: ...``."""

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
    """Error for outputs that differ from the reference by more than the tolerance."""

    exit_code = 1


class BadInput(RammerError):
    """Error for an invalid model, input array or option."""

    exit_code = 2


class TooLong(BadInput):
    """Error for a loop on the host that exceeds its time limit: another execution form would take as long."""


class DeviceUnavailable(RammerError):
    """Error for an unknown device, or one whose hardware or dependency is missing."""

    exit_code = 3


class DeviceFailure(RammerError):
    """Error for a failure of a device or plugin, including exhausted memory."""

    exit_code = 4


class NoMachineCode(DeviceFailure):
    """Error for a program whose machine code a device does not write."""


class MissingDependency(DeviceUnavailable):
    """Error for a missing package, driver or library ``name``; ``hint`` is the package to install."""

    def __init__(self, name: str, hint: str = "") -> None:
        super().__init__(f"needs {name}", hint=hint)
        self.name = name

    @property
    def reason(self) -> str:
        """The missing package and how to install it, in one line."""
        return ": ".join(filter(None, (self.what, self.hint)))


def require_compiler(what: str) -> None:
    """Raise DeviceUnavailable if ``what`` needs the compiler and only the runtime is installed."""
    if find_spec(f"{__package__}.compiler") is None:
        raise DeviceUnavailable(f"{what} needs rammer-core, the compiler", hint="pip install rammer-core")


@contextmanager
def attribute_errors(culprit: object) -> Iterator[None]:
    """Attribute errors in this context, except user errors, to ``culprit``, an object that a plugin may have contributed.
    ``Registry.blaming`` names the plugin."""
    try:
        yield
    except Exception as problem:
        if not isinstance(problem, (BadInput, DeviceUnavailable)) and not hasattr(problem, "culprit"):
            with suppress(AttributeError):
                problem.culprit = culprit  # type: ignore[attr-defined]
        raise


def of_system(problem: Exception, who: str) -> RammerError | None:
    """Return the message of ``problem`` if Python, a file, a database or a missing package caused it. Returns None for any other
    error, which is our bug or clear already. ``who`` starts the message."""
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
    """Convert errors like ``of_system``, and also errors of foreign classes, which are a driver's or a plugin's."""
    if isinstance(problem, RammerError) and not isinstance(problem, MissingDependency):
        return None
    found = of_system(problem, who)
    if found is None and not isinstance(problem, ImportError):
        package = type(problem).__module__.partition(".")[0]
        if package not in _OURS and not package.startswith("rammer_"):
            return DeviceFailure(f"{who} failed: {_error_message(problem)}", where=f"{package}.{type(problem).__name__}")
    return found


def _error_message(problem: Exception) -> str:
    """Return an error's message, or its class if the message is empty."""
    return str(problem).strip() or type(problem).__name__
