"""Cold and warm starts: seconds from opening a model until it is loaded, in new processes.

    python benchmarks/starts.py --device cuda --markdown starts.md            (the whole zoo; about four minutes on an H200)
    python benchmarks/starts.py --device rocm --models squeezenet,bert_base

Cold starts have an empty cache; warm starts use the cached program and machine code. Both are whole processes. The counted time
is that of importing rammer, ``rammer.compile`` and ``prepare``, including the first use of the device.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of

from rammer.compile_options import TUNING_LEVELS
from rammer.errors import DeviceFailure
from rammer.report.text_table import markdown_table

#: Parts of a warm start: importing rammer, opening model and device, the device's fingerprint, reading and verifying the cached
#: program, loading it. The rest is not counted: the first run, the whole process, and its CPU time (all threads).
PARTS = ("importing", "opening", "device", "reading", "loading", "first run", "process", "process, CPU")
HEADERS = ("model", "cold s", "warm s", *(f"warm: {n}" if n in PARTS[:5] else n for n in PARTS))
#: Functions listed by --profile.
PROFILED = 40


def start_once(path: Path, inputs: Path, device: str, tune: str, profile: bool) -> dict[str, float]:
    """Open, load and run the model once; return the seconds of each step."""
    import numpy as np

    with np.load(inputs) as data:
        arrays = {n: data[n] for n in data.files}
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    marks = [time.perf_counter()]
    import rammer
    from rammer.runtime import program_cache

    marks.append(time.perf_counter())
    reading = _timed(program_cache, "load_artifact")
    exe = rammer.compile(path, device=device, tune=tune)
    marks.append(time.perf_counter())
    exe.backend.fingerprint  # noqa: B018 - what looking for a kept program needs first
    marks.append(time.perf_counter())
    special = exe.prepare(exe.checked(arrays))
    marks.append(time.perf_counter())
    special.run(arrays)
    marks.append(time.perf_counter())
    if profile:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(PROFILED)
    exe.close()
    importing, opening, fingerprint, loading, first = (b - a for a, b in pairwise(marks))
    return {
        "importing": importing,
        "opening": opening,
        "device": fingerprint,
        "reading": sum(reading),
        "loading": loading - sum(reading),
        "first run": first,
        "start": marks[4] - marks[0],
        "process, CPU": time.process_time(),
    }


def _timed(module: Any, name: str) -> list[float]:
    """Return a list that records the seconds of every later call of a module's function."""
    function, seconds = getattr(module, name), list[float]()

    def call(*values: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*values)
        finally:
            seconds.append(time.perf_counter() - begin)

    setattr(module, name, call)
    return seconds


def started(path: Path, inputs: Path, device: str, tune: str, cache: Path, profile: bool) -> dict[str, float]:
    """Run ``start_once`` in a separate process and return its figures with the time of the whole process."""
    # Like an installed package, with Python's bytecode cached.
    environment = {n: v for n, v in os.environ.items() if n not in ("PYTHONDONTWRITEBYTECODE", "RAMMER_CACHE")}
    environment["XDG_CACHE_HOME"] = str(cache)
    command = [
        sys.executable,
        __file__,
        "--child",
        str(path),
        "--inputs",
        str(inputs),
        "--device",
        device,
        "--tune",
        tune,
        *(["--profile"] if profile else []),
    ]
    begin = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise DeviceFailure(f"{path.stem} does not start: {done.stderr[-2000:]}")
    if profile:
        click.echo(f"--- {path.stem}\n{done.stderr}", err=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "process": seconds}


def measure(key: str, device: str, tune: str, repeats: int, seed: int, profile: bool) -> list[str]:
    """Return a row: one cold start, the median of ``repeats`` warm ones."""
    import numpy as np
    from measuring import exported
    from zoo import find

    path = exported(key, Path(tempfile.gettempdir()) / "rammer-zoo", seed)
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs.npz"
        np.savez(inputs, **find(key).feeds(seed))  # type: ignore[arg-type]
        cache = Path(folder) / "cache"
        cold = started(path, inputs, device, tune, cache, False)
        warm = sorted((started(path, inputs, device, tune, cache, False) for _ in range(repeats)), key=lambda r: r["start"])
        if profile:
            started(path, inputs, device, tune, cache, True)
    typical: dict[str, Any] = warm[len(warm) // 2]
    parts = [f"{typical[n]:.2f}" for n in PARTS]
    return [key, f"{cold['start']:.1f}", f"{typical['start']:.2f}", *parts]


@click.command()
@click.option("--models", default="", help="Keys of the zoo, with commas; all if none is given.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--tune", default="off", show_default=True, type=click.Choice(TUNING_LEVELS))
@click.option("--repeats", default=5, show_default=True, help="Warm starts; the median counts.")
@click.option("--seed", default=2026, show_default=True, help="Of weights and inputs.")
@click.option("--keep", is_flag=True, help="Rows of other models that the file has stay.")
@click.option("--profile", is_flag=True, help="Show where one more warm start spends its time.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the table.")
@click.option("--child", type=click.Path(path_type=Path), hidden=True)
@click.option("--inputs", type=click.Path(path_type=Path), hidden=True)
def main(
    models: str,
    device: str,
    tune: str,
    repeats: int,
    seed: int,
    keep: bool,
    profile: bool,
    markdown_file: Path | None,
    child: Path | None,
    inputs: Path | None,
) -> None:
    """Measure starts and print the table, written model by model."""
    if child and inputs:
        print(json.dumps(start_once(child, inputs, device, tune, profile)))
        return
    from result import Result, joined, said, write
    from zoo import ZOO

    facts, rows = environment_of(device.partition(":")[0] == "cuda"), list[list[str]]()
    kept = markdown_file.read_text() if keep and markdown_file is not None and markdown_file.is_file() else ""
    for key in models.split(",") if models else ZOO:
        rows.append(measure(key, device, tune, repeats, seed, profile))
        click.echo("  ".join(rows[-1]))
        result = Result(f"Starts on {device}, --tune {tune}", HEADERS, rows, [f"Medians of {repeats} warm starts."])
        command = said(f"python benchmarks/starts.py --device {device} --models {','.join(r[0] for r in rows)} --tune {tune}")
        if markdown_file is None:
            continue
        if kept:
            result, command = joined(result, command, kept, facts)
        write(markdown_file, result.document(command, facts))
    click.echo(markdown_table(rows, HEADERS))


if __name__ == "__main__":
    run(main)
