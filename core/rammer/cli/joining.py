"""Options of runs over several devices. The modules that run over several devices are not imported for a single device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from rammer.cli.files import InputPath
from rammer.cli.options import SECONDS, Finite, ListingOption
from rammer.commands import gather_options
from rammer.compile_options import Request
from rammer.device.loader import Registry
from rammer.distributed.joining import GOALS, TIMEOUT, Joining, launched_processes
from rammer.errors import BadInput

F = TypeVar("F", bound=Callable[..., Any])


def transport_names() -> list[str]:
    """Return the names of all transports, best first."""
    from rammer.distributed.transport.transport_registry import list_transports

    return [transport.name for transport in list_transports(Registry())]


def partition_options(fn: F) -> F:
    """Add --goal and --place."""
    fn = click.option("--place", type=InputPath(), help="Several devices: a file that assigns operators to devices.")(fn)
    kind = click.Choice(GOALS)
    return click.option("--goal", type=kind, default=GOALS[0], show_default=True, help="Several devices: goal of the partition.")(
        fn
    )


def joining_options(fn: F) -> F:
    """Add --transport, --timeout, --in-flight, --goal, --place and --state as ``joining``."""
    fn = gather_options("joining", Joining, "transport", "timeout", "depth", "goal", "place", "states")(fn)
    for option in (
        click.option(
            "--state",
            "states",
            multiple=True,
            metavar="OUTPUT=INPUT",
            help="Several devices, repeatable: an output that is an input of the next run and stays on its device.",
        ),
        partition_options,
        click.option(
            "--in-flight",
            "depth",
            type=click.IntRange(1, 64),
            default=2,
            show_default=True,
            help="Several devices: concurrent runs.",
        ),
        click.option(
            "--timeout",
            type=Finite(SECONDS, above=True),
            default=TIMEOUT,
            show_default=True,
            help="Several devices: seconds that one waits for another; 6 times as long at start-up, 12 times at shutdown.",
        ),
        click.option(
            "--transport",
            cls=ListingOption,
            default="",
            metavar="NAME",
            names=transport_names,
            help="Several devices: mechanism of the transfers, {names}. Default: the best available.",
        ),
    ):
        fn = option(fn)
    return fn


def parse_devices(device: str, joining: Joining, request: Request) -> tuple[str, ...]:
    """Parse devices as ``resolve_devices`` does. Raises BadInput if states are requested for a single device, which needs one
    call for all runs (``bind``)."""
    names: tuple[str, ...] = ()
    if "," in device or request.device_options or launched_processes() > 1:
        from rammer.distributed.runtime.distributed_session import resolve_devices

        names = resolve_devices(device, joining.timeout, request.device_options)
    if not names and joining.states:
        raise BadInput(
            f"--state {joining.states[0]} is for several devices",
            f"--device {device}" if device else "",
            "name several devices, or use exe.bind(inputs, {OUTPUT: INPUT}) in Python",
        )
    return names
