"""Effect of policies: all of them on Rammer's models, Rammer's three bars, IOS's five, and IOS's pruning."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from measuring import Measured, Settings, Way, compile_ahead, each, measured
from replay import graphs_of
from result import Result

from rammer.report.text_table import format_duration
from rammer.schedule.ios import IOS, PROOFS
from rammer.schedule.policy import Memory

#: Rammer's six models and IOS's four (OSDI'20, section 5; MLSys'21, section 6).
RAMMER: Final = ("resnext29_branches", "nasnet_cifar", "alexnet", "deepspeech2", "lstm_tc", "seq2seq")
POLICIES: Final = ("auto", "sequential", "greedy", "wavefront{lean=0}", "wavefront", "ios")
#: Rammer's bars: names and policies.
BARS: Final = (
    ("one after another", "sequential"),
    ("+ co-scheduled, same kernels", "wavefront{lean=0}"),
    ("+ kernels chosen for the wave", "wavefront"),
)
#: IOS's bars: policy and batching. Merging is a step before scheduling here: products and convolutions of one input become one.
FIVE: Final = (
    ("Sequential", "sequential", "off"),
    ("Greedy", "greedy", "off"),
    ("Merge", "sequential", "auto"),
    ("Parallel", "ios", "off"),
    ("Both", "ios", "auto"),
)
#: Names of the executors of devices that have several.
EXECUTORS: Final = {"cuda": ("graph", "wavewise", "persistent", "mixed"), "rocm": ("waves", "single")}
#: Time ratio of a tuned to an untuned program above which the tuned one counts as slower.
SLOWER: Final = 1.03
#: (r, s) of IOS's table of pruning.
PRUNING: Final = ((1, 1), (1, 3), (1, 8), (2, 3), (2, 8), (3, 3), (3, 8))
#: Labels in the table of pruning for the proofs of a search.
PROVED: Final = {"exact": "yes", "chains": "by chains", "none": "no"}
HEADERS: Final = ("model", "schedule", "operators", "launches", "tasks", "waits", "predicted", "median", "first/this", "rel. L2")


def line(model: str, one: Measured, first: float) -> list[str]:
    """Return one row under HEADERS; ``first`` is the base of the ratios in seconds."""
    if one.failure:
        return [model, one.way.name, *["-"] * 7, one.failure]
    counts = [str(n) for n in (one.operators, one.kernels, one.tasks, one.waits)]
    ratio = f"{first / one.seconds:.2f}" if first and one.seconds else "-"
    return [model, one.way.name, *counts, format_duration(one.predicted), format_duration(one.seconds), ratio, f"{one.error:.1e}"]


def lines(model: str, found: Sequence[Measured]) -> list[list[str]]:
    """Return the rows of one model, with ratios to the first way that works."""
    first = next((m.seconds for m in found if not m.failure), 0.0)
    return [line(model, m, first) for m in found]


def compared(settings: Settings, ways: Sequence[Way]) -> list[list[str]]:
    """Measure every model in every way against the reference."""
    compile_ahead(settings, ways)
    rows: list[list[str]] = []
    for model in each(settings):
        rows += lines(model.entry.key, measured(model.path, model.feeds, ways, settings, model.reference))
    return rows


def executors(settings: Settings) -> tuple[str, ...]:
    """Return the device's executors, or ("",) if one was requested or the device has no choice."""
    return ("",) if "executor" in settings.options else EXECUTORS.get(settings.device.partition(":")[0], ("",))


def policies(settings: Settings) -> Result:
    """Measure all policies on each model by every executor. Ratios are relative to ``auto``, which chooses both."""
    ways = [Way(POLICIES[0], {"policy": POLICIES[0]})]
    for policy in POLICIES[1:]:
        ways += [_by(executor, Way(policy, {"policy": policy}), settings) for executor in executors(settings)]
    notes = [
        "Errors are to ONNX Runtime. `first/this`: how much longer `auto`, which measures whole programs, takes than this row."
    ]
    return Result(f"All policies, {settings.device}", HEADERS, compared(settings, ways), notes)


def _by(executor: str, way: Way, settings: Settings) -> Way:
    """Return the way with one of the device's executors, if it has several."""
    if not executor:
        return way
    return replace(
        way, name=f"{way.name}, {executor}", request={**way.request, "device_options": {**settings.options, "executor": executor}}
    )


def ablation(settings: Settings) -> Result:
    """Measure Rammer's three bars on each executor of the device."""
    rows: list[list[str]] = []
    bars = [[_by(e, Way(name, {"policy": policy}), settings) for name, policy in BARS] for e in executors(settings)]
    compile_ahead(settings, [way for ways in bars for way in ways])
    for model in each(settings):
        for ways in bars:
            rows += lines(model.entry.key, measured(model.path, model.feeds, ways, settings, model.reference))
    return Result(f"What scheduling is worth: Rammer's three bars, {settings.device}", HEADERS, rows)


def tuning(settings: Settings) -> Result:
    """Measure every model with predicted and with measured kernels; the latter must not be slower."""
    level = settings.tune if settings.tune != "off" else "quick"
    plain, tuned = Way("untuned", {"tune": "off"}), Way(f"tuned ({level})", {"tune": level})
    rows = list[list[str]]()
    for model in each(settings):
        found = measured(model.path, model.feeds, [plain, tuned], settings, model.reference)
        first, second = found
        verdict = "slower" if second.seconds > SLOWER * first.seconds else "no slower"
        verdict = "the same program" if first.program == second.program else verdict
        verdict = "-" if first.failure or second.failure else verdict
        rows += [[*row, said] for row, said in zip(lines(model.entry.key, found), ("", verdict), strict=True)]
    notes = [f"`first/this`: how much longer the untuned program takes. *Slower*: by over {SLOWER - 1:.0%}."]
    return Result(f"Tuned and untuned programs, {settings.device}", (*HEADERS, "tuned is"), rows, notes)


def five_bars(settings: Settings) -> Result:
    """Measure IOS's comparison of strategies."""
    ways = [Way(name, {"policy": policy, "batching": batching}) for name, policy, batching in FIVE]
    notes = ["Merge and Both let batching (`--batching auto`) make one operator of several before they are scheduled."]
    return Result(f"IOS's five strategies, {settings.device}", HEADERS, compared(settings, ways), notes)


def pruning(settings: Settings) -> Result:
    """Measure search and result over (r, s)."""
    headers = ("model", "r", "s", "transitions", "exact", "search s", "predicted", "median", "rel. L2")
    rows: list[list[str]] = []
    ways = [Way(f"r={r}, s={s}", {"policy": f"ios{{r={r},s={s}}}", "batching": "off"}) for r, s in PRUNING]
    compile_ahead(settings, ways)
    for model in each(settings):
        found = measured(model.path, model.feeds, ways, settings, model.reference)
        graphs = graphs_of(model, settings)
        for (r, s), one in zip(PRUNING, found, strict=True):
            begin = time.thread_time()
            searched = [IOS(r, s).search(replace(graph, memory=Memory()), device) for graph, device in graphs]
            seconds = time.thread_time() - begin
            search = [
                str(sum(x.transitions for x in searched)),
                PROVED[max((x.proved for x in searched), key=PROOFS.index, default="exact")],
            ]
            predicted = sum(x.seconds for x in searched)
            settings.say(f"  r={r}, s={s}: {search[0]} transitions in {seconds:.1f} s")
            end = [format_duration(one.seconds), f"{one.error:.1e}"] if not one.failure else ["-", one.failure]
            rows.append([model.entry.key, str(r), str(s), *search, f"{seconds:.2f}", format_duration(predicted), *end])
    notes = [
        "Searched by kernel times as they are predicted, without measuring stages; `exact`: no block was cut by a limit;"
        " by chains: of schedules that keep chains of operators together, none is predicted to be faster."
    ]
    return Result(f"IOS's pruning, {settings.device}", headers, rows, notes)
