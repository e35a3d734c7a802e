"""The options that a user chooses when compiling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from rammer.errors import BadInput
from rammer.ir.device import VDevice
from rammer.ir.parts import PRECISIONS as PRECISIONS  # re-exported for commands

#: The order of image axes inside a program: the model's (NCHW in ONNX), but all 8-bit quantised images channels last if that is
#: faster; channels last; or the faster order by tensor.
LAYOUTS: Final = ("keep", "nhwc", "auto")

#: Merging of independent products: if predicted to be no slower; never; wherever it copies nothing; as the first, also
#: convolutions of windows that differ, padded with zeros.
BATCHING: Final = ("auto", "off", "all", "pad")

#: Candidates that a device measures for each operator, by tuning level.
MEASURED: Final[Mapping[str, int]] = {"off": 0, "quick": 4, "full": 12}

#: Default number of sets of input shapes whose programs stay on the device.
RESIDENT: Final = 8

#: Called with (step, detail) while compiling.
Progress: TypeAlias = Callable[[str, str], None]


def ignore_progress(step: str, detail: str) -> None:
    """Ignore progress: the default sink."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """The options of a compilation.

    They are the scheduling policy, the tuning level (off, quick, full), the named hardware, the precision, and the layout of
    images. They also include batching of independent products, and patterns of operators that float16 leaves in float32."""

    policy: str = "wavefront"
    tune: str = "off"
    target: str = ""
    precision: str = "float32"
    layout: str = "keep"
    batching: str = "auto"
    keep_float32: tuple[str, ...] = ()


#: The default compile options.
DEFAULT = CompileOptions()


@dataclass(frozen=True, slots=True)
class Request:
    """The options of a model that is opened: CompileOptions and some for the run.

    Precision None is that of a compiled file, and float32 for a model. ``require`` is the kind of hardware ("" for any).
    ``resident`` is the number of sets of input shapes that stay on the device. ``lengths`` has least and greatest lengths of open
    dimensions, or their derivation from others. Operators of ``keep_float32`` stay float32."""

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
        """The compile options of a model that was not compiled before."""
        precision = self.precision or DEFAULT.precision
        return CompileOptions(self.policy, self.tune, self.target, precision, self.layout, self.batching, self.keep_float32)


#: The request with all defaults.
ANY = Request()


def check_precision(precision: str, device: str, vdevice: VDevice) -> None:
    """Raise BadInput for a precision that does not exist or that ``device`` does not have."""
    if precision not in PRECISIONS:
        raise BadInput(f"unknown precision {precision!r}", "--precision", f"one of: {', '.join(PRECISIONS)}")
    if precision not in vdevice.precisions:
        raise BadInput(
            f"device {device} ({vdevice.description}) does not compute in {precision}",
            "--precision",
            f"it has {', '.join(vdevice.precisions)}",
        )


def check_forms(layout: str, batching: str) -> None:
    """Raise BadInput for a layout, or a way of batching, that does not exist."""
    for option, value, known in (("layout", layout, LAYOUTS), ("batching", batching, BATCHING)):
        if value not in known:
            raise BadInput(f"unknown {option} {value!r}", f"--{option}", f"one of: {', '.join(known)}")
