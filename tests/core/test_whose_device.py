"""Device ownership: two plugins with one device name, broken plugins, and interface versions."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from plugin_points import DEVICE, Point

from rammer.device.hooks import hookimpl
from rammer.device.loader import Registry
from rammer.device.manifest import API_VERSION, Device
from rammer.errors import DeviceUnavailable


class Dist:
    """The distribution of an entry point."""

    def __init__(self, name: str) -> None:
        self.name, self.version = name, "1.0"


@dataclass(frozen=True)
class Owned(Point):
    """An entry point of a distribution."""

    dist: Dist


def owned(name: str, dist: str, *devices: str) -> Owned:
    """Return a plugin with devices of these names."""
    made = [replace(DEVICE, name=d) for d in devices]
    return Owned(name, type("Plugin", (), {"rammer_devices": hookimpl(lambda self: made)})(), Dist(dist))


def test_two_plugins_of_one_device_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [owned("one", "d1", "chip", "mine"), owned("two", "d2", "chip"), owned("six", "d6", "chip")]
    statuses = {s.name: s for s in Registry(points).statuses()}
    assert {n: s.state for n, s in statuses.items()} == {"chip": "conflict", "mine": "ok"}
    said = "the plugins one, six and two have a device 'chip'; uninstall one, or leave it out: RAMMER_DISABLE=two"
    assert statuses["chip"].reason == said
    for target in ("", "anything"):
        with pytest.raises(DeviceUnavailable, match="device chip is not available: conflict") as caught:
            Registry(points).open("chip", target=target)
        assert caught.value.where == said
    monkeypatch.setenv("RAMMER_DISABLE", "two six")
    assert Registry(points).status("chip").state == "ok"


def test_two_plugins_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [owned("chip", "d1", "chip"), owned("chip", "d2", "chip"), owned("chip", "d3", "other")]
    registry = Registry(points)
    assert {s.name: s.state for s in registry.statuses()} == {"chip": "conflict", "other": "ok"}
    assert "the plugins chip@d1 and chip@d2 have" in registry.status("chip").reason
    monkeypatch.setenv("RAMMER_DISABLE", "chip@d2")
    assert {s.name: s.state for s in Registry(points).statuses()} == {"chip": "ok", "chip@d2": "disabled", "other": "ok"}
    monkeypatch.setenv("RAMMER_DISABLE", "chip")
    assert {s.state for s in Registry(points).statuses()} == {"disabled"}


def test_a_broken_plugin_is_told_beside_a_device_of_its_name() -> None:
    broken = Owned("mine", type("Plugin", (), {"rammer_devices": hookimpl(lambda self: 1 / 0)})(), Dist("d2"))
    rows = [(s.name, s.state) for s in Registry([owned("one", "d1", "mine"), broken]).statuses()]
    assert rows == [("mine", "ok"), ("mine", "load-error")]


def test_the_api_version_is_a_number_in_the_plugins_text() -> None:
    with pytest.raises(TypeError, match="'api'"):
        Device("chip", "", list, list)  # type: ignore[call-arg, arg-type]
    root = Path(__file__).parents[2]
    files = [
        *root.glob("plugins/*/rammer_*/plugin.py"),
        *root.glob("core/rammer/plugin-template/rammer_*/__init__.py"),
        *root.glob("tests/c_plugin/rammer_*/__init__.py"),
    ]
    calls = [
        node
        for f in files
        for node in ast.walk(ast.parse(f.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Device"
    ]
    versions = [k.value for c in calls for k in c.keywords if k.arg == "api"]
    assert len(files) == len(versions) == 5
    assert all(isinstance(v, ast.Constant) and v.value == API_VERSION for v in versions)


def test_another_api_version_is_told_for_targets_too() -> None:
    old = replace(DEVICE, api=API_VERSION - 1, targets=("chip",))
    registry = Registry([Point("old", type("Plugin", (), {"rammer_devices": hookimpl(lambda self: [old])})())])
    for target in ("", "chip"):
        with pytest.raises(DeviceUnavailable, match="api-mismatch") as caught:
            registry.open("toy", target=target)
        assert f"has API version {API_VERSION - 1}, this core has {API_VERSION}" in caught.value.where
