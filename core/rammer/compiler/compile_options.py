"""What a user chooses when compiling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from rammer.errors import BadInput
from rammer.ir.device import VDevice
from rammer.ir.parts import PRECISIONS as PRECISIONS  # where commands look for it

#: The order of images' axes inside a program: the model's (NCHW in ONNX), but all images of 8-bit codes channels last where that
#: is faster; channels last; or by tensor what is faster.
LAYOUTS: Final = ("keep", "nhwc", "auto")

#: Independent products become one: where that is predicted to be no slower; never; wherever it copies nothing; as the first, also
#: convolutions of windows that differ, padded with zeros.
BATCHING: Final = ("auto", "off", "all", "pad")

#: Sets of input shapes whose programs stay on the device, where nothing is said.
RESIDENT: Final = 8

#: Told (step, detail) while compiling.
Progress: TypeAlias = Callable[[str, str], None]


def ignore_progress(step: str, detail: str) -> None:
    """The default progress sink."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Scheduling policy, tuning level (off, quick, full), the named hardware to compile for, the precision, the layout of
    images inside, whether independent products become one, and patterns of operators that float16 leaves in float32."""

    policy: str = "wavefront"
    tune: str = "off"
    target: str = ""
    precision: str = "float32"
    layout: str = "keep"
    batching: str = "auto"
    keep_float32: tuple[str, ...] = ()


#: What is chosen when nothing is said.
DEFAULT = CompileOptions()


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for when a model is opened: CompileOptions, where None is the precision that a compiled file has and
    float32 for a model; the kind of hardware that it needs ("" for any); the device's own options; how many sets of input shapes
    stay on the device; least and greatest lengths of open dimensions, or how they follow from others; operators that stay
    float32."""

    policy: str = DEFAULT.policy
    tune: str = DEFAULT.tune
    target: str = DEFAULT.target
    precision: str | None = None
    layout: str = DEFAULT.layout
    batching: str = DEFAULT.batching
    require: str = ""
    device_options: Mapping[str, str] = field(default_factory=dict)
    resident: int = RESIDENT
    lengths: Mapping[str, tuple[int, int] | str] = field(default_factory=dict)
    keep_float32: tuple[str, ...] = ()

    @property
    def chosen(self) -> CompileOptions:
        """How a model is compiled that was not compiled before."""
        precision = self.precision or DEFAULT.precision
        return CompileOptions(self.policy, self.tune, self.target, precision, self.layout, self.batching, self.keep_float32)


#: Of who asks for nothing.
ANY = Request()


def check_precision(precision: str, device: str, vdevice: VDevice) -> None:
    """BadInput for a precision that does not exist or that ``device`` does not have."""
    if precision not in PRECISIONS:
        raise BadInput(f"unknown precision {precision!r}", "--precision", f"one of: {', '.join(PRECISIONS)}")
    if precision not in vdevice.precisions:
        raise BadInput(
            f"device {device} ({vdevice.description}) does not compute in {precision}",
            "--precision",
            f"it has {', '.join(vdevice.precisions)}",
        )


def check_forms(layout: str, batching: str) -> None:
    """BadInput for a layout, or a way of batching, that does not exist."""
    for option, value, known in (("layout", layout, LAYOUTS), ("batching", batching, BATCHING)):
        if value not in known:
            raise BadInput(f"unknown {option} {value!r}", f"--{option}", f"one of: {', '.join(known)}")
