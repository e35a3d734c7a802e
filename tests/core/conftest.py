"""The core is tested without a plugin: no device is found here but the core's own template."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from rammer.device.loader import GROUP

#: The plugins that are installed; to look takes as long as a small test.
PLUGINS = " ".join(p.name for p in entry_points(group=GROUP) if p.name != "toy")


@pytest.fixture(autouse=True)
def core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs a plugin belongs into its tests, or into tests/devices. Processes that a test starts inherit this."""
    monkeypatch.setenv("RAMMER_DISABLE", PLUGINS)
