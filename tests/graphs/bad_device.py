"""A device for tests of the search: it hangs at cosines, ends its process at sines, and is wrong at negations."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from rammer.device.hooks import hookimpl
from rammer.device.manifest import Array, Device, Loaded, RunResult
from rammer.ir.program import RProgram

import rammer_toy


class BadProgram(rammer_toy.ToyProgram):
    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        text = " ".join(str(o) for o in self.program.operators)
        if "cos(" in text:
            time.sleep(1000)
        if "sin(" in text:
            os._exit(7)
        result = super().run(inputs)
        # Half a step above any rounding error, if a negation is part of the program.
        return RunResult({n: a + ("-(" in text or "neg" in text) for n, a in result.outputs.items()}, result.seconds)


class BadBackend(rammer_toy.ToyBackend):
    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        return BadProgram(program, constants, self.limit)


@hookimpl
def rammer_devices() -> Sequence[Device]:
    return [Device("bad_device", "toy with faults", rammer_toy.probe, BadBackend, options=(rammer_toy.MEMORY,), api=5)]
