"""IOS's schedules specialised for a batch or a device, and the same models on every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from measuring import Settings, Subject, Way, compile_ahead, each, measured, subject
from replay import Found, Replay, searched
from result import Result

from rammer.device.loader import Registry
from rammer.errors import BadInput
from rammer.report.text_table import format_duration
from rammer.schedule.policy import Policy

#: Batches of the matrix. MLSys'21, table 3, has 1, 32 and 128; a current GPU is full long before 128.
BATCHES: Final = (1, 16, 32)
BOLD: Final = "The best of a row is bold."
#: Last columns of both matrices. The first is the run's time with the stages searched for it, relative to the best of the row.
ENDS: Final = ("its own / the best", "rel. L2 to the first")


@dataclass(frozen=True)
class Run:
    """A row: model, device, and the label of the stages that were searched for it."""

    name: str
    model: Subject
    device: str
    own: str


def hardware(device: str, settings: Settings) -> str:
    """Return the label of a stage search: device, hardware and tuning."""
    backend = Registry().open(device, "", "", settings.options)
    try:
        tuned = f", --tune {settings.tune}" if settings.tune != "off" else ""
        return f"{device.partition(':')[0]} on {backend.hardware.name}{tuned}"
    finally:
        backend.close()


def stages_for(run: Run, key: str, label: str, settings: Settings) -> dict[str, Replay]:
    """Return the stored stages for model ``key``, after searching for those of ``label`` if missing."""
    file = Found(settings.stages)
    found = file.of(key)
    if label not in found:
        settings.say(f"  searching for {run.name}")
        found[label] = searched(run.model.path, run.model.feeds, settings, label, run.device)
        file.keep(key, found[label])
    return found


def _cells(values: Sequence[float], failures: Sequence[str]) -> list[str]:
    """Return the times of one row, the best one in bold."""
    best = min((v for v, f in zip(values, failures, strict=True) if not f), default=0.0)
    shown = [f or format_duration(v) for v, f in zip(values, failures, strict=True)]
    return [f"**{s}**" if not f and v == best else s for s, v, f in zip(shown, values, failures, strict=True)]


def _ways(plans: Mapping[str, Replay], device: str) -> list[Way]:
    return [Way(f"as for {n}", {"batching": "off"}, device, cast(Policy, p)) for n, p in plans.items()]


def _crossed(key: str, runs: Sequence[Run], plans: Mapping[str, Replay], settings: Settings) -> list[list[str]]:
    """Return for each run its measured and predicted times with all stages, and the ratio of its stages' time to the best."""
    rows = list[list[str]]()
    for run in runs:
        found = dict(zip(plans, measured(run.model.path, run.model.feeds, _ways(plans, run.device), settings), strict=True))
        failures = [m.failure for m in found.values()]
        error = f"{max(m.error for m in found.values()):.1e}"
        for what, seconds in (("measured", "seconds"), ("predicted", "predicted")):
            times = {n: float(getattr(m, seconds)) for n, m in found.items()}
            best = min((times[n] for n, m in found.items() if not m.failure), default=0.0)
            near = f"{times[run.own] / best:.3f}" if best and not found[run.own].failure else "-"
            rows.append([key, run.name, what, *_cells([*times.values()], failures), near, error if what == "measured" else "-"])
            settings.say("  " + "  ".join(rows[-1]))
    return rows


def batches(settings: Settings) -> Result:
    """Measure IOS's stages searched for one batch and run with another."""
    rows = list[list[str]]()
    label = hardware(settings.device, settings)
    for model in each(settings, checked=False):
        key = model.entry.key
        plans, runs = dict[str, Replay](), list[Run]()
        for batch in BATCHES:
            other = subject(key, settings.seed, False, batch)
            runs.append(Run(f"batch {batch}", other, settings.device, f"batch {batch}"))
            plans[f"batch {batch}"] = stages_for(runs[-1], other.entry.key, label, settings)[label]
        compile_ahead(replace(settings, models=(key,)), _ways(plans, settings.device), BATCHES)
        rows += _crossed(key, runs, plans, settings)
    headers = ("model", "run with", "time", *(f"stages for batch {b}" for b in BATCHES), *ENDS)
    notes = [BOLD + " Kernels are chosen for the batch that runs; which operators share a stage is taken over."]
    return Result(f"IOS specialised for a batch, {settings.device}", headers, rows, notes)


def devices(settings: Settings) -> Result:
    """Measure IOS's stages searched for one device and run on another: of this machine or, by a file of stages, of others."""
    rows = list[list[str]]()
    plans = dict[str, Replay]()
    labels = {device: hardware(device, settings) for device in settings.devices}
    for model in each(settings, checked=False):
        runs = [Run(label, model, device, label) for device, label in labels.items()]
        for run in runs:
            plans = {**plans, **stages_for(run, model.entry.key, run.own, settings)}
        if len(plans) < 2 and settings.stages is None:
            raise BadInput(
                "ios-device compares devices", hint="name two: --device rocm --device ipu_sim, or a file: --stages FILE"
            )
        for device in settings.devices:
            compile_ahead(replace(settings, models=(model.entry.key,)), _ways(plans, device))
        rows += _crossed(model.entry.key, runs, plans, settings)
    headers = ("model", "run on", "time", *(f"stages for {name}" for name in plans), *ENDS)
    notes = [BOLD + " Where another device fuses otherwise, an operator has the stage of its parts."]
    return Result("IOS specialised for a device", headers, rows, notes, known=2)


def across(settings: Settings) -> Result:
    """Measure the same models on every device."""
    headers = ("model", "device", "operators", "launches", "tasks", "compile s", "median", "rel. L2")
    rows: list[list[str]] = []
    for model in each(settings):
        for device in settings.devices:
            (one,) = measured(model.path, model.feeds, [Way(device, {}, device)], settings, model.reference)
            counts = [str(n) for n in (one.operators, one.kernels, one.tasks)]
            end = [f"{one.compiling:.1f}", format_duration(one.seconds), f"{one.error:.1e}"]
            rows.append([model.entry.key, device, *(["-"] * 5 + [one.failure] if one.failure else counts + end)])
    return Result("The same models on every device", headers, rows, ["A simulator's times are simulated; starts may be warm."])
