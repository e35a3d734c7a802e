"""Search over cases of every family, judged by the references."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from rammer_testing.operators import DESCRIBED, drawn
from rammer_testing.operators.oracles import VoicesVerdict, judge, judge_device


def verdicts(
    ops: Sequence[str], seed: int, count: int, fold: bool = False, device: str = ""
) -> Iterator[tuple[int, VoicesVerdict]]:
    """Judge ``count`` cases of each operator, on ``device`` if non-empty; case numbers are those of ``drawn``."""
    for number in range(count):
        for op in ops:
            case = drawn(op, seed, number)
            case = case.folded() if fold else case
            yield number, judge_device(case, device) if device else judge(case)


Found: TypeAlias = "tuple[Counter[tuple[str, str]], list[tuple[int, VoicesVerdict]]]"


def search(ops: Sequence[str], seed: int, seconds: float, fold: bool = False, device: str = "") -> Found:
    """Search for ``seconds``. Return counts by (operator, kind), and the verdicts other than ok."""
    counts: Counter[tuple[str, str]] = Counter()
    found: list[tuple[int, VoicesVerdict]] = []
    end = time.monotonic() + seconds
    for number, verdict in verdicts(ops or sorted(DESCRIBED), seed, 1_000_000, fold, device):
        counts[verdict.case.op, verdict.kind] += 1
        if verdict.kind != "ok":
            found.append((number, verdict))
        if time.monotonic() > end:
            break
    return counts, found
