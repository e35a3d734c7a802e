"""Effect of fusion: none, element-wise operators only, and all memory layers (Welder, OSDI'23, figure 13 and table 4)."""

from __future__ import annotations

import math
from typing import Final

from measuring import Settings, Way, compile_ahead, each, measured
from result import Result

from rammer.compile_options import FUSION
from rammer.report.text_table import format_duration, format_size

_SIZES: Final = ("operators", "intermediates", "predicted traffic")
HEADERS: Final = ("model", "fusion", *_SIZES, "predicted", "median", "none/this", "rel. L2")


def ablation(settings: Settings) -> Result:
    """Measure every model with each kind of fusion."""
    ways = [Way(name, {"fusion": name}) for name in FUSION]
    compile_ahead(settings, ways)
    rows = list[list[str]]()
    for model in each(settings):
        found = {m.way.name: m for m in measured(model.path, model.feeds, ways, settings, model.reference)}
        for name, one in found.items():
            if one.failure:
                rows.append([model.entry.key, name, *["-"] * 6, one.failure])
                continue
            ratio = found["none"].seconds / one.seconds if not found["none"].failure else math.nan
            moved = [format_size(one.intermediates), format_size(one.traffic)]
            times = [format_duration(one.predicted), format_duration(one.seconds)]
            rows.append([model.entry.key, name, str(one.operators), *moved, *times, f"{ratio:.2f}", f"{one.error:.1e}"])
    notes = [
        "Intermediates: tensors that one operator writes to device memory and another reads. Predicted traffic: bytes of all "
        "tasks to and from device memory, in whole transactions, without the effect of caches. Measured traffic: not measured."
    ]
    return Result(f"What fusion is worth, {settings.device}", HEADERS, rows, notes, known=2)
