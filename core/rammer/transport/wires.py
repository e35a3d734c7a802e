"""Connections between processes, over which one writes into memory that another has exposed.

A write is a header (which memory, where, how many bytes) and the bytes. TCP hands on what it is given in order, so who writes a
payload and then its flag is not seen to have written the flag first, and neither waits for an answer. A thread of the target
receives straight into that memory, whatever else the process does: no buffer between, and nobody has to call anything.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from rammer.errors import DeviceFailure
from rammer.transport.endpoint import Array, last_words
from rammer.transport.exposed import LAST_WORDS, WORD, Exposed

__all__ = ["Inbox", "Introduction", "Wire", "wired"]

#: Which memory, the first byte there, bytes.
HEADER: Final = struct.Struct("<QQQ")
#: Who connects: the secret of the process that it wants, and its own number.
HELLO: Final = struct.Struct("<32sQ")
#: Seconds for an address that may not be the right one.
TRY: Final = 2.0
#: Bytes that a connection may have on the way, where the system grants them: 4 MiB are 4 GB/s at a millisecond.
ON_THE_WAY: Final = 4 << 20
#: Why a device ends whose connection does, where it has said nothing itself.
LOST: Final = "its process has died, or the network"
#: ioctl of Linux <linux/sockios.h>: the IPv4 address of an interface.
SIOCGIFADDR: Final = 0x8915


class Inbox:
    """What this process exposes, one memory after the other, all by number in the order of exposing; whoever waits for something
    in them is woken by words that arrive."""

    def __init__(self) -> None:
        self.memories: list[Array] = []
        self.changed = threading.Condition()
        self._exposed: list[Exposed] = []

    def add(self, memory: Array, exposed: Exposed) -> int:
        """From now on others may write there."""
        self._exposed.append(exposed)
        self.memories.append(memory)
        return len(self.memories) - 1

    def lost(self, other: int, why: str) -> None:
        """A process's connection has ended: unless it has told why, it cannot any more."""
        for memory, exposed in zip(self.memories, self._exposed, strict=False):
            place = exposed.last_words(other)
            if not memory[place : place + WORD].any():
                memory[place : place + LAST_WORDS] = last_words(why)
        self.woken()

    def woken(self) -> None:
        """Somebody may go on."""
        with self.changed:
            self.changed.notify_all()


class Wire:
    """A connection to process ``other``: this process writes, a thread receives."""

    def __init__(self, other: int, connection: socket.socket, inbox: Inbox, seconds: float) -> None:
        self.other, self.connection, self._inbox = other, connection, inbox
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._thread = threading.Thread(target=self._receive, name=f"rammer wire {other}", daemon=True)
        self._thread.start()

    def write(self, memory: int, place: int, values: Array, more: bool) -> None:
        """Return when the system has taken all; with ``more`` it may wait for the next write, which comes at once. OSError."""
        flags, header = socket.MSG_MORE if more else 0, HEADER.pack(memory, place, values.size)
        try:
            done = self.connection.sendmsg([header, values.data], [], flags)
            if done < HEADER.size:
                self.connection.sendall(header[done:], socket.MSG_MORE)
            rest = values.data[max(0, done - HEADER.size) :]
            while rest:
                rest = rest[self.connection.send(rest, flags) :]
        except OSError:
            self.done()  # half a write is there: nothing that follows would be understood
            raise

    def _receive(self) -> None:
        header, word = bytearray(HEADER.size), np.zeros(WORD, np.uint8)
        why = LOST
        with suppress(OSError):
            while self._filled(memoryview(header)):
                number, place, size = HEADER.unpack(header)
                if number >= len(self._inbox.memories) or place + size > self._inbox.memories[number].size:
                    why = f"it wrote {size} bytes where nothing is exposed"
                    break
                into = self._inbox.memories[number][place : place + size]
                if size > WORD:
                    if not self._filled(into.data):
                        break
                    continue
                if not self._filled(word.data[:size]):
                    break
                into[:] = word[:size]  # in one piece: readers never see half a word
                self._inbox.woken()
        self._inbox.lost(self.other, why)

    def _filled(self, into: memoryview) -> bool:
        """Whether so many bytes came before the other side ended."""
        while into:
            count = self.connection.recv_into(into, len(into), socket.MSG_WAITALL)
            if not count:
                return False
            into = into[count:]
        return True

    def done(self) -> None:
        """Say that no more comes."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def close(self, seconds: float) -> None:
        """Go, when the other side has said that no more comes, or after so long."""
        self._thread.join(seconds)
        self.connection.close()


class Introduction:
    """A process before it is connected: it listens, and ``words`` tell others where, and with what secret they are let in."""

    def __init__(self, number: int) -> None:
        self.number, self._secret = number, secrets.token_hex(16)
        self.listener = socket.create_server(("", 0), backlog=64)
        grow(self.listener)
        port = self.listener.getsockname()[1]
        self.words = " ".join([self._secret, str(port), *addresses()])

    def connect(self, other: int, words: str, until: float) -> socket.socket:
        """To a process that listens. DeviceFailure where none of its addresses is its."""
        secret, port, *places = words.split()
        for place in places:
            left = min(TRY, until - time.monotonic())
            if left <= 0:
                break
            made = socket.socket()
            grow(made)
            made.settimeout(left)
            with suppress(OSError):
                made.connect((place, int(port)))
                made.sendall(HELLO.pack(secret.encode(), self.number))
                made.settimeout(max(left, until - time.monotonic()))
                if hmac.compare_digest(received(made, len(self._secret)), self._secret.encode()):
                    return made
            made.close()
        raise DeviceFailure(
            f"process {self.number} cannot connect to process {other} at {', '.join(places) or 'no address'}, port {port}",
            hint="a firewall may be between them; or take another --transport",
        )

    def accept(self, answers: Sequence[str], until: float) -> tuple[int, socket.socket]:
        """The next one that knows the secret, and its number; ``answers`` are all processes' words. DeviceFailure."""
        while (left := until - time.monotonic()) > 0:
            self.listener.settimeout(left)
            with suppress(OSError):
                made, _ = self.listener.accept()
                if (number := self._let_in(made, answers)) is not None:
                    return number, made
                made.close()
        raise DeviceFailure(f"process {self.number} waits for others to connect, which have not", hint="a firewall, or they hang")

    def _let_in(self, made: socket.socket, answers: Sequence[str]) -> int | None:
        """The number of who has connected; None for a stranger."""
        with suppress(OSError, struct.error):
            made.settimeout(TRY)
            said, number = HELLO.unpack(received(made, HELLO.size))
            if hmac.compare_digest(said, self._secret.encode()) and self.number < number < len(answers):
                made.sendall(answers[number].split()[0].encode())
                return int(number)
        return None


def wired(number: int, inbox: Inbox, meet: Callable[[str], list[str]], seconds: float) -> dict[int, Wire]:
    """Connections to all other processes, by number. ``meet`` says a word to all and returns all words, in order. Of two
    processes the later one connects."""
    own = Introduction(number)
    try:
        said, until, wires = meet(own.words), time.monotonic() + seconds, dict[int, Wire]()
        for other in range(number):
            wires[other] = Wire(other, own.connect(other, said[other], until), inbox, seconds)
        while len(wires) < len(said) - 1:
            other, made = own.accept(said, until)
            wires[other] = Wire(other, made, inbox, seconds)
    finally:
        own.listener.close()
    return wires


def received(connection: socket.socket, count: int) -> bytes:
    """So many bytes, or fewer where no more come."""
    found = b""
    while len(found) < count and (more := connection.recv(count - len(found))):
        found += more
    return found


def grow(end: socket.socket) -> None:
    """Much may be on the way from the first write on, where the system lets a process say so: else it begins with little, and
    learns."""
    for option, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        with suppress(OSError, ValueError):
            if int(Path("/proc/sys/net/core", limit).read_text()) >= ON_THE_WAY:
                end.setsockopt(socket.SOL_SOCKET, option, ON_THE_WAY)


def addresses() -> list[str]:
    """This machine's IPv4 addresses; that of the machine itself last."""
    found = list[str]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found.append(socket.inet_ntoa(_interface(asked, name)[20:24]))
    return sorted(dict.fromkeys(found), key=lambda a: a.startswith("127."))


def _interface(asked: socket.socket, name: str) -> Any:
    import fcntl

    return fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
