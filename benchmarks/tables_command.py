"""The command line of ``python -m benchmarks``."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Final

import click
from facts import environment_of
from measuring import ROUNDS, Settings
from registry import TABLES, Table, table
from result import Result, both, check_kept, joined, said, write
from zoo import SEED, SMALL

import rammer
from rammer.cli.options import parse_options
from rammer.compile_options import PRECISIONS, TUNING_LEVELS
from rammer.errors import BadInput, DeviceUnavailable
from rammer.report.text_table import markdown_table, plain_table

HERE: Final = Path(__file__).resolve().parent


def short(device: str) -> str:
    """Return the file name prefix of a device: ``cpu``, ``ipu_sim``, or a GPU's model (``h200``)."""
    name = device.partition(":")[0]
    status = next((s for s in rammer.devices() if s.name == name), None)
    if status is None or not status.hardware:
        raise DeviceUnavailable(f"device {name} does not work here", hint="`rammer devices` says why")
    found = status.hardware[0]
    if found.kind == "cpu":
        return "cpu" if name == "rocm" else name
    model = re.search(r"\b[A-Za-z]*\d+\w*\b", found.name)
    return model[0].lower() if found.kind == "gpu" and model else name


def listing() -> str:
    """Return a table of all benchmarks."""
    rows = [[t.name, t.what, ", ".join(t.devices), t.models or ("its own" if t.script else "")] for t in TABLES.values()]
    return plain_table(rows, ["table", "what it shows", "devices", "models"])


def _keys(chosen: Table, models: str, small: bool) -> tuple[str, ...]:
    names = [n for n in (models or chosen.models).split(",") if n]
    known = chosen.keys
    if not names:
        raise BadInput(f"table {chosen.name} has no small form of its own models", hint="name models with --models")
    keys = known if names == ["*"] else tuple(names)
    keys = tuple(k if k.endswith(SMALL) or not small else k + SMALL for k in keys)
    for key in keys:
        if key.removesuffix(SMALL) not in known:
            hint = f"one of: {', '.join(known)}; KEY{SMALL} is a model's small form"
            raise BadInput(f"unknown model {key!r}", hint=hint)
    return keys


def _script(chosen: Table, out: Path | None, asked: dict[str, Any], rest: Sequence[str]) -> int:
    """Run a script with our options in its spelling and return its exit code."""
    words = [sys.executable, str(HERE / f"{chosen.where}.py")]
    for name, value in asked.items():
        if value in (None, "", ()):
            continue
        if name not in chosen.spelled:
            raise BadInput(
                f"table {chosen.name} takes no --{name}", hint=f"it takes {', '.join(chosen.spelled) or 'its own, behind --'}"
            )
        words += [chosen.spelled[name], str(value)] if value is not True else [chosen.spelled[name]]
    if out is not None and "out" in chosen.spelled:
        hardware = [short(d) for d in (asked.get("device") or chosen.devices[0]).split(",")]
        stem = "_".join((*dict.fromkeys(hardware), chosen.name.replace("-", "_")))
        folder = out.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        words += [w.format(stem=folder / stem, folder=folder, name=stem) for w in chosen.spelled["out"].split(" ")]
    return subprocess.run([*words, *rest], check=False).returncode


def _say(begin: float) -> Any:
    def say(text: str) -> None:
        click.echo(f"{time.perf_counter() - begin:7.1f} s  {text}", err=True)

    return say


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("name", metavar="TABLE", required=False)
@click.argument("rest", nargs=-1, metavar="[-- OPTIONS OF A SCRIPT]")
@click.option("--list", "show", is_flag=True, help="Show all tables.")
@click.option("--device", "devices", multiple=True, metavar="NAME[:INDEX]", help="Repeatable where a table compares devices.")
@click.option("--models", default="", help=f"Keys of the zoo, with commas; '*' for all, KEY{SMALL} for a small form.")
@click.option("--small", is_flag=True, help="Small forms of all models.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the result.")
@click.option("--tune", default="", type=click.Choice(["", *TUNING_LEVELS]), show_choices=True)
@click.option("--precision", default="", type=click.Choice(["", *PRECISIONS]))
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="For the device. Repeatable.")
@click.option("--rounds", type=click.IntRange(1), help=f"Turns of each program ({ROUNDS}).")
@click.option("--seed", type=int, help=f"Of weights and inputs ({SEED}).")
@click.option("--keep", is_flag=True, help="Rows of other models that the file in --out has stay.")
@click.option("--ahead", type=click.IntRange(1), metavar="N", help="N processes compile before anything is measured.")
@click.option(
    "--stages", type=click.Path(path_type=Path, dir_okay=False), help="Stages that were found, here or elsewhere; more are added."
)
@click.option("--budget", type=click.FloatRange(0), metavar="SECONDS", help="Begin no model after so long.")
def main(
    name: str | None,
    rest: tuple[str, ...],
    show: bool,
    devices: tuple[str, ...],
    models: str,
    small: bool,
    out: Path | None,
    tune: str,
    precision: str,
    options: tuple[str, ...],
    rounds: int | None,
    seed: int | None,
    keep: bool,
    budget: float | None,
    ahead: int | None,
    stages: Path | None,
) -> None:
    """Measure TABLE and print it; with --out also write it as Markdown."""
    if show or not name:
        click.echo(listing())
        return
    chosen = table(name)
    if chosen.script:
        keys = ",".join(_keys(chosen, models, small)) if models or small else ""
        named = devices or (chosen.devices if "device" in chosen.spelled else ())
        asked: dict[str, Any] = {"device": ",".join(named), "models": keys, "tune": tune, "precision": precision}
        asked |= {"rounds": rounds, "seed": seed, "budget": budget, "keep": keep or None, "ahead": ahead}
        sys.exit(_script(chosen, out, asked, (*(w for o in options for w in ("--option", o)), *rest)))
    if rest:
        raise BadInput(f"table {name} takes no {' '.join(rest)!r}", hint="only scripts take options of their own")
    if ahead and not chosen.aside:
        raise BadInput(f"table {name} takes no --ahead", hint=f"{', '.join(t.name for t in TABLES.values() if t.aside)} do")
    if stages and not chosen.staged:
        raise BadInput(f"table {name} takes no --stages", hint=f"{', '.join(t.name for t in TABLES.values() if t.staged)} do")
    settings = Settings(
        devices or chosen.devices,
        _keys(chosen, models, small),
        tune or "off",
        precision or "float32",
        SEED if seed is None else seed,
        rounds or ROUNDS,
        parse_options(options),
        _say(time.perf_counter()),
        math.inf if budget is None else budget,
        ahead=ahead or 0,
        stages=stages,
    )
    _measure(chosen, settings, out, keep)


def _measure(chosen: Table, settings: Settings, out: Path | None, keep: bool) -> None:
    """Measure model by model, so that finished rows survive later failures."""
    prefix = "_".join(dict.fromkeys(short(d) for d in settings.devices))
    facts = environment_of(any(d.partition(":")[0] == "cuda" for d in settings.devices))
    path = (out or Path()) / f"{prefix}_{chosen.name.replace('-', '_')}.md"
    kept = path.read_text() if keep and path.is_file() else ""
    if kept:
        check_kept(kept, facts)
    result: Result | None = None
    for key in settings.models:
        more = chosen.call(replace(settings, models=(key,), every=settings.models))
        result = more if result is None else both(result, more)
        if out is None:
            continue
        told, command = _told(result, settings), said(_command(chosen, settings, result))
        if kept:
            told, command = joined(told, command, kept, facts)
        told = _with_mean(told, chosen.mean)
        write(path, told.document(command, facts))
        settings.say(f"wrote {path}")
    assert result is not None
    result = _with_mean(_told(result, settings), chosen.mean)
    click.echo(markdown_table(result.rows, result.headers))
    for note in result.notes:
        click.echo(f"\n{note}")


def _with_mean(result: Result, column: str) -> Result:
    """Return the result with a note of the geometric mean of a column of ratios ("": unchanged), over the rows with one."""
    cells = [row[list(result.headers).index(column)] for row in result.rows] if column and result.rows else []
    ratios = [float(cell) for cell in cells if cell != "-"]
    if not ratios:
        return result
    return replace(
        result, notes=[f"Geometric mean of {column}: {geometric_mean(ratios):.3f} over {len(ratios)} models.", *result.notes]
    )


def _told(result: Result, settings: Settings) -> Result:
    """Return the result with a note of the omitted models."""
    if not settings.skipped:
        return result
    return replace(result, notes=[f"Not begun within {settings.budget:g} s: {', '.join(settings.skipped)}.", *result.notes])


def _command(chosen: Table, settings: Settings, result: Result) -> str:
    """Return the command line for the models that have rows."""
    words = ["python -m benchmarks", chosen.name, *(f"--device {d}" for d in settings.devices)]
    words += [f"--models {','.join(dict.fromkeys(row[0] for row in result.rows))}", f"--tune {settings.tune}"]
    words += [f"--precision {settings.precision}", f"--seed {settings.seed}"]
    words += [f"--option {k}={v}" for k, v in settings.options.items()]
    return " ".join(words)
