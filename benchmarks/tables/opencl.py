"""An OpenCL GPU beside the same GPU through cuda without tensor cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from measuring import Settings, Way, compile_ahead, each, measured
from result import Result

from rammer.cache.cache_location import cache_folder
from rammer.cache.disk_cache import clear_cache
from rammer.report.text_table import format_duration

#: Kernel families of cuda that use tensor cores, as patterns.
TENSOR_CORES: Final = ("gemm_*", "attention")
#: The compilation by cuda: launches as rocm's, without those kernels.
REQUEST: Final[Mapping[str, Any]] = {"exclude_family": TENSOR_CORES, "device_options": {"executor": "graph"}}
CUDA: Final = "cuda without tensor cores"
HEADERS: Final = ("model", "rocm", CUDA, "rocm / cuda", "launches", "form of rocm", "compile s", "rel. L2")


def beside_cuda(settings: Settings) -> Result:
    """Measure the models through OpenCL and through cuda. A ``--option`` is for rocm."""
    rocm, cuda = settings.devices
    ways = Way(rocm, {}, rocm), Way(CUDA, REQUEST, cuda)
    compile_ahead(settings, ways)
    if settings.ahead:  # choices that were measured under this load; the kernels stay
        clear_cache(cache_folder(), "tuned")
    rows = list[list[str]]()
    for model in each(settings):
        ours, base = found = measured(model.path, model.feeds, ways, replace(settings, ahead=0), model.reference)
        ratio = "-" if ours.failure or base.failure else f"{ours.seconds / base.seconds:.3f}"
        form = ours.choice.rpartition("form ")[2] or "-"
        facts = [ratio, str(ours.kernels), form, f"{ours.compiling:.1f}", f"{max(m.error for m in found):.1e}"]
        rows.append([model.entry.key, *(m.failure or format_duration(m.seconds) for m in found), *facts])
        settings.say("  " + "  ".join(rows[-1]))
    notes = [
        "Medians of bound calls. rocm: wall time, with the copies of inputs and outputs on the device. cuda: GPU events, without "
        f"families {', '.join(TENSOR_CORES)}, in a graph of launches. The error is the worse of the two."
    ]
    return Result("An OpenCL GPU beside cuda without tensor cores", HEADERS, rows, notes)
