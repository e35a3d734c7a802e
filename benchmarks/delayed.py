"""Network namespaces of this machine, between which a process holds every packet back: hosts that are far from each other.

A kernel with ``netem`` would do it, too; many have none. Needs root, ``nsenter``, ``ip`` and ``/dev/net/tun``. The namespaces
have no names: they are that process's, and it ends, with all that runs in them, when whoever asked for them does, however that
ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NETWORK: Final = "10.177.0.0/24"
#: Bytes of a packet, at most: large ones, as a process forwards them.
MTU: Final = 60000
#: Of <linux/if_tun.h> and <sched.h>.
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
#: Where an IPv4 header has the address that a packet is for.
TARGET: Final = slice(16, 20)


@dataclass(frozen=True)
class Hosts:
    """Files that are namespaces, and a folder for what starts processes there."""

    places: tuple[str, ...]
    folder: Path

    @property
    def addresses(self) -> list[str]:
        """In order."""
        return [address(n) for n in range(len(self.places))]

    def inside(self, number: int, line: Sequence[str]) -> list[str]:
        """A command line that runs ``line`` on a host, where the machine has another name: MPI tells hosts by that."""
        place = self.places[number]
        named = f'{still_there(place)}hostname rammer-far-{number}; exec "$@"'
        return ["nsenter", f"--net={place}", "unshare", "-u", "sh", "-c", named, "sh", *line]

    def mpirun(self, line: Sequence[str], settings: dict[str, str] | None = None) -> list[str]:
        """A command line that runs ``line`` in a process of MPI on every host. Messages and windows go over TCP; ``settings`` are
        parameters of Open MPI besides."""
        agent = self.folder / "agent"
        cases = "".join(
            f"{a}) place={p}; name=rammer-far-{n};;\n" for n, (a, p) in enumerate(zip(self.addresses, self.places, strict=True))
        )
        agent.write_text(
            f'#!/bin/sh\ncase "$1" in\n{cases}*) exit 1;;\nesac\nshift\n'
            f'exec nsenter --net="$place" unshare -u sh -c "{still_there("$place")}hostname $name; $*"\n'
        )
        agent.chmod(0o755)
        given = {
            "plm_rsh_agent": str(agent),
            "pml": "ob1",
            "btl": "tcp,self",
            "osc": "pt2pt",
            "mpi_yield_when_idle": "1",
            "btl_tcp_if_include": NETWORK,
            "oob_tcp_if_include": NETWORK,
        }
        mca = [word for name, value in (given | (settings or {})).items() for word in ("--mca", name, value)]
        start = ["mpirun", "-n", str(len(self.places)), "-x", "PYTHONPATH", "--host", ",".join(self.addresses)]
        return self.inside(0, [*start, *mca, *line])


def still_there(place: str) -> str:
    """Shell words that end a process which came in when nobody looks for it any more: it may have opened ``place`` before
    ``end_all`` and be in the namespace after."""
    return f"[ -e {place} ] || exit 1; "


def lacking() -> str:
    """Why there can be no such hosts here; "" where there can."""
    if os.name != "posix" or os.geteuid():
        return "not root"
    missing = [name for name in ("ip", "nsenter", "unshare", "mpirun") if shutil.which(name) is None]
    if missing or not Path("/dev/net/tun").exists():
        return f"no {', '.join(missing) or '/dev/net/tun'}"
    tried = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True)
    return tried.stderr.strip() if tried.returncode else ""


@contextmanager
def far_apart(milliseconds: float, count: int = 2) -> Iterator[Hosts]:
    """So many hosts are there, and packets between them take so long each way."""
    line = [sys.executable, __file__, str(milliseconds), str(count)]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as relay,
    ):
        assert relay.stdout is not None and relay.stdin is not None
        said = relay.stdout.readline().split()
        try:
            if said[:1] != ["ready"]:
                raise RuntimeError("the namespaces could not be made or joined")
            yield Hosts(tuple(f"/proc/{relay.pid}/fd/{number}" for number in said[1:]), Path(folder))
        finally:
            relay.stdin.close()
            relay.wait()


def address(number: int) -> str:
    """Of a host."""
    return f"10.177.0.{number + 1}"


def opened(number: int) -> tuple[int, int]:
    """A tunnel's end in a new namespace, up, with its address; and the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no namespace")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", b"far", IFF_TUN | IFF_NO_PI))
    for words in (f"addr add {address(number)}/24 dev far", f"link set far mtu {MTU} up", "link set lo up"):
        subprocess.run(["ip", *words.split()], check=True)
    return end, os.open("/proc/self/ns/net", os.O_RDONLY)


def forward(seconds: float, ends: Sequence[int]) -> None:
    """Packets, each ``seconds`` after it came, until nobody wants it any more: stdin has ended."""
    to = {bytes(int(part) for part in address(n).split(".")): end for n, end in enumerate(ends)}
    waiting, asker = deque[tuple[float, int, bytes]](), sys.stdin.fileno()
    while True:
        rest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select([*ends, asker], [], [], rest)[0]:
            if end == asker:
                return
            with suppress(BlockingIOError):
                packet = os.read(end, MTU + 100)
                if (target := to.get(packet[TARGET])) is not None:
                    waiting.append((time.monotonic() + seconds, target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, packet = waiting.popleft()
            with suppress(BlockingIOError):
                os.write(target, packet)


def end_all(namespaces: Sequence[int]) -> None:
    """What runs in these namespaces, which are ours, ends with them. They have no place any more before what runs there is
    looked for; tunnels' ends keep them."""
    own = {os.fstat(n).st_ino for n in namespaces}
    for number in namespaces:
        os.close(number)
    for _ in range(100):
        left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != os.getpid() and _in(pid) in own]
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _in(pid: int) -> int:
    """A process's namespace; 0 where it has gone."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return 0


def main(milliseconds: float, count: int) -> None:
    """The process between the hosts."""
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends when nobody asks for it, not before
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):  # networks do not wait for processors that others use
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    made = [opened(n) for n in range(count)]
    namespaces = [n for _, n in made]
    print("ready", *namespaces, flush=True)
    try:
        forward(milliseconds / 1000, [end for end, _ in made])
    finally:
        end_all(namespaces)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
