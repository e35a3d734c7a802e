"""Network namespaces of this machine with delayed packets between them: simulated distant hosts.

A kernel with ``netem`` could do this, but many lack it. Needs root, ``nsenter``, ``ip`` and ``/dev/net/tun``. The namespaces are
anonymous and belong to the relay process. It ends when its parent does, however that ends, and kills everything that runs in
them.
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
#: Maximum bytes of a packet: large, since a process forwards the packets.
MTU: Final = 60000
#: Constants of <linux/if_tun.h> and <sched.h>.
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
#: Position of the destination address in an IPv4 header.
TARGET: Final = slice(16, 20)


@dataclass(frozen=True)
class Hosts:
    """The namespaces as files, and a folder for the scripts that start processes there."""

    places: tuple[str, ...]
    folder: Path

    @property
    def addresses(self) -> list[str]:
        """IPv4 addresses of the hosts, in order."""
        return [address(n) for n in range(len(self.places))]

    def inside(self, number: int, line: Sequence[str]) -> list[str]:
        """Return a command line that runs ``line`` on a host, under a separate host name: MPI identifies hosts by name."""
        place = self.places[number]
        named = f'{still_there(place)}hostname rammer-far-{number}; exec "$@"'
        return ["nsenter", f"--net={place}", "unshare", "-u", "sh", "-c", named, "sh", *line]

    def mpirun(self, line: Sequence[str], settings: dict[str, str] | None = None) -> list[str]:
        """Return a command line that runs ``line`` in an MPI process on every host. Messages and windows use TCP; ``settings``
        are further parameters of Open MPI."""
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
    """Return shell words that end a process which entered its namespace too late. The process may have opened ``place`` before
    ``end_all`` and enter the namespace afterwards."""
    return f"[ -e {place} ] || exit 1; "


def lacking() -> str:
    """Return the reason why simulated hosts are unsupported here, or "" if they are supported."""
    if os.name != "posix" or os.geteuid():
        return "not root"
    missing = [name for name in ("ip", "nsenter", "unshare", "mpirun") if shutil.which(name) is None]
    if missing or not Path("/dev/net/tun").exists():
        return f"no {', '.join(missing) or '/dev/net/tun'}"
    tried = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True)
    return tried.stderr.strip() if tried.returncode else ""


@contextmanager
def far_apart(milliseconds: float, count: int = 2) -> Iterator[Hosts]:
    """Provide ``count`` hosts, with packets delayed by ``milliseconds`` each way."""
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
    """Return the IPv4 address of a host."""
    return f"10.177.0.{number + 1}"


def opened(number: int) -> tuple[int, int]:
    """Create a namespace with an active tunnel end that has its address; return tunnel end and namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no namespace")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", b"far", IFF_TUN | IFF_NO_PI))
    for words in (f"addr add {address(number)}/24 dev far", f"link set far mtu {MTU} up", "link set lo up"):
        subprocess.run(["ip", *words.split()], check=True)
    return end, os.open("/proc/self/ns/net", os.O_RDONLY)


def forward(seconds: float, ends: Sequence[int]) -> None:
    """Forward packets ``seconds`` after their arrival until stdin ends."""
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
    """Kill all processes in these namespaces, which this process created. The namespaces are closed before their processes are
    searched for, so that none can enter; tunnel ends keep them alive."""
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
    """Return a process's namespace, or 0 if the process ended."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return 0


def main(milliseconds: float, count: int) -> None:
    """Run the relay process between the hosts."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the relay ends when stdin closes, not before
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):  # delays must not depend on other load
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
