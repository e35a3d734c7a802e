"""The command ``rammer plugins``: list plugins, test a device, and write a new plugin from the template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from keyword import iskeyword
from pathlib import Path
from shlex import quote

import click

from rammer.cli.distributions import require_kit
from rammer.cli.files import OutputFolder, cannot_write, write_texts
from rammer.cli.options import complete_devices, parse_options
from rammer.device.hooks import Hooks
from rammer.device.loader import Registry
from rammer.errors import BadInput, Mismatch
from rammer.report.text_table import plain_table

#: The device of the template, and its files.
TOY = "toy"
FILES = ("pyproject.toml", "README.md", f"rammer_{TOY}/__init__.py", "tests/test_device.py")
#: Occurrences of the template's name: alone, in the distribution's name, in a word with underscores, and before a class's name.
_PLACES = re.compile(r"rammer-toy|(?<![A-Za-z])toy(?![A-Za-z])|(?<![A-Za-z])Toy(?=[A-Z])")
LONGEST = 40
#: Names whose distributions, rammer-NAME, are not plugins.
OWN = ("core", "runtime", "testing", "bench")


@click.group(invoke_without_command=False)
def command() -> None:
    """List installed plugins, test one, or write a new one.

    Example: rammer plugins new mychip
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_plugins(as_json: bool) -> None:
    """List every plugin with its version, its devices, and the hooks that it implements.

    Example: rammer plugins list
    """
    registry = Registry()
    hooks = [name for name in vars(Hooks) if name.startswith("rammer_")]
    rows = [
        [name, registry.versions.get(name) or "-", "ok", ", ".join(h for h in hooks if hasattr(plugin, h))]
        for name, plugin in registry.manager.list_name_plugin()
    ]
    rows += [[s.name, registry.versions.get(s.name) or "-", s.state, s.reason] for s in registry.broken.values()]
    headers = ["plugin", "version", "state", "fills"]
    if as_json:
        click.echo(json.dumps([dict(zip(headers, row, strict=True)) for row in sorted(rows)], indent=2))
    elif rows:
        click.echo(plain_table(sorted(rows), headers))
    else:
        click.echo("no plugins are installed (rammer plugins new NAME writes one)")


@command.command()
@click.argument("name")
@click.option("--into", type=OutputFolder(), default=Path(), metavar="FOLDER", help="Target folder; default: the current folder.")
def new(name: str, into: Path) -> None:
    """Write a working plugin for a device NAME.

    The folder rammer-NAME has a backend on NumPy and the tests that it passes.

    Example: rammer plugins new mychip
    """
    target = write_plugin(name, into, Registry())
    click.echo(
        f"wrote {target}: {', '.join(substitute_name(f, name) for f in FILES)}\n"
        f"next: pip install -e {quote(f'{target}[test]')} && pytest {quote(str(target))}"
    )


@command.command("test")
@click.argument("device", metavar="NAME[:INDEX]", shell_complete=complete_devices)
@click.option("--check", "checks", multiple=True, metavar="CHECK", help="Run only this check; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="The device's own options, repeatable.")
def test_device(device: str, checks: tuple[str, ...], as_json: bool, options: tuple[str, ...]) -> None:
    """Run the conformance kit on a device; exit code 1 if a check fails. Skipped checks are shown with the reason.

    Example: rammer plugins test toy --check manifest
    """
    require_kit("rammer plugins test")
    from rammer_testing.conformance import chosen_checks, results

    names, found = chosen_checks(checks), []
    for result in results(device, parse_options(options), names):
        found.append(result)
        if not as_json:
            click.echo(str(result))
    failed = sum(r.state == "failed" for r in found)
    if as_json:
        click.echo(json.dumps([asdict(r) for r in found], indent=1))
    else:
        skipped = sum(r.state == "skipped" for r in found)
        click.echo(f"{len(found)} checks: {len(found) - failed - skipped} passed, {skipped} skipped, {failed} failed")
    if failed:
        raise Mismatch(f"{failed} of {len(found)} checks failed")


def write_plugin(name: str, into: Path, registry: Registry) -> Path:
    """Write the folder of a new plugin, whole or not at all. Raises BadInput for an unsuitable name or folder."""
    check_name(name, registry)
    target = into / substitute_name(f"rammer-{TOY}", name)
    try:
        if not into.is_dir():
            raise BadInput(f"cannot write {target}: {into} is not a folder")
        if target.exists() or target.is_symlink():
            raise BadInput(f"cannot write {target}: it exists", hint="nothing is overwritten: give another name or --into FOLDER")
    except ValueError as problem:  # a path with a zero byte in it
        raise cannot_write(target, problem) from problem
    write_texts(target, template_texts(name))
    return target


def check_name(name: str, registry: Registry) -> None:
    """Raise BadInput if ``name`` is taken, or unsuitable for a device, a package and a part of a class's name."""
    simple = re.fullmatch(r"[a-z](_?[a-z0-9])+", name, re.ASCII)
    if not simple or iskeyword(name) or len(name) > LONGEST:
        raise BadInput(
            f"{name[:LONGEST]!r} is not a valid device name",
            where="plugins new NAME",
            hint=f"2 to {LONGEST} small letters, digits and single underscores, a letter first: my_chip",
        )
    if name in registry.devices:
        raise BadInput(f"device {name!r} already exists", hint="give another name")
    if name in OWN:
        raise BadInput(f"rammer-{name} is a distribution of rammer itself", hint="give another name")


def template_texts(name: str) -> Mapping[str, str]:
    """Return the template's files by path, with ``name`` in place of the toy's."""
    folder = files("rammer").joinpath("plugin-template")
    return {substitute_name(file, name): substitute_name(folder.joinpath(file).read_text(), name) for file in FILES}


def substitute_name(text: str, name: str) -> str:
    """Return ``text`` of the template for a device ``name``."""
    words = {"Toy": "".join(part.capitalize() for part in name.split("_")), "rammer-toy": f"rammer-{name.replace('_', '-')}"}
    return _PLACES.sub(lambda found: words.get(found.group(), name), text)
