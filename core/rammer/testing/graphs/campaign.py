"""Campaigns: many graphs on one device in several processes, faults shrunk and grouped, and a table of what was covered."""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from rammer.testing.graphs.case import Case
from rammer.testing.graphs.generate import LONGEST, graph, merged
from rammer.testing.graphs.judge import Judge, Setting, Verdict, normalised, registry_of
from rammer.testing.graphs.shrink import Shrinker
from rammer.testing.graphs.spoil import spoiled

#: What ``*`` stands for: each graph draws one.
CHOICES: Final = {
    "policy": ("wavefront", "wavefront", "wavefront", "sequential", "ios", "auto"),
    "layout": ("keep", "keep", "keep", "nhwc", "auto"),
    "precision": ("float32", "float32", "float32", "float16"),
}  # fmt: skip


#: Most nodes of a graph whose schedule is searched for: that takes longer than anything else.
SEARCHED: Final = 8
#: Reasons for refusing that the table lists.
SHOWN: Final = 25


@dataclass(frozen=True)
class Plan:
    """Which graphs run, and how. ``*`` in the setting draws one of ``CHOICES``."""

    setting: Setting
    seed: int
    first: int = 0
    graphs: int = 300
    seconds: float = 600.0
    batch: int = 1
    voices: bool = True
    shrink: float = 60.0
    folder: Path | None = None
    only: tuple[str, ...] = ()
    alone: bool = False
    spoiled: bool = False
    plugins: tuple[str, ...] = ()
    opset: int = 0
    longest: int = LONGEST


@dataclass(frozen=True)
class Fault:
    """A shrunk case."""

    index: int
    case: Case
    setting: Setting
    verdict: Verdict

    @property
    def signature(self) -> str:
        """One line by which equal faults are grouped."""
        ops = "+".join(sorted({c.op for c in self.case.plain().nodes if c.op != "Constant"}))
        return f"{self.verdict.kind} | {ops} | {self.verdict.site}" if self.verdict.site else f"{self.verdict.kind} | {ops}"


@dataclass
class Tally:
    """What a campaign did."""

    graphs: int = 0
    nodes: int = 0
    invalid: int = 0
    told: float = 0.0
    ops: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    example: dict[str, int] = field(default_factory=dict)
    voices: Counter[str] = field(default_factory=Counter)
    settings: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    raw: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Count another process's work."""
        self.graphs, self.nodes = self.graphs + other.graphs, self.nodes + other.nodes
        self.invalid, self.told = self.invalid + other.invalid, self.told + other.told
        for mine, theirs in ((self.ops, other.ops), (self.refused, other.refused), (self.voices, other.voices),
                             (self.settings, other.settings)):  # fmt: skip
            mine.update(theirs)
        self.raw.update(other.raw)
        self.example = {**other.example, **self.example}
        self.faults += other.faults

    def text(self) -> str:
        """The final table."""
        count = max(self.graphs, 1)
        lines = [f"graphs {self.graphs}, nodes {self.nodes}, draws that the checker refused {self.invalid}, "
                 f"elements compared {self.told / count:.1%}"]  # fmt: skip
        lines.append("voices beside ours: " + ", ".join(f"{n} {k}" for k, n in self.voices.most_common()))
        if len(self.settings) > 1:
            lines.append("settings: " + ", ".join(f"{n} {k}" for k, n in self.settings.most_common()))
        shown = " ".join(f"{op} {n}" for op, n in sorted(self.ops.items()))
        lines.append(f"operators {len(self.ops)}: {shown}")
        lines += [f"refused {n}: {why}   [graph {self.example.get(why)}]" for why, n in self.refused.most_common(SHOWN)]
        if len(self.refused) > SHOWN:
            lines.append(f"refused for {len(self.refused) - SHOWN} other reasons: {sum(self.refused.values())} in all")
        lines.append(f"differences {sum(self.raw.values())}" + (":" if self.raw else ""))
        groups = Counter(f.signature for f in self.faults)
        for signature, n in groups.most_common():
            fault = min((f for f in self.faults if f.signature == signature), key=lambda f: len(f.case.text()))
            lines.append(f"  {n} x {signature}   [graph {fault.index}; {fault.setting}]")
        return "\n".join(lines)


def campaign(plan: Plan, processes: int = 1) -> Tally:
    """Run ``plan`` in this many processes."""
    if processes <= 1:
        return _part((plan, 0, 1))
    total = Tally()
    # Not a Pool: its processes are daemons, which may not have the child that ONNX Runtime runs in.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for part in pool.map(_part, [(plan, i, processes) for i in range(processes)]):
            total.add(part)
    return total


def _part(job: tuple[Plan, int, int]) -> Tally:
    plan, number, of = job
    tally, judge = Tally(), Judge(registry_of(plan.plugins), plan.voices)
    judge.backend(drawn(plan.setting, plan.seed, 0))  # no device is no campaign
    end, seen = time.monotonic() + plan.seconds, Counter[tuple[str, str]]()
    try:
        for batch in _batches(plan, number, of, tally):
            if time.monotonic() > end:
                break
            for index, case, setting, verdict in _judged(judge, plan, batch):
                _count(tally, index, case, setting, verdict)
                if verdict.good and not (plan.alone and verdict.kind == "voice"):
                    continue
                seen[verdict.key] += 1
                tally.raw[verdict.key] += 1
                # Equal messages are mostly one fault; differences all look the same before they are shrunk.
                if verdict.site and seen[verdict.key] > 2:
                    continue
                tally.faults.append(_shrunk(judge, plan, index, case, setting, verdict, end))
    finally:
        judge.outside.close()
    return tally


def _batches(plan: Plan, number: int, of: int, tally: Tally) -> Iterator[list[tuple[int, Case]]]:
    """Graphs ``number``, ``number + of``, ...: several of one opset at a time where the plan batches."""
    for start in range(plan.first + number * plan.batch, plan.first + plan.graphs, of * plan.batch):
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
        yield batch


def _judged(judge: Judge, plan: Plan, batch: Sequence[tuple[int, Case]]) -> Iterator[tuple[int, Case, Setting, Verdict]]:
    """Verdicts on the graphs of a batch: of all at once, or where that is no plain "ok", of each on its own."""
    if not batch:
        return
    if plan.spoiled:
        yield from _refused(judge, plan, batch)
        return
    setting = drawn(plan.setting, plan.seed, batch[0][0], sum(len(case.nodes) for _, case in batch))
    if len(batch) > 1:
        together = judge(merged([case for _, case in batch]), setting)
        if together.kind == "ok" and (not judge.voices or together.voices or setting.precision == "float16"):
            for index, case in batch:
                yield index, case, setting, together
            return
    for index, case in batch:
        yield index, case, setting, judge(case, setting)


def _refused(judge: Judge, plan: Plan, batch: Sequence[tuple[int, Case]]) -> Iterator[tuple[int, Case, Setting, Verdict]]:
    """Verdicts on models with one thing wrong: to run them is the fault."""
    for index, case in batch:
        made = spoiled(case, np.random.default_rng([plan.seed, index, 3]))
        if made is not None:
            setting = drawn(plan.setting, plan.seed, index, len(case.nodes))
            verdict = judge(made[0], setting)
            if verdict.kind not in ("refused", "traceback", "internal"):
                verdict = Verdict("accepted", normalised(made[1]), made[1])
            yield index, made[0], setting, verdict


def drawn(setting: Setting, seed: int, index: int, nodes: int = 0) -> Setting:
    """The setting with one of the choices for each ``*``; searching for schedules is for graphs of few nodes."""
    rng = np.random.default_rng([seed, index, 2])
    chosen: dict[str, Any] = {}
    for name, options in CHOICES.items():
        pick = options[int(rng.integers(len(options)))]
        if getattr(setting, name) == "*":
            chosen[name] = "wavefront" if pick in ("ios", "auto") and name == "policy" and nodes > SEARCHED else pick
    return replace(setting, **chosen)


def _count(tally: Tally, index: int, case: Case, setting: Setting, verdict: Verdict) -> None:
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


def _shrunk(judge: Judge, plan: Plan, index: int, case: Case, setting: Setting, verdict: Verdict, end: float) -> Fault:
    seconds = min(plan.shrink, max(end - time.monotonic(), 1.0))
    small, simple, found = case, setting, verdict
    if plan.shrink and verdict.kind != "accepted":
        small, simple, found = Shrinker(judge, seconds, not plan.spoiled)(case, setting, verdict)
    fault = Fault(index, small, simple, found)
    if plan.folder is not None:
        keep(plan.folder, fault)
    return fault


def keep(folder: Path, fault: Fault) -> Path:
    """Write the case that ``--case`` runs again."""
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(fault.signature.encode()).hexdigest()[:8]
    path = folder / f"{fault.verdict.kind}-{name}-{fault.index}.json"
    setting = {k: v for k, v in vars_of(fault.setting).items() if k != "options"}
    path.write_text(fault.case.text(signature=fault.signature, says=fault.verdict.detail[-600:], setting=setting))
    return path


def vars_of(setting: Setting) -> dict[str, Any]:
    """The fields of a setting."""
    return {name: getattr(setting, name) for name in ("device", "policy", "layout", "precision", "options")}
