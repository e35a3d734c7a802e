"""The command ``rammer cache``: show or clear the files that outlive a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from rammer.cache.cache_location import cache_folder
from rammer.cache.whole_files import PARTIAL
from rammer.errors import BadInput
from rammer.report.text_table import format_size, plain_table
from rammer.tuning.kernel_store import KernelStore

#: Cached data in separate files: shown name -> folders under the cache folder. Plugins store compiled kernels and other cached
#: data under ``binaries/NAME``.
FILES = {
    "compiled programs": "programs",
    "constants": "constants",
    "model ports": "heads",
    "model digests": "digests",
    "device binaries": "binaries/*",
}


@click.group(invoke_without_command=False)
def command() -> None:
    """Show or clear the kernel store and the compiled programs.

    Example: rammer cache status
    """


@command.command()
def status() -> None:
    """Show the cache folder, its contents and its size.

    Example: rammer cache status
    """
    store, kernels = KernelStore.default(), cache_folder() / "kernels.sqlite"
    rows = [["tuned kernels", str(store.count()), format_size(_total_bytes([kernels]))]]
    for kind, folder in FILES.items():
        found = _list_files(folder)[0]
        rows.append([kind, str(len(found)), format_size(_total_bytes(found))])
    click.echo(f"{cache_folder()}\n{plain_table(rows, ['kept', 'entries', 'size'])}")


@command.command()
def clear() -> None:
    """Clear the cache, and remove files that interrupted commands left.

    Example: rammer cache clear
    """
    removed = [f"{KernelStore.default().clear()} tuned kernels"]
    for kind, folder in FILES.items():
        found, partial = _list_files(folder)
        for path in (*found, *partial):
            _remove_path(path)
        removed.append(f"{len(found)} {kind}")
    click.echo("removed " + ", ".join(removed))


def _list_files(folder: str) -> tuple[list[Path], list[Path]]:
    """Return the paths in a folder of the cache, and its unfinished files."""
    found = list(cache_folder().glob(f"{folder}/*"))
    return [p for p in found if p.suffix != PARTIAL], [p for p in found if p.suffix == PARTIAL]


def _total_bytes(paths: list[Path]) -> int:
    return sum(p.stat().st_size for p in paths if p.is_file())


def _remove_path(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as problem:
        raise BadInput(f"cannot remove {path}: {problem.strerror}") from problem
