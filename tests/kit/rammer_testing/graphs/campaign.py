"""Campaigns: many graphs on one device in several processes, shrinking and grouping of faults, and a coverage table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.runtime.inputs import scale_outlier_channels
from rammer_testing.graphs.call_forms import FORMS
from rammer_testing.graphs.case import GraphCase
from rammer_testing.graphs.generate import LONGEST, graph, merged
from rammer_testing.graphs.invalidate import spoiled
from rammer_testing.graphs.judge import Judge, Setting, Verdict, normalised, registry_of
from rammer_testing.graphs.shrink import Shrinker

#: Properties that two faults of one cause share: the outcome, and its site or the operators around it.
Key: TypeAlias = tuple[str, str]
#: Values that ``*`` selects from, one per graph.
CHOICES: Final = {
    "policy": ("wavefront", "wavefront", "wavefront", "sequential", "greedy", "ios", "auto"),
    "layout": ("keep", "keep", "keep", "nhwc", "auto"),
    "precision": ("float32", "float32", "float32", "float16"),
    "form": ("run", "run", "run", *FORMS),
}


#: Most nodes of a graph with schedule search, which is the slowest step.
SEARCHED: Final = 8
#: Refusal reasons that the table lists.
SHOWN: Final = 25


@dataclass(frozen=True)
class CampaignPlan:
    """The graphs of a campaign and their settings. A ``*`` in the setting draws one of ``CHOICES``."""

    setting: Setting
    seed: int
    first: int = 0
    graphs: int = 300
    seconds: float = 600.0
    batch: int = 1
    voices: bool = True
    shrink: float = 60.0
    only: tuple[str, ...] = ()
    alone: bool = False
    spoiled: bool = False
    plugins: tuple[str, ...] = ()
    opset: int = 0
    longest: int = LONGEST
    #: Deadline (``time.monotonic``) for starting a graph; computed from ``seconds``.
    end: float = 0.0

    def __post_init__(self) -> None:
        if not self.end:
            object.__setattr__(self, "end", time.monotonic() + self.seconds)

    def starts(self) -> range:
        """Return the first graph of every batch."""
        return range(self.first, self.first + self.graphs, self.batch)


@dataclass(frozen=True)
class Fault:
    """A faulty case, shrunk or as drawn. ``whole`` and ``drawn`` are the original graph and setting."""

    index: int
    case: GraphCase
    setting: Setting
    verdict: Verdict
    whole: GraphCase
    drawn: Setting

    @property
    def key(self) -> Key:
        """The properties shared by graphs that most likely have one fault, before shrinking. Only the first is shrunk."""
        kind, site = self.verdict.key
        return kind, site or "+".join(sorted({c.op for c in self.whole.plain().nodes if c.op != "Constant"}))

    @property
    def signature(self) -> str:
        """A line that groups equal faults."""
        ops = "+".join(sorted({c.op for c in self.case.plain().nodes if c.op != "Constant"}))
        return f"{self.verdict.kind} | {ops} | {self.verdict.site}" if self.verdict.site else f"{self.verdict.kind} | {ops}"


@dataclass
class CampaignTally:
    """The counts and faults of a campaign."""

    graphs: int = 0
    nodes: int = 0
    invalid: int = 0
    told: float = 0.0
    ops: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    example: dict[str, int] = field(default_factory=dict)
    voices: Counter[str] = field(default_factory=Counter)
    settings: Counter[str] = field(default_factory=Counter)
    faults: dict[int, Fault] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)
    raw: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, other: CampaignTally) -> None:
        """Add the counts of another process."""
        self.graphs, self.nodes = self.graphs + other.graphs, self.nodes + other.nodes
        self.invalid, self.told = self.invalid + other.invalid, self.told + other.told
        for mine, theirs in (
            (self.ops, other.ops),
            (self.refused, other.refused),
            (self.voices, other.voices),
            (self.settings, other.settings),
        ):
            mine.update(theirs)
        self.raw.update(other.raw)
        self.example = {**other.example, **self.example}
        self.faults |= other.faults
        self.lost += other.lost
        self.unfinished += other.unfinished

    @property
    def differences(self) -> int:
        """The number of graphs with faults, including those that ended a process."""
        return sum(self.raw.values()) + len(self.lost)

    def text(self) -> str:
        """Return the final table as text."""
        count = max(self.graphs, 1)
        lines = [
            f"graphs {self.graphs}, nodes {self.nodes}, draws that the checker refused {self.invalid}, "
            f"elements compared {self.told / count:.1%}"
        ]
        lines.append("voices beside ours: " + ", ".join(f"{n} {k}" for k, n in self.voices.most_common()))
        if len(self.settings) > 1:
            lines.append("settings: " + ", ".join(f"{n} {k}" for k, n in self.settings.most_common()))
        shown = " ".join(f"{op} {n}" for op, n in sorted(self.ops.items()))
        lines.append(f"operators {len(self.ops)}: {shown}")
        lines += [f"refused {n}: {why}   [graph {self.example.get(why)}]" for why, n in self.refused.most_common(SHOWN)]
        if len(self.refused) > SHOWN:
            lines.append(f"refused for {len(self.refused) - SHOWN} other reasons: {sum(self.refused.values())} in all")
        if self.unfinished:
            lines.append(f"unfinished when the time was up: graphs {' '.join(map(str, sorted(self.unfinished)))}")
        lines.append(f"differences {self.differences}" + (":" if self.differences else ""))
        lines += [f"  {what}" for what in self.lost]
        groups = Counter(f.signature for f in self.faults.values())
        for signature, n in groups.most_common():
            fault = min((f for f in self.faults.values() if f.signature == signature), key=lambda f: len(f.case.text()))
            lines.append(f"  {n} x {signature}   [graph {fault.index}; {fault.setting}]")
        return "\n".join(lines)


class CampaignSearch:
    """The part of a campaign in one process: it judges graphs and reports faults immediately."""

    def __init__(self, plan: CampaignPlan) -> None:
        self.plan = plan
        self.judge = Judge(registry_of(plan.plugins), plan.voices)
        self.judge.backend(drawn(plan.setting, plan.seed, 0))  # an unavailable device ends the campaign here

    def batch(self, start: int, known: set[Key]) -> Iterator[CampaignTally]:
        """Yield the verdicts on one batch, then its shrunk faults one by one. Faults with a key in ``known`` are not shrunk."""
        tally, plan = CampaignTally(), self.plan
        for index, case, setting, verdict in _judged(self.judge, plan, _drawn_batch(plan, start, tally)):
            _count(tally, index, case, setting, verdict)
            if not verdict.good or (plan.alone and verdict.kind == "voice"):
                tally.raw[verdict.key] += 1
                tally.faults[index] = Fault(index, case, setting, verdict, case, setting)
        yield tally
        for fault in tally.faults.values():
            if plan.shrink and fault.verdict.kind != "accepted" and fault.key not in known and time.monotonic() < plan.end:
                yield CampaignTally(faults={fault.index: self._shrunk(fault)})
            known.add(fault.key)

    def _shrunk(self, fault: Fault) -> Fault:
        # A step in progress at the deadline must still finish.
        seconds = min(self.plan.shrink, max(self.plan.end - time.monotonic(), 0.5))
        shrinker = Shrinker(self.judge, seconds, not self.plan.spoiled)
        try:
            small, simple, found = shrinker(fault.case, fault.setting, fault.verdict)
        except Exception:  # an intermediate case that shrinking cannot handle must not lose the fault
            return fault
        return replace(fault, case=small, setting=simple, verdict=found)


def _drawn_batch(plan: CampaignPlan, start: int, tally: CampaignTally) -> list[tuple[int, GraphCase]]:
    """Return the graphs from ``start`` on that run together. Batches of several graphs share one opset."""
    opset = plan.opset
    if plan.batch > 1 and not opset:
        opset = int(np.random.default_rng([plan.seed, start, 1]).integers(7, 27))
    batch = []
    for index in range(start, min(start + plan.batch, plan.first + plan.graphs)):
        case = graph(plan.seed, index, opset, plan.only, plan.longest)
        if case is None:
            tally.invalid += 1
        else:
            batch.append((index, case))
    return batch


def _judged(
    judge: Judge, plan: CampaignPlan, batch: Sequence[tuple[int, GraphCase]]
) -> Iterator[tuple[int, GraphCase, Setting, Verdict]]:
    """Yield verdicts on the graphs of a batch: of all together, or of each separately if the batch is not "ok"."""
    if not batch:
        return
    if plan.spoiled:
        yield from _refused(judge, plan, batch)
        return
    setting = drawn(plan.setting, plan.seed, batch[0][0], sum(len(case.nodes) for _, case in batch))
    batch = [(index, _outlying(case, setting, plan.seed, index)) for index, case in batch]
    if len(batch) > 1:
        together = judge(merged([case for _, case in batch]), setting)
        if together.kind == "ok" and (not judge.voices or together.voices or setting.precision == "float16"):
            for index, case in batch:
                yield index, case, setting, together
            return
    for index, case in batch:
        yield index, case, setting, judge(case, setting)


def _outlying(case: GraphCase, setting: Setting, seed: int, index: int) -> GraphCase:
    """Return ``case``; half of the time with channels of up to 10,000 in float32 inputs that float16 must hold."""
    rng = np.random.default_rng([seed, index, 4])
    if setting.precision != "float16" or rng.random() < 0.5:
        return case
    wide = {n: x.dtype == np.float32 and x.ndim > 0 for n, x in case.inputs.items()}
    return replace(case, inputs={n: scale_outlier_channels(x, x.ndim - 1, rng) if wide[n] else x for n, x in case.inputs.items()})


def _refused(
    judge: Judge, plan: CampaignPlan, batch: Sequence[tuple[int, GraphCase]]
) -> Iterator[tuple[int, GraphCase, Setting, Verdict]]:
    """Yield verdicts on models with one error; running the model is the fault."""
    for index, case in batch:
        made = spoiled(case, np.random.default_rng([plan.seed, index, 3]))
        if made is not None:
            setting = drawn(plan.setting, plan.seed, index, len(case.nodes))
            verdict = judge(made[0], setting)
            if verdict.kind not in ("refused", "traceback", "internal"):
                verdict = Verdict("accepted", normalised(made[1]), made[1])
            yield index, made[0], setting, verdict


def drawn(setting: Setting, seed: int, index: int, nodes: int = 0) -> Setting:
    """Return the setting with a random choice for each ``*``. Schedule search is drawn for graphs of few nodes only."""
    rng = np.random.default_rng([seed, index, 2])
    chosen: dict[str, Any] = {}
    for name, options in CHOICES.items():
        pick = options[int(rng.integers(len(options)))]
        if getattr(setting, name) == "*":
            chosen[name] = "wavefront" if pick in ("ios", "auto") and name == "policy" and nodes > SEARCHED else pick
    return replace(setting, **chosen)


def _count(tally: CampaignTally, index: int, case: GraphCase, setting: Setting, verdict: Verdict) -> None:
    tally.graphs += 1
    tally.nodes += len(case.nodes)
    tally.ops.update(c.op for c in case.plain().nodes)
    tally.settings[str(setting)] += 1
    if verdict.kind == "refused":
        tally.refused[verdict.site] += 1
        tally.example.setdefault(verdict.site, index)
    else:
        heard = "+".join(verdict.voices) or "none"
        tally.voices[f"{heard} (one alone)" if verdict.kind == "voice" else heard] += 1
        tally.told += verdict.told
    if verdict.kind == "refused":
        tally.told += 1
