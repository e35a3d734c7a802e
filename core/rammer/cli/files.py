"""Files of a command: option types for input and output files, and the functions that write outputs.

Each path is recorded as it is parsed. An output is refused if the command reads that file or writes it as another output. This
includes a hard link, a symbolic link or another spelling. Outputs are checked before long work, and again when they are written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import click

from rammer.cache.cache_location import cache_folder
from rammer.cache.whole_files import output_target, write_folder, write_whole
from rammer.errors import BadInput

if TYPE_CHECKING:
    from rammer.runtime.model_source import ModelSource

#: The name of standard output, for options that may write there.
STDOUT: Final = "-"
_KEY: Final = "rammer.files"


@dataclass
class UsedFiles:
    """Files and whole folders of a command, each with a phrase for messages."""

    reads: dict[Path, str] = field(default_factory=dict)
    writes: dict[Path, str] = field(default_factory=dict)

    def read(self, path: Path, what: str) -> None:
        """Record a file or folder that the command reads. Raises BadInput if an output would replace it."""
        self.reads[path] = what
        for output in self.writes:
            _check_apart(output, {path: what})

    def write(self, path: Path, option: str) -> None:
        """Record an output. Raises BadInput if it cannot be written or would replace another file of the command."""
        self.check(path)
        _check_apart(path, {p: f"also the output of {o}" for p, o in self.writes.items()})
        self.writes[path] = option

    def check(self, path: Path) -> None:
        """Raise BadInput if ``path`` cannot be created or replaced, or is a file that the command reads."""
        try:
            target = output_target(path)
        except (OSError, ValueError) as problem:
            raise cannot_write(path, problem) from problem
        _check_apart(target, self.reads, path)
        for stream in range(3):
            try:
                taken = os.path.samestat(os.fstat(stream), target.stat())
            except OSError:
                continue
            if taken:
                raise BadInput(f"cannot write {path}: it is a standard stream of this command", hint="give another file")


def used_files(ctx: click.Context | None = None) -> UsedFiles:
    """Return the files of the running command, empty outside a command."""
    ctx = ctx or click.get_current_context(silent=True)
    if ctx is None:
        return UsedFiles()
    if _KEY not in ctx.meta:
        ctx.meta[_KEY] = UsedFiles({cache_folder(): "in the cache of rammer"})
    found = ctx.meta[_KEY]
    assert isinstance(found, UsedFiles)
    return found


def note_source(source: ModelSource) -> None:
    """Record the files of a model after its head was read. Raises BadInput if an output would replace one of them."""
    for path in source.paths:
        used_files().read(path, "the model that is read" if path == source.path else "read with the model")


class InputPath(click.Path):
    """A file or folder that a command reads."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Record the path as a file that the command reads."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        option = isinstance(param, click.Option)
        used_files(ctx).read(path, f"read by {param.opts[0]}" if option and param else "the model that is read")
        return path


class OutputPath(click.Path):
    """A file that a command writes; ``-`` is standard output, which is refused unless ``stdout`` is set."""

    def __init__(self, stdout: bool = False) -> None:
        super().__init__(path_type=Path, allow_dash=stdout)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Record the path and check that it can be written."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        option = param.opts[0] if param else ""
        if str(value) != STDOUT:
            path = path.absolute() if str(path) == STDOUT else path
            used_files(ctx).write(path, option)
        elif not self.allow_dash:
            raise BadInput(f"{option} cannot write to standard output", option, "give a file (./- for a file named -)")
        return path


class OutputFolder(click.Path):
    """A folder that a command writes files into."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)


def write_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write an output of the running command, whole or not at all. Raises BadInput if that fails."""
    used_files().check(path)
    with _report_write_errors(path):
        write_whole(path, fill)


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8 as ``write_file`` does; ``-`` is standard output."""
    if str(path) == STDOUT:
        click.echo(text, nl=not text.endswith("\n"))
    else:
        write_file(path, lambda file: file.write(text.encode()))


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files into ``folder``, all or none. Raises BadInput if that fails."""
    with _report_write_errors(folder):
        if folder.exists():
            for name in texts:
                used_files().check(folder / name)
        write_folder(folder, texts)


@contextmanager
def _report_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as problem:  # ValueError: a path with a zero byte in it
        raise cannot_write(path, problem) from problem


def cannot_write(path: Path, problem: OSError | ValueError) -> BadInput:
    """Return the error for an output that cannot be written."""
    return BadInput(f"cannot write {path}: {getattr(problem, 'strerror', None) or problem}")


def _check_apart(output: Path, taken: Mapping[Path, str], shown: Path | None = None) -> None:
    """Raise BadInput if ``output`` is one of the files ``taken``, or in one of the folders."""
    target = Path(os.path.realpath(output))
    for path, what in taken.items():
        if target.is_relative_to(os.path.realpath(path)) or _is_same_file(target, path):
            raise BadInput(f"cannot write {shown or output}: it is {what}", hint="give another file")


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):  # one of them does not exist
        return False
