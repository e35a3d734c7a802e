"""The command ``rammer inspect``: the printed form of any compilation step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rammer.cli.common import collect_inputs, open_model, show_progress
from rammer.cli.files import InputPath, OutputFolder, OutputPath, note_source, write_file, write_text, write_texts
from rammer.cli.joining import partition_options
from rammer.cli.options import InputChoice, compile_options, device_flag, parse_shapes, target_option
from rammer.commands import gather_options
from rammer.compile_options import Progress, Request, check_precision
from rammer.device.loader import Registry
from rammer.distributed.joining import GOALS, options_for
from rammer.distributed.report.distributed_text import describe_spread
from rammer.distributed.runtime.distributed_session import (
    SEVERAL,
    check_spread,
    kind_of,
    open_shapes,
    read_partition_file,
    resolve_devices,
)
from rammer.distributed.transport.protocol import Site
from rammer.distributed.transport.transport_registry import known_links
from rammer.errors import BadInput
from rammer.jit.onnx_source import check_kept, open_source
from rammer.report.stage_text import STAGES, dump_texts
from rammer.runtime.input_checks import check_inputs
from rammer.runtime.shape_buckets import Lengths, describe_scope
from rammer.tuning.kernel_store import KernelStore

if TYPE_CHECKING:
    from rammer.compiler.compiler import Compiler


@dataclass(frozen=True)
class Printed:
    """The stage to print, and the folder and the file to write to. For several devices also the goal of the partition, and a file
    with a manual partition."""

    stage: str
    dump: Path | None = None
    output: Path | None = None
    goal: str = GOALS[0]
    place: Path | None = None


@click.command()
@click.argument("model", type=InputPath())
@device_flag(
    "device",
    "Default: the first working device with a clock. NAME,NAME: one model over several, partitioned and predicted only.",
    "--devices",
    default="",
)
@click.option("--stage", type=click.Choice(list(STAGES)), default="program", show_default=True, help="What to print.")
@click.option("--dump", type=OutputFolder(), help="Write the numbered text of every step to this folder.")
@click.option("-o", "output", type=OutputPath(), help="Write the text to this file; with --stage graph, F.onnx: an ONNX model.")
@partition_options
@gather_options("printed", Printed, "stage", "dump", "output", "goal", "place")
@compile_options
@target_option
def command(model: Path, device: str, printed: Printed, shapes: tuple[str, ...], request: Request) -> None:
    """Print one STAGE of MODEL on its way to the device.

    Example: rammer inspect model.onnx --device ipu_sim --stage tile
    """

    as_model = printed.output is not None and printed.output.suffix == ".onnx"
    if as_model and printed.stage != "graph":
        raise BadInput(f"stage {printed.stage} is a text, not an ONNX model", "-o", "add --stage graph, or name another file")
    with show_progress(model.name) as sink:
        if names := resolve_devices(device, options=request.device_options):
            click.echo(_inspect_distributed(model, names, printed, (shapes, request), sink), nl=False)
            return
        exe, given = open_model(model, device, request, sink), parse_shapes(shapes)
        if exe.source.known is None:
            compiled = exe.compile_only(given)
            compiled = exe.with_needs(compiled) if printed.stage == "kernels" else compiled
        elif printed.stage == "program" and printed.dump is None:
            compiled = next(iter(exe.cache.values())).compiled
        else:
            raise BadInput(
                f"{model} is a compiled model: only its program can be printed",
                f"--stage {printed.stage}" if printed.dump is None else "--dump",
                "inspect the ONNX model that it was compiled from",
            )
    heading = ""
    if compiled.ranged is not None:
        spans = exe.lengths.spans_of(exe.head.inputs, exe.lengths.greatest(exe.head.inputs, given))
        symbols = ", ".join(f"{tensor} is {dim}" for dim, tensor in compiled.ranged.lengths.items())
        heading = f"# {symbols}: {describe_scope(exe.lengths, spans)}\n"
    if printed.output is None:
        click.echo(heading + STAGES[printed.stage](compiled, exe.backend.vdevice))
    elif as_model:
        from rammer.report.onnx_export import to_onnx

        content = to_onnx(compiled.graph).SerializeToString()
        write_file(printed.output, lambda file: file.write(content))
    else:
        write_text(printed.output, f"{heading}{STAGES[printed.stage](compiled, exe.backend.vdevice)}\n")
    if printed.output is not None:
        click.echo(f"wrote {printed.output}", err=True)
    if printed.dump is not None:
        write_texts(printed.dump, texts := dump_texts(compiled, exe.backend.vdevice))
        for name in texts:
            click.echo(f"wrote {printed.dump / name}", err=True)


def _inspect_distributed(
    model: Path, names: tuple[str, ...], printed: Printed, asked: tuple[tuple[str, ...], Request], sink: Progress
) -> str:
    """Return the text of a model over several devices: its partition and its program."""
    if printed.stage != "program" or printed.dump is not None or printed.output is not None:
        raise BadInput("only the program can be printed for several devices", "--stage", "inspect the model on one of them")
    from rammer.distributed.partition.search import compile_open

    shapes, request = asked
    place = read_partition_file(printed.place)
    check_spread(model, request)
    registry = Registry()
    source = open_source(model, registry.operators)
    note_source(source)
    check_kept(request.chosen, source)
    lengths = Lengths.of(source.head.inputs, request.lengths)
    choice = InputChoice(shapes=parse_shapes(shapes))
    inputs = check_inputs(source.head.inputs, collect_inputs(source.head, choice, lengths))
    made = {name: _make_compiler(registry, name, request, sink) for name in dict.fromkeys(names)}
    try:
        devices = [(name, made[name]) for name in names]
        at = open_shapes(source.head, lengths, inputs)
        known = known_links(registry, [Site(name, kind_of(registry, name)) for name in names])
        spread = compile_open(devices, source.model, at, known, printed.goal, place)
    finally:
        for compiler in made.values():
            compiler.backend.close()
    return describe_spread(spread)


def _make_compiler(registry: Registry, name: str, request: Request, sink: Progress) -> Compiler:
    from rammer.compiler.compiler import Compiler

    options = options_for(name, request.device_options)
    backend = registry.open(name, request.require, request.target, options)
    check_precision(request.chosen.precision, name, backend.vdevice)
    return Compiler(backend, request.chosen, KernelStore.default(), registry, sink, name.partition(":")[0], SEVERAL)
