"""Test plugins: entry points that are already loaded, and their device."""

from __future__ import annotations

from dataclasses import dataclass

import rammer_toy

(DEVICE,) = rammer_toy.rammer_devices()


@dataclass(frozen=True)
class Point:
    """An entry point that is already loaded."""

    name: str
    plugin: object

    def load(self) -> object:
        return self.plugin
