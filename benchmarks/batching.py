"""Effect of operator batching: models with independent products, run separately and as one operator.

``python benchmarks/batching.py --device rocm --markdown batching.md``: for each ``--batching``, the operators of the program,
those that copy, the predicted time, and the median of the bound call. The three programs of a model are timed alternately in one
process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import click
import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "core"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of, section
from measuring import ROUNDS, Measured, Settings, Way, measured
from sibling_models import attention, cell, onnx_cell
from zoo import SEED, find

from rammer.compile_options import PRECISIONS, TUNING_LEVELS
from rammer.report.text_table import format_duration, markdown_table

HEADERS: Final = ("model", "batching", "operators", "copies", "predicted", "median", "off / this", "rel. L2 to off")
#: Batching off, chosen by the compiler, and everywhere possible.
WAYS: Final = tuple(Way(b, {"batching": b}) for b in ("off", "auto", "all"))
#: Models of sibling products that the zoo lacks.
OWN: Final[Mapping[str, Callable[[np.random.Generator], onnx.ModelProto]]] = {
    "cell_64": lambda rng: cell(rng, width=64),
    "onnx_cell_64": lambda rng: onnx_cell(rng, width=64),
    "cell_256": lambda rng: cell(rng, width=256),
    "onnx_cell_256": lambda rng: onnx_cell(rng, width=256),
    "attention_128": lambda rng: attention(rng, 128, 768, 12),
}


def source(key: str, seed: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return a model and its inputs."""
    if key not in OWN:
        return find(key).build(seed), find(key).feeds(seed)
    rng = np.random.default_rng(seed)
    proto = OWN[key](rng)
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in proto.graph.input}
    return proto, {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def row(model: str, one: Measured, first: float) -> list[str]:
    """Return one row of the table; ``first`` is the base of the ratio."""
    if one.failure:
        return [model, one.way.name, *["-"] * 5, one.failure]
    times = [format_duration(one.predicted), format_duration(one.seconds), f"{first / one.seconds:.2f}", f"{one.error:.1e}"]
    return [model, one.way.name, str(one.operators), str(one.copies), *times]


@click.command()
@click.option("--models", default=",".join((*OWN, "bert_base", "inception_v3")), show_default=True, help="With commas.")
@click.option("--device", default="rocm", show_default=True)
@click.option("--precision", default="float32", type=click.Choice(PRECISIONS), show_default=True)
@click.option("--tune", default="off", show_default=True, type=click.Choice(TUNING_LEVELS))
@click.option("--seed", default=SEED, show_default=True, help="Of weights and inputs.")
@click.option("--rounds", default=ROUNDS, show_default=True, help="Turns of each program.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the table.")
def main(models: str, device: str, precision: str, tune: str, seed: int, rounds: int, markdown_file: Path | None) -> None:
    """Measure the models and print the table."""
    rows = list[list[str]]()
    settings = Settings((device,), (), tune, precision, seed, rounds)
    for key in models.split(","):
        click.echo(key)
        found = measured(*source(key, seed), WAYS, settings)
        rows += [row(key, m, found[0].seconds) for m in found]
        click.echo(markdown_table(rows[-len(found) :], HEADERS))
    if markdown_file is not None:
        text = f"{device}, {precision}, `--tune {tune}`, inputs on the device, medians of {rounds} turns, in one process."
        title = "# Independent products apart and as one"
        markdown_file.write_text(
            f"{title}\n\n{text}\n\n{markdown_table(rows, HEADERS)}\n\n{section(environment_of(device == 'cuda'))}"
        )


if __name__ == "__main__":
    run(main)
