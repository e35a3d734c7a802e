"""Models as torch's two exporters write them, beside the zoo's hand-made models of the same layers.

On a GPU:  python tests/models/export_torch.py --full --out exports && python benchmarks/exports.py exports --markdown exports.md

Errors are relative L2 against ONNX Runtime on the CPU, of fresh inputs. A mask keeps all tokens. Exports have what the zoo's
models leave out: a mask and a pooler in BERT.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click
import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of, section
from measuring import exported
from peers import measured, open_rammer
from zoo import SEED, ZOO

from rammer.errors import BadInput, Mismatch
from rammer.frontend.reader import read_model
from rammer.reference.outputs import expected_outputs
from rammer.report.bench import Effort
from rammer.report.table import markdown
from rammer_bench.graph import Array

#: The zoo's model of the same layers, by the export's name without its exporter.
TWINS = {"lstm_tc": "lstm_tc", "bert_base": "bert_base"}
#: Largest relative L2 error of float32.
MOST = 1e-4
HEADERS = ("export", "nodes", "kernels", "ms", "rel. L2 error", "hand-made kernels", "hand-made ms", "export / hand-made")


def inputs_of(proto: onnx.ModelProto, rng: np.random.Generator) -> dict[str, Array]:
    """Floats N(0, 1), words below 1,000, and masks of ones."""
    made: dict[str, Array] = {}
    for port in proto.graph.input:
        shape = tuple(d.dim_value for d in port.type.tensor_type.shape.dim)
        if port.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            made[port.name] = rng.standard_normal(shape, np.float32)
        else:
            made[port.name] = np.ones(shape, np.int64) if "mask" in port.name else rng.integers(0, 1000, shape)
    return made


def figures(path: Path, device: str, tune: str, inputs: dict[str, Array]) -> tuple[int, float, float]:
    """Kernels of a run, median milliseconds, and the worst error of several runs."""
    want = expected_outputs(read_model(path), "onnxruntime", inputs)
    prepared, kernels = open_rammer(path, inputs, device, "float32", tune, {})
    try:
        row = measured(prepared, want, Effort(5, 100, 0.5))
    finally:
        prepared.close()
    return kernels, row["median"], row["error"]


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--device", default="cuda", show_default=True)
@click.option("--tune", default="quick", show_default=True, type=click.Choice(["off", "quick", "full"]))
@click.option("--seed", default=SEED, show_default=True, help="Of the inputs.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path))
def main(folder: Path, device: str, tune: str, seed: int, markdown_file: Path | None) -> None:
    """Measure every export of FOLDER and print the table; exit with 1 where an error is too large."""
    paths, rng = sorted(folder.glob("*.onnx")), np.random.default_rng(seed)
    if not paths:
        raise BadInput(f"{folder} holds no .onnx file")
    twins: dict[str, tuple[int, float, float]] = {}
    rows, wrong = [], []
    for path in paths:
        proto = onnx.load(str(path))
        kernels, ms, error = figures(path, device, tune, inputs_of(proto, rng))
        twin = TWINS.get(path.stem.rpartition("_")[0], "")
        if twin and twin not in twins:
            model = exported(twin, Path(tempfile.gettempdir()) / "rammer-zoo", SEED)
            twins[twin] = figures(model, device, tune, ZOO[twin].feeds(seed))
        beside = (str(twins[twin][0]), f"{twins[twin][1]:.4g}", f"{ms / twins[twin][1]:.2f}") if twin else ("-",) * 3
        rows.append([path.stem, str(len(proto.graph.node)), str(kernels), f"{ms:.4g}", f"{error:.1e}", *beside])
        click.echo("  ".join(rows[-1]))
        if not error <= MOST:
            wrong.append(path.stem)
    text = f"# Models as torch exports them\n\n{(__doc__ or '').strip()}\n\n{markdown(rows, HEADERS)}\n"
    if markdown_file is not None:
        markdown_file.write_text(f"{text}\n{section(environment_of(device.startswith('cuda')))}")
    if wrong:
        raise Mismatch(f"errors over {MOST:.0e}: {', '.join(wrong)}")


if __name__ == "__main__":
    run(main)
