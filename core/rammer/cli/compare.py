"""``rammer compare``: the same inputs on devices and on a reference, output by output."""

from __future__ import annotations

from pathlib import Path

import click

from rammer.cli.common import collect_inputs, opened, progress
from rammer.cli.options import (
    InputChoice,
    Tolerance,
    compile_options,
    input_options,
    tolerance_options,
)
from rammer.compiled.options import Request
from rammer.errors import Mismatch
from rammer.report.compare import HEADERS, differences, rows
from rammer.report.table import plain


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--device", "devices", multiple=True, required=True, metavar="NAME[:INDEX]", help="Repeatable.")
@click.option(
    "--against",
    default="onnxruntime",
    show_default=True,
    metavar="REFERENCE",
    help="onnxruntime, reference (ONNX's own, in Python) or F.npz.",
)
@input_options
@compile_options
@tolerance_options
def command(
    model: Path,
    devices: tuple[str, ...],
    against: str,
    tolerance: Tolerance,
    choice: InputChoice,
    request: Request,
) -> None:
    """Compare MODEL's outputs on each DEVICE with a reference; exit code 1 on a mismatch.

    Example: rammer compare model.onnx --device rocm --device ipu_sim --against onnxruntime
    """
    from rammer.peers.oracle import expected_outputs

    table, bad = [], 0
    want = None
    for device in devices:
        with progress(f"{model.name} for {device}") as sink:
            exe = opened(model, device, request, sink)
            inputs = collect_inputs(exe.head, choice)
            have = exe.run(inputs)  # first: it has limits where a reference would run for ever
            want = want or expected_outputs(exe.source.model, against, inputs)
        found = differences(have, want, *tolerance.of(exe.options.precision))
        bad += sum(not d.good for d in found)
        hosted = sum(len(s.host_nodes) for s in exe.cache.values())
        name = f"{device} ({exe.backend.hardware.name})" + (f", {hosted} on host" if hosted else "")
        table += [[name, *row] for row in rows(found)]
        exe.close()
    click.echo(plain(table, ["device", *HEADERS]))
    if bad:
        raise Mismatch(f"{bad} outputs differ from {against}")
