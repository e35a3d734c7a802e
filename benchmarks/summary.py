"""A summary of the peers' rows, one line per model and precision: rammer, its best peer, and the goal if one is set. python
benchmarks/summary.py benchmarks/results/h200_*.jsonl --out benchmarks/results/h200_summary.md"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from rows import OURS, Row, ratio, read_rows

from rammer.report.text_table import markdown_table

HEADERS: Final = ("model", "precision", "rammer ms", "best peer ms", "which", "faster by", "goal", "torch ms", "torch-graph ms")
#: Intended speed-up over the best peer, by model and precision.
GOALS: Final = {
    **{(m, "float32"): 3.0 for m in ("resnext29", "inception_v3", "nasnet_cifar", "resnet50", "densenet121")},
    **{(m, "tf32"): 1.5 for m in ("resnext29", "inception_v3", "nasnet_cifar", "resnet50", "densenet121")},
    ("lstm_tc", "float32"): 8.0,
    ("lstm_tc_bs4", "float32"): 5.0,
    ("bert_base", "float32"): 1.5,
    ("nerf_mlp", "float32"): 1.5,
    ("squeezenet", "float32"): 2.5,
    ("mobilenet_v2", "float32"): 2.5,
    ("squeezenet", "tf32"): 2.0,
    ("mobilenet_v2", "tf32"): 2.0,
    ("bert_base", "float16"): 1.2,
}


def line(rows: Sequence[Row], ours: Row) -> list[str]:
    """Return the table's cells for one of rammer's rows."""
    peers = {r.runner: r for r in rows if (r.model, r.precision) == (ours.model, ours.precision) and r.good and r.runner != OURS}
    best = min(peers.values(), key=lambda r: r.median)
    goal = GOALS.get((ours.model, ours.precision))
    reached = best.median / ours.median
    wanted = "-" if goal is None else f"{goal:g}x {'reached' if reached >= goal else 'missed'}"
    shown = [f"{peers[n].median:.4g}" if n in peers else "-" for n in ("torch", "torch-graph")]
    return [
        ours.model,
        ours.precision,
        f"{ours.median:.4g}",
        f"{best.median:.4g}",
        best.runner,
        ratio(ours, rows).split(" ")[0],
        wanted,
        *shown,
    ]


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The Markdown file.")
def main(files: tuple[Path, ...], out: Path) -> None:
    """Write the summary of the rows in FILES."""
    rows = [r for f in files for r in read_rows(f)]
    ours = [r for r in rows if r.runner == OURS and r.good]
    table = [line(rows, r) for r in sorted(ours, key=lambda r: ("float32", "tf32", "float16").index(r.precision))]
    names = ", ".join(f.with_suffix(".md").name for f in files)
    notes = (
        "Batch 1 unless the name says otherwise, medians, inputs resident on the device; each model was measured with its\n"
        f"peers in one run. All rows, errors and the environment: {names}."
    )
    out.write_text(f"{markdown_table(table, HEADERS)}\n\n{notes}\n")


if __name__ == "__main__":
    run(main)
