"""Device code: the CUDA C++ that kernels begin with, one file per subject.

A translation unit repeats a file for each kernel that uses it, so a file guards itself with a macro. In files of instructions
that are spelled by their size, ``@name@`` is a placeholder for a value."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files


@cache
def device_source(*names: str) -> str:
    """Return the texts of ``{name}.cuh``, one after the other."""
    return "".join((files(__package__) / f"{name}.cuh").read_text(encoding="utf-8") for name in names)


def fill_template(name: str, /, **values: object) -> str:
    """Return the text of ``{name}.cuh`` with every ``@value@`` filled in. Raises KeyError if a value is missing."""
    return re.sub(r"@(\w+)@", lambda m: str(values[m[1]]), device_source(name))
