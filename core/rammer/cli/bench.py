"""The command ``rammer bench``: one table of all models, devices and peers, with the environment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from rammer.cli.common import collect_inputs, open_model, show_progress
from rammer.cli.distributions import not_installed
from rammer.cli.files import STDOUT, InputPath, OutputPath, note_source, write_text
from rammer.cli.options import COUNT, SECONDS, Finite, InputChoice, compile_options, parse_shapes
from rammer.cli.several import bench_spread, joining_options, parse_devices, spread_table
from rammer.commands import gather_options
from rammer.compile_options import DEFAULT, Request
from rammer.distributed.runtime.distributed_session import Joining
from rammer.distributed.transport.mpi_launch import launched_processes, rank_and_size
from rammer.errors import BadInput
from rammer.report.bench import Effort, Row, Runner, bench_device, bench_peer
from rammer.report.environment import describe_environment
from rammer.report.operator_times import HEADERS as OPERATOR_HEADERS
from rammer.report.operator_times import OperatorShare, operator_shares, table_rows
from rammer.report.peers import load_peer, peer_names
from rammer.report.text_table import format_duration, markdown_table, plain_table
from rammer.runtime.host_bound import WHOLE

HEADERS = ["model", "on", "hardware", "median", "p90", "p99", "first run", "compile", "kernels", "on host", "ratio"]


def check_peers(context: click.Context, option: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of peers. Raises BadInput if a peer is unknown or not installed."""
    names = peer_names()
    if value and not names:
        raise not_installed("rammer bench --peer", "rammer-bench")
    for name in value:
        if name not in names:
            raise BadInput(f"unknown peer {name!r}", "--peer", f"one of: {', '.join(names)}")
    return value


@dataclass(frozen=True)
class Runners:
    """The devices and peers that run the models."""

    devices: tuple[str, ...]
    peers: tuple[str, ...]
    joining: Joining


@dataclass(frozen=True)
class Files:
    """The result files besides the terminal, and the switch for operator times."""

    json_file: Path | None
    markdown_file: Path | None
    per_operator: bool


@dataclass(frozen=True)
class ModelParts:
    """The operator times of a model on a device."""

    model: str
    runner: str
    operators: list[OperatorShare]

    def __str__(self) -> str:
        return f"{self.model} on {self.runner}\n\n{plain_table(table_rows(self.operators), OPERATOR_HEADERS)}"


@dataclass(frozen=True)
class Measured:
    """The settings of measurements on a device: effort and clock.

    Operator times are appended to ``parts`` (None: not measured)."""

    effort: Effort
    on_device: bool
    parts: list[ModelParts] | None


@click.command()
@click.argument("models", nargs=-1, required=True, type=InputPath())
@click.option(
    "--device",
    "--devices",
    "devices",
    multiple=True,
    required=True,
    metavar="NAME[:INDEX]",
    help="Repeatable. NAME,NAME: one model over several.",
)
@click.option(
    "--peer", "peers", multiple=True, metavar=f"[{'|'.join(peer_names()) or 'NAME'}]", callback=check_peers, help="Repeatable."
)
@click.option("--warmup", type=click.IntRange(0, COUNT.max), default=3, show_default=True, help="Untimed runs.")
@click.option("--iterations", type=COUNT, default=20, show_default=True, help="Minimum number of timed runs.")
@click.option("--duration", type=Finite(SECONDS), default=1.0, show_default=True, help="Minimum seconds of timed runs.")
@click.option("--json", "json_file", type=OutputPath(stdout=True), help="Write rows and environment as JSON ('-': stdout).")
@click.option("--per-operator", is_flag=True, help="Also time each operator on each device.")
@click.option("--markdown", "markdown_file", type=OutputPath(), help="Write the table as Markdown.")
@compile_options
@joining_options
@gather_options("runners", Runners, "devices", "peers", "joining")
@gather_options("effort", Effort, "warmup", "iterations", "duration")
@gather_options("files", Files, "json_file", "markdown_file", "per_operator")
def command(
    models: tuple[Path, ...], runners: Runners, effort: Effort, files: Files, shapes: tuple[str, ...], request: Request
) -> None:
    """Time MODELS on every DEVICE and PEER with the same inputs.

    The ratio is the best peer's median divided by the device's: above 1 the device is faster. Simulated times have no ratio.
    Inputs and outputs stay on the device and its clock counts, for torch and JAX as well. With ONNX Runtime as the only peer,
    whole runs are timed on both sides: NumPy in, NumPy out.

    The option --per-operator adds a table for each device. Its times come from the device's record of a run, or are simulated
    cycles (ipu_sim). Without a record they come from its profiler, which runs each operator alone. Operators on the host are
    timed by type, by the host's clock.

    Example: rammer bench a.onnx b.onnx --device rocm --device ipu_sim --peer onnxruntime --markdown table.md
    """
    precision, layout = request.chosen.precision, request.layout
    if precision != DEFAULT.precision and "onnxruntime" in runners.peers:
        raise BadInput(
            f"ONNX Runtime on the CPU does not compute in {precision}",
            "--peer onnxruntime",
            f"leave it out, or compare in {DEFAULT.precision}",
        )
    on_device = set(runners.peers) != {"onnxruntime"}
    rows, parts, spreads = list[Row](), list[ModelParts](), list[dict[str, Any]]()
    wanted = Measured(effort, on_device, parts if files.per_operator else None)
    for model, choice in zip(models, _choose_inputs(models, shapes), strict=True):
        for device in runners.devices:
            asked = replace(request, precision=precision)
            if names := parse_devices(device, runners.joining, request):
                row = bench_spread(model, names, (asked, runners.joining), choice, effort.iterations)
                spreads += [row] if row else []
                continue
            rows.append(_time_device(model, device, asked, choice, wanted))
        rows += [_time_peer(model, peer, choice, effort, precision) for peer in runners.peers if not first_elsewhere()]
    facts = describe_environment() | {"precision": precision, "layout": layout}
    if first_elsewhere():
        return
    shown = filter(
        None, [format_table(rows, plain_table), spread_table(spreads, plain_table) if spreads else "", *map(str, parts)]
    )
    click.echo("\n\n".join(shown), err=str(files.json_file) == STDOUT)
    if files.json_file is not None:
        listed = _to_dict(facts, rows, parts) | ({"several": spreads} if spreads else {})
        write_text(files.json_file, json.dumps(listed, indent=2) + "\n")
    if files.markdown_file is not None:
        write_text(files.markdown_file, format_document(rows, facts, spread_table(spreads, markdown_table) if spreads else ""))


def first_elsewhere() -> bool:
    """Return True if another process of a multi-process run has device 0, and so prints."""
    return launched_processes() > 1 and rank_and_size()[0] > 0


def _choose_inputs(models: tuple[Path, ...], shapes: tuple[str, ...]) -> list[InputChoice]:
    """Return the --shape options of each model's inputs. Raises BadInput for a name that matches no input."""
    from rammer.device.loader import Registry
    from rammer.runtime.onnx_source import open_source

    given, plugins = parse_shapes(shapes), Registry().operators
    sources = [open_source(model, plugins) for model in models]
    for source in sources:
        note_source(source)
    ports = [{p.name for p in source.head.inputs} for source in sources]
    unknown = sorted(set(given) - set().union(*ports))
    if unknown:
        raise BadInput(
            f"--shape names {unknown[0]!r}, which is not an input of any model",
            hint=f"their inputs are: {', '.join(sorted(set().union(*ports)))}",
        )
    return [InputChoice(shapes={n: s for n, s in given.items() if n in names}) for names in ports]


def _to_dict(facts: dict[str, str], rows: list[Row], parts: list[ModelParts]) -> dict[str, Any]:
    whole = {"environment": facts, "rows": [asdict(r) for r in rows]}
    return {**whole, "operators": [asdict(p) for p in parts]} if parts else whole


def _time_device(model: Path, device: str, request: Request, choice: InputChoice, wanted: Measured) -> Row:
    """Return the result row of a device. Operator times are appended to ``wanted.parts``."""
    with show_progress(f"{model.name} for {device}") as sink:
        exe = open_model(model, device, request, sink)
        inputs = exe.checked(collect_inputs(exe.head, choice, exe.lengths))
        special = exe.prepare(inputs)
    hardware = exe.backend.hardware.name
    simulated = exe.backend.vdevice.simulated
    runner = Runner(model.stem, device, hardware)
    on_device = wanted.on_device and special.compiled.ranged is None  # ranged arrays have no fixed shapes: whole runs
    row = bench_device(runner, special, inputs, wanted.effort, simulated=simulated, on_device=on_device)
    if wanted.parts is not None:
        wanted.parts.append(ModelParts(model.stem, device, operator_shares(exe.backend, special, inputs)))
    exe.close()
    return row


def _time_peer(model: Path, peer: str, choice: InputChoice, effort: Effort, precision: str) -> Row:
    from rammer.device.loader import Registry
    from rammer.runtime.onnx_source import open_source

    source = open_source(model, Registry().operators)
    inputs = collect_inputs(source.head, choice)
    hardware = f"{describe_environment()['cpu']}, {describe_environment()['cores']} cores"
    return bench_peer(Runner(model.stem, peer, hardware), load_peer(peer)(source.model, inputs, precision), effort)


def _table_cells(rows: list[Row]) -> Iterator[list[Any]]:
    for r in rows:
        best = _best_peer(r, rows)
        mark = " (simulated)" if r.simulated else ""
        ratio = f"{best / r.median:.2f}x" if best is not None else ""
        times = [f"{format_duration(t)}{mark}" for t in (r.median, r.p90, r.p99, r.first)]
        yield [r.model, r.runner, r.hardware, *times, format_duration(r.compile), r.kernels or "", r.host_nodes, ratio]


def _best_peer(row: Row, rows: list[Row]) -> float | None:
    """Return the fastest peer's median. Times without copies are never compared with times with copies."""
    known = peer_names()
    if row.simulated or row.runner in known:
        return None
    peers = [r for r in rows if r.runner in known and r.model == row.model]
    return min((r.median for r in peers if row.timed == WHOLE or r.timed != WHOLE), default=None)


def format_table(rows: list[Row], form: Any) -> str:
    """Format measured rows first and simulated rows in a separate table: they are never ranked together."""
    parts = [list(_table_cells(rows))]
    measured = [c for c, r in zip(parts[0], rows, strict=True) if not r.simulated]
    simulated = [c for c, r in zip(parts[0], rows, strict=True) if r.simulated]
    return "\n\n".join(str(form(part, HEADERS)) for part in (measured, simulated) if part)


def format_document(rows: list[Row], facts: dict[str, str], several: str = "") -> str:
    """Return the Markdown result file: tables, that of models over ``several`` devices, and the environment."""
    lines = "\n".join(f"- {k}: {v}" for k, v in facts.items())
    tables = [f"{format_table(rows, markdown_table)}\n\nMedians of {_describe_timing(rows)}."] if rows else []
    return "\n\n".join([*tables, *filter(None, [several]), f"## Environment\n\n{lines}\n"])


def _describe_timing(rows: list[Row]) -> str:
    found = dict.fromkeys(r.timed for r in rows)
    return "whole runs, NumPy in and NumPy out" if list(found) == [WHOLE] else f"runs timed by: {'; '.join(found)}"
