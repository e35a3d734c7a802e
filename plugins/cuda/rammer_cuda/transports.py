"""The transports between GPUs. ``plugin`` imports this module when devices are joined, since a runtime has no transports."""

from __future__ import annotations

from typing import Final

from rammer.distributed.transport import Fabric, Party, Site, Transport


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


PEER: Final = Transport(
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


SYMMETRIC: Final = Transport(
    "nvshmem",
    "GPUs of one host or several, a process each: NVSHMEM's puts",
    check_nvshmem,
    nvshmem_link_refusal,
    open_symmetric,
    rank=5,
    far=10,
    separate_hardware=True,
)
