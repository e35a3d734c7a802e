"""The entry of a model in the zoo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnx

from rammer.errors import BadInput
from zoo.net import Array

SEED: Final = 2026
_NONE: Final[Mapping[str, Any]] = MappingProxyType({})
#: Integers of small forms are below this: their tables have at least this many rows, except for the two kinds of tokens.
_FEW: Final = 16


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    ``parameters`` and ``gmacs`` are the published figures. ``places`` are the digits of ``parameters`` (None: exact; -5: rounded
    to 100,000), and ``spread`` is its allowed deviation. ``tolerance`` is the relative rounding of ``gmacs``. ``small`` are the
    builder's arguments for the small form."""

    key: str
    builder: Callable[..., onnx.ModelProto] = field(repr=False)
    inputs: Mapping[str, tuple[int, ...]]
    parameters: int
    gmacs: float
    tolerance: float
    source: str
    places: int | None = None
    integers: Mapping[str, int] = field(default_factory=lambda: _NONE)
    spread: int = 0
    small: Mapping[str, Any] = field(default_factory=lambda: _NONE)

    def build(self, seed: int = SEED, batch: int = 0) -> onnx.ModelProto:
        """Return the model with weights drawn from ``seed``, with ``batch`` if nonzero."""
        return self.builder(seed, batch=batch) if batch else self.builder(seed)

    def feeds(self, seed: int) -> dict[str, Array]:
        """Return random inputs by name: floats N(0, 1), integers uniform below the bound in ``integers``."""
        rng = np.random.default_rng(seed)
        return {
            n: rng.integers(0, self.integers[n], s) if n in self.integers else rng.standard_normal(s, np.float32)
            for n, s in self.inputs.items()
        }

    def of_batch(self, batch: int) -> Entry:
        """Return the model for ``batch`` inputs, without published figures. Raises BadInput if the model has no such form."""
        try:
            return self._other(f"{self.key}_bs{batch}", partial(self.builder, batch=batch), self.integers)
        except (TypeError, ValueError) as problem:
            raise BadInput(f"model {self.key} has no form for a batch of {batch}") from problem

    def narrow(self) -> Entry:
        """Return the small form, without published figures."""
        bounds = {n: min(b, _FEW) for n, b in self.integers.items()}
        return self._other(f"{self.key}:small", partial(self.builder, **self.small), bounds)

    def _other(self, key: str, builder: Callable[..., onnx.ModelProto], integers: Mapping[str, int]) -> Entry:
        ports = builder(SEED).graph.input
        inputs = {p.name: tuple(d.dim_value for d in p.type.tensor_type.shape.dim) for p in ports}
        return replace(self, key=key, builder=builder, inputs=inputs, integers=integers, parameters=0, gmacs=0.0, small=_NONE)
