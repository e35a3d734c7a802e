"""Declarations: each compile option, capability and registry entry is listed once, and everything else follows from the list."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from plugin_points import Point

import rammer
from rammer.cli.group import LazyGroup
from rammer.compile_options import CompileOptions, Request, declaration_of, default_of, flag_of, parameter_of
from rammer.device import capabilities, in_place, loader, manifest
from rammer.device.capabilities import CAPABILITIES, Capability, capabilities_of
from rammer.device.guard import Guard
from rammer.device.hooks import hookimpl
from rammer.distributed.transport.local import LOCAL
from rammer.distributed.transport.protocol import Transport
from rammer.errors import BadInput
from rammer.schedule.baselines import Sequential
from rammer.schedule.policy import Policy
from rammer_testing.nonempty import some

ROOT = Path(__file__).parents[2]
OPTIONS = ROOT / "core/rammer/compile_options.py"

#: Prints the help of ``rammer compile``, two keys and a request, with the edited declarations.
EDITED = """
import inspect, sys, types
name = "rammer.compile_options"
module = sys.modules[name] = types.ModuleType(name)
exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), module.__dict__)
package = types.ModuleType("edited")
exec(compile(open(sys.argv[2]).read(), sys.argv[2], "exec"), package.__dict__)
from click.testing import CliRunner
from rammer.cli.compile import command
print(CliRunner().invoke(command, ["--help"]).output)
print(module.CompileOptions().key())
print(module.Request.from_parameters({"unroll": "7"}).chosen.key())
parameters = [*inspect.signature(package.compile).parameters][2:]
print(sorted(parameters) == sorted(map(module.parameter_of, module.fields(module.Request))))
"""


def test_parameters_of_compile_are_the_declared_options() -> None:
    parameters = dict(inspect.signature(rammer.compile).parameters)
    del parameters["model"], parameters["device"]
    declared = {parameter_of(f): f for f in fields(Request)}
    assert parameters.keys() == declared.keys()
    for name, entry in declared.items():
        assert (parameters[name].default or None) == (default_of(entry) or None), name


def test_every_flag_of_compile_is_declared() -> None:
    group = LazyGroup()
    flags = {flag_of(f) for f in fields(Request)} - {""}
    for name in ("run", "compare", "inspect", "bench", "compile"):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        found = {flag for p in command.params for flag in p.opts}
        assert flags - found <= {"--target"}, name


def test_choices_are_checked() -> None:
    for entry in fields(Request):
        if declaration_of(entry).choices:
            with pytest.raises(BadInput, match=r"unknown .* 'x'"):
                rammer.compile(b"", **{parameter_of(entry): "x"})  # type: ignore[arg-type]


def test_a_record_gives_the_recorded_options() -> None:
    options = CompileOptions("ios", precision="tf32", target="gfx90a")
    assert CompileOptions.from_record(options.record()) == options
    assert [f.name for f in fields(Request) if declaration_of(f).key] == [
        *("policy", "tune", "precision", "layout", "batching", "fusion", "keep_float32", "device_options")
    ]


def test_the_page_adds_an_option(tmp_path: Path) -> None:
    page = (ROOT / "docs/howto/cli_option.md").read_text()
    blocks = dict(re.findall(r"<!-- option: (\w+) -->\s*```python\n(.*?)```", page, re.DOTALL))
    edits = {
        "declaration": (OPTIONS, r"class Options\(Generic\[P\]\):.*?\n\n"),
        "parameter": (ROOT / "core/rammer/__init__.py", r"    keep_float32: Sequence\[str\] = \(\),\n"),
    }
    files = []
    for name, (path, place) in edits.items():
        line = textwrap.indent(textwrap.dedent(blocks[name]), "    ")
        text, count = re.subn(place, lambda m, line=line: m[0] + line, path.read_text(), count=1, flags=re.DOTALL)  # type: ignore[misc]
        assert count == 1
        files.append(tmp_path / f"{name}.py")
        files[-1].write_text(text)
    done = subprocess.run([sys.executable, "-c", EDITED, *files], capture_output=True, text=True, check=True)
    *text, key, other, same = done.stdout.splitlines()
    assert "--unroll N" in "\n".join(text) and "Iterations per loop body." in "\n".join(text)
    assert "'4'" in key and "'7'" in other and same == "True"


class Invented:
    """A plugin with a policy and a transport."""

    @hookimpl
    def rammer_policies(self) -> Sequence[Policy]:
        return [Named()]

    @hookimpl
    def rammer_transports(self) -> Sequence[Transport]:
        return [Transport("pigeon", "", lambda: None, lambda a, b: None, LOCAL.open, 1)]


class Named(Sequential):
    """A policy with a name of its own."""

    @property
    def name(self) -> str:
        return "lottery"


def test_help_lists_the_policies_and_transports_of_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find_entry_points", lambda group: (Point("invented", Invented()),))
    group = LazyGroup()
    command = group.get_command(click.Context(group), "run")
    assert command is not None
    text = command.get_help(click.Context(command, terminal_width=1000))
    assert "sequential, greedy, wavefront, ios, auto, lottery" in text
    assert re.search(r"--transport .*\bpigeon, .*\blocal\b|--transport .*\blocal, .*\bpigeon\b", text)


def test_every_optional_protocol_is_listed() -> None:
    modules = (capabilities, in_place, manifest)
    optional = {p for m in modules for p in vars(m).values() if getattr(p, "_is_runtime_protocol", False)}
    assert {c.protocol for c in CAPABILITIES} == optional


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: c.name)
def test_a_guard_has_the_capabilities_of_its_object(capability: Capability) -> None:
    def answer(self: object) -> str:
        return "answer"

    members: dict[str, Any] = {m: property(answer) if m in capability.properties else answer for m in capability.members}
    plain, guarded = type("Plain", (), {}), type("Capable", (), members)
    assert capability in capabilities_of(Guard(guarded(), "toy")) and not capabilities_of(Guard(plain(), "toy"))
    for member in some(capability.members):
        found = getattr(Guard(guarded(), "toy"), member)
        assert (found if member in capability.properties else found()) == "answer"


def test_a_guard_has_capabilities_that_are_instance_attributes() -> None:
    class Sharing:
        def __init__(self) -> None:
            self.host_room = in_place.HostRoom(64, 0)

    plain = Sharing()
    guard: Any = Guard(plain, "toy")
    assert (
        isinstance(guard, in_place.InPlace) and isinstance(guard, Sharing) and not isinstance(guard, capabilities.LengthVariants)
    )
    plain.host_room = in_place.HostRoom(128, 0)
    assert guard.host_room == in_place.HostRoom(128, 0)
