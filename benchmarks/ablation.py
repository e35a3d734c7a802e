"""Effect of scheduling: Rammer's three bars (OSDI'20, section 5.4) for LSTM-TC with batch 4, on each executor.

1. Sequential operators, each with its fastest kernel.
2. Co-scheduled in waves, with the same kernels.
3. Co-scheduled, each wave with the kernels that are best when run concurrently.

    On a GPU:  python benchmarks/ablation.py --folder results
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of, section
from measuring import Measured, Settings, Way, measured, subject
from tables.scheduling import BARS, EXECUTORS
from zoo import SEED

from rammer.compile_options import TUNING_LEVELS
from rammer.errors import DeviceFailure
from rammer.report.text_table import format_duration, markdown_table

HEADERS = ("schedule", "policy", "executor", "median", "of the first", "tasks", "waits", "predicted")


def plot(path: Path, key: str, bars: Sequence[Measured]) -> None:
    """Plot the bars, grouped by executor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(EXECUTORS["cuda"]), figsize=(9, 3.2), squeeze=False)
    for axis, executor in zip(axes[0], EXECUTORS["cuda"], strict=True):
        mine = [b for b in bars if _executor(b) == executor]
        drawn = axis.bar(range(len(mine)), [b.seconds * 1e3 for b in mine], color=["#9aa5b1", "#5b8db8", "#2f5d8a"])
        axis.bar_label(drawn, fmt="%.3g")
        axis.set_xticks(range(len(mine)), [b.way.name.replace(", ", ",\n").replace(" for", "\nfor") for b in mine], fontsize=7)
        axis.set(title=f"{key}, {executor}", ylabel="ms a run")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def document(key: str, tune: str, bars: Sequence[Measured], facts: dict[str, str]) -> str:
    """Return the Markdown file with table and facts."""
    first = {_executor(b): b.seconds for b in bars if b.way.request["policy"] == BARS[0][1]}
    rows = [
        [
            b.way.name,
            f"`{b.way.request['policy']}`",
            _executor(b),
            format_duration(b.seconds),
            f"{first[_executor(b)] / b.seconds:.2f}x",
            str(b.tasks),
            str(b.waits),
            format_duration(b.predicted),
        ]
        for b in bars
    ]
    return (
        f"# What scheduling is worth: {key}\n\nFloat32, `--tune {tune}`, device-resident inputs, medians of runs in turns by "
        f"GPU events, one process. `predicted` is the policy's own estimate.\n\n{markdown_table(rows, HEADERS)}\n\n"
        f"![bars](ablation.svg)\n\n{section(facts)}"
    )


def _executor(bar: Measured) -> str:
    return str(bar.way.request["device_options"]["executor"])


@click.command()
@click.option("--model", default="lstm_tc_bs4", show_default=True, help="Key of the zoo.")
@click.option("--folder", default="ablation", type=click.Path(path_type=Path), show_default=True, help="Results.")
@click.option("--tune", default="off", show_default=True, type=click.Choice(TUNING_LEVELS))
@click.option("--seed", default=SEED, show_default=True, help="Of weights and inputs.")
def main(model: str, folder: Path, tune: str, seed: int) -> None:
    """Measure all bars and write the table and the plot."""
    folder.mkdir(parents=True, exist_ok=True)
    subject_of = subject(model, seed, checked=False)
    ways = [Way(name, {"policy": p, "device_options": {"executor": e}}) for e in EXECUTORS["cuda"] for name, p in BARS]
    bars = measured(subject_of.path, subject_of.feeds, ways, Settings(("cuda",), (), tune, seed=seed))
    if failure := next((b.failure for b in bars if b.failure), ""):
        raise DeviceFailure(failure)
    (folder / "ablation.md").write_text(document(model, tune, bars, environment_of(True)))
    plot(folder / "ablation.svg", model, bars)


if __name__ == "__main__":
    run(main)
