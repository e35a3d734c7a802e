"""Transfer of a schedule's stages from one program to another: of another batch, or for another device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from measuring import Settings, Subject, Way, session
from result import write

from rammer.compiled.segments import ProgramSegment
from rammer.errors import BadInput
from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel
from rammer.schedule.baselines import Sequential
from rammer.schedule.ios import IOS
from rammer.schedule.policy import OperatorGraph, Policy, Schedule, rows_of
from rammer.schedule.stage_clock import stage_kernels
from rammer.schedule.task_placement import Row, side_by_side


@dataclass(frozen=True)
class Asked(Policy):
    """One proposal for a graph on a device, with a unique name that identifies the program which uses it."""

    label: str
    graph: OperatorGraph
    device: VDevice
    schedule: Schedule

    def __str__(self) -> str:
        return self.label

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """Return the proposed schedule."""
        return self.schedule


@dataclass(frozen=True)
class Recorder(Policy):
    """A policy that proposes the schedules of ``inner`` and records them with their graphs."""

    inner: Policy
    label: str
    seen: list[Asked] = field(default_factory=list, compare=False, repr=False)

    @property
    def name(self) -> str:
        """A unique name, so that cached programs of other policies are never used."""
        return f"recorded-{hashlib.sha256(self.label.encode()).hexdigest()[:12]}-{id(self.seen)}"

    def __str__(self) -> str:
        return self.name

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """Return the first proposed schedule."""
        return self.proposals(graph, device)[0][1]

    def proposals(self, graph: OperatorGraph, device: VDevice) -> list[tuple[Policy, Schedule]]:
        """Return the proposals of ``inner`` and record them."""
        found = [
            Asked(f"{self.name}-{number}", graph, device, schedule)
            for number, (_, schedule) in enumerate(self.inner.proposals(graph, device), len(self.seen))
        ]
        self.seen.extend(found)
        return [(asked, asked.schedule) for asked in found]


def recorded(model: Any, feeds: Mapping[str, Any], inner: Policy, settings: Settings, device: str = "") -> list[Asked]:
    """Compile once with ``inner`` and return the proposals that the model's programs use. Batching is off, and only timed kernels
    are loaded."""
    recorder = Recorder(inner, f"{model}")
    exe = session(model, Way("", {"batching": "off"}, device, cast(Policy, recorder)), settings)
    try:
        compiled = exe.compile_only({name: array.shape for name, array in feeds.items()})
    finally:
        exe.close()
    by_name = {asked.name: asked for asked in recorder.seen}
    return [by_name[s.program.policy] for s in compiled.segments if isinstance(s, ProgramSegment)]


def graphs_of(model: Subject, settings: Settings) -> list[tuple[OperatorGraph, VDevice]]:
    """Return the graph and device of each program of a model, as policies receive them, without stage timing."""
    seen = recorded(model.path, model.feeds, Sequential(), settings)
    return [(replace(asked.graph, timed=None), asked.device) for asked in seen]


def stages_of(seen: Sequence[Asked]) -> dict[str, int]:
    """Return the stage of every tensor expression, by name, numbered consecutively over the programs of a model."""
    found: dict[str, int] = {}
    first = 0
    for asked in seen:
        for number, stage in enumerate(asked.schedule.stages):
            found |= {c.name: first + number for n in stage for c in asked.graph.kernels[n][0].operator.computes}
        first += len(asked.schedule.stages)
    return found


@dataclass(frozen=True)
class Replay(Policy):
    """A policy that assigns each operator the stage that its expressions had elsewhere. If a producer has a later stage here, the
    operator uses that one: fusion may differ between the programs. Kernels are the best for this device."""

    stages: Mapping[str, int]
    label: str

    @property
    def name(self) -> str:
        """A name with a hash of the stages, which distinguishes schedules."""
        text = f"{self.label} {sorted(self.stages.items())}"
        return f"replayed-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def __str__(self) -> str:
        return self.name

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """Return stages with barriers, like IOS's."""
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
    """Return the stages of IOS's search."""
    return Replay(stages_of(recorded(model, feeds, IOS(), settings, device)), label)


@dataclass(frozen=True)
class Found:
    """Stages by model and search target in a JSON file (None: no file), to run on one machine the stages of another."""

    path: Path | None

    def of(self, key: str) -> dict[str, Replay]:
        """Return a model's stages by search target. Raises BadInput for a file with other contents."""
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
        self.of(key)  # rejects a file with other contents
        held = json.loads(self.path.read_text()) if self.path.is_file() else {}
        held.setdefault(key, {})[replay.label] = dict(replay.stages)
        write(self.path, json.dumps(held) + "\n")
