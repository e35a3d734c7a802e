"""An OpenCL GPU compared with the same GPU through cuda without tensor cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import onnx
from measuring import Settings, Way, compile_ahead, each, measured
from peers import reference_outputs
from result import Result

from rammer.report.text_table import format_duration

#: Kernel families of cuda that use tensor cores, as patterns.
TENSOR_CORES: Final = ("gemm_*", "attention")
#: The compilation by cuda: launches, without those kernels.
REQUEST: Final[Mapping[str, Any]] = {"exclude_family": TENSOR_CORES, "device_options": {"executor": "graph"}}
#: The executors of rocm, of which the faster one counts: it is what rocm chooses by default, by whole runs.
EXECUTORS: Final = ("waves", "mixed")
CUDA: Final = "cuda without tensor cores"
HEADERS: Final = ("model", *(f"rocm {e}" for e in EXECUTORS), CUDA, "rocm / cuda", "launches", "operators", "rel. L2")


def beside_cuda(settings: Settings) -> Result:
    """Measure the models through OpenCL and through cuda. A ``--option`` is for rocm."""
    rocm, cuda = settings.devices
    options = [{**settings.options, **({"executor": e} if rocm.partition(":")[0] == "rocm" else {})} for e in EXECUTORS]
    ways = [*(Way(e, {"device_options": o}, rocm) for e, o in zip(EXECUTORS, options, strict=True)), Way(CUDA, REQUEST, cuda)]
    compile_ahead(replace(settings, models=settings.every if settings.models[:1] == settings.every[:1] else ()), ways)
    rows = list[list[str]]()
    for model in each(settings, checked=False):
        reference = reference_outputs(onnx.load(str(model.path)), model.feeds, "cuda" if cuda.startswith("cuda") else "cpu")
        found = measured(model.path, model.feeds, ways, settings, reference)
        ours, base = [m for m in found[:-1] if not m.failure], found[-1]
        ratio = f"{min(m.seconds for m in ours) / base.seconds:.3f}" if ours and not base.failure else "-"
        facts = [str(found[0].kernels), str(found[0].operators), f"{max(m.error for m in found):.1e}"]
        rows.append([model.entry.key, *(m.failure or format_duration(m.seconds) for m in found), ratio, *facts])
        settings.say("  " + "  ".join(rows[-1]))
    notes = [
        "Medians of bound calls. rocm: wall time, by launches of waves, and with one launch for each range of small waves. The "
        f"ratio has the faster. cuda: GPU events, without families {', '.join(TENSOR_CORES)}, in a graph of launches. "
        "Launches and operators are those of waves. The error is the worst of the row, relative to float64."
    ]
    return Result("An OpenCL GPU beside cuda without tensor cores", HEADERS, rows, notes)
