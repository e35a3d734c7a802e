"""Campaigns of mutants: drawn, run in a child, judged, and shrunk on failure."""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import shutil
import sys
import tempfile
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rammer_testing.mutants.change import CANARY
from rammer_testing.mutants.kinds import KINDS, OUTPUTS, Kind, Seed, same_outputs
from rammer_testing.mutants.tally import FAULT, OTHER, RAN, REFUSED, RIGHT, Tally
from rammer_testing.mutants.value import NOT_JUDGED, Voices
from rammer_testing.sandbox import Machinery, Outcome, caged, command, forked, installed

#: Most changes to one mutant.
CHANGES = 3
#: Placeholder for the folder of a saved case.
_PLACE = "{folder}"
#: Modules that must not be imported before a fork: they start threads or drivers.
_NEVER = ("pyopencl", "cuda", "cupy", "pocl", "openvino", "torch", "jax", "rammer_rocm", "rammer_cuda")


@dataclass(frozen=True)
class Mutant:
    """A mutant: the index of its seed file, the random state of its command, its way of change, and a seed per change."""

    seed: int
    draw: int
    way: int
    changes: tuple[int, ...]


class Campaign:
    """Mutants of one kind for one device. ``folder`` is emptied repeatedly; ``keep`` is a file of failing mutants."""

    def __init__(self, kind: str, device: Sequence[str], seed: str, folder: Path, keep: Path | None = None) -> None:
        self.kind: Kind = KINDS[kind](device)
        self.number, self.folder, self.keep = seed, folder, keep
        self.rng = random.Random(f"{kind} {seed}")
        preload(folder.parent, tuple(device))
        self.seeds: list[Seed] = self.kind.seeds(folder, self.rng)
        self.voices = Voices()
        self.tally, self.known = Tally(), set[str]()

    def drawn(self) -> Mutant:
        """Return the next mutant."""
        rng = self.rng
        ways = [number for number, way in enumerate(self.kind.ways) for _ in range(way.share)]
        changes = tuple(rng.randrange(1 << 48) for _ in range(rng.choice((1, 1, 1, 2, CHANGES))))
        return Mutant(rng.randrange(len(self.seeds)), rng.randrange(1 << 48), rng.choice(ways), changes)

    def one(self, mutant: Mutant) -> str:
        """Return the fault of one mutant after counting, shrinking and storing it; "" if the mutant passes."""
        what, fault, end = self.judged(mutant)
        self.tally.count(self.kind.name, self.kind.ways[mutant.way].name, what, end.seconds)
        if fault:
            small = self._shrunk(mutant, fault)
            self.tally.faults.append((fault, str(self._kept(small, fault) or small)))
        return fault

    def judged(self, mutant: Mutant) -> tuple[str, str, Outcome]:
        """Return the outcome of a mutant (a table column), its fault, and the end of its run."""
        place = self.folder / "mutant"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        end = caged(self.placed(mutant, place), place, self.kind.device)
        what, fault = self._verdict(mutant, end, place)
        return what, fault, end

    def placed(self, mutant: Mutant, place: Path) -> list[str]:
        """Write the mutant's files into ``place`` and return the command that uses them."""
        return self.kind.place(place, self.seeds[mutant.seed], self.data(mutant), random.Random(mutant.draw))

    def data(self, mutant: Mutant) -> bytes:
        """Return the changed bytes. A change of unreadable data has no effect."""
        data, change = self.seeds[mutant.seed].data, self.kind.ways[mutant.way].change
        for number in mutant.changes:
            with contextlib.suppress(Exception):
                data = change(random.Random(number), data)
        return data

    def _verdict(self, mutant: Mutant, end: Outcome, place: Path) -> tuple[str, str]:
        fault = "ran what the file says" if (place / CANARY).exists() else end.fault
        if not fault and end.code and self.kind.forgiving:
            fault = f"a damaged cache must not cause exit code {end.code}: {end.err.splitlines()[0]}"
        if fault or end.code:
            return (FAULT, fault) if fault else (REFUSED, "")
        if not (place / OUTPUTS).exists():
            return RAN, ""  # inspection only
        if not self.kind.voiced:
            if same_outputs(place, self.seeds[mutant.seed]):
                return RIGHT, ""
            free = self.kind.ways[mutant.way].free
            return (OTHER, "") if free else (FAULT, f"a damaged {self.kind.name} file gave other numbers")
        said = self.voices(self.data(mutant), place)
        return (RAN, "") if said == NOT_JUDGED else (FAULT, f"wrong numbers, {said}") if said else (RIGHT, "")

    def _shrunk(self, mutant: Mutant, fault: str) -> Mutant:
        """Return the mutant with the fewest changes that fails in the same way."""
        for index in range(len(mutant.changes) - 1, -1, -1):
            fewer = replace(mutant, changes=mutant.changes[:index] + mutant.changes[index + 1 :])
            if fewer.changes and self.judged(fewer)[1][:30] == fault[:30]:
                mutant = fewer
        return mutant

    def _kept(self, mutant: Mutant, fault: str) -> str:
        """Return the location and command of the failing files: a line of ``keep``, one per fault."""
        if self.keep is None or fault in self.known:
            return ""
        self.known.add(fault)
        place = self.folder / "kept"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        words = [w.replace(str(place), _PLACE) for w in self.placed(mutant, place)]
        files = {
            str(p.relative_to(place)): b64encode(zlib.compress(p.read_bytes())).decode() for p in place.rglob("*") if p.is_file()
        }
        case = {
            "kind": self.kind.name,
            "fault": fault,
            "campaign": self.number,
            "mutant": str(mutant),
            "words": words,
            "device": self.kind.device,
            "files": files,
        }
        self.keep.parent.mkdir(parents=True, exist_ok=True)
        with self.keep.open("ab", buffering=0) as file:  # one write: several processes append to it
            file.write(json.dumps(case).encode() + b"\n")
        return f"{self.keep} ({self.kind.name}, campaign {self.number})"


def again(line: str) -> tuple[str, Outcome]:
    """Rerun a saved case and return its fault and end, including the references' judgement of a model's numbers."""
    case = json.loads(line)
    with tempfile.TemporaryDirectory() as folder:
        for name, data in case["files"].items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(zlib.decompress(b64decode(data)))
        end = caged([w.replace(_PLACE, folder) for w in case["words"]], Path(folder), case.get("device", ()))
        if end.fault or not KINDS[case["kind"]].voiced or not (Path(folder) / OUTPUTS).exists():
            return end.fault, end
        voices = Voices()
        try:
            return voices((Path(folder) / "m.onnx").read_bytes(), Path(folder)), end
        finally:
            voices.outside.close()


@cache
def preload(folder: Path, device: tuple[str, ...]) -> None:
    """Import the modules of a run here, so that children inherit them. A first child runs a model and lists its modules."""
    import numpy as np

    from rammer_testing.small_models import MODELS

    folder.mkdir(parents=True, exist_ok=True)
    installed()
    path, listed = folder / "m.onnx", folder / "modules"
    path.write_bytes(MODELS["recurrence"].build(np.random.default_rng(0)).SerializeToString())

    def work() -> int:
        code = command(["run", path, *device])
        listed.write_text("\n".join(sys.modules))
        return code

    code, *_ = forked(work, folder / "stdout", folder / "stderr", 120)
    if code:
        raise Machinery("a valid model does not run", hint=(folder / "stderr").read_text()[-2000:].strip())
    for name in listed.read_text().split():
        if name != "__main__" and not name.startswith(_NEVER):
            try:
                importlib.import_module(name)
            except Exception:
                continue  # created at run time, not importable
