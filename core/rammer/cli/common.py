"""What several commands do: show progress, collect inputs, write files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from rich.console import Console

from rammer.cli.options import InputChoice
from rammer.errors import BadInput
from rammer.runtime.inputs import load_npy, load_npz, make_inputs
from rammer.runtime.options import Progress
from rammer.runtime.source import Head

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


def collect_inputs(model: Head, choice: InputChoice) -> dict[str, Array]:
    """Arrays from files and random ones for the rest."""
    given: dict[str, Array] = load_npz(choice.npz) if choice.npz else {}
    given |= {name: load_npy(path) for name, path in choice.single.items()}
    return make_inputs(model, shapes=choice.shapes, ranges=choice.ranges, seed=choice.seed, given=given)


def write_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """The file that ``fill`` writes, in one step, so that neither an interruption nor a full disk leaves half of it.

    What is there and no ordinary file (/dev/stdout, a pipe) is written in place. BadInput where that is impossible.
    """
    in_place = path.exists() and not path.is_file()
    target = path if in_place else path.with_name(f"{path.name}.partial")
    try:
        with target.open("wb") as file:
            fill(file)
        if not in_place:
            target.replace(path)
    except OSError as problem:
        raise BadInput(f"cannot write {path}: {problem.strerror}") from problem
    finally:
        if not in_place and target.is_file():
            target.unlink()


def write_text(path: Path, text: str) -> None:
    """``write_file`` of a text in UTF-8."""
    write_file(path, lambda file: file.write(text.encode()))


def describe_array(name: str, array: Array) -> list[str]:
    """A table row: name, type, smallest and largest value, count of NaN."""
    shape = "x".join(map(str, array.shape)) or "scalar"
    if not array.size or array.dtype.kind not in "biuf":
        return [name, f"{array.dtype} {shape}", "-", "-", "-"]
    floating = array.dtype.kind == "f"
    nans = int(np.isnan(array).sum()) if floating else 0
    finite: Mapping[str, float] = (
        {"low": float(np.nanmin(array)), "high": float(np.nanmax(array))} if nans < array.size else {}
    )
    show = [f"{finite[k]:.6g}" if k in finite else "nan" for k in ("low", "high")]
    return [name, f"{array.dtype} {shape}", *show, str(nans)]
