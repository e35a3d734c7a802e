"""A schedule's stages taken from one program and put on another: of another batch, or for another device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from measuring import Settings, Subject, Way, session
from result import write

from rammer.errors import BadInput
from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel
from rammer.schedule.clock import stage_kernels
from rammer.schedule.ios import IOS
from rammer.schedule.place import Row, side_by_side
from rammer.schedule.policy import OperatorGraph, Policy, Schedule, rows_of
from rammer.schedule.sequential import Sequential


@dataclass(frozen=True)
class Recorder:
    """Schedules as ``inner`` does, and keeps what it was asked and what it said."""

    inner: Policy
    label: str
    seen: list[tuple[OperatorGraph, VDevice, Schedule]] = field(default_factory=list, compare=False, repr=False)

    @property
    def name(self) -> str:
        """A word of its own, so that no kept program is taken for this one's."""
        return f"recorded-{hashlib.sha256(self.label.encode()).hexdigest()[:12]}-{id(self.seen)}"

    def __str__(self) -> str:
        return self.name

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """What ``inner`` proposes."""
        schedule = self.inner(graph, device)
        self.seen.append((graph, device, schedule))
        return schedule


def recorded(model: Any, feeds: Mapping[str, Any], inner: Policy, settings: Settings, device: str = "") -> Recorder:
    """Compile once with ``inner`` (nothing is loaded), batching off."""
    recorder = Recorder(inner, f"{model}")
    exe = session(model, Way("", {"batching": "off"}, device, cast(Policy, recorder)), settings)
    try:
        exe.compile_only({name: array.shape for name, array in feeds.items()})
    finally:
        exe.close()
    return recorder


def graphs_of(model: Subject, settings: Settings) -> list[tuple[OperatorGraph, VDevice]]:
    """What a policy is asked for each program of a model, without a device that measures stages."""
    seen = recorded(model.path, model.feeds, Sequential(), settings).seen
    return [(replace(graph, timed=None), device) for graph, device, _ in seen]


def stages_of(recorder: Recorder) -> dict[str, int]:
    """The stage of every tensor expression, by name, counted on over the programs of a model."""
    found: dict[str, int] = {}
    first = 0
    for graph, _, schedule in recorder.seen:
        for number, stage in enumerate(schedule.stages):
            found |= {c.name: first + number for n in stage for c in graph.kernels[n][0].operator.computes}
        first += len(schedule.stages)
    return found


@dataclass(frozen=True)
class Replay:
    """Puts every operator in the stage that its expressions had elsewhere, or in the latest stage of what it reads if that is
    later: where fusion differs, so that a stage there is no stage here. Kernels are the best here."""

    stages: Mapping[str, int]
    label: str

    @property
    def name(self) -> str:
        """A word that tells schedules apart."""
        text = f"{self.label} {sorted(self.stages.items())}"
        return f"replayed-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def __str__(self) -> str:
        return self.name

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """Stages with barriers, as IOS's."""
        place: dict[str, int] = {}
        for name in graph.names:
            mine = max((self.stages.get(c.name, 0) for c in graph.kernels[name][0].operator.computes), default=0)
            place[name] = max((mine, *(place[p] for p in graph.after.get(name, ()))))
        numbers = sorted(set(place.values()))
        stages = tuple(tuple(n for n in graph.names if place[n] == number) for number in numbers)
        chosen: dict[str, RKernel] = {}
        rows: list[Row] = [[] for _ in range(device.veus)]
        seconds = 0.0
        for stage in stages:
            kernels = stage_kernels(graph, stage, device)
            seconds += side_by_side(kernels, graph.after, device, rows)
            chosen |= {k.operator.name: k for k in kernels}
        return Schedule(tuple(chosen[n] for n in graph.names), stages, rows_of(rows), True, seconds)


def searched(model: Any, feeds: Mapping[str, Any], settings: Settings, label: str, device: str = "") -> Replay:
    """The stages that IOS finds."""
    return Replay(stages_of(recorded(model, feeds, IOS(), settings, device)), label)


@dataclass(frozen=True)
class Found:
    """Stages by model and by what they were searched for, in a JSON file (None: nowhere): one machine runs what another found."""

    path: Path | None

    def of(self, key: str) -> dict[str, Replay]:
        """Of a model, by what they were searched for. BadInput for a file that holds something else."""
        if self.path is None or not self.path.is_file():
            return {}
        try:
            found = json.loads(self.path.read_text()).get(key, {})
            return {label: Replay({str(n): int(i) for n, i in stages.items()}, label) for label, stages in found.items()}
        except (ValueError, AttributeError, TypeError) as problem:
            raise BadInput(f"{self.path} holds no stages", hint="--stages names a file that this command wrote") from problem

    def keep(self, key: str, replay: Replay) -> None:
        """Add stages to the file."""
        if self.path is None:
            return
        self.of(key)  # refuses a file that holds something else
        held = json.loads(self.path.read_text()) if self.path.is_file() else {}
        held.setdefault(key, {})[replay.label] = dict(replay.stages)
        write(self.path, json.dumps(held) + "\n")
