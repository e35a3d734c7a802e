"""The results of the matrix: one stored line per case, and the page that shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from result import Result, said, write
from rows import append, lines_of

from rammer.errors import BadInput

#: Characters of a reason that the page shows.
SHOWN: Final = 160
TITLE: Final = "Every model by every policy"


@dataclass(frozen=True)
class Case:
    """A model on a device with a policy."""

    model: str
    device: str
    policy: str


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case, with its relative L2 distance to the ``judge``.

    Unless it is right, ``said`` is "wrong", "declined" (with a clear error), "failed" or "did not end", and ``why`` is the
    reason. ``seconds`` of compiling and running are CPU time; ``clock`` is wall-clock time."""

    case: Case
    error: float = 0.0
    judge: str = ""
    said: str = ""
    why: str = ""
    seconds: float = 0.0
    clock: float = 0.0

    @property
    def cell(self) -> str:
        """The text of the outcome in the table."""
        if self.said and self.said != "wrong":
            return self.said
        mark = "" if self.judge == "ONNX Runtime" else f" ({self.judge})"
        return f"{'**wrong** ' if self.said else ''}{self.error:.1e}{mark}"

    def __str__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.case.model}, {self.case.policy}, {self.case.device}: {self.cell}, {self.seconds:.1f} CPU s{why}"


class MatrixPage:
    """The page at ``path`` (None: nowhere) and the file of its lines. With ``keep`` existing lines are reused. Raises BadInput if
    they come from another environment."""

    def __init__(self, path: Path | None, facts: Mapping[str, str], keep: bool) -> None:
        self.path, self.facts = path, dict(facts)
        self.lines = path.with_suffix(".jsonl") if path is not None else None
        self.found: dict[Case, Outcome] = {}
        if self.lines is not None and keep:
            self.keep(self.lines)
        elif self.lines is not None:
            self.lines.unlink(missing_ok=True)

    def keep(self, lines: Path) -> None:
        """Read the outcomes in a file, except cases that did not end."""
        for data in lines_of(lines):
            facts = data.pop("environment", self.facts)
            if facts != self.facts:
                hint = "leave out --keep, or name another folder"
                raise BadInput(f"{lines} is of another environment", hint=hint)
            outcome = Outcome(Case(**data.pop("case")), **data)
            self.found.pop(outcome.case, None)
            if outcome.said != "did not end":
                self.found[outcome.case] = outcome

    def add(self, outcome: Outcome) -> None:
        """Add one outcome and rewrite the page."""
        self.found[outcome.case] = outcome
        if self.lines is not None and self.path is not None:
            more: dict[str, Any] = {} if self.lines.is_file() else {"environment": self.facts}
            append(self.lines, {**asdict(outcome), **more})
            write(self.path, self.text())

    def result(self) -> Result:
        """Return the table: one row per model and device."""
        policies = list(dict.fromkeys(c.policy for c in self.found))
        models = list(dict.fromkeys(c.model for c in self.found))
        places = sorted(dict.fromkeys((c.model, c.device) for c in self.found), key=lambda p: models.index(p[0]))
        rows = []
        for model, device in places:
            mine = [self.found.get(Case(model, device, p)) for p in policies]
            longest = max((o.seconds for o in mine if o is not None), default=0.0)
            rows.append([model, device, *(o.cell if o is not None else "not begun" for o in mine), f"{longest:.1f}"])
        right = sum(not o.said for o in self.found.values())
        others = [str(o) for o in self.found.values() if o.why]
        notes = [
            f"{right} of {len(self.found)} cases are right: at a relative L2 distance of at most 1e-4 from ONNX Runtime, or "
            "from float64. A case is a process of its own; CPU seconds are of compiling and of one run.",
            "\n".join(f"- {text[:SHOWN]}" for text in others) or "None failed.",
        ]
        return Result(TITLE, ("model", "device", *policies, "longest CPU s"), rows, notes)

    def text(self) -> str:
        """Return the page as Markdown text."""
        devices = dict.fromkeys(c.device for c in self.found)
        command = f"python -m benchmarks matrix {' '.join(f'--device {d}' for d in devices)}"
        return self.result().document(said(command), self.facts)
