"""Device code: the CUDA C++ that kernels begin with, a file a subject.

A file stands in a translation unit as often as there are kernels that use it, so it guards itself by a macro of its own. In
files of instructions that are spelled by their size, ``@name@`` is a place for a value.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files


@cache
def device_source(*names: str) -> str:
    """The texts of ``{name}.cuh``, one after the other."""
    return "".join((files(__package__) / f"{name}.cuh").read_text(encoding="utf-8") for name in names)


def fill_template(name: str, /, **values: object) -> str:
    """The text of ``{name}.cuh`` with every ``@value@`` filled in. KeyError where one is missing."""
    return re.sub(r"@(\w+)@", lambda m: str(values[m[1]]), device_source(name))
