"""Execution providers: ONNX Runtime's names for devices, mapped to rammer's.

A device declares the providers that it replaces (``Device.providers``). ``CPUExecutionProvider`` is the first unit that computes
on a CPU. ``RammerExecutionProvider`` has the option ``device``, and the other options of ``rammer.compile``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from rammer.compile_options import Request, default_of, flag_of, parameter_of
from rammer.device.loader import Registry
from rammer.device.manifest import Device
from rammer.errors import BadInput

CPU: Final = "CPUExecutionProvider"
RAMMER: Final = "RammerExecutionProvider"

#: Options of a provider: texts, as ONNX Runtime passes them.
ProviderOptions = dict[str, str]


@dataclass(frozen=True)
class Unit:
    """A working unit of a device, and the providers that the device replaces if the unit is a GPU."""

    device: str
    index: int
    kind: str
    providers: tuple[str, ...]


@cache
def working_units() -> tuple[Unit, ...]:
    """Return every working unit of this machine."""
    found = []
    for status in Registry().statuses():
        if status.state == "ok" and isinstance(status.device, Device):
            providers = status.device.providers
            found += [Unit(status.name, u.index, u.kind, providers if u.kind == "gpu" else ()) for u in status.hardware]
    return tuple(found)


def get_available_providers() -> list[str]:
    """Return the providers whose devices work here, in order of precedence."""
    units = working_units()
    cpu = [CPU] if any(u.kind == "cpu" for u in units) else []
    return [*dict.fromkeys(name for u in units for name in u.providers), *cpu, RAMMER]


def get_all_providers() -> list[str]:
    """Return the providers of all installed devices, in order of precedence, whether they work here or not."""
    devices = [d for d in Registry().devices.values() if isinstance(d, Device)]
    return [*dict.fromkeys(name for d in devices for name in d.providers), CPU, RAMMER]


def get_device() -> str:
    """Return ``GPU`` if a GPU works here, else ``CPU``."""
    return "GPU" if any(u.kind == "gpu" for u in working_units()) else "CPU"


def normalize_providers(
    providers: Sequence[str | tuple[str, Mapping[Any, Any]]] | None, options: Sequence[Mapping[Any, Any]] | None
) -> dict[str, ProviderOptions]:
    """Return the options of each requested provider, in order. Warns of unavailable and repeated providers. Raises ValueError for
    malformed arguments."""
    if providers is None:
        return {}
    if not isinstance(providers, Sequence):
        raise ValueError("'providers' should be a sequence.")
    if options is not None:
        if not isinstance(options, Sequence):
            raise ValueError("'provider_options' should be a sequence.")
        if len(providers) != len(options):
            raise ValueError("'providers' and 'provider_options' should be the same length if both are given.")
        if not all(isinstance(p, str) for p in providers):
            raise ValueError("Only string values for 'providers' are supported if 'provider_options' is given.")
        if not all(isinstance(o, dict) for o in options):
            raise ValueError("'provider_options' values must be dicts.")
        pairs: list[Any] = list(zip(providers, options, strict=True))
    else:
        pairs = [(p, {}) if isinstance(p, str) else p for p in providers]
    found: dict[str, ProviderOptions] = {}
    available = get_available_providers()
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], dict)):
            raise ValueError("'providers' values must be either strings or (string, dict) tuples.")
        name, given = pair
        if name not in available:
            listed = ", ".join(available)
            warnings.warn(
                f"Specified provider '{name}' is not in available provider names. Available providers: '{listed}'", stacklevel=4
            )
        if name in found:
            warnings.warn(f"Duplicate provider '{name}' encountered, ignoring.", stacklevel=4)
        else:
            found[name] = {str(k): str(v) for k, v in given.items()}
    return found


def select_device(requested: Mapping[str, ProviderOptions]) -> tuple[str, str, dict[str, Any]]:
    """Return (provider, device, options of ``rammer.compile``) for the first requested provider that works here; device "" is the
    default device. Without a request, all providers are candidates. If none of the requested ones works, the CPU computes. Raises
    RuntimeError for a name that is not a provider's, and ValueError for a unit that does not exist."""
    for name in requested:
        if not name.endswith("ExecutionProvider"):
            raise RuntimeError(f"Unknown Provider Type: {name}")
    available = get_available_providers()
    name = next((n for n in requested or available if n in available), CPU if CPU in available else RAMMER)
    options = dict(requested.get(name, {}))
    if name == RAMMER:
        return name, options.pop("device", ""), _parse_options(options)
    index = int(options["device_id"]) if options.get("device_id", "").isdigit() else None
    for unit in working_units():
        if (unit.kind == "cpu" if name == CPU else name in unit.providers) and index in (None, unit.index):
            return name, f"{unit.device}:{unit.index}", {}
    raise ValueError(f"{name} has no device {index}")


def takes_cores(device: str) -> bool:
    """Return True if programs of a device can be limited to some of its cores."""
    found = Registry().devices.get(device.partition(":")[0])
    return isinstance(found, Device) and any(option.name == "cores" for option in found.options)


def _parse_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return options of the RammerExecutionProvider as parameters of ``rammer.compile``. Raises BadInput for an unknown one."""
    fields = Request.__dataclass_fields__.values()
    known = {
        parameter_of(f): f for f in fields if isinstance(f.default, int) or (flag_of(f) and isinstance(default_of(f), str | None))
    }
    for name in options:
        if name not in known:
            raise BadInput(f"unknown option {name!r} of {RAMMER}", hint=f"the options are: device, {', '.join(known)}")
    return {n: int(v) if isinstance(known[n].default, int) else v for n, v in options.items()}
