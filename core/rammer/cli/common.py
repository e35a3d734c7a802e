"""What several commands do: show progress, collect inputs, write files."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import click
import numpy as np
from rich.console import Console

from rammer.cli.options import InputChoice
from rammer.compiled.files import write_whole
from rammer.compiled.options import Progress, Request
from rammer.errors import BadInput
from rammer.ir.formats import readable
from rammer.runtime.inputs import load_npy, load_npz, make_inputs
from rammer.runtime.lengths import FIXED, Lengths
from rammer.runtime.source import Head

if TYPE_CHECKING:
    from rammer.runtime.executable import Executable

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """A live line on a terminal that says which step runs; silent where stderr is no terminal."""
    console = Console(stderr=True)
    if not sys.stderr.isatty():
        yield lambda step, detail: None
        return
    with console.status(f"compiling {what}") as status:
        yield lambda step, detail: status.update(f"compiling {what}: {step} {detail}")


def opened(model: Path, device: str, request: Request, sink: Progress) -> Executable:
    """``open_executable``; program and device are closed when the command ends, however it does."""
    from rammer.runtime.session import open_executable

    exe = open_executable(model, device, request, progress=sink)
    click.get_current_context().call_on_close(exe.close)
    return exe


def collect_inputs(model: Head, choice: InputChoice, lengths: Lengths = FIXED) -> dict[str, Array]:
    """Arrays from files and random ones for the rest, of the greatest lengths where a range is all that is said."""
    given: dict[str, Array] = load_npz(choice.npz) if choice.npz else {}
    given |= {name: load_npy(path) for name, path in choice.single.items()}
    return make_inputs(
        model, shapes=lengths.greatest(model.inputs, choice.shapes), ranges=choice.ranges, seed=choice.seed, given=given
    )


def write_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """``write_whole``, so that neither an interruption nor a full disk leaves half a file. BadInput where it fails."""
    try:
        write_whole(path, fill)
    except (OSError, ValueError) as problem:  # ValueError: a path with a zero byte in it
        raise cannot_write(path, problem) from problem


def cannot_write(path: Path, problem: OSError | ValueError) -> BadInput:
    """What to tell of a file that could not be written."""
    return BadInput(f"cannot write {path}: {getattr(problem, 'strerror', None) or problem}")


def check_writable(path: Path | None, source: Path) -> None:
    """BadInput where a file cannot be written or is what is read, asked before long work rather than after it."""
    if path is None:
        return
    try:
        _check_writable(path, source)
    except (OSError, ValueError) as problem:
        raise cannot_write(path, problem) from problem


def _check_writable(path: Path, source: Path) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise BadInput(f"cannot write {path}: its folder does not exist")
    if path.exists() and source.exists() and path.samefile(source):
        raise BadInput(f"cannot write {path}: it is the model that is read", hint="give another file")
    if path.is_dir():
        raise BadInput(f"cannot write {path}: it is a folder", hint=f"give a file, for example {path / 'model.rammer'}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise BadInput(f"cannot write {path}: {os.strerror(errno.EACCES)}")


def write_text(path: Path, text: str) -> None:
    """``write_file`` of a text in UTF-8."""
    write_file(path, lambda file: file.write(text.encode()))


def describe_array(name: str, array: Array) -> list[str]:
    """A table row: name, type, smallest and largest value, count of NaN."""
    if not isinstance(array, np.ndarray):
        return [name, "nothing" if array is None else f"sequence of {len(array)}", "-", "-", "-"]
    kind = f"{array.dtype} {'x'.join(map(str, array.shape)) or 'scalar'}"
    array = readable(array)
    if not array.size or array.dtype.kind not in "biuf":
        return [name, kind, "-", "-", "-"]
    floating = array.dtype.kind == "f"
    nans = int(np.isnan(array).sum()) if floating else 0
    finite: Mapping[str, float] = {"low": float(np.nanmin(array)), "high": float(np.nanmax(array))} if nans < array.size else {}
    show = [f"{finite[k]:.6g}" if k in finite else "nan" for k in ("low", "high")]
    return [name, kind, *show, str(nans)]
