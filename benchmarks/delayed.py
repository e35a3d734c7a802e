"""Two network namespaces of this machine, between which a process holds every packet back: a network that is far away.

A kernel with ``netem`` would do it, too; many have none. Needs root, ``ip`` and ``/dev/net/tun``.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

#: Namespaces with their addresses.
ENDS: Final = {"rammer_near": "10.177.0.1", "rammer_far": "10.177.0.2"}
NETWORK: Final = "10.177.0.0/24"
#: Bytes of a packet, at most: large ones, as a process forwards them.
MTU: Final = 60000
#: Of <linux/if_tun.h> and <sched.h>.
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


def inside(name: str, line: Sequence[str]) -> list[str]:
    """A command line that runs ``line`` in a namespace, where the machine has its name: MPI tells machines by that."""
    return [
        "ip",
        "netns",
        "exec",
        name,
        "unshare",
        "-u",
        "sh",
        "-c",
        f'hostname {name.replace("_", "-")}; exec "$@"',
        "sh",
        *line,
    ]


@contextmanager
def far_apart(milliseconds: float) -> Iterator[None]:
    """The namespaces are there, and packets between them take so long each way. Both go in the end."""
    for name in ENDS:
        subprocess.run(["ip", "netns", "add", name], check=True)
    relay = subprocess.Popen([sys.executable, __file__, str(milliseconds)], stdout=subprocess.PIPE, text=True)
    try:
        assert relay.stdout is not None
        if relay.stdout.readline() != "ready\n":
            raise RuntimeError("the namespaces could not be joined")
        yield
    finally:
        relay.kill()
        relay.wait()
        for name in ENDS:
            subprocess.run(["ip", "netns", "del", name], check=False)


def opened(namespace: str) -> int:
    """A tunnel's end in ``namespace``, up, with its address."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as there:
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"namespace {namespace}")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", b"far", IFF_TUN | IFF_NO_PI))
    for words in (f"addr add {ENDS[namespace]}/24 dev far", f"link set far mtu {MTU} up", "link set lo up"):
        subprocess.run(["ip", *words.split()], check=True)
    return end


def relay(seconds: float) -> None:
    """Forward packets, each ``seconds`` after it came."""
    near, far = (opened(name) for name in ENDS)
    other, waiting = {near: far, far: near}, deque[tuple[float, int, bytes]]()
    print("ready", flush=True)
    while True:
        rest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select([near, far], [], [], rest)[0]:
            with suppress(BlockingIOError):
                waiting.append((time.monotonic() + seconds, other[end], os.read(end, MTU + 100)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, packet = waiting.popleft()
            with suppress(BlockingIOError):
                os.write(target, packet)


if __name__ == "__main__":
    relay(float(sys.argv[1]) / 1000)
