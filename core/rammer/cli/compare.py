"""The command ``rammer compare``: outputs on devices and on a reference for the same inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from rammer.cli.common import collect_inputs, open_model, show_progress
from rammer.cli.files import InputPath
from rammer.cli.options import InputChoice, Tolerance, compile_options, device_flag, input_options, tolerance_options
from rammer.commands import gather_options
from rammer.compile_options import Request
from rammer.errors import Mismatch
from rammer.report.output_errors import (
    HEADERS,
    Difference,
    as_record,
    compare_outputs,
    difference_rows,
    outlier_differences,
    perturb_inputs,
)
from rammer.report.text_table import plain_table
from rammer.runtime.inputs import load_npz, with_outliers

if TYPE_CHECKING:
    from rammer.reference.rounding_ties import Ties
    from rammer.runtime.executable import Executable


@dataclass(frozen=True)
class Shown:
    """The reference, and the form of the result."""

    against: str
    as_json: bool


@click.command()
@click.argument("model", type=InputPath())
@device_flag("devices", "Repeatable.", multiple=True, required=True)
@click.option(
    "--against",
    default="onnxruntime",
    show_default=True,
    metavar="REFERENCE",
    help="onnxruntime, reference (ONNX's own, in Python) or F.npz; for a compiled file also its model F.onnx, by onnxruntime.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@compile_options
@input_options
@tolerance_options
@gather_options("shown", Shown, "against", "as_json")
def command(
    model: Path, devices: tuple[str, ...], shown: Shown, tolerance: Tolerance, choice: InputChoice, request: Request
) -> None:
    """Compare MODEL's outputs on each DEVICE with a reference; exit code 1 on a mismatch.

    With --precision float16, random inputs are drawn twice: once with channels of up to 10,000, as in language models. Errors of
    that draw count as far as the reference is stable under half-precision errors in its inputs.

    If outputs of a quantised model differ, each quantised tensor is judged separately. Values may be off by one, and only if the
    number before rounding is within 0.001 steps of a tie. Operators that ONNX Runtime computes differently are named.

    Example: rammer compare model.onnx --device rocm --device ipu_sim --against onnxruntime
    """
    from rammer.frontend.lower.contrib.function import list_departures

    against = shown.against
    table, records, bad, said = [], list[dict[str, Any]](), 0, list[str]()
    want = None
    for device in devices:
        with show_progress(f"{model.name} for {device}") as sink:
            exe = open_model(model, device, request, sink)
            inputs = collect_inputs(exe.head, choice, exe.lengths)
            have = exe.run(inputs)  # first: it has limits, a reference could run forever
            want = want or _expected(exe, against, inputs)
        found = compare_outputs(have, want, *tolerance.of(exe.options.precision))
        if against == "onnxruntime" and any(not d.good for d in found):
            ties = _explain_ties(exe, inputs, have, request, tolerance.of(exe.options.precision))
            if ties is not None:
                said.append(f"{device}: {ties}")
                found = [replace(d, good=True, why="but for ties") if ties.good and _is_comparable(d) else d for d in found]
            if any(not d.good for d in found):
                said += (f"{device}: {line}; this one does not" for line in list_departures(exe.source.model.whole))
        found += _with_outliers(exe, choice, against, inputs, tolerance)
        bad += sum(not d.good for d in found)
        hosted = sum(len(s.host_nodes) for s in exe.cache.values())
        name = f"{device} ({exe.backend.hardware.name})" + (f", {hosted} on host" if hosted else "")
        table += [[name, *row] for row in difference_rows(found)]
        records += [{"device": device, "hardware": exe.backend.hardware.name, "hosted": hosted, **as_record(d)} for d in found]
        exe.close()
    if shown.as_json:
        click.echo(json.dumps({"against": against, "outputs": records, "notes": said}, indent=2))
    else:
        click.echo("\n".join([plain_table(table, ["device", *HEADERS]), *said]))
    if bad:
        raise Mismatch(f"{bad} outputs differ from {against}")


def _expected(exe: Executable, against: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the outputs of the reference. A compiled file has no model: its outputs are in a file, or computed by its model."""
    from rammer.device.loader import Registry
    from rammer.jit.onnx_source import open_source
    from rammer.reference.outputs import expected_outputs

    if against.endswith(".npz"):
        return load_npz(Path(against))
    if against.endswith(".onnx"):
        return expected_outputs(open_source(Path(against), Registry().operators).model, "onnxruntime", inputs)
    return expected_outputs(exe.source.model, against, inputs)


def _with_outliers(
    exe: Executable, choice: InputChoice, against: str, inputs: Mapping[str, Any], tolerance: Tolerance
) -> list[Difference]:
    """Return differences in float16 for inputs with outliers. Returns [] if files or ranges specify all inputs, or a file the
    outputs."""
    from rammer.reference.outputs import expected_outputs

    given = {*choice.single, *choice.ranges, *(load_npz(choice.npz) if choice.npz else ())}
    drawn = {p.name for p in exe.head.inputs} - given
    feeds = with_outliers(exe.head, inputs, drawn, choice.seed)
    if (
        exe.options.precision != "float16"
        or against not in ("onnxruntime", "reference")
        or all(feeds[n] is inputs[n] for n in feeds)
    ):
        return []
    want, moved = (expected_outputs(exe.source.model, against, f) for f in (feeds, perturb_inputs(feeds, choice.seed)))
    return outlier_differences(exe.run(feeds), want, moved, *tolerance.of("float16"))


def _is_comparable(found: Difference) -> bool:
    """Return True if an output differs, but has the right shape and finite numbers."""
    return not found.good and bool(np.isfinite(found.worst))


def _explain_ties(
    exe: Executable, inputs: Mapping[str, Any], have: Mapping[str, Any], request: Request, tolerance: tuple[float, float]
) -> Ties | None:
    """Return the differences that rounding ties of a quantised model explain."""
    from rammer.jit.session import open_executable
    from rammer.reference.rounding_ties import judge_ties

    def run(proto: Any) -> Mapping[str, Any]:
        parts = open_executable(proto, exe.device, request)
        try:
            return parts.run(inputs)
        finally:
            parts.close()

    return judge_ties(exe.source.model.whole, inputs, have, run, tolerance)
