"""Helpers of several commands: show progress, open models, collect inputs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click
import numpy as np

from rammer.cli.files import note_source
from rammer.cli.options import InputChoice
from rammer.compile_options import Progress, Request
from rammer.ir.formats import to_readable
from rammer.opening import open_as_requested
from rammer.runtime.inputs import load_npy, load_npz, make_inputs
from rammer.runtime.model_source import Head
from rammer.runtime.shape_buckets import FIXED, Lengths

if TYPE_CHECKING:
    from rammer.runtime.executable import Executable

#: The name that stands for every installed device.
ALL: Final = "all"
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@contextmanager
def show_progress(what: str) -> Iterator[Progress]:
    """Show the current step in a live line if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda step, detail: None
        return
    from rich.console import Console

    with Console(stderr=True).status(f"compiling {what}") as status:
        yield lambda step, detail: status.update(f"compiling {what}: {step} {detail}")


def open_model(model: Path, device: str, request: Request, sink: Progress) -> Executable:
    """Open a model as ``open_as_requested`` does. Program and device are closed when the command ends."""
    exe = open_as_requested(model, device, request, sink)
    click.get_current_context().call_on_close(exe.close)
    note_source(exe.source)
    return exe


def device_names(given: Sequence[str]) -> tuple[str, ...]:
    """Return the devices of an option. ``all`` stands for every installed device."""
    from rammer.device.loader import Registry

    every = sorted(Registry().devices) if ALL in given else ()
    return tuple(dict.fromkeys(name for each in given for name in (every if each == ALL else (each,))))


def collect_inputs(model: Head, choice: InputChoice, lengths: Lengths = FIXED) -> dict[str, Array]:
    """Return arrays from files and random arrays for the rest, of the greatest lengths if only a range is specified."""
    given: dict[str, Array] = load_npz(choice.npz) if choice.npz else {}
    given |= {name: load_npy(path) for name, path in choice.single.items()}
    return make_inputs(
        model, shapes=lengths.greatest(model.inputs, choice.shapes), ranges=choice.ranges, seed=choice.seed, given=given
    )


def describe_array(name: str, array: Array) -> list[str]:
    """Return a table row: name, type, smallest and largest value, count of NaN."""
    if not isinstance(array, np.ndarray):
        return [name, "nothing" if array is None else f"sequence of {len(array)}", "-", "-", "-"]
    kind = f"{array.dtype} {'x'.join(map(str, array.shape)) or 'scalar'}"
    array = to_readable(array)
    if not array.size or array.dtype.kind not in "biuf":
        return [name, kind, "-", "-", "-"]
    floating = array.dtype.kind == "f"
    nans = int(np.isnan(array).sum()) if floating else 0
    finite: Mapping[str, float] = {"low": float(np.nanmin(array)), "high": float(np.nanmax(array))} if nans < array.size else {}
    show = [f"{finite[k]:.6g}" if k in finite else "nan" for k in ("low", "high")]
    return [name, kind, *show, str(nans)]
