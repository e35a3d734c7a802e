"""The errors that people see: what went wrong, where, and what to do about it.

Three kinds, told apart by exit code: the user's input (2), an unavailable device (3), a failing device
or plugin (4). Exit code 1 is a numerical mismatch. Anything else that escapes is our own bug.
"""

from __future__ import annotations

from typing import ClassVar


def printable(text: str) -> str:
    """``text`` without what a terminal would obey: names of files and models are in it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


class RammerError(Exception):
    """Base of all expected errors. Prints as ``what``, then ``  at: where``, then ``  hint: ...``."""

    exit_code: ClassVar[int] = 4

    def __init__(self, what: str, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.hint = what, where, hint

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  at: {self.where}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return printable("\n".join(lines))


class Mismatch(RammerError):
    """Outputs differ from the reference by more than the tolerance."""

    exit_code = 1


class BadInput(RammerError):
    """The model, an input array or an option is wrong."""

    exit_code = 2


class DeviceUnavailable(RammerError):
    """No such device, or its hardware or a dependency is missing."""

    exit_code = 3


class DeviceFailure(RammerError):
    """A device or plugin failed, memory exhaustion included."""

    exit_code = 4
