"""A schedule's stages taken from one program and put on another: of another batch, or for another device."""

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
from rammer.compiler.policy_choice import propose_schedules
from rammer.errors import BadInput
from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel
from rammer.schedule.baselines import Sequential
from rammer.schedule.ios import IOS
from rammer.schedule.policy import OperatorGraph, Policy, Schedule, rows_of
from rammer.schedule.stage_clock import stage_kernels
from rammer.schedule.task_placement import Row, side_by_side


@dataclass(frozen=True)
class Asked:
    """One proposal for a graph on a device, under a name of its own, by which a program that has it is told."""

    name: str
    graph: OperatorGraph
    device: VDevice
    schedule: Schedule

    def __str__(self) -> str:
        return self.name

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """What was proposed."""
        return self.schedule


@dataclass(frozen=True)
class Recorder:
    """Proposes what ``inner`` does, and keeps what it was asked and what it said."""

    inner: Policy
    label: str
    seen: list[Asked] = field(default_factory=list, compare=False, repr=False)

    @property
    def name(self) -> str:
        """A word of its own, so that no kept program is taken for this one's."""
        return f"recorded-{hashlib.sha256(self.label.encode()).hexdigest()[:12]}-{id(self.seen)}"

    def __str__(self) -> str:
        return self.name

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """The first of what is proposed."""
        return self.proposals(graph, device)[0][1]

    def proposals(self, graph: OperatorGraph, device: VDevice) -> list[tuple[Policy, Schedule]]:
        """What ``inner`` proposes."""
        found = [
            Asked(f"{self.name}-{number}", graph, device, schedule)
            for number, (_, schedule) in enumerate(propose_schedules(self.inner, graph, device), len(self.seen))
        ]
        self.seen.extend(found)
        return [(asked, asked.schedule) for asked in found]


def recorded(model: Any, feeds: Mapping[str, Any], inner: Policy, settings: Settings, device: str = "") -> list[Asked]:
    """Compile once with ``inner`` (nothing is loaded but what is timed), batching off: what the model's programs have."""
    recorder = Recorder(inner, f"{model}")
    exe = session(model, Way("", {"batching": "off"}, device, cast(Policy, recorder)), settings)
    try:
        compiled = exe.compile_only({name: array.shape for name, array in feeds.items()})
    finally:
        exe.close()
    by_name = {asked.name: asked for asked in recorder.seen}
    return [by_name[s.program.policy] for s in compiled.segments if isinstance(s, ProgramSegment)]


def graphs_of(model: Subject, settings: Settings) -> list[tuple[OperatorGraph, VDevice]]:
    """What a policy is asked for each program of a model, without a device that measures stages."""
    seen = recorded(model.path, model.feeds, Sequential(), settings)
    return [(replace(asked.graph, timed=None), asked.device) for asked in seen]


def stages_of(seen: Sequence[Asked]) -> dict[str, int]:
    """The stage of every tensor expression, by name, counted on over the programs of a model."""
    found: dict[str, int] = {}
    first = 0
    for asked in seen:
        for number, stage in enumerate(asked.schedule.stages):
            found |= {c.name: first + number for n in stage for c in asked.graph.kernels[n][0].operator.computes}
        first += len(asked.schedule.stages)
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
