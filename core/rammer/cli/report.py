"""The command ``rammer report``: one HTML page about a model on one or several devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

import rammer
from rammer.cli.common import collect_inputs, device_names, open_model, show_progress
from rammer.cli.files import InputPath, OutputPath, write_text
from rammer.cli.options import InputChoice, compile_options, device_flag, parse_shapes, target_option
from rammer.compile_options import Request
from rammer.compiled.segments import ProgramSegment
from rammer.device.manifest import Array, Span
from rammer.distributed.joining import options_for
from rammer.errors import DeviceFailure, DeviceUnavailable, RammerError
from rammer.report.html_page import render_page
from rammer.report.operator_times import operator_shares
from rammer.report.page_data import DevicePage, Measured, page_data
from rammer.report.text_table import format_size

if TYPE_CHECKING:
    from rammer.runtime.executable import Executable
    from rammer.runtime.loaded_model import LoadedModel

#: Timed runs of the model on a device with a clock.
RUNS = 5


@click.command()
@click.argument("model", type=InputPath())
@device_flag("devices", "Repeatable; all: every installed device. Default: the first working device with a clock.", multiple=True)
@click.option("-o", "output", type=OutputPath(), required=True, help="The page to write.")
@click.option("--measure", is_flag=True, help="Also run the model on each device and show measured times.")
@compile_options
@target_option
def command(
    model: Path, devices: tuple[str, ...], output: Path, measure: bool, shapes: tuple[str, ...], request: Request
) -> None:
    """Write an HTML page with the graph, passes, fusion, schedule, memory and operators of MODEL.

    The page needs no network and no other file. Several devices are shown side by side. The option
    cuda.executor=graph and the target cuda.sm_90a apply to one of them. A device that is missing is shown with the reason.

    Example: rammer report model.onnx --device rocm --device ipu_sim -o page.html
    """
    pages, name, problems = list[DevicePage](), model.stem, list[RammerError]()
    for device in device_names(devices) or ("",):
        own = options_for(device, request.device_options) if device else request.device_options
        mine = replace(request, target=_target_for(device, request.target), device_options=own)
        try:
            with show_progress(f"{model.name} for {device or 'the first device'}") as sink:
                exe = open_model(model, device, mine, sink)
                name = exe.head.name or name
                pages.append(_device_page(exe, device or exe.device, parse_shapes(shapes), measure))
                exe.close()
        except (DeviceUnavailable, DeviceFailure) as problem:
            problems.append(problem)
            pages.append(DevicePage(device, f"{problem.what} {problem.where}".strip()))
    if len(problems) == len(pages):
        raise problems[0]
    text = render_page(f"{name}: rammer report", page_data(name, rammer.__version__, pages))
    write_text(output, text)
    click.echo(f"wrote {output} ({format_size(len(text))})")


def _target_for(device: str, target: str) -> str:
    """Return the target of one device: ``sm_90a`` applies to all devices, ``cuda.sm_90a`` to one."""
    owner, _, name = target.rpartition(".")
    return name if owner in ("", device, device.partition(":")[0]) else ""


def _device_page(exe: Executable, device: str, shapes: Mapping[str, tuple[int, ...]], measure: bool) -> DevicePage:
    compiled, chosen = exe.compile_only(shapes), exe.options
    options = {f.name: str(getattr(chosen, f.name)) for f in fields(chosen) if getattr(chosen, f.name)} | dict(exe.device_options)
    measured = Measured()
    if measure:
        inputs = exe.checked(collect_inputs(exe.head, InputChoice(shapes=shapes), exe.lengths))
        measured = _measure(exe, exe.adopt(compiled), inputs)
    return DevicePage(device, "", compiled, exe.backend.vdevice, exe.backend.hardware, options, measured)


def _measure(exe: Executable, special: LoadedModel, inputs: Mapping[str, Array]) -> Measured:
    """Return the median of a run, the times of operators and, if the device records them, of tasks."""
    feeds, spans = list[tuple[ProgramSegment, Mapping[str, Array]]](), dict[str, list[Span]]()
    shares = operator_shares(exe.backend, special, inputs)
    special.run(inputs, lambda segment, given: feeds.append((segment, given)))
    if exe.backend.records_tasks:
        for segment, given in feeds:
            spans[segment.program.name] = list(exe.backend.trace(segment.program, segment.constants, given).spans)
    runs = 1 if exe.backend.vdevice.simulated else RUNS
    return Measured(float(np.median([special.run(inputs)[1].device for _ in range(runs)])), shares, spans)
