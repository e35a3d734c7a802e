"""Discovery of devices. Each entry point is loaded separately, so a broken plugin never hides another."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.metadata import EntryPoint, distributions
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

import pluggy

from rammer.device.code_hash import code_hash, package_of
from rammer.device.custom_operators import CustomOperator
from rammer.device.declared_api import DeclaredDevice, devices_of_other_api
from rammer.device.guard import Opening, guard_backend
from rammer.device.hook_results import (
    Checked,
    check_candidates,
    check_declarations,
    check_lowerings,
    check_passes,
    check_policies,
    check_transports,
    describe_key,
)
from rammer.device.hooks import PROJECT, Hooks
from rammer.device.manifest import API_VERSION, Backend, Binding, Device, Hardware, OpenOptions
from rammer.device.plugin_output import stdout_to_stderr
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable, MissingDependency, RammerError, of_driver, to_printable
from rammer.ir.operator import ROperator
from rammer.ir.untrusted_json import whole_number

if TYPE_CHECKING:
    from rammer.distributed.transport.protocol import Transport
    from rammer.frontend.lower.lowering_registry import LoweringFn
    from rammer.fusion.fusion_rules import FusionRule
    from rammer.passes.pass_pipeline import AnyPass
    from rammer.schedule.policy import Policy

__all__ = ["DeviceStatus", "Registry"]

GROUP = "rammer.devices"
#: Hooks by which a plugin changes compilation for devices of other plugins.
EXTENSIONS = ("rammer_policies", "rammer_passes", "rammer_operators", "rammer_lowerings", "rammer_kernels", "rammer_fusion_rules")
HOOKS = ("rammer_devices", *EXTENSIONS, "rammer_transports")
#: Timeout in seconds for each device when all are listed.
PROBING = 10.0
#: Maximum number of characters in the value of a device option.
LONGEST_OPTION: Final = 200
#: Hint that names the devices of this repository.
PLUGINS = "the checkout has plugins: pip install -e plugins/NAME"


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One row of ``rammer devices``. ``state`` is ok, no-hardware, missing-dependency, api-mismatch, conflict,
    load-error or disabled; ``reason`` explains every state but ok."""

    name: str
    state: str
    reason: str = ""
    device: Device | None = None
    hardware: tuple[Hardware, ...] = ()
    traceback: str = ""


class Loadable(Protocol):
    """An entry point: a name and the object that it loads."""

    @property
    def name(self) -> str:
        """The name shown if loading fails."""
        ...

    def load(self) -> Any:
        """Return the plugin: a module or object with hook implementations."""
        ...


@dataclass
class Registry:
    """All plugins of this environment (or of explicit entry points, for tests)."""

    points: Iterable[Loadable] | None = None
    disabled: frozenset[str] = field(default_factory=lambda: _disabled_names())
    broken: dict[str, DeviceStatus] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    failed: dict[tuple[str, str], str] = field(default_factory=dict)  #: Errors by plugin and hook.
    owners: list[tuple[object, str]] = field(default_factory=list)  #: Contributed values and their plugins.

    @cached_property
    def manager(self) -> pluggy.PluginManager:
        """The plugin manager with every loadable plugin registered and its hooks checked."""
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(Hooks)
        points = find_entry_points(GROUP) if self.points is None else sorted(self.points, key=lambda p: p.name)
        labelled = _label_entry_points(points)
        if self.points is None or self.disabled != _disabled_names():  # names in the environment refer to installed plugins only
            _report_unknown(self.disabled, {n for name, point in labelled.items() for n in (point.name, name)})
        for name, point in labelled.items():
            if {point.name, name} & self.disabled:
                self.broken[name] = DeviceStatus(name, "disabled", "named in RAMMER_DISABLE")
                continue
            self.versions[name] = getattr(getattr(point, "dist", None), "version", "")
            if self._is_other_version(name, devices_of_other_api(point, API_VERSION)):
                continue
            try:
                with stdout_to_stderr():
                    plugin = point.load()
                manager.register(plugin, name=name)
                manager.check_pending()
                _check_marks(manager, plugin)
            except (Exception, SystemExit) as problem:
                if manager.has_plugin(name):
                    manager.unregister(name=name)
                if not self._is_other_version(name, devices_of_other_api(point, API_VERSION, whole=True)):
                    self.broken[name] = _load_error(name, problem)
        return manager

    def _is_other_version(self, name: str, others: Sequence[DeclaredDevice]) -> bool:
        """Return True if the plugin's source declares devices of another API version, and report them accordingly."""
        for number, device in enumerate(others):
            key = device.name or name
            if number == 0 or device.name:
                self.broken[key] = DeviceStatus(key, "api-mismatch", _mismatch_reason(device.api))
                self.versions.setdefault(key, self.versions.get(name, ""))
        return bool(others)

    @cached_property
    def devices(self) -> dict[str, Device | DeviceStatus]:
        """Manifests by device name. A device has a status instead if its plugin fails while listing, or if several plugins define
        it."""
        found: dict[str, dict[str, Device]] = {}
        for name, call in self._hook_plugins("rammer_devices"):
            try:
                with stdout_to_stderr():
                    given = call()
                for device in [_check_manifest(d) for group in given for d in group]:
                    if name in (owners := found.setdefault(device.name, {})):
                        raise ValueError(f"it has two devices {device.name!r}")
                    owners[name] = device
            except (Exception, SystemExit) as problem:
                self.broken[name] = _load_error(name, problem)
        result: dict[str, Device | DeviceStatus] = dict(self.broken)
        for name, owners in found.items():
            good = [o for o in owners if o not in self.broken]
            if len(good) > 1:
                result[name] = _conflict_status(name, good)
            elif good:
                result[name] = owners[good[0]]
        return result

    def statuses(self) -> Iterator[DeviceStatus]:
        """Probe every device concurrently and yield its status; never raises. A device whose probe exceeds ``PROBING`` seconds is
        reported as a load error. A broken plugin is reported even if another plugin has a device of its name."""
        probed = _probe_devices({n: d for n, d in self.devices.items() if isinstance(d, Device)})
        for name, entry in sorted(self.devices.items()):
            yield entry if isinstance(entry, DeviceStatus) else probed[name]
        yield from (status for name, status in sorted(self.broken.items()) if self.devices[name] is not status)

    def status(self, name: str) -> DeviceStatus:
        """Return the status of one device. Raises BadInput for an unknown name and suggests the nearest known one."""
        entry = self.devices.get(name)
        if entry is None:
            raise _unknown_device_error(name, sorted(self.devices))
        if isinstance(entry, DeviceStatus):
            return entry
        with stdout_to_stderr():
            return _probe_device(name, entry)

    def open(
        self, spec: str, require: str = "", target: str = "", options: Mapping[str, str] | None = None, run_only: bool = False
    ) -> Backend:
        """Open ``NAME[:INDEX]``; ``run_only``: for machine code alone. Raises BadInput for a malformed or unknown name,
        DeviceUnavailable otherwise."""
        name, _, place = spec.partition(":")
        index = whole_number(place or "0")
        if index is None:
            raise BadInput(f"device index {place!r} is not a number", where=spec, hint=f"write {name}:0")
        request = OpenOptions(index, target, require, options or {}, run_only)
        for key, value in request.options.items():
            if isinstance(value, str) and len(value) > LONGEST_OPTION:
                raise BadInput(f"option {key} has a value of {len(value)} characters", name, f"at most {LONGEST_OPTION}")
        if not target:
            self._check_status(self.status(name), request.index)
        elif name not in self.devices:
            raise _unknown_device_error(name, sorted(self.devices))
        device = self.devices[name]
        if isinstance(device, DeviceStatus):
            raise _unavailable_error(device)
        if device.api != API_VERSION:
            raise _unavailable_error(_mismatch_status(name, device))
        device.check_options(request.options)
        try:
            # Plugins passed as arguments exist in this process only.
            opening = Opening(name, request) if self.points is None else None
            return guard_backend(_check_backend(device.open(request)), name, opening)
        except Exception as problem:
            told = of_driver(problem, f"device {name}")
            if told is None and isinstance(problem, RammerError):
                raise
            if isinstance(told, DeviceUnavailable):
                raise told from problem
            raise DeviceFailure(f"device {name} failed to open: {problem}", where=spec) from problem

    def _check_status(self, status: DeviceStatus, index: int) -> None:
        if status.state != "ok":
            raise _unavailable_error(status)
        if index >= len(status.hardware):
            found = ", ".join(f"{status.name}:{h.index} {h.name}" for h in status.hardware)
            raise DeviceUnavailable(f"unit {status.name}:{index} does not exist", hint=f"found: {found}")

    def policies(self, device: str = "") -> list[Policy]:
        """Return the scheduling policies of all plugins for ``device``."""
        return [policy for _, policy in self._hook_contributions("rammer_policies", check_policies, device=device)]

    def transports(self) -> list[Transport]:
        """Return the transports of all plugins."""
        return [transport for _, transport in self._hook_contributions("rammer_transports", check_transports)]

    def passes(self, device: str = "") -> list[AnyPass]:
        """Return the passes of all plugins for ``device``, of graphs and of tensor expressions."""
        return [step for _, step in self._hook_contributions("rammer_passes", check_passes, device=device)]

    def fusion_rules(self, device: str = "") -> list[FusionRule]:
        """Return the fusion rules of all plugins for ``device``."""
        return [rule for _, rule in self._hook_contributions("rammer_fusion_rules", check_passes, device=device)]

    def operators(self) -> dict[tuple[str, str], CustomOperator]:
        """Return the operators that plugins declare, by (domain, operator)."""
        self.lowerings()  # reports undeclared operators that a plugin lowers, before a model with one of them is rejected
        return self._declared_operators

    @cached_property
    def _declared_operators(self) -> dict[tuple[str, str], CustomOperator]:
        found = {key: o.owned(name) for key, o, name in self._call_hook("rammer_operators", check_declarations)}
        self.owners += [(o, o.plugin) for o in found.values()]
        return found

    def lowerings(self, device: str = "") -> dict[tuple[str, str], LoweringFn]:
        """Return the lowerings of all plugins for ``device`` by (domain, operator)."""

        def checked(group: Any) -> list[tuple[Any, Any]]:
            return check_lowerings(group, self._declared_operators)

        return dict(self._hook_contributions("rammer_lowerings", checked, device=device))

    def extra_kernels(self, device: str, operator: ROperator, binding: Binding) -> list[ROperator]:
        """Return the candidates that other plugins add for ``device``."""
        given = {"device": device, "operator": operator, "binding": binding}
        found = list(self._call_hook("rammer_kernels", lambda group: check_candidates(group, operator), **given))
        self.owners += [(value, name) for _, value, name in found]
        return [value for _, value, _ in found]

    def _hook_contributions(self, hook: str, checked: Checked, **given: str) -> list[tuple[Any, Any]]:
        """Return the keys and values that all plugins contribute to ``hook``, which is called once for each device."""
        call = hook, *given.values()
        if call not in self._cached_contributions:
            found = list(self._call_hook(hook, checked, **given))
            self.owners += [(value, name) for _, value, name in found]
            self._cached_contributions[call] = [(key, value) for key, value, _ in found]
        return self._cached_contributions[call]

    @cached_property
    def _cached_contributions(self) -> dict[tuple[str, ...], list[tuple[Any, Any]]]:
        return {}

    def _call_hook(self, hook: str, checked: Checked, **given: Any) -> Iterator[tuple[Any, Any, str]]:
        """Yield the key, value and plugin name of each result of ``hook``. A plugin is skipped with a warning if it fails in the
        hook, or if it returns a key that another plugin already has."""
        owners: dict[Any, str] = {}
        for name, call in self._hook_plugins(hook):
            try:
                pairs = [pair for group in call(**given) for pair in checked(group)]
                for key, _ in pairs:
                    if key is not None and owners.setdefault(key, name) != name:
                        raise ValueError(f"plugin {owners[key]} also has {describe_key(key)}")
            except (Exception, SystemExit) as problem:
                self._leave_out(name, hook, problem)
            else:
                yield from ((key, value, name) for key, value in pairs)

    def _hook_plugins(self, hook: str) -> list[tuple[str, Callable[..., list[Any]]]]:
        """Return the plugins that implement ``hook``, each with a separate caller."""
        if hook not in self._hook_callers:
            plugins = self.manager.list_name_plugin()
            filling = {i.plugin_name for i in getattr(self.manager.hook, hook).get_hookimpls()}
            self._hook_callers[hook] = [
                (name, self.manager.subset_hook_caller(hook, [p for n, p in plugins if n != name]))
                for name, _ in plugins
                if name in filling
            ]
        return self._hook_callers[hook]

    @cached_property
    def _hook_callers(self) -> dict[str, list[tuple[str, Callable[..., list[Any]]]]]:
        return {}

    def _leave_out(self, name: str, hook: str, problem: BaseException) -> None:
        """Record that a plugin failed in a hook, and warn once."""
        if (name, hook) not in self.failed:
            self.failed[name, hook] = text = f"{type(problem).__name__}: {problem}"
            sys.stderr.write(
                to_printable(
                    f"rammer: warning: plugin {name} fails in {hook} and is skipped there: {text} "
                    f"(RAMMER_DISABLE={name} disables it)\n"
                )
            )

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Convert errors that a plugin causes in this context to a DeviceFailure that names the plugin.

        Covers errors raised by a plugin's pass, policy, lowering, declared operator or kernel. Also covers errors that the core
        raises about one of them (``culprit``)."""
        try:
            yield
        except Exception as problem:
            culprit = getattr(problem, "culprit", None)
            name = next((n for value, n in reversed(self.owners) if value is culprit), None)
            if name is None and not isinstance(problem, RammerError):
                name = self._blame_plugin(problem)
            if name is None:
                raise
            said = problem.what if isinstance(problem, RammerError) else f"{type(problem).__name__}: {problem}"
            raise DeviceFailure(
                f"plugin {name} fails: {said}", getattr(problem, "where", ""), f"leave it out: RAMMER_DISABLE={name}"
            ) from problem

    def _blame_plugin(self, problem: Exception) -> str | None:
        """Return the plugin whose code raised ``problem``."""
        owners = {package_of(p): n for n, p in self.manager.list_name_plugin() if self._is_extension(n)}
        frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(problem.__traceback__)]
        return next((owners[f] for f in (f.partition(".")[0] for f in reversed(frames)) if f in owners), None)

    def _is_extension(self, name: str) -> bool:
        """Return True if a plugin implements a hook for devices of other plugins."""
        return any(name == n for hook in EXTENSIONS for n, _ in self._hook_plugins(hook))

    def extension_key(self) -> str:
        """Return names, versions and code hashes of the plugins that change compilation, and the hooks that failed. Part of the
        key of compiled programs and tuned kernels."""
        extending = [(n, p) for n, p in sorted(self.manager.list_name_plugin(), key=itemgetter(0)) if self._is_extension(n)]
        parts = [f"{name}={self.versions.get(name, '')}+{code_hash(package_of(plugin))}" for name, plugin in extending]
        return " ".join([*parts, *(f"{name}!{hook}" for name, hook in sorted(self.failed))])


def _label_entry_points(points: Iterable[Loadable]) -> dict[str, Loadable]:
    """Return the entry points by name; duplicate names get the name of their distribution."""
    points = list(points)
    count, result = Counter(p.name for p in points), dict[str, Loadable]()
    for point in points:
        label = point.name
        if count[label] > 1:
            label += f"@{getattr(getattr(point, 'dist', None), 'name', '') or 'unknown'}"
        while label in result:
            label += "+"
        result[label] = point
    return result


def _check_marks(manager: pluggy.PluginManager, plugin: object) -> None:
    """Raise TypeError if a plugin implements no hook, or has an unmarked function with a hook's name."""
    filled = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
    for hook in HOOKS:
        if hook not in filled and callable(getattr(plugin, hook, None)):
            raise TypeError(f"{hook} is not marked with @hookimpl (rammer.device.hooks)")
    if not filled:
        raise TypeError(f"it implements no hook; the hooks are {', '.join(HOOKS)}")


def _conflict_status(name: str, owners: list[str]) -> DeviceStatus:
    text = " and ".join([", ".join(owners[:-1]), owners[-1]])
    return DeviceStatus(
        name,
        "conflict",
        f"the plugins {text} have a device {name!r}; uninstall one, or leave it out: RAMMER_DISABLE={owners[-1]}",
    )


def _disabled_names() -> frozenset[str]:
    """Return the names in RAMMER_DISABLE."""
    return frozenset(os.environ.get("RAMMER_DISABLE", "").replace(",", " ").split())


def _report_unknown(disabled: Collection[str], known: Collection[str]) -> None:
    """Warn of names in RAMMER_DISABLE that match no plugin, and suggest the nearest names."""
    for name in sorted(set(disabled) - set(known)):
        sys.stderr.write(
            to_printable(f"rammer: warning: RAMMER_DISABLE names {name!r}, but {_suggest_names(name, sorted(known))}\n")
        )


def _suggest_names(name: str, known: list[str]) -> str:
    import difflib  # slow to import

    nearest = difflib.get_close_matches(name, known, 2)
    return (
        f"no plugin has that name; did you mean {' or '.join(map(repr, nearest))}?"
        if nearest
        else (f"no plugin has that name; installed: {', '.join(known) or 'none'}")
    )


def _mismatch_reason(api: int) -> str:
    return f"the plugin has API version {api}, this core has {API_VERSION}; upgrade the older one"


def _mismatch_status(name: str, device: Device) -> DeviceStatus:
    return DeviceStatus(name, "api-mismatch", _mismatch_reason(device.api), device)


def _probe_devices(devices: Mapping[str, Device]) -> dict[str, DeviceStatus]:
    """Probe devices in one thread each. A device that times out gets a load error, and its thread is abandoned."""
    found: dict[str, DeviceStatus] = {}

    def probe(name: str, device: Device) -> None:
        found[name] = _probe_device(name, device)

    with stdout_to_stderr():
        threads = [threading.Thread(target=probe, args=item, daemon=True) for item in devices.items()]
        for thread in threads:
            thread.start()
        end = time.monotonic() + PROBING
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        late = f"probe did not finish within {PROBING:g} s"
        return {n: found.get(n) or DeviceStatus(n, "load-error", late, d) for n, d in devices.items()}


def _probe_device(name: str, device: Device) -> DeviceStatus:
    if device.api != API_VERSION:
        return _mismatch_status(name, device)
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


def _check_manifest(found: Any) -> Device:
    if not isinstance(found, Device):
        raise TypeError(f"{found!r} is not a Device")
    return found


def _check_backend(backend: Backend) -> Backend:
    """Return the Backend after checking it. Raises TypeError if it is of another class or lacks a required method."""
    if not isinstance(backend, Backend):
        raise TypeError(f"{type(backend).__name__} is not a rammer.device.manifest.Backend")
    lacking = [m for m in sorted(Backend.__abstractmethods__) if not callable(getattr(backend, m))]
    if lacking:
        raise TypeError(f"{type(backend).__name__} has no method {lacking[0]} (rammer.device.manifest.Backend)")
    return backend


def _load_error(name: str, problem: BaseException) -> DeviceStatus:
    text = "".join(traceback.format_exception(problem))
    first = f"{type(problem).__name__}: {problem}".splitlines()[0]
    return DeviceStatus(name, "load-error", first, None, (), text)


def _unavailable_error(status: DeviceStatus) -> DeviceUnavailable:
    return DeviceUnavailable(
        f"device {status.name} is not available: {status.state}",
        where=status.reason,
        hint="`rammer devices` lists what works here",
    )


def _unknown_device_error(name: str, known: list[str]) -> BadInput:
    import difflib  # slow to import

    nearest = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"installed: {', '.join(known) or 'none'}; {PLUGINS}"
    return BadInput(f"unknown device {name!r}", hint=hint + " (the name 'rammer' on PyPI is another project)")


def find_entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of ``group`` by name, cached: scanning all distributions takes longer than most calls of a
    registry."""
    return _found(group, tuple((folder, _change_time(folder)) for folder in sys.path))


@lru_cache(8)
def _found(group: str, folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    # Most distributions have no point of the group, and are not parsed. The first of two equal points has the earlier path.
    named = (d for d in distributions() if f"[{group}]" in (d.read_text("entry_points.txt") or ""))
    points = dict.fromkeys(point for d in named for point in d.entry_points if point.group == group)
    return tuple(sorted(points, key=lambda point: point.name))


def _change_time(folder: str) -> int:
    """Return the time in nanoseconds when the names in a folder or an archive last changed: installing a package changes them."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0
