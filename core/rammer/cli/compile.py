"""The command ``rammer compile``: all steps but the run, for a file or for a report on absent hardware."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rammer.cli.common import open_model, show_progress
from rammer.cli.files import InputPath, OutputPath, write_file
from rammer.cli.options import compile_options, complete_devices, parse_shapes, target_option
from rammer.compile_options import Request
from rammer.ir.operator import RKernel
from rammer.report.operator_times import grouped, summarise_float32
from rammer.report.text_table import format_duration, format_size, plain_table


@click.command()
@click.argument("model", type=InputPath())
@click.option("--device", required=True, metavar="NAME[:INDEX]", shell_complete=complete_devices, help="Compile for this device.")
@click.option("-o", "output", type=OutputPath(), help="File to write; `rammer run FILE` runs it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@compile_options
@target_option
def command(model: Path, device: str, output: Path | None, as_json: bool, shapes: tuple[str, ...], request: Request) -> None:
    """Compile MODEL for a device and print the resources of each kernel.

    Example: rammer compile model.onnx --device cuda --target sm_90a -o model.rammer
    """
    from rammer.compiled.artifact import write_artifact

    with show_progress(model.name) as sink:
        exe = open_model(model, device, request, sink)
        compiled = exe.compile_whole(parse_shapes(shapes))
        chosen = exe.resources(compiled)
        artifact = exe.artifact(compiled) if output is not None else None
    arena = max((p.arena_bytes for p in compiled.programs), default=0)
    tasks, hosted = sum(p.task_count for p in compiled.programs), len(compiled.host_nodes)
    where = exe.backend.hardware.name
    if output is not None and artifact is not None:
        write_file(output, lambda file: write_artifact(file, artifact, verify=exe.source.check))
    if as_json:
        kernels = [dict(zip(HEADERS, [*_kernel_row(k)[:-1], k.crowded], strict=True)) for k in chosen]
        found = {
            "hardware": where,
            "kernels": kernels,
            "arena": arena,
            "tasks": tasks,
            "hosted": hosted,
            "seconds": compiled.seconds,
        }
        click.echo(json.dumps({**found, "file": str(output) if output is not None else None}, indent=2))
        return
    click.echo(plain_table([_kernel_row(k) for k in chosen], HEADERS))
    click.echo(f"{where}: {len(chosen)} kernels, arena {format_size(arena)}, {tasks} tasks, {hosted} operators on the host")
    for line in grouped(compiled.host_nodes):
        click.echo(f"on host: {line}")
    for line in summarise_float32(compiled.float32):
        click.echo(line)
    click.echo("steps: " + ", ".join(f"{name} {format_duration(s)}" for name, s in compiled.seconds.items()))
    if compiled.rest is not None:
        click.echo(f"later: {compiled.rest}")
    if output is not None:
        click.echo(f"wrote {output} ({format_size(output.stat().st_size)})")


HEADERS = ["operator", "tile", "family", "tasks", "threads", "registers", "scalar", "local", "spills", "predicted"]


def _kernel_row(kernel: RKernel) -> list[str]:
    operator, r = kernel.operator, kernel.resources
    known = ["?" if v < 0 else str(v) for v in (r.registers, r.scalar_registers, r.spills)]
    return [
        operator.name,
        "x".join(map(str, operator.tile)),
        operator.family or "generic",
        str(operator.task_count),
        str(r.threads),
        known[0],
        known[1],
        str(r.local_bytes),
        known[2],
        format_duration(kernel.crowded),
    ]
