"""IOS's schedules specialised for a batch or a device, and the same models on every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from measuring import Measured, Settings, Way, each, measured
from replay import Replay, searched
from result import Result

from rammer.errors import BadInput
from rammer.report.table import duration
from rammer.schedule.policy import Policy

#: Batches of the matrix (MLSys'21, table 3, has 1, 32 and 128).
BATCHES: Final = (1, 4, 16)


def _cells(found: Sequence[Measured]) -> list[str]:
    """Times of one row; the best one in bold."""
    best = min((m.seconds for m in found if not m.failure), default=0.0)
    shown = [m.failure or duration(m.seconds) for m in found]
    return [f"**{s}**" if not m.failure and m.seconds == best else s for s, m in zip(shown, found, strict=True)]


def _crossed(runs: Mapping[str, tuple[Any, Any, str]], settings: Settings) -> list[list[str]]:
    """A row for each (model, inputs, device): its times with the stages searched for each of them."""
    plans: dict[str, Replay | str] = {}
    for name, (model, feeds, device) in runs.items():
        settings.say(f"  searching for {name}")
        plans[name] = searched(model, feeds, settings, name, device)
    rows = []
    for name, (model, feeds, device) in runs.items():
        ways = [Way(f"as for {n}", {"batching": "off"}, device, cast(Policy, p)) for n, p in plans.items()]
        found = measured(model, feeds, ways, settings)
        rows.append([name, *_cells(found), f"{max(m.error for m in found):.1e}"])
        settings.say("  " + "  ".join(rows[-1]))
    return rows


def batches(settings: Settings) -> Result:
    """IOS's stages searched for one batch and run with another."""
    rows: list[list[str]] = []
    for model in each(settings, checked=False):
        runs = {}
        for batch in BATCHES:
            other = model.entry.of_batch(batch)
            runs[f"batch {batch}"] = other.build(settings.seed), other.feeds(settings.seed), settings.device
        rows += [[model.entry.key, *row] for row in _crossed(runs, settings)]
    headers = ("model", "run with", *(f"stages for batch {b}" for b in BATCHES), "rel. L2 to the first")
    notes = [
        "The best of a row is bold. Kernels are chosen for the batch that runs; which operators share a stage is taken over."
    ]
    return Result(f"IOS specialised for a batch, {settings.device}", headers, rows, notes)


def devices(settings: Settings) -> Result:
    """IOS's stages searched for one device and run on another."""
    if len(settings.devices) < 2:
        raise BadInput("ios-device compares devices", hint="name two: --device rocm --device ipu_sim")
    rows: list[list[str]] = []
    for model in each(settings, checked=False):
        runs = {d: (model.path, model.feeds, d) for d in settings.devices}
        rows += [[model.entry.key, *row] for row in _crossed(runs, settings)]
    headers = ("model", "run on", *(f"stages for {d}" for d in settings.devices), "rel. L2 to the first")
    notes = ["The best of a row is bold. Where another device fuses otherwise, an operator has the stage of its parts."]
    return Result("IOS specialised for a device", headers, rows, notes)


def across(settings: Settings) -> Result:
    """The same models on every device."""
    headers = ("model", "device", "operators", "launches", "tasks", "compile s", "median", "rel. L2")
    rows: list[list[str]] = []
    for model in each(settings):
        for device in settings.devices:
            (one,) = measured(model.path, model.feeds, [Way(device, {}, device)], settings, model.reference)
            counts = [str(n) for n in (one.operators, one.kernels, one.tasks)]
            end = [f"{one.compiling:.1f}", duration(one.seconds), f"{one.error:.1e}"]
            rows.append([model.entry.key, device, *(["-"] * 5 + [one.failure] if one.failure else counts + end)])
    return Result("The same models on every device", headers, rows, ["A simulator's times are simulated; starts may be warm."])
