"""The command ``rammer cache``: show, export, import or clear the files that outlive a run."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from rammer.cache.cache_location import cache_folder
from rammer.cache.cache_transfer import export_cache, import_cache
from rammer.cache.disk_cache import KIND, Entry, clear_cache, list_entries, old_files, size_bound
from rammer.cli.files import InputPath, OutputPath, write_file
from rammer.errors import BadInput
from rammer.report.text_table import format_size, plain_table


def _check_kinds(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Return names of kinds. Raises BadInput for a name that no kind can have."""
    for kind in ((value,) if value else ()) if isinstance(value, str) else value:
        if KIND.fullmatch(kind) is None:
            raise BadInput(f"{kind!r} is not a kind of cache entries", hint="rammer cache info lists them")
    return value


@click.group(invoke_without_command=False)
def command() -> None:
    """Show, export, import or clear compiled programs, measured kernels and compiled kernels.

    Example: rammer cache info
    """


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(as_json: bool) -> None:
    """Show the cache folder, its size bound, and the entries of each kind.

    Example: rammer cache info
    """
    root, bound = cache_folder(), size_bound()
    kinds = dict[str, list[Entry]]()
    for entry in list_entries(root):
        kinds.setdefault(entry.kind, []).append(entry)
    rows = [(k, len(f), sum(e.nbytes for e in f), min(e.written for e in f), max(e.written for e in f)) for k, f in kinds.items()]
    rows, total = sorted(rows), sum(row[2] for row in rows)
    limit = bound if bound < float("inf") else None
    if as_json:
        records = [dict(zip(("kind", "files", "bytes", "oldest", "newest"), row, strict=True)) for row in rows]
        click.echo(json.dumps({"folder": str(root), "bytes": total, "bound": limit, "kinds": records}, indent=2))
        return
    click.echo(f"{root}\n{format_size(total)} of {format_size(limit) if limit is not None else 'no limit'}")
    table = [[kind, str(count), format_size(size), _date(old), _date(new)] for kind, count, size, old, new in rows]
    click.echo(plain_table(table, ["kind", "files", "size", "oldest", "newest"]))
    if old_files(root):
        click.echo("files of older versions are not used: rammer cache clear removes them")


@command.command(name="export")
@click.option("-o", "output", type=OutputPath(), required=True, metavar="FILE", help="Write this tar file.")
@click.argument("kind", nargs=-1, callback=_check_kinds)
def export_command(output: Path, kind: tuple[str, ...]) -> None:
    """Write the entries of all kinds, or of each KIND, to a tar file for another machine.

    Example: rammer cache export -o cache.tar programs constants
    """
    counts = Counter[str]()
    write_file(output, lambda target: counts.update(export_cache(cache_folder(), target, kind)))
    click.echo(f"exported {_format_counts(counts)}")


@command.command(name="import")
@click.argument("file", type=InputPath())
@click.option("--trust-code", is_flag=True, help="Also import machine code, which runs without further checks.")
def import_command(file: Path, trust_code: bool) -> None:
    """Read the entries in FILE, written by ``rammer cache export``.

    Example: rammer cache import cache.tar
    """
    with _report_errors(f"cannot import {file}"):
        imported, skipped = import_cache(cache_folder(), file, trust_code)
    click.echo(f"imported {_format_counts(imported)}")
    if skipped:
        click.echo(f"skipped {_format_counts(skipped)}: they are machine code, which --trust-code imports, or of another machine")


@command.command()
@click.argument("kind", default="", callback=_check_kinds)
def clear(kind: str) -> None:
    """Remove all entries, or those of one KIND, and files of older versions and of interrupted commands.

    Example: rammer cache clear
    """
    with _report_errors("cannot clear the cache"):
        counts = clear_cache(cache_folder(), kind)
    click.echo(f"removed {_format_counts(counts)}")


@contextmanager
def _report_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as problem:
        where = getattr(problem, "filename", None)
        raise BadInput(f"{what}: {getattr(problem, 'strerror', None) or problem}", str(where or "")) from problem


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()) if n) or "nothing"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
