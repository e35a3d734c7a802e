"""A campaign shared by several processes, each with a seed of its own, that ends when it is told to and leaves a report."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rammer.runtime.files import write_whole
from rammer.testing.cage import Machinery
from rammer.testing.mutants.tally import Tally

#: Seconds between two reports, and for the processes to say what they have when the time is up.
PERIOD, GRACE = 5.0, 3.0
#: A fault that a process which ends by itself counts as.
DIED: Final = "a process of the campaign ended"


@dataclass
class _Part:
    """One process and the counts that it has sent."""

    process: subprocess.Popen[bytes]
    rest: bytes = b""
    tally: Tally = field(default_factory=Tally)


def crew(words: Sequence[str], processes: int, seed: int, seconds: float, report: Path | None) -> Tally:
    """Run ``python -m rammer.testing.mutants WORDS`` in so many processes; the sum of what they counted, which ``report`` has
    every few seconds, too. They are killed when ``seconds`` and a little more are over, whatever they do."""
    end = time.monotonic() + seconds
    own = [sys.executable, "-m", "rammer.testing.mutants", *words, "--stream", "--seconds", str(seconds)]
    parts = [_Part(subprocess.Popen([*own, "--seed", str(seed * 1000 + i)], stdout=subprocess.PIPE, start_new_session=True))
             for i in range(processes)]  # fmt: skip
    written, alive = 0.0, list(parts)
    try:
        while alive and time.monotonic() < end + GRACE:
            alive = [p for p in alive if _heard(p, alive)]
            if time.monotonic() > written + PERIOD:
                written = time.monotonic()
                _write(report, Tally.sum(p.tally for p in parts), len(alive), end)
    finally:
        for part in parts:
            if part.process.poll() is None:
                os.killpg(part.process.pid, signal.SIGKILL)
            part.process.wait()
    total = Tally.sum(p.tally for p in parts)
    _write(report, total, 0, end)
    return total


def _heard(part: _Part, alive: Sequence[_Part]) -> bool:
    """Read what a process says; False when it has ended."""
    assert part.process.stdout is not None
    if not select.select([part.process.stdout], [], [], 0.2 / len(alive))[0]:
        return True
    data = os.read(part.process.stdout.fileno(), 1 << 16)
    *lines, part.rest = (part.rest + data).split(b"\n")
    if lines:
        part.tally = Tally.of(json.loads(lines[-1]))
    if data:
        return True
    code = part.process.wait()
    if code == Machinery.exit_code:
        raise Machinery("a process of the campaign ended: nothing can be searched here", hint="its own error stands above")
    if code not in (0, 1):
        part.tally.faults.append((f"{DIED} with exit code {code}", "its standard error"))
    return False


def _write(report: Path | None, total: Tally, running: int, end: float) -> None:
    if report is not None:
        left = max(0.0, end - time.monotonic())
        entry = {"mutants": total.mutants, "running": running, "seconds_left": round(left, 1), **total.data()}
        text = f"{total}\n\n{json.dumps(entry)}\n"
        write_whole(report, lambda file: file.write(text.encode()))
