"""``rammer cache``: what is kept between runs, and how to forget it."""

from __future__ import annotations

import click

from rammer.profile.store import KernelStore, cache_folder
from rammer.report.table import plain, size


@click.group(invoke_without_command=False)
def command() -> None:
    """Show or clear the kernel store and the compiled programs.

    Example: rammer cache status
    """


@command.command()
def status() -> None:
    """Where the cache is, what it holds and how large it is.

    Example: rammer cache status
    """
    store, programs = KernelStore.default(), list(cache_folder().glob("programs/*.rammer"))
    kernels = cache_folder() / "kernels.sqlite"
    rows = [
        ["tuned kernels", str(store.count()), size(kernels.stat().st_size if kernels.exists() else 0)],
        ["compiled programs", str(len(programs)), size(sum(p.stat().st_size for p in programs))],
    ]
    click.echo(f"{cache_folder()}\n{plain(rows, ['kept', 'entries', 'size'])}")


@command.command()
def clear() -> None:
    """Forget everything.

    Example: rammer cache clear
    """
    store, programs = KernelStore.default(), list(cache_folder().glob("programs/*.rammer"))
    count = store.clear()
    for path in programs:
        path.unlink(missing_ok=True)
    click.echo(f"removed {count} tuned kernels and {len(programs)} compiled programs")
