"""A device's step that the host computes, as a loaded program of that device: bound, run and closed in the same way."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rammer.device.arrays import Array
from rammer.device.manifest import Backend, Bound, Loaded, RunResult
from rammer.ir.spread import DeviceStep, OnHost
from rammer.runtime.host_bound import HostBound

__all__ = ["load_step"]


def load_step(backend: Backend, step: DeviceStep) -> Loaded:
    """``step`` on its device, or on the host beside it."""
    return backend.load(step.program, step.constants) if step.host is None else HostedProgram(step, step.host)


@dataclass
class HostedProgram:
    """One operator on the host."""

    step: DeviceStep
    host: OnHost
    kernels: int = 0

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """Once; its seconds by the wall clock."""
        begin = time.perf_counter()
        made = self.host.run({**self.step.constants, **inputs})
        outputs = {n: np.asarray(made[n], order="C") for n in self.step.outputs}
        return RunResult(outputs, time.perf_counter() - begin, (f"{self.host.title} runs on the host",))

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        """Reads arrays where they are; what it makes is copied."""
        return HostedCall(self, inputs, outputs, stream)

    def close(self) -> None:
        """Nothing is held."""


class HostedCall(HostBound):
    """``HostBound`` of one operator."""

    def __init__(self, program: HostedProgram, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any) -> None:
        super().__init__(program.step.program, program.run, inputs, outputs, stream)
        self.copied = (), tuple(self.outputs)
        self.notes = (f"{program.host.title} runs on the host",)
