"""``rammer inspect``: the printed form of any step of the staircase."""

from __future__ import annotations

from pathlib import Path

import click

from rammer.cli.common import opened, progress
from rammer.cli.options import compile_options, parse_shapes, target_option
from rammer.compiled.options import Request
from rammer.report.stages import STAGES, write_dump


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--device", default="", metavar="NAME[:INDEX]", help="Default: the first working device with a clock.")
@click.option("--stage", type=click.Choice(list(STAGES)), default="program", show_default=True, help="What to print.")
@click.option("--dump", type=click.Path(path_type=Path), help="Write the numbered text of every step to this folder.")
@compile_options
@target_option("Compile for named hardware without running it, e.g. sm_90a.")
def command(model: Path, device: str, stage: str, dump: Path | None, shapes: tuple[str, ...], request: Request) -> None:
    """Print one STAGE of MODEL on its way to the device.

    Example: rammer inspect model.onnx --device ipu_sim --stage tile
    """

    with progress(model.name) as sink:
        exe = opened(model, device, request, sink)
        compiled = exe.compile_only(parse_shapes(shapes))
    click.echo(STAGES[stage](compiled, exe.backend.vdevice))
    if dump is not None:
        for path in write_dump(dump, compiled, exe.backend.vdevice):
            click.echo(f"wrote {path}", err=True)
