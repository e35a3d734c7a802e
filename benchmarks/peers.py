"""The models of the zoo on rammer and on its peers: same weights, same inputs, one table with ratios.

    On a GPU:  python benchmarks/peers.py --models squeezenet,resnet50 --precision float32 --out rows.jsonl --markdown t.md
    Without:   python benchmarks/peers.py --quick --models squeezenet     (rammer on rocm against the peers on the CPU)

Each row is stored immediately and not measured again; ``--again rammer`` repeats that runner.
"""

from __future__ import annotations

import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of
from measuring import exported
from rows import HEADERS, OURS, Row, cells, document, keep, read_rows, summary
from zoo import SEED, ZOO, find

import rammer
from rammer.compile_options import PRECISIONS, TUNING_LEVELS
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable, RammerError
from rammer.report.bench import Effort, bound_call, sample_times
from rammer.report.peers import Prepared
from rammer.report.text_table import plain_table
from rammer_bench.graph import Array
from rammer_bench.prepare import (
    PEERS,
    delay,
    float64_outputs,
    open_peer,
    relative_error,
)

#: Default runners; torch-compile-nhwc compiles everything a second time.
GPU_RUNNERS = (OURS, "torch", "torch-graph", "torch-graph-nhwc", "torch-compile", "onnxruntime", "jax")
CPU_RUNNERS = (OURS, "onnxruntime", "torch")
#: Runs whose outputs are compared: a race need not occur in each.
CHECKED = 10


def open_rammer(
    path: Path, inputs: Mapping[str, Array], device: str, precision: str, tune: str, options: Mapping[str, str]
) -> tuple[Prepared, int]:
    """Open rammer on ``device`` with inputs and outputs bound to device arrays; also return its kernel launches per run."""
    start = time.perf_counter()
    exe = rammer.compile(path, device=device, tune=tune, precision=precision, options=options)
    arrays = exe.checked(inputs)
    special = exe.prepare(arrays)
    seconds = time.perf_counter() - start
    if special.compiled.host_nodes:
        raise DeviceFailure(f"{len(special.compiled.host_nodes)} operators run on the host: nothing to compare")
    bound = exe.bind(arrays)

    def outputs() -> dict[str, Array]:
        bound.run()
        return bound.to_host()

    return Prepared(bound_call(bound, [delay]), outputs, seconds, bound.clock, exe.close), special.kernels


def measured(prepared: Prepared, reference: Mapping[str, Array], effort: Effort) -> dict[str, Any]:
    """Return the figures of a row: times, and the worst error of the outputs of ``CHECKED`` later runs."""
    _, seconds = sample_times(prepared.seconds, effort)
    error = max(relative_error(prepared.outputs(), reference) for _ in range(CHECKED))
    return {
        **summary(seconds),
        "iterations": len(seconds),
        "prepare": prepared.prepare_seconds,
        "timed": prepared.timed,
        "error": error,
    }


def reference_outputs(model: onnx.ModelProto, inputs: Mapping[str, Array], device: str) -> dict[str, Array]:
    """Return float64 outputs by torch, or without it by rammer's NumPy evaluation."""
    try:
        return float64_outputs(model, inputs, device)
    except DeviceUnavailable:
        from zoo.counts import compute_graph

        from rammer.ir.evaluate import run_graph

        graph = compute_graph(model)
        found = run_graph(graph, dict(inputs), precise=True)
        return {graph.aliases.get(n, n): np.asarray(found[graph.aliases.get(n, n)]) for n in graph.outputs}


def model_rows(
    key: str,
    path: Path,
    runners: list[str],
    precision: str,
    device: str,
    hardware: str,
    tune: str,
    options: Mapping[str, str],
    effort: Effort,
    seed: int,
) -> Iterator[Row]:
    """Measure ``runners`` on one model in sequence; a runner that fails gives a row with the reason."""
    run = uuid.uuid4().hex[:8]
    model = onnx.load(str(path))
    inputs = find(key).feeds(seed)
    place = "cuda" if device.startswith("cuda") else "cpu"
    reference = reference_outputs(model, inputs, place)
    for runner in runners:
        head, kernels, prepared = (run, key, precision, runner, hardware), 0, None
        try:
            if runner == OURS:
                prepared, kernels = open_rammer(path, inputs, device, precision, tune, options)
            else:
                prepared = open_peer(runner, model, inputs, place, precision)
            yield Row(*head, **measured(prepared, reference, effort), kernels=kernels)
        except RammerError as problem:
            yield Row(*head, failure=problem.what)
        except Exception as problem:  # a peer's failure is a result: the other rows must still follow
            first = str(problem).partition("\n")[0]
            yield Row(*head, failure=f"{type(problem).__name__}: {first}")
        finally:
            if prepared is not None:
                prepared.close()


def _chosen(text: str, known: tuple[str, ...], what: str) -> list[str]:
    names = [n for n in text.split(",") if n]
    for name in names:
        if name not in known:
            raise BadInput(f"unknown {what} {name!r}", hint=f"one of: {', '.join(known)}")
    return names


@click.command()
@click.option("--models", default=",".join(ZOO), show_default=True, help="Keys of the zoo, with commas.")
@click.option("--runners", default="", help=f"With commas: {OURS}, {', '.join(PEERS)}.")
@click.option("--precision", default="float32", type=click.Choice(PRECISIONS), show_default=True)
@click.option("--device", default="", help="rammer's device; default cuda, with --quick rocm.")
@click.option("--quick", is_flag=True, help="No GPU: rammer on rocm against peers on the CPU.")
@click.option("--tune", default="quick", show_default=True, type=click.Choice(TUNING_LEVELS))
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="For rammer's device. Repeatable.")
@click.option("--out", default="peers.jsonl", type=click.Path(path_type=Path), show_default=True, help="The rows.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the table of all kept rows.")
@click.option("--again", default="", help="Runners to measure anew, with commas; 'failed' for those without a time.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where built models are kept.")
@click.option("--iterations", default=100, show_default=True, help="At least so many timed runs,")
@click.option("--duration", default=0.5, show_default=True, help="and at least so many seconds.")
@click.option("--seed", default=SEED, show_default=True, help="Of weights and inputs.")
def main(
    models: str,
    runners: str,
    precision: str,
    device: str,
    quick: bool,
    tune: str,
    options: tuple[str, ...],
    out: Path,
    markdown_file: Path | None,
    again: str,
    folder: Path | None,
    iterations: int,
    duration: float,
    seed: int,
) -> None:
    """Measure all runners, store the rows and print the table."""
    device = device or ("rocm" if quick else "cuda")
    gpu = device.startswith("cuda")
    facts = environment_of(gpu)
    hardware = facts.get("gpu") or f"{facts['cpu']}, {facts['cores']} cores"
    wanted = _chosen(runners, (OURS, *PEERS), "runner") or list(GPU_RUNNERS if gpu else CPU_RUNNERS)
    redo = _chosen(again, (OURS, *PEERS, "failed"), "runner")
    settings = dict(o.partition("=")[::2] for o in options)
    for key in filter(None, models.split(",")):
        find(key)
        kept = {r.key for r in read_rows(out) if not (r.runner in redo or (r.failure and "failed" in redo))}
        missing = [r for r in wanted if (key, precision, r, hardware) not in kept]
        if not missing:
            continue
        path = exported(key, folder or Path(tempfile.gettempdir()) / "rammer-zoo", seed)
        for row in model_rows(
            key, path, missing, precision, device, hardware, tune, settings, Effort(5, iterations, duration), seed
        ):
            keep(out, row)
            shown = row.failure or f"{row.median:.4g} ms, error {row.error:.1e}, prepared in {row.prepare:.1f} s"
            click.echo(f"{key} {precision} {row.runner}: {shown}")
    rows = read_rows(out)
    click.echo(plain_table(cells(rows), HEADERS))
    if markdown_file is not None:
        markdown_file.write_text(document(rows, facts))


if __name__ == "__main__":
    run(main)
