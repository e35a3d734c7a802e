"""The command ``rammer bench``: one table of all models, devices and peers, with the environment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import click

from rammer.cli.common import Array, collect_inputs, device_names, open_model, show_progress
from rammer.cli.distributions import not_installed
from rammer.cli.files import STDOUT, InputPath, OutputPath, note_source, write_text
from rammer.cli.joining import joining_options, parse_devices
from rammer.cli.options import COUNT, SECONDS, Finite, InputChoice, Tolerance, compile_options, device_flag, parse_shapes
from rammer.cli.several import bench_spread, spread_table
from rammer.commands import gather_options
from rammer.compile_options import DEFAULT, Request
from rammer.distributed.joining import Joining, launched_processes
from rammer.distributed.transport.mpi_launch import rank_and_size
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable, RammerError, print_warning
from rammer.report.bench import Effort, Row, Runner, bench_device, bench_peer
from rammer.report.environment import describe_environment
from rammer.report.operator_times import HEADERS as OPERATOR_HEADERS
from rammer.report.operator_times import OperatorShare, operator_shares, table_rows
from rammer.report.output_errors import compare_outputs
from rammer.report.peers import load_peer, peer_names
from rammer.report.text_table import format_duration, format_size, markdown_table, plain_table
from rammer.runtime.host_bound import WHOLE

HEADERS = [
    *("model", "on", "median", "p90", "p99", "first run", "compile", "memory", "rel L2", "kernels", "on host", "ratio"),
    "hardware",
]
#: Mark of the fastest measured row of a model.
BEST = " *"


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
    """The settings of measurements on a device: effort, clock and tolerance.

    Operator times are appended to ``parts`` (None: not measured), errors of devices that are missing or fail to ``problems``."""

    effort: Effort
    on_device: bool
    parts: list[ModelParts] | None
    close: tuple[float, float]
    problems: list[RammerError]


@click.command()
@click.argument("models", nargs=-1, required=True, type=InputPath())
@device_flag(
    "devices",
    "Repeatable; all: every installed device. NAME,NAME: one model over several.",
    "--devices",
    multiple=True,
    required=True,
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

    The ratio is the best peer's median divided by the device's: above 1 the device is faster than the peer that it names. A star
    marks the fastest row of a model. Simulated times have no ratio and no star. The relative L2 error is against ONNX Runtime on
    the same inputs. A device that is missing or fails has a row with the reason.

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
    close, problems = Tolerance().of(request.chosen.precision), list[RammerError]()
    wanted = Measured(effort, on_device, parts if files.per_operator else None, close, problems)
    for model, choice in zip(models, _choose_inputs(models, shapes), strict=True):
        want = _reference_outputs(model, choice, "onnxruntime" in runners.peers) if not first_elsewhere() else None
        for device in device_names(runners.devices):
            asked = replace(request, precision=precision)
            if names := parse_devices(device, runners.joining, request):
                row = bench_spread(model, names, (asked, runners.joining), choice, effort.iterations)
                spreads += [row] if row else []
                continue
            rows.append(_device_row(model, device, asked, (choice, want), wanted))
        rows += [_time_peer(model, peer, (choice, want), wanted, precision) for peer in runners.peers if not first_elsewhere()]
    if problems and not any(r.median for r in rows) and not spreads:
        raise problems[0]
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
    from rammer.jit.onnx_source import open_source

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


#: The inputs that were chosen, and the outputs of the reference for them (None without a reference).
Judged: TypeAlias = "tuple[InputChoice, Mapping[str, Array] | None]"


def _reference_outputs(model: Path, choice: InputChoice, asked: bool) -> Mapping[str, Array] | None:
    """Return the outputs of ONNX Runtime, or None with a warning if it refuses the model or is missing. Raises the latter as an
    error if the user ``asked`` for it as a peer."""
    from rammer.device.loader import Registry
    from rammer.jit.onnx_source import open_source
    from rammer.reference.outputs import expected_outputs

    source = open_source(model, Registry().operators)
    try:
        return expected_outputs(source.model, "onnxruntime", collect_inputs(source.head, choice))
    except RammerError as problem:
        if asked and isinstance(problem, DeviceUnavailable):
            raise
        print_warning(f"{model.name}: outputs are not compared: {problem.what}")
        return None


def _with_error(row: Row, have: Mapping[str, Array], want: Mapping[str, Array] | None, close: tuple[float, float]) -> Row:
    """Return the row with the error of the outputs ``have``."""
    if want is None:
        return row
    found = compare_outputs(dict(have), dict(want), *close)
    return replace(row, error=max((d.l2 for d in found), default=0.0), agrees=all(d.good for d in found))


def _device_row(model: Path, device: str, request: Request, judged: Judged, wanted: Measured) -> Row:
    """Return the result row of a device, or one with the reason if it is missing or fails."""
    try:
        return _time_device(model, device, request, judged, wanted)
    except (DeviceUnavailable, DeviceFailure) as problem:
        wanted.problems.append(problem)
        return Row.missing(Runner(model.stem, device, ""), f"{problem.what} {problem.where}".strip())


def _time_device(model: Path, device: str, request: Request, judged: Judged, wanted: Measured) -> Row:
    """Return the result row of a device. Operator times are appended to ``wanted.parts``."""
    choice, want = judged
    with show_progress(f"{model.name} for {device}") as sink:
        exe = open_model(model, device, request, sink)
        inputs = exe.checked(collect_inputs(exe.head, choice, exe.lengths))
        special = exe.prepare(inputs)
    hardware = exe.backend.hardware.name
    simulated = exe.backend.vdevice.simulated
    runner = Runner(model.stem, device, hardware)
    on_device = wanted.on_device and special.compiled.ranged is None  # ranged arrays have no fixed shapes: whole runs
    row = bench_device(runner, special, inputs, wanted.effort, simulated=simulated, on_device=on_device)
    row = _with_error(row, special.run(inputs)[0], want, wanted.close)
    if wanted.parts is not None:
        wanted.parts.append(ModelParts(model.stem, device, operator_shares(exe.backend, special, inputs)))
    exe.close()
    return row


def _time_peer(model: Path, peer: str, judged: Judged, wanted: Measured, precision: str) -> Row:
    from rammer.device.loader import Registry
    from rammer.jit.onnx_source import open_source

    source, (choice, want) = open_source(model, Registry().operators), judged
    inputs = collect_inputs(source.head, choice)
    hardware = f"{describe_environment()['cpu']}, {describe_environment()['cores']} cores"
    prepared = load_peer(peer)(source.model, inputs, precision)
    outputs = prepared.outputs()
    return _with_error(bench_peer(Runner(model.stem, peer, hardware), prepared, wanted.effort), outputs, want, wanted.close)


def _table_cells(rows: list[Row]) -> Iterator[list[Any]]:
    for r in rows:
        if r.why:
            yield [r.model, r.runner, *["-"] * 10, r.why]
            continue
        best = _best_peer(r, rows)
        ratio = f"{best.median / r.median:.2f}x {best.runner}" if best is not None else ""
        mark = " (simulated)" if r.simulated else BEST if _is_best(r, rows) else ""
        times = [format_duration(t) for t in (r.p90, r.p99, r.first, r.compile)]
        memory = format_size(r.memory) if r.memory else "-"
        error = "-" if r.error is None else f"{r.error:.1e}{'' if r.agrees else ' MISMATCH'}"
        cells = [*times, memory, error, r.kernels or "", r.host_nodes, ratio, r.hardware]
        yield [r.model, r.runner, f"{format_duration(r.median)}{mark}", *cells]


def _rivals(row: Row, rows: list[Row]) -> list[Row]:
    """Return the measured rows of the same model. Times without copies are never compared with times with copies."""
    if row.simulated or row.why:
        return []
    alike = [r for r in rows if r.model == row.model and r is not row and not (r.simulated or r.why)]
    return [r for r in alike if row.timed == WHOLE or r.timed != WHOLE]


def _is_best(row: Row, rows: list[Row]) -> bool:
    """Return True if the row is the fastest of at least two comparable rows."""
    rivals = _rivals(row, rows)
    return bool(rivals) and all(row.median <= r.median for r in rivals)


def _best_peer(row: Row, rows: list[Row]) -> Row | None:
    """Return the row of the fastest peer, or None for a peer and without a comparable one."""
    known = peer_names()
    if row.runner in known:
        return None
    return min((r for r in _rivals(row, rows) if r.runner in known), key=lambda r: r.median, default=None)


def format_table(rows: list[Row], form: Any) -> str:
    """Format all rows as one table. Simulated times are marked and never ranked."""
    note = "* the fastest measured of a model" if any(_is_best(r, rows) for r in rows) else ""
    return "\n\n".join(filter(None, [str(form(list(_table_cells(rows)), HEADERS)) if rows else "", note]))


def format_document(rows: list[Row], facts: dict[str, str], several: str = "") -> str:
    """Return the Markdown result file: tables, that of models over ``several`` devices, and the environment."""
    lines = "\n".join(f"- {k}: {v}" for k, v in facts.items())
    tables = [f"{format_table(rows, markdown_table)}\n\nMedians of {_describe_timing(rows)}."] if rows else []
    return "\n\n".join([*tables, *filter(None, [several]), f"## Environment\n\n{lines}\n"])


def _describe_timing(rows: list[Row]) -> str:
    found = dict.fromkeys(r.timed for r in rows if not r.why)
    return "whole runs, NumPy in and NumPy out" if list(found) == [WHOLE] else f"runs timed by: {'; '.join(found)}"
