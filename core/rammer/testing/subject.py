"""The device that the conformance kit looks at."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rammer.compiled.options import RESIDENT, CompileOptions
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.profile.store import KernelStore
from rammer.runtime.executable import Executable
from rammer.runtime.source import open_source
from rammer.testing.small_models import SmallModel

__all__ = ["ConformanceError", "Subject"]


class ConformanceError(AssertionError):
    """A device breaks the contract; the text says which part, with the seed to repeat it."""


@dataclass
class Subject:
    """The device under test. ``seed`` is fresh unless given, so that no device can know the answers."""

    spec: str
    registry: Registry = field(default_factory=Registry)
    options: Mapping[str, str] = field(default_factory=dict)
    seed: int = field(default_factory=lambda: int(np.random.SeedSequence().generate_state(1)[0]))

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.backend: Backend = self.registry.open(self.spec, options=dict(self.options))
        #: Reasons why a check, or a part of it, does not apply to this device.
        self.skipped = list[str]()

    def skip(self, reason: str) -> None:
        """Record that a check, or a part of it, does not apply, because of ``reason``."""
        self.skipped.append(reason)

    def expect(self, good: bool, what: str) -> None:
        """Raise ConformanceError unless ``good`` (NaN compares false, and so fails)."""
        if not good:
            raise ConformanceError(f"{self.spec} (seed {self.seed}): {what}")

    def timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """What ``work`` gives, and the seconds that the caller waits for it."""
        start = time.perf_counter()
        result = work()
        return result, time.perf_counter() - start

    def executable(
        self,
        model: SmallModel,
        policy: str = "wavefront",
        layout: str = "keep",
        batching: str = "auto",
        resident: int = RESIDENT,
        precision: str = "float32",
    ) -> Executable:
        """``model`` with fresh weights on this device; nothing is kept in the user's cache."""
        source = open_source(model.build(self.rng))
        options, store = CompileOptions(policy, precision=precision, layout=layout, batching=batching), KernelStore(None)
        return Executable(source, self.backend, self.spec, options, self.registry, store=store, resident=resident)
