"""What scheduling is worth: Rammer's three bars (OSDI'20, section 5.4) for LSTM-TC with batch 4, on each executor.

1. One operator after another, each with its fastest kernel.
2. Co-scheduled in waves, with the same kernels.
3. Co-scheduled, each wave with the kernels that are best side by side.

On a GPU:  python benchmarks/ablation.py --folder results
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of, section
from peers import exported
from zoo import SEED, ZOO

import rammer
from rammer.compiled.segments import ProgramSegment
from rammer.peers.bench import bound_call
from rammer.report.table import duration, markdown

#: The bars: what they are called, and the policy that schedules so.
BARS = (
    ("one after another", "sequential"),
    ("+ co-scheduled, same kernels", "wavefront{lean=0}"),
    ("+ kernels chosen for the wave", "wavefront"),
)
EXECUTORS = ("graph", "persistent")
WARM, TIMED = 5, 50
HEADERS = ("schedule", "policy", "executor", "median", "of the first", "tasks", "waits", "predicted")


@dataclass(frozen=True)
class Bar:
    """One measurement: median seconds of a device-resident run, and the size of its program."""

    name: str
    policy: str
    executor: str
    seconds: float
    tasks: int
    waits: int
    predicted: float


def measure(path: Path, key: str, name: str, policy: str, executor: str, tune: str, seed: int) -> Bar:
    """Compile ``path`` with ``policy`` and time it on ``executor``."""
    exe = rammer.compile(path, device="cuda", policy=policy, tune=tune, options={"executor": executor})
    arrays = exe.checked(ZOO[key].feeds(seed))
    (segment,) = exe.prepare(arrays).compiled.segments
    assert isinstance(segment, ProgramSegment)
    program = segment.program
    call = bound_call(exe.bind(arrays))
    for _ in range(WARM):
        call()
    seconds = median(call() for _ in range(TIMED))
    exe.close()
    waits = sum(len(t.waits) for row in program.rows for t in row)
    return Bar(name, policy, executor, seconds, program.task_count, waits, program.predicted)


def plot(path: Path, key: str, bars: Sequence[Bar]) -> None:
    """Bars side by side, one group an executor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(EXECUTORS), figsize=(9, 3.2), squeeze=False)
    for axis, executor in zip(axes[0], EXECUTORS, strict=True):
        mine = [b for b in bars if b.executor == executor]
        drawn = axis.bar(range(len(mine)), [b.seconds * 1e3 for b in mine], color=["#9aa5b1", "#5b8db8", "#2f5d8a"])
        axis.bar_label(drawn, fmt="%.3g")
        axis.set_xticks(range(len(mine)), [b.name.replace(", ", ",\n").replace(" for", "\nfor") for b in mine], fontsize=7)
        axis.set(title=f"{key}, {executor}", ylabel="ms a run")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def document(key: str, tune: str, bars: Sequence[Bar], facts: dict[str, str]) -> str:
    """The Markdown file."""
    first = {b.executor: b.seconds for b in bars if b.policy == BARS[0][1]}
    rows = [
        [
            b.name,
            f"`{b.policy}`",
            b.executor,
            duration(b.seconds),
            f"{first[b.executor] / b.seconds:.2f}x",
            str(b.tasks),
            str(b.waits),
            duration(b.predicted),
        ]
        for b in bars
    ]
    return (
        f"# What scheduling is worth: {key}\n\nFloat32, `--tune {tune}`, device-resident inputs, medians of {TIMED} runs by "
        f"GPU events, one process. `predicted` is the policy's own estimate.\n\n{markdown(rows, HEADERS)}\n\n"
        f"![bars](ablation.svg)\n\n{section(facts)}"
    )


@click.command()
@click.option("--model", default="lstm_tc_bs4", show_default=True, help="Key of the zoo.")
@click.option("--folder", default="ablation", type=click.Path(path_type=Path), show_default=True, help="Results.")
@click.option("--tune", default="off", show_default=True, type=click.Choice(["off", "quick", "full"]))
@click.option("--seed", default=SEED, show_default=True, help="Of weights and inputs.")
def main(model: str, folder: Path, tune: str, seed: int) -> None:
    """Measure and write table and plot."""
    folder.mkdir(parents=True, exist_ok=True)
    path = exported(model, Path(tempfile.gettempdir()) / "rammer-zoo", seed)
    bars = list[Bar]()
    for executor in EXECUTORS:
        for name, policy in BARS:
            bars.append(measure(path, model, name, policy, executor, tune, seed))
            click.echo(f"{executor} {name}: {duration(bars[-1].seconds)}")
    (folder / "ablation.md").write_text(document(model, tune, bars, environment_of(True)))
    plot(folder / "ablation.svg", model, bars)


if __name__ == "__main__":
    run(main)
