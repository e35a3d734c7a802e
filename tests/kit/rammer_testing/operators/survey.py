"""Survey of misused operators in the frontend and lowering: each is refused as bad input or lowered to a runnable model. Misuses
run in a child, since some end ONNX's C++ code. A crash ends only the current misuse, which counts as a fault."""

from __future__ import annotations

import json
import re
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import rammer
from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower_node
from rammer.frontend.lower.lowering_registry import CannotLower
from rammer.frontend.read.reader import read_model
from rammer_testing.operators import drawn
from rammer_testing.operators.misuse import Misuse, misuses
from rammer_testing.sandbox import MEMORY, forked, limit_memory

#: The folders of the packages rammer and rammer_testing.
PACKAGES: Final = (Path(str(rammer.__file__)).parent, Path(__file__).parents[1])

#: Time limit in seconds for the misuses of one case.
PATIENCE: Final = 120.0


@dataclass
class Survey:
    """Counts of refused and accepted misuses, and the faults: a description of each kind with its first example."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {what}" for what, n in self.ends.most_common())
        return "\n".join([f"{sum(self.ends.values())} misuses: {counts}", *(f"{k}\n    {v}" for k, v in self.faults.items())])


def survey(ops: Sequence[str], seed: int, seconds: float, share: float = 1.0, cases: int = 1) -> Survey:
    """Misuse cases of each of ``ops`` for ``seconds``; ``share`` is the probability of each change."""
    result, end = Survey(), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        for number in range(cases):
            for op in ops:
                if time.monotonic() < end:
                    _of_case(result, op, seed, number, share, Path(folder))
    return result


def _of_case(result: Survey, op: str, seed: int, number: int, share: float, folder: Path) -> None:
    case, start = drawn(op, seed, number), 0
    chosen = Random(f"{op} {seed} {number}")
    todo = [m for m in misuses(case, Random(f"{op} {seed} {number}")) if chosen.random() < share]
    while start < len(todo):
        code, sign, late, _ = forked(lambda first=start: _judged(todo[first:]), folder / "out", folder / "err", PATIENCE)  # type: ignore[misc]
        lines = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
        for misuse, (what, fault) in zip(todo[start:], lines, strict=False):
            result.ends[what] += 1
            if fault:
                result.faults.setdefault(f"{op}: {fault}", f"{misuse} of {case}")
        start += len(lines)
        if start < len(todo):
            why = "hangs" if late else f"ends the process (signal {sign}, exit code {code})"
            result.ends["faults"] += 1
            result.faults.setdefault(f"{op}: {why}", f"{todo[start]} of {case}")
            start += 1


def _judged(todo: Sequence[Misuse]) -> int:
    warnings.simplefilter("ignore")
    limit_memory(MEMORY)
    for misuse in todo:
        print(json.dumps(outcome(misuse)), flush=True)
    return 0


def outcome(misuse: Misuse) -> tuple[str, str]:
    """Return ``refused`` or ``accepted``, or ``faults`` with the exception and its origin."""
    try:
        graph = bind(read_model(misuse.model), {name: a.shape for name, a in misuse.feeds.items()})
        taken = set(graph.types)
        for node in graph.nodes:
            try:
                lower_node(graph, node, taken)
            except CannotLower:
                continue
    except BadInput:
        return "refused", ""
    except Exception as error:  # any other escaped exception is a fault
        frames = [f for f in traceback.extract_tb(error.__traceback__) if any(map(Path(f.filename).is_relative_to, PACKAGES))]
        said = re.sub(r"\d+", "#", (str(error).splitlines() or [""])[0])
        where = f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "?"
        return "faults", f"{type(error).__name__} in {where}: {said[:100]}"
    return "accepted", ""
