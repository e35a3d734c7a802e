"""The entry point: the manifest of the ``rocm`` device. Importing it loads no driver."""

from __future__ import annotations

from collections.abc import Sequence

from rammer.device.hooks import hookimpl
from rammer.device.manifest import Backend, Device, Hardware, OpenOptions, Option
from rammer.errors import require_compiler


def probe() -> Sequence[Hardware]:
    """Return the OpenCL devices, AMD GPUs first. Raises MissingDependency without pyopencl."""
    from rammer_rocm.opencl_runtime import units
    from rammer_rocm.units import make_hardware

    return [make_hardware(i, unit) for i, unit in enumerate(units())]


def open_device(options: OpenOptions) -> Backend:
    """Return the backend of one device, or of the AMD target ``options.target`` without hardware. Raises DeviceUnavailable if
    kernels must be compiled and only the runtime is installed."""
    if options.target:
        from rammer_rocm.offline import open_target

        return open_target(options)
    if options.run_only:
        from rammer_rocm.opened_unit import RunOnlyUnit

        return RunOnlyUnit(options, options.value(EXECUTOR), options.value(CORES), options.value(KERNELS))
    require_compiler("compiling kernels for device rocm")
    from rammer_rocm.backend import OpenClBackend

    without = () if options.value(WINOGRAD) == "on" else ("winograd",)
    return OpenClBackend(options, options.value(EXECUTOR), without, options.value(CORES), options.value(KERNELS))


#: AMD architectures that kernels can be compiled for without the card.
TARGETS = ("gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx1030", "gfx1100")

EXECUTOR = Option(
    "executor", "", "One launch per program, per wave, or (GPUs) per range of small waves.", ("single", "waves", "mixed")
)
KERNELS = Option("kernels", "", "Kernels of CPU cores or of a GPU's groups, whatever the device.", ("cpu", "gpu"))
WINOGRAD = Option("winograd", "on", "Winograd kernels for 3 x 3 convolutions.", ("on", "off"))

CORES = Option("cores", 0, "Most cores of a CPU that programs use; 0: all.", least=0)

DEVICE = Device(
    name="rocm",
    summary="OpenCL: an AMD GPU, else another GPU, else the CPU",
    probe=probe,
    open=open_device,
    targets=TARGETS,
    options=(EXECUTOR, WINOGRAD, CORES, KERNELS),
    providers=("MIGraphXExecutionProvider", "ROCMExecutionProvider"),
    api=5,
)


@hookimpl
def rammer_devices() -> Sequence[Device]:
    """Return the manifest of this plugin."""
    return [DEVICE]
