"""Fixtures that hide all plugins: the core is tested with its device template only."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from rammer.device.loader import GROUP

#: The installed plugins, cached because a look-up costs as much as a small test.
PLUGINS = " ".join(p.name for p in entry_points(group=GROUP) if p.name != "toy")


@pytest.fixture(autouse=True)
def core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the plugins; child processes inherit this.

    Tests that need a plugin belong to the plugin's tests or to tests/devices."""
    monkeypatch.setenv("RAMMER_DISABLE", PLUGINS)
