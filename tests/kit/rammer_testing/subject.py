"""The device under test of the conformance kit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rammer.compile_options import RESIDENT, CompileOptions
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.jit.onnx_source import open_source
from rammer.runtime.executable import Executable
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.small_models import SmallModel

__all__ = ["ConformanceError", "Subject"]


#: Loops of about a millisecond that detect other load: their number, and the ratio of the mean to the least time that indicates
#: load.
LOOPS, DISTURBED = 40, 1.7


def disturbance() -> float:
    """Return the slowdown of a short computation by other work on this machine."""
    times = list[float]()
    for _ in range(LOOPS):
        start = time.perf_counter()
        sum(range(30_000))
        times.append(time.perf_counter() - start)
    return sum(times) / len(times) / min(times)


class ConformanceError(AssertionError):
    """A violation of the contract by a device; the text names the violated part and the seed to reproduce it."""


@dataclass
class Subject:
    """The device under test. ``seed`` is random by default, so that no device can anticipate the answers."""

    spec: str
    registry: Registry = field(default_factory=Registry)
    options: Mapping[str, str] = field(default_factory=dict)
    seed: int = field(default_factory=lambda: int(np.random.SeedSequence().generate_state(1)[0]))

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.backend: Backend = self.registry.open(self.spec, options=dict(self.options))
        #: Reasons why a check, or part of it, does not apply to this device.
        self.skipped = list[str]()
        #: True if the whole check was skipped.
        self.whole = False

    def skip(self, reason: str) -> None:
        """Record that a part of a check does not apply, because of ``reason``."""
        self.skipped.append(reason)

    def skip_whole(self, reason: str) -> None:
        """Record that a check does not apply, because of ``reason``."""
        self.skip(reason)
        self.whole = True

    def expect(self, good: bool, what: str) -> None:
        """Raise ConformanceError unless ``good`` (NaN compares false, and so fails)."""
        if not good:
            raise ConformanceError(f"{self.spec} (seed {self.seed}): {what}")

    def timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """Return the result of ``work`` and the seconds that the caller waited for it."""
        start = time.perf_counter()
        result = work()
        return result, time.perf_counter() - start

    def expect_time(self, good: bool, what: str) -> None:
        """Check a measured time, unless the machine is busy. On a machine with other load a failed check is skipped, since it
        proves nothing about the device."""
        if not good and not self.backend.vdevice.simulated and (share := disturbance()) > DISTURBED:
            return self.skip(f"the machine is busy with other work, and takes {share:.1f} times as long: {what}")
        self.expect(good, what)

    def executable(
        self,
        model: SmallModel,
        policy: str = "wavefront",
        layout: str = "keep",
        batching: str = "auto",
        resident: int = RESIDENT,
        precision: str = "float32",
    ) -> Executable:
        """Return ``model`` with new weights, opened on this device; the user's cache stays unchanged."""
        source = open_source(model.build(self.rng))
        options, store = CompileOptions(policy, precision=precision, layout=layout, batching=batching), KernelStore(None)
        return Executable(source, self.backend, self.spec, options, self.registry, store=store, resident=resident)
