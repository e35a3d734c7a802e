"""LRU cache of loaded programs on the device, keyed by their specialisation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from threading import RLock
from typing import Any, Generic, TypeVar

from rammer.errors import DeviceFailure
from rammer.runtime.loaded_model import LoadedModel

Key = TypeVar("Key", bound=Hashable)


@dataclass
class LoadedPrograms(Generic[Key]):
    """An LRU cache of at most ``limit`` programs in ``memory`` bytes (0: any number). Programs that run or have an open bound
    call are never freed. Any thread may call it. ``name`` is the model's, for messages."""

    name: str
    limit: int
    memory: int = 0
    held: dict[Key, LoadedModel] = field(default_factory=dict)
    closed: bool = False
    _lock: Any = field(default_factory=RLock, repr=False)
    _closing: Any = field(default_factory=RLock, repr=False)

    def find(self, key: Key) -> LoadedModel | None:
        """Return the program for ``key`` and mark it as most recently used. Raises DeviceFailure once closed."""
        with self._lock:
            if self.closed:
                raise DeviceFailure(f"the executable of {self.name} was closed", hint="open the model again")
            found = self.held.pop(key, None)
            if found is None or found.closed:
                return None
            self.held[key] = found
            return found

    def keep(self, key: Key, special: LoadedModel) -> None:
        """Add a program, and free the least recently used."""
        with self._lock:
            if not self.closed:
                self.held[key] = special
        if self.closed:
            special.close()
        self.trim(special)

    def reserve(self, nbytes: int) -> None:
        """Free the least recently used programs until ``nbytes`` more fit into ``memory``. Raises DeviceFailure if the programs
        in use leave too little."""
        if not self.memory:
            return
        freed = list[LoadedModel]()
        with self._lock:
            while (used := sum(s.nbytes for s in self.held.values())) + nbytes > self.memory:
                key = next((key for key, special in self.held.items() if special.retire()), None)
                if key is None:
                    break
                freed.append(self.held.pop(key))
        for special in freed:
            special.close()
        if used + nbytes > self.memory:
            raise DeviceFailure(
                f"out of memory: a program of {self.name} needs {nbytes} bytes, the limit is {self.memory}, {used} are in use",
                hint="use smaller inputs or fewer copies, or give a larger memory",
            )

    def drop(self, key: Key) -> None:
        """Free the unused program for ``key``."""
        with self._lock:
            special = self.held.pop(key, None)
        if special is not None:
            special.close()

    def trim(self, newest: LoadedModel) -> None:
        """Free the least recently used programs, until at most ``limit`` remain or all others are in use."""
        with self._lock:
            excess = len(self.held) - self.limit
            if excess <= 0:
                return
            idle = (key for key, special in self.held.items() if special is not newest and special.retire())
            freed = [self.held.pop(key) for key in list(islice(idle, excess))]
        for special in freed:
            special.close()

    @contextmanager
    def used(self, find: Callable[[], LoadedModel]) -> Iterator[LoadedModel]:
        """Return the program from ``find`` and prevent its release in this context."""
        while True:
            special = find()
            try:
                special.enter()
                break
            except DeviceFailure:  # freed in the meantime
                continue
        try:
            yield special
        finally:
            special.leave()
        self.trim(special)

    def close(self) -> None:
        """Free all programs when their runs have ended; later calls raise DeviceFailure."""
        with self._closing:  # a second caller also waits
            with self._lock:
                freed = list(self.held.values())
                for special in freed:
                    special.check_outside()
                self.closed = True
            for special in freed:
                special.close()
            self.held.clear()
