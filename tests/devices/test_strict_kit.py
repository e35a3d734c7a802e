"""The kit's checks of corners find planted mistakes of the toy device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from rammer.device.manifest import Array, Bound, Device, OpenOptions, RunResult
from rammer.ir.program import RProgram, Task
from rammer.testing.conformance import CHECKS, ConformanceError, Subject, registry_of

import rammer_toy


class Crooked(rammer_toy.ToyProgram):
    """The toy's program with one mistake."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int, mistake: str) -> None:
        self.mistake = mistake
        if mistake in ("first wait", "last wait"):
            program = replace(program, rows=tuple(tuple(map(self._waiting, row)) for row in program.rows))
        super().__init__(program, constants, limit)
        if mistake == "signals before tasks":  # all that is not the row's own is taken for done
            self.waves = [[tasks for wave in self.waves for tasks in wave][::-1]]
        if mistake == "more rows than units":
            self.waves = [rows[: rammer_toy.VEUS] for rows in self.waves]
        if mistake == "unknown families":
            self.waves = [[[t for t in tasks if not t[0].family] for tasks in rows] for rows in self.waves]

    def _waiting(self, task: Task) -> Task:
        return replace(task, waits=task.waits[:1] if self.mistake == "first wait" else task.waits[-1:])

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        if self.mistake == "drops NaN":
            inputs = {n: np.nan_to_num(a, posinf=np.inf, neginf=-np.inf) for n, a in inputs.items()}
        if self.mistake == "caps infinity":
            inputs = {n: np.clip(a, -3e38, 3e38) for n, a in inputs.items()}
        result = super().run(inputs)
        if self.mistake == "coarse float16" and any(b.dtype == "float16" for b in self.program.buffers):
            return RunResult({n: self._coarse(a) for n, a in result.outputs.items()}, result.seconds)
        return result

    @staticmethod
    def _coarse(values: Array) -> Array:
        """Seven bits of mantissa, as bfloat16 has."""
        bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).astype(values.dtype)

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        if self.mistake == "dense outputs":
            outputs = {n: np.ascontiguousarray(a) for n, a in outputs.items()}
        if self.mistake == "dense inputs":
            inputs = {n: as_strided(a, strides=np.empty(a.shape, a.dtype).strides) for n, a in inputs.items()}
        return super().bind(inputs, outputs, stream)


#: Mistake -> the check that finds it, and what that says.
MISTAKES = {
    "signals before tasks": ("waits", "long tasks and their readers"),
    "first wait": ("waits", "long tasks and their readers"),
    "last wait": ("waits", "long tasks and their readers"),
    "more rows than units": ("waits", "on 3 rows"),
    "unknown families": ("unknown family", "relative L2 error"),
    "coarse float16": ("precisions", "in float16: relative L2 error"),
    "dense outputs": ("strided arrays", "an output with gaps"),
    "dense inputs": ("strided arrays", "an input with gaps"),
    "drops NaN": ("special values", "of NaN and infinities gives"),
    "caps infinity": ("special values", "of NaN and infinities gives"),
}


def subject(mistake: str) -> Subject:
    """A toy device of two precisions with ``mistake``."""

    class Backend(rammer_toy.ToyBackend):
        def __init__(self, options: OpenOptions) -> None:
            super().__init__(options)
            self.vdevice = replace(self.vdevice, precisions=("float32", "float16"))

        def load(self, program: RProgram, constants: Mapping[str, Array]) -> Any:
            return Crooked(program, constants, self.limit, mistake)

    return Subject("bad", registry_of(Device("bad", "a mistake", rammer_toy.probe, Backend)))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_kit_finds(mistake: str) -> None:
    check, words = MISTAKES[mistake]
    with pytest.raises(ConformanceError, match=words):
        CHECKS[check](subject(mistake))


@pytest.mark.parametrize("check", sorted({check for check, _ in MISTAKES.values()}))
def test_the_kit_passes_what_is_right(check: str) -> None:
    CHECKS[check](subject(""))
