"""The entry point: the manifest of the ``cuda`` device. Importing it loads no driver."""

from __future__ import annotations

from collections.abc import Sequence

from rammer.device.hooks import hookimpl
from rammer.device.manifest import Backend, Device, Hardware, OpenOptions, Option
from rammer.distributed.transport import Fabric, Party, Site, Transport

from rammer_cuda.gpu import TARGETS


def probe() -> Sequence[Hardware]:
    """Return the GPUs of this machine. Raises MissingDependency without the driver, cuda-bindings or CuPy."""
    from rammer_cuda.hardware import probe_gpus

    return probe_gpus()


def open_device(options: OpenOptions) -> Backend:
    """Return the backend of one GPU, or without a GPU that of the target ``options.target``."""
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


def check_cupy() -> None:
    """Check the requirements for joining GPUs. Raises MissingDependency without CuPy."""
    from rammer_cuda.hardware import import_cupy

    import_cupy()


def peer_link_refusal(a: Site, b: Site) -> str | None:
    """Return the reason why two GPUs cannot join by peer access, or None."""
    from rammer_cuda.peer.fabric import connects as asked

    return asked(a, b)


def open_fabric(party: Party) -> Fabric:
    """Return a fabric of GPUs of one host."""
    from rammer_cuda.peer.fabric import PeerFabric

    return PeerFabric(party)


PEER = Transport(
    "cuda-peer",
    "GPUs of one host: stores and copies into each other's memory",
    check_cupy,
    peer_link_refusal,
    open_fabric,
    rank=10,
    separate_hardware=True,
)


def check_nvshmem() -> None:
    """Check the requirements of NVSHMEM. Raises MissingDependency without them."""
    from rammer_cuda.peer.symmetric import probe as asked

    asked()


def nvshmem_link_refusal(a: Site, b: Site) -> str | None:
    """Return the reason why two GPUs cannot join by NVSHMEM, or None."""
    from rammer_cuda.peer.symmetric import connects as asked

    return asked(a, b)


def open_symmetric(party: Party) -> Fabric:
    """Return a fabric of several processes' GPUs, joined by NVSHMEM."""
    from rammer_cuda.peer.symmetric import SymmetricFabric

    return SymmetricFabric(party)


SYMMETRIC = Transport(
    "nvshmem",
    "GPUs of one host or several, a process each: NVSHMEM's puts",
    check_nvshmem,
    nvshmem_link_refusal,
    open_symmetric,
    rank=5,
    far=10,
    separate_hardware=True,
)


@hookimpl
def rammer_transports() -> Sequence[Transport]:
    """Return the transports between GPUs."""
    return [PEER, SYMMETRIC]


@hookimpl
def rammer_devices() -> Sequence[Device]:
    """Return the one manifest of this plugin."""
    return [DEVICE]
