"""Options and parsing shared by the commands."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import click

from rammer.cli.files import InputPath, used_files
from rammer.commands import gather_options
from rammer.compile_options import Request, declaration_of, default_of, flag_of, parameter_of
from rammer.errors import BadInput
from rammer.ir.extent import GivenLength
from rammer.ir.untrusted_json import LARGEST

F = TypeVar("F", bound=Callable[..., Any])

#: Range of run counts, and maximum seconds of an option.
COUNT, SECONDS = click.IntRange(1, 10**9), 1e9


class Finite(click.FloatRange):
    """A finite number from 0 on, or above 0, up to ``most``."""

    def __init__(self, most: float, above: bool = False) -> None:
        super().__init__(0, most, min_open=above)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Refuse NaN, which FloatRange lets through."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class ListingOption(click.Option):
    """An option whose help lists a registry: ``{names}`` in its text stands for the result of ``names``."""

    def __init__(self, *args: Any, names: Callable[[], Iterable[str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.names = names

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the spelling and the help text. Plugins are loaded only for the names in a help text."""
        found = super().get_help_record(ctx)
        if found is None or self.names is None:
            return found
        return found[0], found[1].replace("{names}", ", ".join(self.names()))


def policy_names() -> list[str]:
    """Return the names of all policies, including those of plugins."""
    from rammer.device.loader import Registry
    from rammer.schedule.policy_registry import list_policies

    return list(list_policies(Registry().policies()))


def device_options() -> list[str]:
    """Return the options of all devices, each with its meaning."""
    from rammer.device.loader import Registry
    from rammer.device.manifest import Device

    devices = [d for d in Registry().devices.values() if isinstance(d, Device)]
    shown = {d.name: "; ".join(f"{o.spelling} ({o.help.rstrip('.')})" for o in d.options) for d in devices}
    return [f"{name}: {options}" for name, options in shown.items() if options]


def complete_devices(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the installed devices that complete a word of the shell (``_RAMMER_COMPLETE``): of ``NAME,NAME``, the last name.
    Nothing is probed."""
    from rammer.device.loader import Registry

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in sorted(Registry().devices) if name.startswith(last)]


def device_flag(name: str, text: str, *others: str, **settings: Any) -> Callable[[F], F]:
    """Return the option --device, and ``others``, as parameter ``name`` with the help ``text``."""
    return click.option("--device", *others, name, metavar="NAME[:INDEX]", shell_complete=complete_devices, help=text, **settings)


#: The names that help texts list, by the registry that a declaration names.
REGISTRIES: Final[Mapping[str, Callable[[], Iterable[str]]]] = {"policies": policy_names, "device options": device_options}


def _declared_option(entry: Field[Any]) -> Callable[[F], F]:
    """Return the option of the command line that is declared as a field of ``Request``."""
    declared, default = declaration_of(entry), default_of(entry)
    if isinstance(default, bool):
        return click.option(flag_of(entry), parameter_of(entry), is_flag=True, help=declared.help)
    shown = {"default": default, "show_default": bool(default)} if isinstance(default, str) else {}
    kind: dict[str, object] = {"type": click.Choice(declared.choices)} if declared.choices else {"metavar": declared.values}
    kind |= {"type": click.IntRange(declared.least)} if declared.least is not None else {}
    facts = {
        **shown,
        **kind,
        "multiple": declared.convert in (dict, tuple),
        "help": declared.help,
        "names": REGISTRIES.get(declared.listed),
    }
    return click.option(flag_of(entry), parameter_of(entry), cls=ListingOption, **facts)


def compile_options(fn: F) -> F:
    """Add the declared options except --target as ``request``, and the shapes of inputs in --shape as ``shapes``."""
    entries = [f for f in fields(Request) if flag_of(f) and f.name != "target"]

    @wraps(fn)
    def taking(**given: Any) -> Any:
        asked = {parameter_of(f): given.pop(parameter_of(f)) for f in entries}
        given["shapes"], asked["shapes"] = _split_shapes(asked["shapes"])
        asked["options"] = parse_options(asked["options"])
        return fn(request=Request.from_parameters(asked), **given)

    made = cast(F, taking)
    for entry in reversed(entries):
        made = _declared_option(entry)(made)
    return made


def target_option(fn: F) -> F:
    """Add --target to ``request``. The decorator is placed below ``compile_options``."""

    @wraps(fn)
    def taking(target: str, request: Request, **given: Any) -> Any:
        return fn(request=replace(request, target=target), **given)

    return _declared_option(Request.__dataclass_fields__["target"])(cast(F, taking))


#: Relative and absolute tolerance by precision: float16 has 11 bits, tf32 rounds operands of products to 11 bits, bfloat16 to 8.
TOLERANCES = {"float32": (1e-4, 1e-5), "tf32": (5e-3, 5e-4), "float16": (1e-2, 1e-3), "bfloat16": (4e-2, 4e-3)}


@dataclass(frozen=True)
class Tolerance:
    """The tolerances that the user set (None: that of the precision)."""

    rtol: float | None = None
    atol: float | None = None

    def of(self, precision: str) -> tuple[float, float]:
        """Return the (relative, absolute) tolerance of the user, else of ``precision``."""
        relative, absolute = TOLERANCES[precision]
        return relative if self.rtol is None else self.rtol, absolute if self.atol is None else self.atol


def tolerance_options(fn: F) -> F:
    """Add --rtol and --atol as ``tolerance``."""
    fn = gather_options("tolerance", Tolerance, "rtol", "atol")(fn)
    relative, absolute = (", ".join(f"{t[i]:g} in {p}" for p, t in TOLERANCES.items()) for i in (0, 1))
    for option in (
        click.option("--atol", type=Finite(1e18), help=f"Absolute tolerance, element-wise. Default: {absolute}."),
        click.option("--rtol", type=Finite(1e18), help=f"Relative tolerance (element-wise or L2). Default: {relative}."),
    ):
        fn = option(fn)
    return fn


def input_options(fn: F) -> F:
    """Add --inputs, --input, --range and --seed, together with --shape as ``choice``."""

    @wraps(fn)
    def taking(**given: Any) -> Any:
        said = [given.pop(n) for n in ("npz", "single", "shapes", "ranges", "seed")]
        return fn(choice=parse_inputs(*said), **given)

    made = cast(F, taking)
    for option in (
        click.option("--seed", type=click.IntRange(0, LARGEST), default=0, show_default=True, help="Seed of the random inputs."),
        click.option(
            "--range",
            "ranges",
            multiple=True,
            metavar="NAME:0..256",
            help="Range of a random input (high end excluded for integers).",
        ),
        click.option("--input", "single", multiple=True, metavar="NAME=@F.npy", help="One input from a .npy file."),
        click.option("--inputs", "npz", type=InputPath(), help="All inputs from an .npz file."),
    ):
        made = option(made)
    return made


@dataclass(frozen=True)
class InputChoice:
    """The inputs that the user specified."""

    npz: Path | None = None
    single: Mapping[str, Path] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seed: int = 0


def parse_inputs(
    npz: Path | None, single: tuple[str, ...], shapes: tuple[str, ...], ranges: tuple[str, ...], seed: int
) -> InputChoice:
    """Parse the input options. Raises BadInput that shows the expected form."""
    return InputChoice(
        npz, dict(map(_parse_input_file, single)), parse_shapes(shapes), dict(map(_parse_input_range, ranges)), seed
    )


def parse_shapes(items: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Parse ``x:1x3x224x224`` to {"x": (1, 3, 224, 224)}; an empty shape is a scalar."""
    result = {}
    for item in items:
        name, colon, text = item.rpartition(":")
        if not colon or not re.fullmatch(r"([0-9]{1,18}(x[0-9]{1,18})*)?", text):
            raise BadInput(f"--shape {item!r} is not NAME:EXTENTxEXTENT...", hint="for example --shape x:1x3x224x224")
        result[name] = tuple(int(n) for n in text.split("x") if n)
    return result


def _split_shapes(items: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, GivenLength]]:
    """Split --shape options into shapes of inputs and lengths of open dimensions."""
    found = {item: _parse_length(item) for item in items}
    return tuple(i for i in items if found[i] is None), dict(f for f in found.values() if f is not None)


def _parse_length(item: str) -> tuple[str, GivenLength] | None:
    """Parse ``seq=1..512``, ``width=32..960/32`` or ``total=past+1``; return None for the shape of an input."""
    name, sign, said = item.partition("=")
    if not sign or ":" in item:
        return None
    found = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})(?:/(\d{1,18}))?", said)
    if found is not None:
        low, high, step = int(found[1]), int(found[2]), found[3]
        return name, (low, high) if step is None else (low, high, int(step))
    if not re.fullmatch(r"[\w.*+ -]+", said) or ".." in said:
        raise BadInput(
            f"--shape {item!r} is not DIM=LEAST..MOST/STEP", hint="for example --shape seq=1..512, or --shape total=past+1"
        )
    return name, said


def _parse_input_file(item: str) -> tuple[str, Path]:
    name, sign, path = item.partition("=@")
    if not sign:
        raise BadInput(f"--input {item!r} is not NAME=@FILE.npy", hint="for example --input x=@image.npy")
    used_files().read(Path(path), f"read by --input {name}")
    return name, Path(path)


def _parse_input_range(item: str) -> tuple[str, tuple[float, float]]:
    name, colon, text = item.rpartition(":")
    low, dots, high = text.partition("..")
    try:
        if colon and dots and -math.inf < float(low) < float(high) < math.inf:
            return name, (float(low), float(high))
    except ValueError:
        pass
    raise BadInput(f"--range {item!r} is not NAME:LOW..HIGH", hint="for example --range tokens:0..256")


def parse_options(items: tuple[str, ...]) -> dict[str, str]:
    """Parse ``key=value`` pairs into a dictionary."""
    result = {}
    for item in items:
        key, sign, value = item.partition("=")
        if not sign:
            raise BadInput(f"--option {item!r} is not KEY=VALUE")
        result[key] = value
    return result
