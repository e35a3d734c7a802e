"""rocm's kernels for GPUs under Oclgrind, a simulated OpenCL GPU: races, bounds, barriers, calls and uninitialised values.

    python tests/kit/tools/oclgrind.py --seconds 300 --seed 1

First each planted fault must be detected. Then random operators with random candidates (``rammer_testing.families``) and small
models with random, mostly partial tiles run in every precision and layout. Values are compared with float64. The two tools
exclude each other. ``races`` also reports races of equal values, bounds, barriers and API errors. ``values`` reports
uninitialised reads, for models only. Every program buffer is a separate allocation meanwhile (``separate.py``). ``--case``
repeats a printed case.

Oclgrind is a package of Debian and Ubuntu (``apt-get install oclgrind``).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from entry import run

from rammer.errors import DeviceUnavailable, Mismatch

#: Settings of both tools: three concurrent work-groups, and memory for allocations that are never freed.
ALWAYS = {
    "OCLGRIND_COMPUTE_UNITS": "3",
    "OCLGRIND_CHECK_API": "1",
    "OCLGRIND_MAX_ERRORS": "1000000",
    "OCLGRIND_GLOBAL_MEM_SIZE": str(4_000_000_000),
    "OCLGRIND_NUM_THREADS": "1",
    "PYOPENCL_NO_CACHE": "1",
}
#: The tools. The second lacks ``freeze``, which the compiler's optimisations insert.
TOOLS = {
    "races": {"OCLGRIND_DATA_RACES": "1", "OCLGRIND_UNIFORM_WRITES": "1"},
    "values": {"OCLGRIND_UNINITIALIZED": "1", "OCLGRIND_BUILD_OPTIONS": "-cl-opt-disable"},
}
#: Faults planted by replacement in a model's source: (tool, case, pattern, replacement, expected message).
PLANTED = {
    "a barrier between stages": ("races", "kit:product", r"    barrier\(CLK_LOCAL_MEM_FENCE\);", "", "data race at local"),
    "one element too many is written": ("races", "kit:convolution", r"u < (\d+);", r"u < \1 + 1;", "Invalid write of size 4"),
    "one row too many is read": ("races", "kit:convolution", r"< 13u", "< 14u", "Invalid read of size 4"),
    "two threads write the same": (
        "races",
        "kit:convolution",
        r"u \+= \(int\)get_local_size\(0\)\)",
        "u += 1)",
        "data race at global",
    ),
    "a barrier that some threads miss": (
        "races",
        "kit:product",
        r"    barrier\(CLK_LOCAL_MEM_FENCE\);",
        "if (get_local_id(0) < 128) barrier(CLK_LOCAL_MEM_FENCE);",
        "divergence",
    ),
    "a sum that does not begin with 0": ("values", "kit:convolution", r"float a1 = 0\.0f;", "float a1;", "ninitialized"),
    "a stage that leaves out an element": (
        "values",
        "kit:normalisation",
        r"for \(int t = rm_item\(\)",
        "for (int t = rm_item() + 1",
        "ninitialized",
    ),
}
#: Complaints to ignore, as patterns. pyopencl queries every device for newer features. The tree of a shared reduction also
#: combines slots of elements beyond the tensor, which are never read. An error counts only if this value is stored in global
#: memory, is an address or decides anything but a maximum. Oclgrind reports those cases.
IGNORED = (
    r"Function: clGetDeviceInfo",
    r"^\d+ warnings? generated",
    r"^Uninitialized value written to local memory",
    r"^Controlflow .* rm_(max|min)_",
)


def find_library() -> Path:
    """Return the path of Oclgrind's library for OpenCL loaders. Raises DeviceUnavailable if it is missing."""
    binary = shutil.which("oclgrind")
    roots = [Path(binary).resolve().parent.parent] if binary else []
    for root in (*roots, Path("/usr"), Path("/usr/local")):
        # Searching all of /usr/lib takes half a second.
        for depth in ("", "*/", "*/*/"):
            for found in sorted(root.glob(f"lib*/{depth}liboclgrind-rt-icd.so")):
                return found
    raise DeviceUnavailable("oclgrind is not installed", hint="apt-get install oclgrind")


def child(library: Path, tool: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a process that runs this file under a tool."""
    with tempfile.TemporaryDirectory(prefix="rammer-oclgrind-") as folder:
        (Path(folder) / "oclgrind.icd").write_text(f"{library}\n")
        log = Path(folder) / "log"
        # Of a cached binary pyopencl asks for a kernel that does not exist, and Oclgrind reports that.
        environment = {**os.environ, **ALWAYS, **TOOLS[tool], "OCL_ICD_VENDORS": folder, "XDG_CACHE_HOME": folder}
        command = [sys.executable, __file__, "--child", str(log), *arguments]
        with (
            log.open("w") as errors,
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            assert process.stdout is not None
            last = "before the first case"
            for line in process.stdout:
                event = json.loads(line)
                last = event.get("case", last)
                yield event
        if process.returncode:
            yield {"case": last, "found": [f"the process ended with {process.returncode}: {log.read_text()[-500:]}"]}


def complaints(text: str) -> list[str]:
    """Return the distinct complaints in a piece of a log, without addresses and threads."""
    found = Counter[str]()
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        if lines and not any(re.search(pattern, " ".join(lines)) for pattern in IGNORED):
            kept = [re.sub(r"0x[0-9a-f]+", "ADDRESS", line) for line in lines if not line.startswith(("Entity:", "store", "%"))]
            found["; ".join(kept[:6])] += 1
    return [f"{count} x {what}" for what, count in found.most_common(8)]


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant the fault in every source of the plugin; an empty name plants none. Raises Mismatch if it applies nowhere."""
    import rammer_rocm.launch_executor

    honest = rammer_rocm.launch_executor.launch_text

    def faulty(*arguments: Any) -> str:
        _, _, pattern, replacement, _ = PLANTED[name]
        text, count = re.subn(pattern, replacement, honest(*arguments), count=1)
        if not count:
            raise Mismatch(f"the fault {name!r} cannot be planted", hint="the kernels have changed: update PLANTED")
        return text

    rammer_rocm.launch_executor.launch_text = faulty if name else honest
    try:
        yield
    finally:
        rammer_rocm.launch_executor.launch_text = honest


def work(log: Path, seconds: float, seed: int, case: str, faults: str) -> None:
    """Run one case, those of planted faults, or random ones until the time ends; events are lines on stdout."""
    from oclgrind_cases import Runner

    poisoned = "OCLGRIND_UNINITIALIZED" not in os.environ
    runner, random, end = Runner(poisoned), Random(seed), time.monotonic() + seconds
    place = log.stat().st_size
    drawn = ((runner.draw(random), "") for _ in iter(lambda: time.monotonic() < end, False))
    chosen = [(PLANTED[name][1], name) for name in PLANTED if faults == PLANTED[name][0]]
    for one, fault in [(case, "")] if case else chosen if faults else drawn:
        print(json.dumps({"case": one, "fault": fault}), flush=True)
        with planted(fault):
            problem = runner.run(one)
        data = log.read_bytes()
        found = complaints(data[place:].decode(errors="replace")) + ([problem] if problem else [])
        place = len(data)
        print(json.dumps({"case": one, "fault": fault, "found": found, "covered": runner.covered}), flush=True)


def check_planted(library: Path, tool: str) -> None:
    """Raise Mismatch unless the tool detects each of its planted faults."""
    events = [e for e in child(library, tool, "--faults", tool) if "found" in e]
    for name in (n for n in PLANTED if PLANTED[n][0] == tool):
        said, words = [f for e in events if e.get("fault") == name for f in e["found"]], PLANTED[name][-1]
        if not any(words in f for f in said):
            raise Mismatch(f"the planted fault {name!r} is not found by {tool}: {said}")
        click.echo(f"planted, found by {tool}: {name} ({next(f for f in said if words in f)[:90]})")


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="Seconds for each tool.")
@click.option("--seed", default=1, show_default=True, help="Seed of the cases.")
@click.option("--tools", default=",".join(TOOLS), show_default=True, help="Comma-separated tools.")
@click.option("--case", default="", help="Run this case, as it was printed.")
@click.option("--planted/--no-planted", "faults_first", default=True, help="Look for the planted faults first.")
@click.option("--child", "log", type=click.Path(path_type=Path), hidden=True)
@click.option("--faults", default="", hidden=True)
def main(seconds: float, seed: int, tools: str, case: str, faults_first: bool, log: Path | None, faults: str) -> None:
    """Run the search, print its coverage and its failures, and exit with 1 if it has failures."""
    if log is not None:
        return work(log, seconds, seed, case, faults)
    library = find_library()
    if faults_first and not case:
        for tool in tools.split(","):
            check_planted(library, tool)
    bad = 0
    for tool in tools.split(","):
        count, covered = 0, dict[str, int]()
        for event in child(library, tool, "--seconds", str(seconds), "--seed", str(seed), "--case", case):
            if "found" not in event:
                continue
            count, covered, bad = count + 1, event.get("covered", covered), bad + bool(event["found"])
            for line in event["found"]:
                click.echo(f"{tool}: --case {event['case']!r}\n    {line}")
        click.echo(f"{tool}: {count} cases, " + ", ".join(f"{n} {what}" for what, n in sorted(covered.items())))
    if bad:
        raise Mismatch(f"{bad} cases have reports")


if __name__ == "__main__":
    try:
        run(lambda: main(standalone_mode=False))
    except click.ClickException as problem:
        problem.show()
        sys.exit(problem.exit_code)
