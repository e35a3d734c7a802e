"""The compile options. Each is declared once, as a field of ``Options``, ``CompileOptions`` or ``Request``.

The declaration has the type, the default, the help text, the command-line spelling and the effect on cached and compiled files.
The parameters of ``rammer.compile``, the commands, the checks, the records of compiled files and the cache keys follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

from rammer.errors import BadInput
from rammer.ir.device import VDevice
from rammer.ir.extent import GivenLength
from rammer.ir.parts import PRECISIONS as PRECISIONS  # re-exported for commands

#: The order of image axes inside a program: the model's (NCHW in ONNX), but all 8-bit quantised images channels last if that is
#: faster; channels last; or the faster order by tensor.
LAYOUTS: Final = ("keep", "nhwc", "auto")

#: Merging of independent products: if predicted to be no slower; never; wherever it copies nothing; as the first, also
#: convolutions of windows that differ, padded with zeros.
BATCHING: Final = ("auto", "off", "all", "pad")

#: Fusion of operators: every tensor expression is an operator; element-wise expressions join their producers; all memory layers.
FUSION: Final = ("none", "elementwise", "full")

#: Candidates that a device measures for each operator, by tuning level.
MEASURED: Final[Mapping[str, int]] = {"off": 0, "quick": 4, "full": 12}

#: The tuning levels of ``--tune``.
TUNING_LEVELS: Final = tuple(MEASURED)

#: Default number of sets of input shapes whose programs stay on the device.
RESIDENT: Final = 8

#: Called with (step, detail) while compiling.
Progress: TypeAlias = Callable[[str, str], None]
P = TypeVar("P", bound=str | None)


def ignore_progress(step: str, detail: str) -> None:
    """Ignore progress: the default sink."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """The facts about an option that are not its name, type and default.

    - ``help``: the help text. ``{names}`` stands for the names in the registry ``listed``.
    - ``values``: all legal values, or the placeholder of any value; "" for an option of Python only.
    - ``flag``: the spelling on the command line, if it does not follow from the name. ``noun``: the name in messages.
    - ``parameter``: the parameter of ``rammer.compile``, if its name is not that of the field. ``convert`` converts its value;
      the conversion to a collection makes the option repeatable on the command line.
    - ``least``: the option is a whole number of at least this.
    - ``key``: the option is part of the key of cached programs.
    - ``file``: a compiled file records the option, or fixes it, so that another value is refused."""

    help: str
    values: str | tuple[str, ...] = ""
    flag: str = ""
    listed: Literal["", "policies", "device options"] = ""
    noun: str = ""
    parameter: str = ""
    convert: Callable[[Any], Any] = lambda value: value
    least: int | None = None
    key: bool = False
    file: Literal["", "recorded", "fixed"] = ""

    @property
    def choices(self) -> tuple[str, ...]:
        """All legal values; empty if any value is legal."""
        return self.values if isinstance(self.values, tuple) else ()


#: The facts of options of the program that a compiled file records, or that it fixes.
_RECORDED: Final[dict[str, Any]] = {"key": True, "file": "recorded"}
_FIXED: Final[dict[str, Any]] = {"key": True, "file": "fixed"}


def option(default: Any, text: str, values: str | tuple[str, ...] = "", kw_only: bool = True, **facts: Any) -> Any:
    """Return a dataclass field that declares an option. ``values`` are all legal values, or a placeholder for any value. A
    callable ``default`` makes the default value."""
    made = {"default_factory" if callable(default) else "default": default}
    return field(**made, metadata={"declaration": Declaration(text, values, **facts)}, kw_only=kw_only)


def declaration_of(entry: Field[Any]) -> Declaration:
    """Return the declaration of a field."""
    found = entry.metadata["declaration"]
    assert isinstance(found, Declaration)
    return found


def default_of(entry: Field[Any]) -> Any:
    """Return the default value of a field."""
    return entry.default_factory() if callable(entry.default_factory) else entry.default


def flag_of(entry: Field[Any]) -> str:
    """Return the spelling of a field on the command line, or "" for an option of Python only."""
    declared = declaration_of(entry)
    return (declared.flag or f"--{entry.name.replace('_', '-')}") if declared.values else ""


def parameter_of(entry: Field[Any]) -> str:
    """Return the name of a field as a parameter of ``rammer.compile`` and of the commands."""
    return declaration_of(entry).parameter or entry.name


@dataclass(frozen=True, slots=True)
class Options(Generic[P]):
    """The options of a compilation. The precision may be open (None) in a request. The policy "" is that of the device."""

    policy: str = option(
        "",
        "Scheduling: {names}; with arguments e.g. ios{r=3,s=8}. Default: the policy of the device, which is wavefront for most.",
        "NAME",
        False,
        listed="policies",
        **_RECORDED,
    )
    tune: str = option(
        "off",
        f"off: cost model only; quick: measure {MEASURED['quick']} tiles an operator; full: {MEASURED['full']}.",
        TUNING_LEVELS,
        False,
        noun="tuning level",
        key=True,
    )
    precision: P = option(  # noqa: RUF009 - ``option`` returns a field
        None,
        "tf32, bfloat16: matrix products round their operands; float16: tensors are stored in 16 bits. "
        "Default: float32, or the precision of a compiled file.",
        PRECISIONS,
        **_RECORDED,
    )
    layout: str = option(
        "keep",
        "Image layout inside the program: the model's order (for 8-bit codes and float16 the faster order), channels last, "
        "or the faster order for each tensor.",
        LAYOUTS,
        **_FIXED,
    )
    batching: str = option(
        "auto",
        "Merge independent products: if not slower by prediction, never, wherever no copy is needed, or as auto with "
        "differing windows.",
        BATCHING,
        **_FIXED,
    )
    fusion: str = option(
        "full",
        "Fusion: none; element-wise operators with their producers; or also rows, chains of products and several results.",
        FUSION,
        **_FIXED,
    )
    keep_float32: tuple[str, ...] = option(
        (),
        "With float16: operators whose name or type matches stay float32, e.g. '*/norm/*' or Exp; repeatable.",
        "PATTERN",
        convert=tuple,
        **_FIXED,
    )
    exclude_family: tuple[str, ...] = option(
        (),
        "Leave out kernel families of the device whose name matches, e.g. 'gemm_wgmma*'; repeatable.",
        "PATTERN",
        convert=tuple,
        **_FIXED,
    )
    target: str = option(
        "", "Compile for named hardware, e.g. sm_90a or gfx90a, which need not be present.", "NAME", file="recorded"
    )


@dataclass(frozen=True, slots=True)
class CompileOptions(Options[str]):
    """The options of a compilation in a known precision."""

    precision: str = field(default="float32", metadata=Options.__dataclass_fields__["precision"].metadata, kw_only=True)

    def with_policy(self, default: str) -> CompileOptions:
        """Return the options with the policy ``default`` (``Backend.default_policy``) unless they name one."""
        return self if self.policy else replace(self, policy=default)

    def key(self) -> tuple[str, ...]:
        """Return the texts that identify the options in the key of cached programs."""
        return tuple(str(getattr(self, f.name)) for f in fields(self) if declaration_of(f).key)

    def record(self) -> dict[str, str]:
        """Return the options that a compiled file records."""
        return {f.name: str(getattr(self, f.name)) for f in fields(self) if declaration_of(f).file == "recorded"}

    @classmethod
    def from_record(cls, record: Mapping[str, str]) -> CompileOptions:
        """Return the options that a compiled file recorded. Raises BadInput if it recorded an unknown option."""
        if not record.keys() <= DEFAULT.record().keys():  # an earlier version recorded fewer
            raise BadInput(
                f"compiled file records the options {', '.join(record)}, not {', '.join(DEFAULT.record())}",
                hint="compile the model again",
            )
        return cls(**record)  # type: ignore[arg-type]  # recorded options are texts


#: The default compile options.
DEFAULT = CompileOptions()


@dataclass(frozen=True, slots=True)
class Request(Options[str | None]):
    """The options of a model that is opened: those of the compilation and some for the run. Precision None is that of a compiled
    file, and float32 for a model."""

    require: str = option("", "Fail unless the device is of this kind, e.g. gpu.", "KIND")
    lengths: Mapping[str, GivenLength] = option(
        dict,
        "Shape of an input, or range of a dynamic dimension, also in steps, for few programs (total=past+1: dependent).",
        "NAME:1x3x224x224|DIM=32..960/32",
        flag="--shape",
        parameter="shapes",
        convert=dict,
    )
    device_options: Mapping[str, str] = option(
        dict,
        "Option of the device; repeatable. Those of installed devices: {names}.",
        "KEY=VALUE",
        listed="device options",
        flag="--option",
        parameter="options",
        convert=dict,
        key=True,
    )
    trust: bool = option(False, "Run the machine code in a compiled file: its author may execute code here.", "FLAG")
    trust_key: str = option(
        "", "Run the machine code in a compiled file if this public key (PEM, Ed25519) signed it.", "FILE", convert=str
    )
    resident: int = option(RESIDENT, "Number of sets of input shapes whose programs stay on the device.", least=1)
    cores: int = option(0, "Most cores that programs use, on a device with the option cores; 0: all.", least=0)
    memory: int = option(0, "Most bytes that loaded programs may take on the device; 0: all that it has.", least=0)
    copies: int = option(1, "Copies of a program on the device; so many runs of it execute side by side.", least=1)
    progress: Progress | None = option(None, "Called with (step, detail) while compiling.")  # noqa: RUF009 - a field

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Request:
        """Return the request for the parameters of ``rammer.compile`` or of a command. None stands for the default."""
        declared = {parameter_of(f): f for f in fields(cls)}
        given = [(declared[name], value) for name, value in parameters.items() if value is not None]
        made = cls(**{f.name: declaration_of(f).convert(value) for f, value in given})
        return replace(made, device_options={**made.device_options, "cores": str(made.cores)}) if made.cores else made

    @property
    def chosen(self) -> CompileOptions:
        """The compile options of a model that was not compiled before."""
        values = {f.name: getattr(self, f.name) for f in fields(CompileOptions)}
        return CompileOptions(**values | {"precision": self.precision or DEFAULT.precision})


#: The request with all defaults.
ANY = Request()


def check_choices(request: Request) -> None:
    """Raise BadInput for the value of an option that is not one of its choices, and for a malformed number."""
    for entry in fields(request):
        value = getattr(request, entry.name)
        if value is not None:
            _check_choice(entry, value)


def _check_choice(entry: Field[Any], value: Any) -> None:
    declared, least = declaration_of(entry), declaration_of(entry).least
    if least is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise BadInput(f"{entry.name} is {value!r}, not a whole number of at least {least}")
    if declared.choices and value not in declared.choices:
        noun = declared.noun or entry.name
        raise BadInput(f"unknown {noun} {value!r}", flag_of(entry), f"one of: {', '.join(declared.choices)}")


def check_fixed(request: Request, name: str) -> None:
    """Raise BadInput for an option that differs from its default, but is fixed in the compiled file ``name``."""
    for entry in fields(request):
        flag = flag_of(entry)
        if declaration_of(entry).file == "fixed" and getattr(request, entry.name) != default_of(entry):
            raise BadInput(
                f"{name} was compiled before, with its {flag.removeprefix('--')}",
                flag,
                f"leave out {flag}, or compile the model again with it",
            )


def check_precision(precision: str, device: str, vdevice: VDevice) -> None:
    """Raise BadInput for a precision that does not exist or that ``device`` does not have."""
    _check_choice(CompileOptions.__dataclass_fields__["precision"], precision)
    if precision not in vdevice.precisions:
        raise BadInput(
            f"device {device} ({vdevice.description}) does not compute in {precision}",
            "--precision",
            f"it has {', '.join(vdevice.precisions)}",
        )
