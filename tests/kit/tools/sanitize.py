"""NVIDIA's compute-sanitizer over whole models and kernels of every family.

The tools are memcheck (addresses), racecheck (shared memory) and initcheck (uninitialised memory).

    python tests/kit/tools/sanitize.py --models squeezenet,lstm_tc,families --markdown sanitizer.md

First each tool must detect a planted fault in a kernel. Each check is a separate process that runs the model twice through
``run`` and twice through a bound call on new inputs. Its results are compared with an unchecked process. Errors of driver calls
raise exceptions and are not counted.

Use version 2026.3 or later (``pip install nvidia-cuda-sanitizer-api``). NVIDIA's release notes list these fixes: in 2025.4,
2026.1 and 2026.3 false races of racecheck (mbarriers, barriers of warpgroups on Hopper), in 2026.3 crashes of Python processes
(https://docs.nvidia.com/compute-sanitizer/ReleaseNotes/index.html).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from entry import run
from facts import environment_of, section
from zoo import SEED, find
from zoo.entry import Entry

import rammer
from rammer.compile_options import TUNING_LEVELS
from rammer.errors import DeviceUnavailable, Mismatch
from rammer.report.text_table import markdown_table
from rammer_testing.cases import Sampler
from rammer_testing.search import Search, again, partial_tiles

#: Seconds that a block of a checked persistent kernel waits before it reports a hang: checked kernels are far slower.
WAIT = 300
TOOLS = ("memcheck", "racecheck", "initcheck")
#: Suffixes of a key, after a colon, that select another executor than the graph executor.
EXECUTORS = ("persistent", "mixed")
#: Short forms ``KEY:short`` that executor mixed partitions like the whole model, for which racecheck needs minutes.
SHORT = {"deepspeech2": {"frames": 60, "bins": 64, "channels": 16, "layers": 2}}
#: The key for kernels of every family instead of a model: sampled cases, products of a case, and cases per family and precision.
FAMILIES, CASES, LARGEST, EACH = "families", 60, 200_000, 2
#: For every tool, a kernel with its kind of fault, run from a CUDA graph as models are. The tool must detect it.
PLANTED = {
    "memcheck": "out[blockDim.x * 1024 * 1024 + threadIdx.x] = 1.0f;",
    "initcheck": "out[threadIdx.x] = out[threadIdx.x] + 1.0f;",
    "racecheck": "__shared__ float s[64]; s[threadIdx.x] = threadIdx.x; out[threadIdx.x] = s[63 - threadIdx.x];",
}
CLEAN = "clean"
HEADERS = ("model", "tool", "result", "clean", "seconds")
NOTE = """\
Whole models on the GPU, `--tune {tune}`, by the graph executor unless another is named, each run twice through `run` and
twice through a bound call; outputs equal those of a process that was not checked, bit for bit. Before that each tool found
a fault planted in a kernel of a CUDA graph."""
#: The first version whose racecheck supports all barriers (see above).
LEAST = (2026, 3)
#: "ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
SUMMARY = re.compile(r"SUMMARY: (\d+) (?:errors?|hazards? displayed)(.*)")


def find_sanitizer() -> str:
    """Return the path of compute-sanitizer, PyPI's before the system's. Raises DeviceUnavailable without it."""
    wheels = importlib.util.find_spec("nvidia")
    places = [p for folder in ((wheels and wheels.submodule_search_locations) or ()) for p in Path(folder).glob("cu*/bin")]
    system = sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True)
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(map(str, [*places, *os.get_exec_path(), *system])))
    if found is None:
        raise DeviceUnavailable("compute-sanitizer is not installed", hint="pip install nvidia-cuda-sanitizer-api")
    return found


def knows_barriers(version: str) -> bool:
    """Return True if the version, e.g. "Version 2026.4.0.0 (build 39022338)", recognises barriers between accesses."""
    found = re.search(r"Version (\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= LEAST


def run_model(key: str, tune: str, seed: int, path: Path) -> None:
    """Run the model and store its outputs in ``path``, or compare them with the stored outputs. ``key`` runs by the graph
    executor, ``key:persistent`` and ``key:mixed`` by those executors."""
    if key == FAMILIES:
        return run_families(seed, path)
    name, _, last = key.rpartition(":")
    key, executor = (name, last) if last in EXECUTORS else (key, "graph")
    entry = entry_of(key)
    exe = rammer.compile(entry.build(SEED), device="cuda", tune=tune, options={"executor": executor, "watchdog": str(WAIT)})
    outputs: dict[str, np.ndarray] = {}
    feeds = [entry.feeds(seed + i) for i in range(2)]
    (loaded,) = exe.prepare(exe.checked(feeds[0])).loaded.values()
    for i, inputs in enumerate(feeds):
        outputs |= {f"{n}.{i}": a for n, a in loaded.run(inputs).outputs.items()}
    bound = loaded.bind(feeds[0], {})
    for i, inputs in enumerate(feeds):
        bound.write(inputs)
        bound.run()
        outputs |= {f"{n}.bound{i}": a for n, a in bound.to_host().items()}
    exe.close()
    if not path.is_file():
        with path.open("wb") as file:
            np.savez(file, **outputs)  # type: ignore[arg-type]
        return
    with np.load(path) as kept:
        for name, array in outputs.items():
            if not np.array_equal(array, kept[name]):
                raise Mismatch(f"output {name} differs from the run that was not checked")


def entry_of(key: str) -> Entry:
    """Return the zoo's model ``KEY`` or ``KEY:small``, or the form in ``SHORT``."""
    name, _, form = key.rpartition(":")
    return replace(find(name), small=SHORT[name]).narrow() if form == "short" else find(key)


def run_families(seed: int, path: Path) -> None:
    """Run kernels of every family and precision with partial tiles, each as a program of one operator. The cases come from
    ``rammer_testing.families``; wrong results also count as failures."""
    search = Search("cuda", {"executor": "graph"}, 2)
    sampler = Sampler(Random(seed), LARGEST, tuple(search.backend.vdevice.precisions))
    wrong = [str(case) for case in partial_tiles(search, sampler, EACH, CASES) if again(search, case)]
    path.touch()
    if wrong:
        raise Mismatch(f"wrong: {'; '.join(wrong)}")


def run_planted(tool: str) -> None:
    """Run a graph of one kernel with a fault."""
    import cupy

    kernel = cupy.RawKernel(f'extern "C" __global__ void planted(float *out) {{ {PLANTED[tool]} }}', "planted")
    out, stream = cupy.empty(64, cupy.float32), cupy.cuda.Stream(non_blocking=True)
    kernel.compile()
    with stream:
        stream.begin_capture()
        kernel((1,), (64,), (out,))
        stream.end_capture().launch()
    stream.synchronize()


def checked(sanitizer: str, tool: str, key: str, tune: str, seed: int, kept: Path, limit: int) -> tuple[str, float]:
    """Return the findings of the tool and the seconds. ``key`` selects a model; "" selects the planted fault."""
    command = [
        sanitizer,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        "--print-limit",
        "20",
        "--target-processes",
        "all",
        sys.executable,
        __file__,
        "--tune",
        tune,
        "--seed",
        str(seed),
        "--kept",
        str(kept),
        *(["--child", key] if key else ["--plant", tool]),
    ]
    if tool == "memcheck":
        command[3:3] = ["--report-api-errors", "no"]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"not finished in {limit} s", float(limit)
    seconds = time.perf_counter() - start
    text = done.stdout + done.stderr
    summary = SUMMARY.findall(text)
    if done.returncode == 0 and summary and all(int(count) == 0 for count, _ in summary):
        return CLEAN, seconds
    if key:
        click.echo(f"--- {key} {tool}: exit code {done.returncode}\n{text[-6000:]}", err=True)
    shown = "; ".join(f"{count} found{rest}" for count, rest in summary) or "no summary"
    return f"not clean: {shown}, exit code {done.returncode}", seconds


@click.command()
@click.option(
    "--models",
    default="squeezenet,lstm_tc,lstm_tc:persistent,squeezenet:small:persistent,deepspeech2:short:mixed",
    show_default=True,
    help="Keys of the zoo, with commas; with :persistent or :mixed by that executor; families for kernels.",
)
@click.option("--tools", default="memcheck,racecheck", show_default=True, help=f"With commas: {', '.join(TOOLS)}.")
@click.option("--tune", default="off", show_default=True, type=click.Choice(TUNING_LEVELS))
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the table.")
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1), help="Processes checked for each row.")
@click.option("--limit", default=200, show_default=True, help="Seconds for one check.")
@click.option("--seed", default=SEED, show_default=True, help="Seed of the inputs.")
@click.option("--child", default="", hidden=True)
@click.option("--plant", default="", hidden=True)
@click.option("--kept", type=click.Path(path_type=Path), hidden=True)
def main(
    models: str,
    tools: str,
    tune: str,
    markdown_file: Path | None,
    repeats: int,
    limit: int,
    seed: int,
    child: str,
    plant: str,
    kept: Path | None,
) -> None:
    """Check the models, print the results, and exit with 1 unless all are clean."""
    if child and kept:
        return run_model(child, tune, seed, kept)
    if plant:
        return run_planted(plant)
    sanitizer = find_sanitizer()
    about = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    version = next((line.strip() for line in about if "version" in line.lower()), "")
    if "racecheck" in tools.split(",") and not knows_barriers(version):
        least = ".".join(map(str, LEAST))
        raise DeviceUnavailable(
            f"{sanitizer}, {version or 'of no known version'}, reports races across barriers",
            hint=f"pip install 'nvidia-cuda-sanitizer-api' for {least} or later, or --tools memcheck",
        )
    rows = []
    for tool in tools.split(","):
        result, seconds = checked(sanitizer, tool, "", tune, seed, Path(), limit)
        if " found" not in result or not re.match(r"not clean: [1-9]", result):
            raise Mismatch(f"{tool} does not find a planted fault: {result}")
        click.echo(f"planted fault, {tool}: found ({seconds:.0f} s)")
    with tempfile.TemporaryDirectory() as folder:
        for key in models.split(","):
            path = Path(folder) / f"{key.replace(':', '-')}.npz"
            plain = [sys.executable, __file__, "--child", key, "--tune", tune, "--seed", str(seed), "--kept", str(path)]
            subprocess.run(plain, check=True)  # compiles, so that checked processes use the cache
            for tool in tools.split(","):
                results = [checked(sanitizer, tool, key, tune, seed, path, limit) for _ in range(repeats)]
                result, seconds = next((r for r in results if r[0] != CLEAN), results[0])
                rows.append([key, tool, result, f"{sum(r[0] == CLEAN for r in results)} of {repeats}", f"{seconds:.0f}"])
                click.echo(f"{key} {tool}: {result} ({seconds:.0f} s)")
                text = markdown_table(rows, HEADERS)
                if markdown_file is not None:  # after every row: checks take minutes
                    markdown_file.write_text(
                        f"# compute-sanitizer\n\n{NOTE.format(tune=tune)}\n\n{text}\n\n{version}\n\n"
                        + section(environment_of(True))
                    )
    click.echo(markdown_table(rows, HEADERS))
    if any(row[2] != CLEAN for row in rows):
        raise Mismatch("some checks are not clean")


if __name__ == "__main__":
    run(main)
