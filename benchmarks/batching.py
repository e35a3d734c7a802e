"""What operator batching is worth: models with independent products, apart and as one.

``python benchmarks/batching.py --device rocm --markdown batching.md``: by ``--batching``, the operators of the program, those
of them that copy, the predicted time, and the median of the bound call. The three programs of a model take turns in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import click
import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "core"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of, section
from sibling_models import attention, cell, onnx_cell
from zoo import SEED, ZOO

import rammer
from rammer.compiled.options import BATCHING, PRECISIONS
from rammer.compiled.segments import ProgramSegment
from rammer.ir.pieces import pieces
from rammer.peers.bench import Effort, bound_call, sample
from rammer.peers.prepare import relative_error
from rammer.report.table import duration, markdown
from rammer.tile.siblings import rearranges

HEADERS: Final = ("model", "batching", "operators", "copies", "predicted", "median", "off / this", "rel. L2 to off")
#: Turns of each program, and what a turn is.
ROUNDS, TURN = 7, Effort(2, 10, 0.2)
#: Models of siblings beside the zoo's.
OWN: Final[Mapping[str, Callable[[np.random.Generator], onnx.ModelProto]]] = {
    "cell_64": lambda rng: cell(rng, width=64),
    "onnx_cell_64": lambda rng: onnx_cell(rng, width=64),
    "cell_256": lambda rng: cell(rng, width=256),
    "onnx_cell_256": lambda rng: onnx_cell(rng, width=256),
    "attention_128": lambda rng: attention(rng, 128, 768, 12),
}


@dataclass(frozen=True)
class Measured:
    """One program: sizes, and seconds by prediction and of a run."""

    batching: str
    operators: int
    copies: int
    predicted: float
    seconds: float
    error: float

    def row(self, model: str, first: float) -> list[str]:
        """One line of the table."""
        times = [duration(self.predicted), duration(self.seconds), f"{first / self.seconds:.2f}", f"{self.error:.1e}"]
        return [model, self.batching, str(self.operators), str(self.copies), *times]


def source(key: str, seed: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model and its inputs."""
    if key in ZOO:
        return ZOO[key].build(seed), dict(ZOO[key].feeds(seed))
    rng = np.random.default_rng(seed)
    proto = OWN[key](rng)
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in proto.graph.input}
    return proto, {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def measured(key: str, device: str, precision: str, tune: str, seed: int) -> list[Measured]:
    """A model apart, as chosen and as one wherever that may be, in turns."""
    proto, feeds = source(key, seed)
    ways = [b for b in ("off", "auto", "all") if b in BATCHING]
    programs = [rammer.compile(proto, device=device, precision=precision, tune=tune, batching=b) for b in ways]
    inputs = programs[0].checked(feeds)
    special, bound = [exe.prepare(inputs) for exe in programs], [exe.bind(inputs) for exe in programs]
    times: list[list[float]] = [[] for _ in bound]
    for _ in range(ROUNDS):
        for call, seconds in zip(bound, times, strict=True):
            seconds += sample(bound_call(call), TURN)[1]
    outputs = [exe.run(feeds) for exe in programs]
    found = list[Measured]()
    for way, shapes, seconds, have in zip(ways, special, times, outputs, strict=True):
        segments = [s for s in shapes.compiled.segments if isinstance(s, ProgramSegment)]
        operators = [o for s in segments for o in s.program.operators]
        copies = [o for o in operators if any(rearranges(c) or pieces(c) for c in o.computes)]
        predicted = sum(s.program.predicted for s in segments)
        error = relative_error(have, outputs[0])
        found.append(Measured(way, len(operators), len(copies), predicted, median(seconds), error))
    for exe in programs:
        exe.close()
    return found


@click.command()
@click.option("--models", default=",".join((*OWN, "bert_base", "inception_v3")), show_default=True, help="With commas.")
@click.option("--device", default="rocm", show_default=True)
@click.option("--precision", default="float32", type=click.Choice(PRECISIONS), show_default=True)
@click.option("--tune", default="off", show_default=True, type=click.Choice(["off", "quick", "full"]))
@click.option("--seed", default=SEED, show_default=True, help="Of weights and inputs.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the table.")
def main(models: str, device: str, precision: str, tune: str, seed: int, markdown_file: Path | None) -> None:
    """Measure and print the table."""
    rows = list[list[str]]()
    for key in models.split(","):
        found = measured(key, device, precision, tune, seed)
        rows += [m.row(key, found[0].seconds) for m in found]
        click.echo(markdown(rows[-len(found) :], HEADERS))
    if markdown_file is not None:
        text = f"{device}, {precision}, `--tune {tune}`, inputs on the device, medians of {ROUNDS} turns, in one process."
        title = "# Independent products apart and as one"
        markdown_file.write_text(f"{title}\n\n{text}\n\n{markdown(rows, HEADERS)}\n\n{section(environment_of(device == 'cuda'))}")


if __name__ == "__main__":
    run(main)
