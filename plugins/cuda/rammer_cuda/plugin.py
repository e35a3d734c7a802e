"""The entry point: the manifest of the ``cuda`` device. Importing it loads no driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rammer.device.hooks import hookimpl
from rammer.device.manifest import Backend, Device, Hardware, OpenOptions, Option
from rammer.errors import require_compiler

from rammer_cuda.gpu import TARGETS

if TYPE_CHECKING:
    from rammer.distributed.transport import Transport


def probe() -> Sequence[Hardware]:
    """Return the GPUs of this machine. Raises MissingDependency without the driver, cuda-bindings or CuPy."""
    from rammer_cuda.hardware import probe_gpus

    return probe_gpus()


def open_device(options: OpenOptions) -> Backend:
    """Return the backend of one GPU, or without a GPU that of the target ``options.target``. Raises DeviceUnavailable if kernels
    must be compiled and only the runtime is installed."""
    if options.run_only:
        from rammer_cuda.run_only import RunOnlyGpu

        return RunOnlyGpu(options)
    require_compiler("compiling kernels for device cuda")
    from rammer_cuda.backend import open_backend

    return open_backend(options)


EXECUTOR = Option(
    "executor", "auto", "Form in which programs run; auto measures.", ("auto", "graph", "wavewise", "persistent", "mixed")
)
WATCHDOG = Option("watchdog", 2.0, "Seconds after which persistent kernels report a hang.", least=1e-9, most=86400.0)

DEVICE = Device(
    name="cuda",
    summary="NVIDIA GPUs: NVRTC kernels in a CUDA graph",
    probe=probe,
    open=open_device,
    targets=tuple(TARGETS),
    options=(EXECUTOR, WATCHDOG),
    providers=("TensorrtExecutionProvider", "CUDAExecutionProvider"),
    api=5,
)


@hookimpl
def rammer_transports() -> Sequence[Transport]:
    """Return the transports between GPUs."""
    from rammer_cuda.transports import PEER, SYMMETRIC

    return [PEER, SYMMETRIC]


@hookimpl
def rammer_devices() -> Sequence[Device]:
    """Return the one manifest of this plugin."""
    return [DEVICE]
