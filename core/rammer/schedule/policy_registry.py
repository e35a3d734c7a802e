"""Registry of policies by their ``--policy`` spelling, such as ``wavefront`` or ``ios{r=2,s=4}``."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any, cast

from rammer.errors import BadInput
from rammer.ir.device import VDevice
from rammer.ir.untrusted_json import LARGEST
from rammer.schedule.baselines import Greedy, Sequential
from rammer.schedule.ios import IOS
from rammer.schedule.policy import OperatorGraph, Policy, Schedule
from rammer.schedule.stage_clock import StageClock
from rammer.schedule.wavefront import Wavefront

#: The greatest ratio of two predicted times at which the slower schedule of one graph could still be the faster one. With five
#: models on an H200 and three executors, a predicted ratio of at least 2.3 meant a measured ratio of at least 1.4.
FAR = 2.5
#: The least possible gain for which ``auto`` runs the search of IOS, and the default seconds of that search.
GAIN, AUTO_SECONDS = 1.02, 60

_log = logging.getLogger(__name__)
_SPELLING = re.compile(r"\s*([\w-]+)\s*(?:\{(.*)\})?\s*")


@dataclass(frozen=True, slots=True)
class Auto(Policy):
    """A policy that proposes the schedule of every built-in policy.

    Schedules predicted to take over ``FAR`` times the best are dropped, to avoid compiling and loading them. IOS has ``seconds``
    of processor time. It is skipped if by prediction no stages could be clearly faster than the best of the others. If the device
    can be measured, the compiler selects the fastest whole program. Called as a policy, it returns the best prediction.
    ``others`` are the policies of plugins that are ``in_auto``."""

    seconds: int = AUTO_SECONDS
    others: tuple[Policy, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ValueError(f"seconds must be at least 0, got {self.seconds}")

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """Return the schedule with the best prediction."""
        return self.proposals(graph, device)[0][1]

    def proposals(self, graph: OperatorGraph, device: VDevice) -> list[tuple[Policy, Schedule]]:
        """Return each policy's schedule, best prediction first. The simpler policy precedes in a tie. Equal schedules of two
        policies are listed once."""
        kept: list[tuple[Policy, Schedule]] = []
        for basic in (*_BASIC, *self.others, IOS(seconds=self.seconds)):
            if isinstance(basic, IOS) and _is_near_optimal(graph, device, min(schedule.predicted for _, schedule in kept)):
                _log.info("%s: %s is left out, since no stages could be predicted to take less", self, basic)
                continue
            for policy, mine in basic.proposals(graph, device):
                if not any(replace(mine, predicted=0.0) == replace(other, predicted=0.0) for _, other in kept):
                    kept.append((policy, mine))
        best = min(schedule.predicted for _, schedule in kept)
        for policy, schedule in kept:
            if schedule.predicted > FAR * best:
                _log.info("%s: %s is left out, predicted to take %.3g times the best", self, policy, schedule.predicted / best)
        return sorted((k for k in kept if k[1].predicted <= FAR * best), key=lambda pair: pair[1].predicted)

    def __str__(self) -> str:
        return "auto" if self.seconds == AUTO_SECONDS else f"auto{{seconds={self.seconds}}}"


def _is_near_optimal(graph: OperatorGraph, device: VDevice, seconds: float) -> bool:
    """Return True if no stages could take clearly less than ``seconds``, by the lower bound of all operators. Return False if
    stages are measured, because predictions then prove nothing."""
    if graph.timed is not None or not graph.names:
        return False
    launches, path, share = StageClock(graph, device).least(graph.names)
    return seconds <= GAIN * (launches + max(path, share))


_BASIC: tuple[Policy, ...] = (Sequential(), Wavefront(), Wavefront(lean=0))


def list_policies(extra: Iterable[Policy] = ()) -> dict[str, Policy]:
    """Return every policy by its bare name, with default arguments; ``extra`` come from plugins."""
    extra = tuple(extra)
    auto = Auto(others=tuple(p for p in extra if p.in_auto))
    known: tuple[Policy, ...] = (Sequential(), Greedy(), Wavefront(), IOS(), auto, *extra)
    return {_bare_name(p): p for p in known}


def _bare_name(policy: Policy) -> str:
    return policy.name.partition("{")[0]


def parse_policy(text: str, extra: Iterable[Policy] = ()) -> Policy:
    """Parse a policy, the inverse of ``str``; omitted arguments use their defaults. Raises BadInput with the nearest name."""
    match = _SPELLING.fullmatch(text)
    if match is None:
        raise BadInput(f"not a policy: {text!r}", "--policy", "write NAME or NAME{key=value,...}, such as ios{r=3,s=8}")
    name, arguments = match.groups()
    known = list_policies(extra)
    if name not in known:
        near = get_close_matches(name, known, 1, 0.0)
        raise BadInput(f"unknown policy {name!r}", "--policy", f"did you mean {near[0]}? Known: {', '.join(known)}")
    return _with_arguments(known[name], arguments or "")


def _with_arguments(policy: Policy, text: str) -> Policy:
    allowed: set[str] = {f.name for f in fields(policy) if f.compare} if is_dataclass(policy) else set()
    values: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = item.partition("=")
        if key.strip() not in allowed:
            hint = f"it takes {', '.join(sorted(allowed))}" if allowed else "it takes no arguments"
            raise BadInput(f"policy {_bare_name(policy)} has no argument {key.strip()!r}", "--policy", hint)
        try:
            values[key.strip()] = int(value)
            if abs(values[key.strip()]) > LARGEST:
                raise ValueError
        except ValueError:
            raise BadInput(
                f"argument {key.strip()} of policy {_bare_name(policy)} must be an integer, got {value!r}", "--policy"
            ) from None
    try:
        return replace(cast(Any, policy), **values) if values else policy
    except ValueError as problem:
        raise BadInput(f"policy {_bare_name(policy)}: {problem}", "--policy") from problem
