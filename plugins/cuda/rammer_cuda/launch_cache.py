"""Cached launches of large programs (``rammer.ir.launches``)."""

from __future__ import annotations

from pathlib import Path

from rammer.ir import launches
from rammer.ir.launches import Launch, decode_plan, encode_plan, make_launches
from rammer.ir.program import RProgram

from rammer_cuda.kernel_cache import Cached

#: Minimum tasks of a program whose launches are cached: fewer are planned in a few milliseconds.
CACHED_FROM = 1_000


def cached_launches(program: RProgram) -> list[Launch]:
    """Return ``make_launches``, cached for the next process if the program is large. Best effort."""
    if program.task_count < CACHED_FROM:
        return make_launches(program)
    return Cached(program, "launches", Path(launches.__file__).read_text()).get(
        lambda record: decode_plan(record, program), lambda: make_launches(program), encode_plan
    )
