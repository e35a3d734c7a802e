"""The command ``rammer compile``: all steps but the run, for a file or for a report on absent hardware."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import click

from rammer.cache.cached_constants import ModelWeights
from rammer.cli.common import open_model, show_progress
from rammer.cli.files import InputPath, OutputPath, write_file
from rammer.cli.options import compile_options, device_flag, parse_shapes
from rammer.commands import gather_options
from rammer.compile_options import Request
from rammer.compiled.artifact import Artifact, SeparateConstants
from rammer.compiled.segments import Compiled
from rammer.compiled.signature import UNSIGNED, check_key, sign_file
from rammer.errors import BadInput, NoMachineCode, print_warning
from rammer.ir.constants.mapped_files import Mapped
from rammer.ir.operator import RKernel
from rammer.report.operator_times import grouped, summarise_float32
from rammer.report.text_table import format_duration, format_size, plain_table
from rammer.runtime.executable import Executable
from rammer.runtime.model_source import ModelSource

#: The target that stands for the opened unit: a file has machine code for named targets only.
HERE: Final = "here"
#: Places of the weights: in the compiled file, or in the model's own files if they are there.
WEIGHTS: Final = ("inside", "external")


@dataclass(frozen=True)
class Output:
    """The file to write: its path, the targets of its machine code, the private key that signs it, and the place of weights.
    ``as_json``: print JSON."""

    output: Path | None
    target: tuple[str, ...]
    sign: Path | None
    weights: str
    as_json: bool


@click.command()
@click.argument("model", type=InputPath())
@device_flag("device", "Compile for this device.", required=True)
@click.option("-o", "output", type=OutputPath(), help="File to write; `rammer run FILE` runs it.")
@click.option(
    "--target",
    multiple=True,
    metavar="NAME",
    help=f"Write machine code for hardware that need not be present, e.g. sm_90a, or for the opened unit ({HERE}); repeatable.",
)
@click.option("--sign", type=InputPath(), help="Sign the file with this private key (PEM, Ed25519).")
@click.option(
    "--weights",
    type=click.Choice(WEIGHTS),
    default=WEIGHTS[0],
    show_default=True,
    help="external: leave weights in the model's files, which must be in the folder of the file or below.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: one entry per target.")
@compile_options
@gather_options("wanted", Output, *(f.name for f in fields(Output)))
def command(model: Path, device: str, wanted: Output, shapes: tuple[str, ...], request: Request) -> None:
    """Compile MODEL for a device and print the resources of each kernel.

    Example: rammer compile model.onnx --device cuda --target sm_90a -o model.rammer
    """
    if wanted.sign is not None:
        check_key(wanted.sign)
    made, records = list[Variant](), list[dict[str, Any]]()
    for target in wanted.target or ("",):
        asked = replace(request, target="" if target == HERE else target)
        with show_progress(model.name) as sink:
            exe = open_model(model, device, asked, sink)
            compiled = exe.compile_whole(parse_shapes(shapes))
            chosen = exe.resources(compiled)
            if wanted.output is not None:
                made.append(Variant(exe, exe.artifact(add_code(exe, compiled, target) if target else compiled)))
        records.append({"target": target, **compiled_record(exe, compiled, chosen)})
        if not wanted.as_json:
            print_compiled(exe, compiled, chosen)
    written = write_compiled(wanted.output, made, wanted) if wanted.output is not None else None
    if wanted.as_json:
        click.echo(json.dumps({"compiled": records, "file": str(wanted.output) if written else None}, indent=2))
    elif written is not None:
        click.echo(written)


@dataclass(frozen=True)
class Variant:
    """A compiled model for one target, and the open model."""

    exe: Executable
    artifact: Artifact


def add_code(exe: Executable, compiled: Compiled, target: str) -> Compiled:
    """Return a compiled model with its machine code, or without it and with a warning if the device writes none for it."""
    try:
        return exe.with_code(compiled)
    except NoMachineCode as problem:
        print_warning(f"no machine code for {target}: {problem.what}; {problem.hint}")
        return compiled


def compiled_record(exe: Executable, compiled: Compiled, chosen: Sequence[RKernel]) -> dict[str, Any]:
    """Return a compiled model as plain data for JSON: predicted times in seconds, other columns as in the table."""
    return {
        "hardware": exe.backend.hardware.name,
        "kernels": [dict(zip(HEADERS, [*_kernel_row(k)[:-1], k.crowded], strict=True)) for k in chosen],
        "arena": max((p.arena_bytes for p in compiled.programs), default=0),
        "tasks": sum(p.task_count for p in compiled.programs),
        "hosted": len(compiled.host_nodes),
        "seconds": dict(compiled.seconds),
    }


def print_compiled(exe: Executable, compiled: Compiled, chosen: Sequence[RKernel]) -> None:
    """Print the kernels of a compiled model with their resources, and the times of the steps."""
    click.echo(plain_table([_kernel_row(k) for k in chosen], HEADERS))
    arena = max((p.arena_bytes for p in compiled.programs), default=0)
    tasks, hosted = sum(p.task_count for p in compiled.programs), len(compiled.host_nodes)
    where = exe.backend.hardware.name
    click.echo(f"{where}: {len(chosen)} kernels, arena {format_size(arena)}, {tasks} tasks, {hosted} operators on the host")
    for line in grouped(compiled.host_nodes):
        click.echo(f"on host: {line}")
    for line in summarise_float32(compiled.float32):
        click.echo(line)
    click.echo("steps: " + ", ".join(f"{name} {format_duration(s)}" for name, s in compiled.seconds.items()))
    if compiled.rest is not None:
        click.echo(f"later: {compiled.rest}")


def write_compiled(output: Path, made: Sequence[Variant], wanted: Output) -> str:
    """Write the compiled file, and return a line with its size. Raises BadInput if it cannot be written or signed."""
    from rammer.compiled.artifact import write_artifact

    separate = separate_weights(output, [v.exe.source for v in made]) if wanted.weights == "external" else None

    def fill(file: BinaryIO) -> None:
        comment = UNSIGNED if wanted.sign is not None else b""
        check = [v.exe.source.check for v in made]
        write_artifact(file, *(v.artifact for v in made), separate=separate, verify=lambda: [c() for c in check], comment=comment)
        if wanted.sign is not None:
            sign_file(file, wanted.sign)

    write_file(output, fill)
    targets = zip(wanted.target or ("",), made, strict=True)
    codes = [f"machine code for {target}" for target, variant in targets if variant.artifact.code_target]
    notes = ", ".join([format_size(output.stat().st_size), *codes, *(["signed"] if wanted.sign is not None else [])])
    return f"wrote {output} ({notes})"


def separate_weights(output: Path, sources: Sequence[ModelSource]) -> SeparateConstants:
    """Return the store of weights in the model's own files. Raises BadInput unless they are in the output's folder or below."""
    home, opened = output.parent.resolve(), dict[str, Mapped]()
    for file in (f for source in sources for f in source.files):
        path = file.path.resolve()
        if not path.is_relative_to(home):
            raise BadInput(
                f"{file.path} is not in the folder of {output} or below", "--weights external", "write the file next to the model"
            )
        opened[path.relative_to(home).as_posix()] = file
    files = tuple(opened.values())
    return SeparateConstants(ModelWeights(home, opened), files)


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
