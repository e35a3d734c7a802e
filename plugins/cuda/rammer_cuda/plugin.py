"""The entry point: the manifest of the ``cuda`` device. Importing it loads no driver."""

from __future__ import annotations

from collections.abc import Sequence

from rammer.device.hooks import hookimpl
from rammer.device.manifest import Backend, Device, Hardware, OpenOptions

from rammer_cuda.gpu import TARGETS


def probe() -> Sequence[Hardware]:
    """The GPUs of this machine; MissingDependency without the driver, cuda-bindings or CuPy."""
    from rammer_cuda.hardware import probe_gpus

    return probe_gpus()


def open_device(options: OpenOptions) -> Backend:
    """The backend of one GPU, or of the target named by ``options.target`` without one."""
    from rammer_cuda.backend import open_backend

    return open_backend(options)


DEVICE = Device(
    name="cuda",
    summary="NVIDIA GPUs: NVRTC kernels in a CUDA graph",
    probe=probe,
    open=open_device,
    targets=tuple(TARGETS),
    api=3,
)


@hookimpl
def rammer_devices() -> Sequence[Device]:
    """The one manifest of this plugin."""
    return [DEVICE]
