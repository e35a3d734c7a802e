"""Finding devices: each entry point is loaded on its own, so one broken plugin never hides another."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from rammer.device.guard import guarded
from rammer.device.hooks import PROJECT, Hooks
from rammer.device.manifest import API_VERSION, Backend, Binding, Device, Hardware, OpenOptions
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable, MissingDependency, RammerError, of_driver
from rammer.ir.operator import ROperator

if TYPE_CHECKING:
    from rammer.frontend.lowering import LoweringFn
    from rammer.passes.pipeline import Pass
    from rammer.schedule.policy import Policy

GROUP = "rammer.devices"
#: Hooks by which a plugin changes the compilation for devices that are not its own.
EXTENSIONS = ("rammer_policies", "rammer_passes", "rammer_lowerings", "rammer_kernels")
#: Distributions in this repository, by device: what to install when a name is unknown.
KNOWN = {"cuda": "plugins/cuda", "rocm": "plugins/rocm", "ipu_sim": "plugins/ipu_sim"}


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One row of ``rammer devices``. ``state`` is ok, no-hardware, missing-dependency, api-mismatch,
    load-error or disabled; ``reason`` explains every state but ok."""

    name: str
    state: str
    reason: str = ""
    device: Device | None = None
    hardware: tuple[Hardware, ...] = ()
    traceback: str = ""


class Loadable(Protocol):
    """An entry point: a name and what it loads."""

    @property
    def name(self) -> str:
        """Shown where loading fails."""
        ...

    def load(self) -> Any:
        """The plugin: a module or object with hook implementations."""
        ...


@dataclass
class Registry:
    """All plugins of this environment (or the given entry points, for tests)."""

    points: Iterable[Loadable] | None = None
    disabled: frozenset[str] = field(
        default_factory=lambda: frozenset(os.environ.get("RAMMER_DISABLE", "").replace(",", " ").split())
    )
    broken: dict[str, DeviceStatus] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @cached_property
    def manager(self) -> pluggy.PluginManager:
        """The plugin manager with every loadable plugin registered and its hooks checked."""
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(Hooks)
        points = entry_points(group=GROUP) if self.points is None else self.points
        for point in sorted(points, key=lambda p: p.name):
            if point.name in self.disabled:
                self.broken[point.name] = DeviceStatus(point.name, "disabled", "named in RAMMER_DISABLE")
                continue
            self.versions[point.name] = getattr(getattr(point, "dist", None), "version", "")
            try:
                manager.register(point.load(), name=point.name)
                manager.check_pending()
            except (Exception, SystemExit) as problem:
                if manager.has_plugin(point.name):
                    manager.unregister(name=point.name)
                self.broken[point.name] = _load_error(point.name, problem)
        return manager

    @cached_property
    def devices(self) -> dict[str, Device | DeviceStatus]:
        """Manifests by device name; a plugin that fails while listing them gets a status instead."""
        manager = self.manager
        result: dict[str, Device | DeviceStatus] = dict(self.broken)
        for name, plugin in manager.list_name_plugin():
            others = [p for n, p in manager.list_name_plugin() if n != name]
            try:
                for group in manager.subset_hook_caller("rammer_devices", others)():
                    result |= {device.name: device for device in map(_manifest, group)}
            except (Exception, SystemExit) as problem:
                result[name] = _load_error(name, problem)
            del plugin
        return result

    def statuses(self) -> Iterator[DeviceStatus]:
        """Probe every device; never raises."""
        for name, entry in sorted(self.devices.items()):
            yield entry if isinstance(entry, DeviceStatus) else _probe(name, entry)

    def status(self, name: str) -> DeviceStatus:
        """Status of one device. BadInput for an unknown name, with the nearest known one."""
        entry = self.devices.get(name)
        if entry is None:
            raise _unknown(name, sorted(self.devices))
        return entry if isinstance(entry, DeviceStatus) else _probe(name, entry)

    def open(self, spec: str, require: str = "", target: str = "", options: dict[str, str] | None = None) -> Backend:
        """Open ``NAME[:INDEX]``. BadInput for a malformed or unknown name, DeviceUnavailable otherwise."""
        name, _, place = spec.partition(":")
        if place and not place.isdigit():
            raise BadInput(f"device index {place!r} is not a number", where=spec, hint=f"write {name}:0")
        request = OpenOptions(int(place or 0), target, require, options or {})
        if not target:
            self._check(self.status(name), request.index)
        elif name not in self.devices:
            raise _unknown(name, sorted(self.devices))
        device = self.devices[name]
        if isinstance(device, DeviceStatus):
            raise _unavailable(device)
        try:
            return guarded(device.open(request), name)
        except Exception as problem:
            told = of_driver(problem, f"device {name}")
            if told is None and isinstance(problem, RammerError):
                raise
            if isinstance(told, DeviceUnavailable):
                raise told from problem
            raise DeviceFailure(f"device {name} failed to open: {problem}", where=spec) from problem

    def _check(self, status: DeviceStatus, index: int) -> None:
        if status.state != "ok":
            raise _unavailable(status)
        if index >= len(status.hardware):
            found = ", ".join(f"{status.name}:{h.index} {h.name}" for h in status.hardware)
            raise DeviceUnavailable(f"there is no {status.name}:{index}", hint=f"found: {found}")

    def policies(self) -> list[Policy]:
        """Scheduling policies of all plugins."""
        return [policy for group in self._contributed("rammer_policies") for policy in group]

    def passes(self) -> list[Pass]:
        """Graph passes of all plugins."""
        return [step for group in self._contributed("rammer_passes") for step in group]

    def lowerings(self) -> dict[tuple[str, str], LoweringFn]:
        """Lowerings of all plugins by (domain, operator)."""
        return {key: function for group in self._contributed("rammer_lowerings") for key, function in group.items()}

    def _contributed(self, hook: str) -> Iterator[Any]:
        """What each plugin returns from ``hook``. DeviceFailure names the plugin that fails in it."""
        for name, plugin in self.manager.list_name_plugin():
            others = [p for _, p in self.manager.list_name_plugin() if p is not plugin]
            try:
                yield from self.manager.subset_hook_caller(hook, others)()
            except Exception as problem:
                raise DeviceFailure(f"plugin {name} fails in {hook}: {problem}",
                                    hint=f"leave it out: RAMMER_DISABLE={name}") from problem  # fmt: skip

    def extension_key(self) -> str:
        """Names and versions of the plugins that change how models are compiled: part of the key of compiled programs."""
        extending = [n for n, p in self.manager.list_name_plugin() if any(hasattr(p, hook) for hook in EXTENSIONS)]
        return " ".join(f"{name}={self.versions.get(name, '')}" for name in sorted(extending))

    def extra_kernels(self, device: str, operator: ROperator, binding: Binding) -> list[ROperator]:
        """Candidates that third parties add for somebody else's device."""
        found: list[Any] = self.manager.hook.rammer_kernels(device=device, operator=operator, binding=binding)
        return [o for group in found for o in group]


def _probe(name: str, device: Device) -> DeviceStatus:
    if device.api != API_VERSION:
        reason = f"the plugin speaks API version {device.api}, this core {API_VERSION}; upgrade the older one"
        return DeviceStatus(name, "api-mismatch", reason, device)
    try:
        hardware = tuple(device.probe())
    except MissingDependency as problem:
        return DeviceStatus(name, "missing-dependency", problem.reason, device)
    except Exception as problem:
        if isinstance(told := of_driver(problem, "it"), DeviceUnavailable):
            return DeviceStatus(name, "missing-dependency", f"{told.what}: {told.where}", device)
        return DeviceStatus(name, "load-error", f"probe failed: {problem}", device, (), traceback.format_exc())
    if not hardware:
        return DeviceStatus(name, "no-hardware", "no unit was found", device)
    return DeviceStatus(name, "ok", "", device, hardware)


def _manifest(found: Any) -> Device:
    if not isinstance(found, Device):
        raise TypeError(f"{found!r} is no Device")
    return found


def _load_error(name: str, problem: BaseException) -> DeviceStatus:
    text = "".join(traceback.format_exception(problem))
    first = f"{type(problem).__name__}: {problem}".splitlines()[0]
    return DeviceStatus(name, "load-error", first, None, (), text)


def _unavailable(status: DeviceStatus) -> DeviceUnavailable:
    return DeviceUnavailable(
        f"device {status.name} is not available: {status.state}", where=status.reason,
        hint="`rammer devices` lists what works here",
    )  # fmt: skip


def _unknown(name: str, known: list[str]) -> BadInput:
    import difflib  # takes long to import

    nearest = difflib.get_close_matches(name, [*known, *KNOWN], 1)
    if nearest and nearest[0] not in known:
        hint = f"install it from the checkout: pip install -e {KNOWN[nearest[0]]}"
    elif nearest:
        hint = f"did you mean {nearest[0]!r}?"
    else:
        hint = "installed: " + (", ".join(known) or "none; from the checkout: pip install -e plugins/rocm")
    return BadInput(f"unknown device {name!r}", hint=hint + " (the name 'rammer' on PyPI is another project)")
