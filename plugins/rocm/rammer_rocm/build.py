"""Compilation of OpenCL C, with readable error messages."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from contextlib import suppress
from threading import Lock
from typing import Any, Final

from rammer.cache import Cache
from rammer.errors import DeviceFailure

from rammer_rocm.icd import CONFIG_PREFIX
from rammer_rocm.opencl_runtime import import_opencl

#: Build options for correctly rounded division, on devices that support it. The define informs the source (``dialect.ROUNDED``).
ROUNDED: Final = ("-cl-fp32-correctly-rounded-divide-sqrt", "-DRM_ROUNDED")

#: The define for copies to local memory that finish later (``ring.device_text``).
ASYNC: Final = ("-DRM_ASYNC",)

#: The option that limits registers of NVIDIA GPUs, so that a processor with 65,536 holds two groups of 256 work-items.
REGISTERS: Final = ("-cl-nv-maxrregcount=128",)

#: Maximum number of build log lines in an error message.
LOG_LINES = 12
#: Maximum number of built programs cached in memory.
REMEMBERED = 4
#: Entries: binaries of programs, by source, options, driver and the driver's environment.
_CACHE: Final = Cache("rocm-binaries")
#: Held while a build filters warnings, because warning filters are process-wide.
_FILTERED: Final = Lock()


class Builder:
    """An LRU cache of built programs for one context. Measuring a kernel loads the same source repeatedly."""

    def __init__(self, context: Any, options: tuple[str, ...]) -> None:
        self.context, self.options = context, options
        self._recent: OrderedDict[str, Any] = OrderedDict()

    def __call__(self, source: str) -> Any:
        """Return the built program. Raises DeviceFailure."""
        if source not in self._recent:
            self._recent[source] = build_program(self.context, source, self.options)
            if len(self._recent) > REMEMBERED:
                self._recent.popitem(last=False)
        self._recent.move_to_end(source)
        return self._recent[source]


def build_program(context: Any, source: str, options: tuple[str, ...] = ()) -> Any:
    """Build a program, or load its binary from the cache.

    Raises DeviceFailure with the first error lines of the build log."""
    cl = import_opencl()
    (device,) = context.devices
    about = [device.platform.name, device.platform.version, device.name, device.version, device.driver_version]
    about += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(CONFIG_PREFIX)]
    key = _CACHE.key(source, *options, *about)
    with _FILTERED, warnings.catch_warnings():
        # Runtimes print a banner into every build log, and pyopencl warns of any output.
        warnings.simplefilter("ignore")
        known = _CACHE.get(key, bytes)
        if known is not None:
            with suppress(cl.Error):  # another driver of the same version refuses it
                return cl.Program(context, [device], [known]).build(list(options))
        try:
            program = cl.Program(context, source).build(list(options), cache_dir=False)
        except cl.Error as problem:
            raise DeviceFailure("an OpenCL kernel does not compile", where=_extract_errors(str(problem))) from problem
        _CACHE.put(key, program.get_info(cl.program_info.BINARIES)[0])
        return program


def _extract_errors(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()] or lines
    return "\n      ".join(telling[:LOG_LINES])


def build_options(device: Any) -> tuple[str, ...]:
    """Return the build options: the newest supported language version, and correctly rounded division if available."""
    known = language_version(device)
    language = ("-cl-std=CL3.0",) if known >= (3, 0) else ("-cl-std=CL2.0",) if known >= (2, 0) else ()
    able = device.single_fp_config & import_opencl().device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT
    capability = nvidia_capability(device)
    copies = ASYNC if capability >= (8, 0) else ()
    return language + (ROUNDED if able else ()) + copies + (REGISTERS if capability >= (7, 0) else ())


def nvidia_capability(device: Any) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU, as (major, minor); (0, 0) for other devices."""
    if "cl_nv_device_attribute_query" not in device.extensions.split():
        return 0, 0
    return int(device.compute_capability_major_nv), int(device.compute_capability_minor_nv)


def language_version(device: Any) -> tuple[int, int]:
    """Return the newest OpenCL C version of ``device``. An OpenCL 3.0 device may still name 1.2 as its default language."""
    language = device.opencl_c_version.split()[2]
    whole = device.version.split()[1]
    return max(_parse_version(language), _parse_version(whole) if _parse_version(whole) >= (3, 0) else (1, 0))


def _parse_version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)
