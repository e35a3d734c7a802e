"""KernelStore: a cache of measurements, in memory and on disk.

Keys hash the device's fingerprint, the operator's ``Binding.key`` and the tuning level. Entries are checked on reading: a damaged
one is measured again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rammer.cache.cache_location import cache_folder
from rammer.cache.disk_cache import Cache
from rammer.ir.operator import Resources
from rammer.ir.untrusted_json import load_json

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class TunedKernel:
    """A stored candidate: tile, family, config, resources and task times (seconds)."""

    tile: tuple[int, ...]
    family: str
    config: tuple[tuple[str, int], ...]
    resources: Resources
    alone: float
    crowded: float
    origin: str


class KernelStore:
    """A thread-safe map of keys to tuned kernels and times, in the cache folder ``root``. If it is None, all is in memory."""

    def __init__(self, root: Path | None) -> None:
        self.cache = Cache("tuned", "1", root) if root is not None else None
        self._memory: dict[str, tuple[TunedKernel, ...] | float] = {}
        self.hits = self.misses = 0

    @staticmethod
    def default() -> KernelStore:
        """Return the user's store in the cache folder."""
        return KernelStore(cache_folder())

    def get(self, key: str) -> tuple[TunedKernel, ...] | None:
        """Return the kernels stored under ``key``, or None."""
        found = self._memory.get(key) or self._read(key, decode_kernels)
        kernels = found if isinstance(found, tuple) else None
        self.hits, self.misses = self.hits + (kernels is not None), self.misses + (kernels is None)
        return kernels

    def put(self, key: str, kernels: Sequence[TunedKernel]) -> None:
        """Store ``kernels``."""
        self._memory[key] = tuple(kernels)
        self._write(key, [asdict(k) for k in kernels])

    def seconds(self, key: str) -> float | None:
        """Return the time stored under ``key``, or None."""
        found = self._memory.get(key)
        return found if isinstance(found, float) else self._read(key, _decode_seconds)

    def put_seconds(self, key: str, seconds: float) -> None:
        """Store a measured time under ``key``."""
        self._memory[key] = seconds
        self._write(key, seconds)

    def _read(self, key: str, decode: Callable[[bytes], Value]) -> Value | None:
        return self.cache.get(self.cache.key(key), decode) if self.cache is not None else None

    def _write(self, key: str, value: object) -> None:
        if self.cache is not None:
            self.cache.put(self.cache.key(key), json.dumps(value).encode())

    def forget(self) -> None:
        """Drop the entries in memory; files stay."""
        self._memory.clear()


def _decode_seconds(data: bytes) -> float:
    """Return the time in an entry. Raises ValueError or TypeError if it is malformed."""
    found = load_json(data)
    if not isinstance(found, float) or not 0 <= found < math.inf:
        raise ValueError("not a time")
    return found


def decode_kernels(data: bytes) -> tuple[TunedKernel, ...]:
    """Return the kernels in an entry. Raises ValueError or a similar error if they are malformed."""
    kernels = tuple(map(_decode_kernel, load_json(data)))
    if not kernels:
        raise ValueError("no kernels")
    return kernels


def _decode_kernel(item: dict[str, Any]) -> TunedKernel:
    kernel = TunedKernel(
        tile=tuple(map(_check_integer, item["tile"])),
        family=str(item["family"]),
        config=tuple((str(k), _check_integer(v)) for k, v in item["config"]),
        resources=Resources(**{k: _check_integer(v) for k, v in item["resources"].items()}),
        alone=float(item["alone"]),
        crowded=float(item["crowded"]),
        origin=str(item["origin"]),
    )
    if min(kernel.tile, default=1) < 1 or not all(0 <= t < math.inf for t in (kernel.alone, kernel.crowded)):
        raise ValueError("invalid tile or time")
    return kernel


def _check_integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an integer")
    return value
