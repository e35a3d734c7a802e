"""Declarations: each compile option, capability and registry entry is listed once, and everything else follows from the list."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import pytest
from plugin_points import Point

import rammer
from rammer.cli.group import LazyGroup
from rammer.compile_options import CompileOptions, Request, declaration_of, default_of, flag_of, parameter_of
from rammer.device import loader
from rammer.device.arrays import HostRoom
from rammer.device.guard import Guard
from rammer.device.hooks import hookimpl
from rammer.device.manifest import (
    API_VERSION,
    Array,
    Backend,
    Binding,
    Bound,
    Device,
    Hardware,
    IterationCost,
    Loaded,
    OpenOptions,
    Option,
    Profiler,
    Recorded,
)
from rammer.distributed.transport.local import LOCAL
from rammer.distributed.transport.protocol import Transport
from rammer.errors import BadInput, DeviceFailure
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.operator import RKernel, ROperator
from rammer.ir.program import RProgram
from rammer.schedule.baselines import Sequential
from rammer.schedule.policy import Policy
from rammer_testing.conformance import registry_of
from rammer_testing.interface import optional_members
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
        *("policy", "tune", "precision", "layout", "batching", "fusion", "keep_float32", "exclude_family", "device_options")
    ]


def test_the_page_adds_an_option(tmp_path: Path) -> None:
    page = (ROOT / "docs/howto/cli_option.md").read_text()
    blocks = dict(re.findall(r"<!-- option: (\w+) -->\s*```python\n(.*?)```", page, re.DOTALL))
    edits = {
        "declaration": (OPTIONS, r"class Options\(Generic\[P\]\):.*?\n\n"),
        "parameter": (ROOT / "core/rammer/__init__.py", r"    progress: [^\n]*,\n"),
    }
    files = []
    for name, (path, place) in edits.items():
        line = textwrap.indent(textwrap.dedent(blocks[name]).rstrip() + "," * (name == "parameter") + "\n", "    ")
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


#: Members of a plugin's objects that every device defines, and those of Bound that none overrides.
REQUIRED = {
    Backend: {"vdevice", "hardware", "profiler", "fingerprint"},
    Profiler: set[str](),
    Loaded: {"kernels"},
    Bound: {"run", "seconds", "synchronize", "write", "to_host", "close"},
}


@pytest.mark.parametrize("kind", REQUIRED)
def test_every_other_member_documents_its_default(kind: type[Any]) -> None:
    members = {n for n in vars(kind) if not n.startswith("_")} - {*kind.__abstractmethods__}
    optional = {name for owner, name in optional_members() if owner == kind.__name__}
    assert members - optional - REQUIRED[kind] <= {"records_tasks"} and not optional & REQUIRED[kind]


class Bare(Backend):
    """A device without capabilities. Its required attributes are not defined."""

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        return [operator]

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        raise DeviceFailure("no kernel")

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Any:
        return program, constants

    def close(self) -> None: ...


class Able(Bare):
    """A device with every capability: values of the class, of the object, properties and methods."""

    cases = 3

    def __init__(self) -> None:
        self.host_room = HostRoom(128)
        self.vdevice = VDevice("able", "", 1, (MemoryLayer("m", "device", 0, 1.0), MemoryLayer("v", "veu", 0, 1.0)), 1.0, 0.0)

    @property
    def families(self) -> Mapping[str, Mapping[str, range]]:
        return {"": {}}

    @cached_property
    def iteration_cost(self) -> IterationCost:
        return IterationCost(1, 1)

    def rate(self, operator: ROperator, binding: Binding) -> float:
        return 0.25

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        return Recorded(program, ())


def asked(backend: Any) -> list[object]:
    """Return the answers of ``backend`` to all capabilities that need no operator's facts."""
    operator: Any = "operator"
    attributes = [backend.cases, backend.families, backend.host_room, backend.iteration_cost, backend.records_tasks]
    rates = [backend.rate(operator, None), backend.arrangements(operator, None)]
    kernels = [backend.smallest_kernel(operator, None), backend.same_packing(operator, None, (), 0.0)]
    tiled = [backend.retile_for(operator, None, 0.0), list(backend.all_candidates(operator, None))]
    return [*attributes, *rates, *kernels, *tiled, backend.load_case("program", {}, None)]


DEFAULTS = [0, None, HostRoom(), None, False, 1.0, frozenset(), None, None, "operator", ["operator"], ("program", {})]


def test_a_backend_without_capabilities_has_the_defaults() -> None:
    assert asked(Bare()) == DEFAULTS
    with pytest.raises(DeviceFailure, match="does not record"):
        Bare().trace(*[{}] * 3)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="Bare does not define 'vdevice'"):
        _ = Bare().vdevice


@pytest.mark.parametrize("kind", [Bare, Able])
def test_a_guard_forwards_capabilities_and_their_defaults(kind: type[Backend]) -> None:
    plain, guard = kind(), Guard(kind(), "toy")
    assert asked(guard) == asked(plain) and isinstance(guard, Backend)
    assert (asked(guard) == DEFAULTS) == (kind is Bare)
    assert kind is Bare or (guard.vdevice == plain.vdevice and guard.trace("program", {}, {}).program == "program")


def test_a_backend_of_another_class_is_refused() -> None:
    registry = registry_of(Device("odd", "", lambda: [Hardware(0, "a", "cpu", 1)], lambda options: object(), api=API_VERSION))  # type: ignore[arg-type, return-value]
    with pytest.raises(DeviceFailure, match=r"object is not a rammer\.device\.manifest\.Backend"):
        registry.open("odd")


EXECUTOR = Option("executor", "", "Where it runs.", ("single", "waves"))
TILES, SLOW, SPEED = (
    Option("tiles", 8, "Tiles.", least=1, most=64),
    Option("slow", False, "Slow."),
    Option("speed", 1.5, "Speed."),
)
VALUES: dict[tuple[Option[Any], str], object] = {
    (EXECUTOR, "waves"): "waves",
    (TILES, "64"): 64,
    (SLOW, ""): True,
    (SLOW, "0"): False,
    (SPEED, "2.5e1"): 25.0,
}
MALFORMED: dict[tuple[Option[Any], str], str] = {
    (EXECUTOR, "other"): "option executor=other: not one of single, waves",
    (TILES, "65"): "option tiles=65: not a whole number from 1 to 64",
    (TILES, "1.5"): "option tiles=1.5: not a whole number from 1 to 64",
    (SLOW, "7"): "option slow=7: not a truth value",
    (SPEED, "fast"): "option speed=fast: not a number",
    (SPEED, "nan"): "option speed=nan: not a number",
}


@pytest.mark.parametrize(("option", "text"), VALUES, ids=str)
def test_options_of_devices_have_the_type_of_their_default(option: Option[Any], text: str) -> None:
    found = OpenOptions(options={option.name: text}).value(option)
    assert found == VALUES[option, text] and type(found) is type(option.default)
    assert OpenOptions().value(option) == option.default


@pytest.mark.parametrize(("option", "text"), MALFORMED, ids=str)
def test_malformed_options_of_devices_are_refused_before_opening(option: Option[Any], text: str) -> None:
    opened = list[OpenOptions]()

    def opening(options: OpenOptions) -> Backend:
        opened.append(options)
        return Able()

    hardware = [Hardware(0, "a", "cpu", 1)]
    registry = registry_of(Device("able", "", lambda: hardware, opening, options=(option,), api=API_VERSION))
    with pytest.raises(BadInput) as found:
        registry.open("able", options={option.name: text})
    assert (found.value.what, found.value.hint) == (MALFORMED[option, text], f"--option {option.spelling}")
    with pytest.raises(BadInput, match="device able has no option 'other'") as unknown:
        registry.open("able", options={"other": "1"})
    assert unknown.value.hint == f"it takes {option.spelling}" and not opened
    registry.open("able")
    assert opened


class Optional:
    """A plugin with a device that has options."""

    @hookimpl
    def rammer_devices(self) -> Sequence[Device]:
        return [Device("able", "", lambda: [], lambda options: Able(), options=(EXECUTOR, TILES), api=API_VERSION)]


def test_help_lists_the_options_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find_entry_points", lambda group: (Point("able", Optional()),))
    group = LazyGroup()
    command = group.get_command(click.Context(group), "run")
    assert command is not None
    text = "".join(command.get_help(click.Context(command)).split())
    assert "able:executor=single|waves(Whereitruns);tiles=INT(Tiles)." in text


def test_the_contract_page_names_every_field_of_devices() -> None:
    page = (ROOT / "docs/device.md").read_text()
    for entry in some((*fields(VDevice), *fields(Device), *fields(Option))):
        assert f"`{entry.name}`" in page, entry.name
