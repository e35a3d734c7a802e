"""Matrices: every model by every policy, and IOS's schedules specialised for a batch or a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from measuring import Measured, Settings, Way, each, measured, opened
from replay import Replay, searched
from result import Result

from rammer.errors import BadInput, RammerError
from rammer.peers.prepare import relative_error
from rammer.report.table import duration
from rammer.schedule.policy import Policy
from tables.scheduling import POLICIES

#: Batches of the matrix (MLSys'21, table 3, has 1, 32 and 128).
BATCHES: Final = (1, 4, 16)
#: Largest relative L2 distance to the reference.
RIGHT: Final = 1e-4


def matrix(settings: Settings) -> Result:
    """Every model by every policy on every device: compiled, verified, run once, compared with the reference."""
    rows, failures = list[list[str]](), list[str]()
    for model in each(settings):
        assert model.reference is not None
        for device in settings.devices:
            cells, seconds = list[str](), list[float]()
            for policy in POLICIES:
                try:
                    program = opened(model.path, model.feeds, Way(policy, {"policy": policy}, device), settings)
                except RammerError as problem:
                    failures.append(f"- {model.entry.key}, {policy}, {device}: {problem.what.splitlines()[0]}")
                    cells.append("failed")
                    continue
                program.bound.run()
                program.bound.synchronize()
                error = relative_error(program.bound.to_host(), model.reference)
                seconds.append(program.compiling)
                program.close()
                cells.append(f"{error:.1e}")
                if not error <= RIGHT:
                    failures.append(f"- {model.entry.key}, {policy}, {device}: relative L2 error {error:.2e}")
            rows.append([model.entry.key, device, *cells, f"{max(seconds, default=0.0):.1f}"])
            settings.say("  " + "  ".join(rows[-1][1:]))
    said = "\n".join(failures) or "Of what this call ran, none failed."
    notes = [f"Relative L2 distances to ONNX Runtime; at most {RIGHT:g} is right.", said]
    return Result("Every model by every policy", ("model", "device", *POLICIES, "longest compile s"), rows, notes)


def failed(result: Result) -> bool:
    """Whether a matrix has a cell that is wrong: of any row, those kept from earlier too."""
    cells = [cell for row in result.rows for cell in row[2 : 2 + len(POLICIES)]]
    return any(cell == "failed" or not float(cell) <= RIGHT for cell in cells)


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
