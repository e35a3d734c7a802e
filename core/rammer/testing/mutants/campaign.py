"""Many mutants, one after another: drawn, run in a child, judged, and shrunk where they fail."""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rammer.testing.cage import Outcome, caged, forked, installed
from rammer.testing.mutants.change import CANARY
from rammer.testing.mutants.kinds import KINDS, Kind, Seed, same_outputs

#: Most changes to one mutant.
CHANGES = 3
#: Modules that must not be imported before a fork: they start threads or drivers.
_NEVER = ("pyopencl", "cuda", "cupy", "pocl", "openvino", "torch", "jax", "rammer_rocm", "rammer_cuda")


@dataclass(frozen=True)
class Mutant:
    """Which seed, how to draw what is run, and the changes: (number of a step, seed of its generator)."""

    seed: int
    draw: int
    changes: tuple[tuple[int, int], ...]


@dataclass
class Tally:
    """What became of the mutants: ends by kind, and the faults with their smallest mutants."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, Mutant, Path | None]] = field(default_factory=list)
    slowest: float = 0.0

    def __str__(self) -> str:
        lines = [f"{sum(self.ends.values())} mutants: " + ", ".join(f"{n} {what}" for what, n in self.ends.most_common()),
                 f"slowest {self.slowest:.1f} s"]  # fmt: skip
        kinds = Counter(fault for fault, _, _ in self.faults)
        lines += [f"{n} times {fault}" for fault, n in kinds.most_common()]
        return "\n".join((*lines, *(f"kept {place}" for _, _, place in self.faults if place)))


class Campaign:
    """Mutants of one kind for one device. ``folder`` is emptied again and again; ``keep`` gets the failing files."""

    def __init__(self, kind: str, device: Sequence[str], seed: int, folder: Path, keep: Path | None = None) -> None:
        self.kind: Kind = KINDS[kind](device)
        self.number, self.folder, self.keep = seed, folder, keep
        self.rng = random.Random(f"{kind} {seed}")
        preload(folder, device)
        self.seeds: list[Seed] = self.kind.seeds(folder, self.rng)
        self.tally = Tally()

    def run(self, count: int, seconds: float) -> Tally:
        """Draw and judge up to ``count`` mutants within ``seconds``."""
        end = time.monotonic() + seconds
        for _ in range(count):
            if time.monotonic() > end:
                break
            self.one(self._drawn())
        return self.tally

    def _drawn(self) -> Mutant:
        rng = self.rng
        steps = range(len(self.kind.steps))
        changes = tuple((rng.choice(steps), rng.randrange(1 << 48)) for _ in range(rng.choice((1, 1, 1, 2, CHANGES))))
        return Mutant(rng.randrange(len(self.seeds)), rng.randrange(1 << 48), changes)

    def one(self, mutant: Mutant) -> str:
        """The fault of one mutant, which is counted, shrunk and kept; "" where there is none."""
        fault, end = self.judged(mutant)
        self.tally.slowest = max(self.tally.slowest, end.seconds)
        what = "faults" if fault else "runs" if end.code == 0 else f"errors of exit code {end.code}"
        self.tally.ends[what] += 1
        if fault:
            small = self._shrunk(mutant, fault)
            self.tally.faults.append((fault, small, self._kept(small, fault)))
        return fault

    def judged(self, mutant: Mutant) -> tuple[str, Outcome]:
        """The fault of a mutant and the end of its run."""
        place = self.folder / "mutant"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        end = caged(self.placed(mutant, place), place)
        return self._fault(mutant, end, place), end

    def placed(self, mutant: Mutant, place: Path) -> list[str]:
        """The mutant's files in ``place``, and the command that uses them."""
        seed = self.seeds[mutant.seed]
        data = self.data(mutant)
        return self.kind.place(place, seed, data, random.Random(mutant.draw))

    def data(self, mutant: Mutant) -> bytes:
        """The changed bytes. A step that cannot read what the last one made changes nothing."""
        data = self.seeds[mutant.seed].data
        for step, number in mutant.changes:
            try:
                data = self.kind.steps[step](random.Random(number), data)
            except Exception:
                continue
        return data

    def _fault(self, mutant: Mutant, end: Outcome, place: Path) -> str:
        if (place / CANARY).exists():
            return "ran what the file says"
        if end.fault:
            return end.fault
        if not self.kind.forgiving:
            return ""
        if end.code:
            return f"a damaged cache is no reason for exit code {end.code}: {end.err.splitlines()[0]}"
        exact = not any(self.kind.sealed(step) for step, _ in mutant.changes)
        if (exact or self.kind.name == "store") and not same_outputs(place, self.seeds[mutant.seed]):
            return "wrong outputs from a damaged cache"
        return ""

    def _shrunk(self, mutant: Mutant, fault: str) -> Mutant:
        """The mutant with changes left out as long as it fails in the same way."""
        alike = fault[:30]
        for index in range(len(mutant.changes) - 1, -1, -1):
            fewer = Mutant(mutant.seed, mutant.draw, mutant.changes[:index] + mutant.changes[index + 1 :])
            if fewer.changes and self.judged(fewer)[0][:30] == alike:
                mutant = fewer
        return mutant

    def _kept(self, mutant: Mutant, fault: str) -> Path | None:
        """The failing files with the words to run them; one of each fault."""
        if self.keep is None or any(f == fault for f, _, _ in self.tally.faults):
            return None
        place = self.keep / f"{self.kind.name}-{self.number}-{len(self.tally.faults)}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        words = [w.replace(str(place), "{folder}") for w in self.placed(mutant, place)]
        (place / "case.json").write_text(json.dumps({"words": words, "fault": fault}, indent=2))
        return place


def again(place: Path) -> Outcome:
    """The end of a kept case, run once more in a copy of its folder."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "case"
        shutil.copytree(place, copy)
        words = json.loads((place / "case.json").read_text())["words"]
        return caged([w.replace("{folder}", str(copy)) for w in words], copy)


def preload(folder: Path, device: Sequence[str]) -> None:
    """Import here what a run imports, so that children find it: a first child runs a model and lists its modules."""
    import numpy as np

    from rammer.testing.small_models import MODELS

    folder.mkdir(parents=True, exist_ok=True)
    path, listed = folder / "m.onnx", folder / "modules"
    path.write_bytes(MODELS["recurrence"].build(np.random.default_rng(0)).SerializeToString())

    def work() -> int:
        sys.argv = ["rammer", "run", str(path), *device]
        with contextlib.suppress(SystemExit):
            installed()()
        listed.write_text("\n".join(sys.modules))
        return 0

    forked(work, folder / "stdout", folder / "stderr", 120)
    for name in listed.read_text().split():
        if name != "__main__" and not name.startswith(_NEVER):
            try:
                importlib.import_module(name)
            except Exception:
                continue  # made while running, not importable
