"""Host-memory endpoint of a fabric: slots, flags and credits over any engine that writes into other devices' memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np

from rammer.device.arrays import Array
from rammer.distributed.distributed_program import Transfer
from rammer.distributed.transport.counters import Counters
from rammer.distributed.transport.dynamic_shape import Arriving, SendPool, TensorRecord, bytes_of, view_words
from rammer.distributed.transport.memory_layout import LAST_WORDS, WORD, Exposed
from rammer.distributed.transport.protocol import Endpoint, Reach
from rammer.errors import DeviceFailure

__all__ = ["Array", "MemoryEndpoint", "bytes_of", "last_words"]

#: Marker word of a device that has ended, before the reason.
ENDED: Final = 1


class MemoryEndpoint(Endpoint):
    """An endpoint over a ``Reach``.

    A flag is the run number plus one of the tensor in the slot. A credit is that of the tensor that was read there. Both only
    increase, so nothing is reset between runs. For a dynamic-shape tensor the flag follows a record. An acknowledgement, the run
    number plus one, frees memory of the source's pool (``dynamic_shape``).
    """

    def __init__(self, device: int, exposed: Exposed, writer: Reach, timeout: float) -> None:
        self.device, self.exposed, self.timeout = device, exposed, timeout
        self.counters, self.reach, self._memory = Counters(), writer, writer.memory
        self._word = np.zeros(1, np.int64)
        self._slots: dict[tuple[str, int], Array] = {}
        self._flags = {t.name: self._words(exposed.places[t.name].flags) for t in exposed.arriving(device)}
        self._credits = {t.name: self._words(exposed.places[t.name].credits) for t in exposed.transfers if t.source == device}
        self.kept = SendPool(device, exposed, writer.memory)
        self.arriving = {t.name: Arriving(t, exposed, writer.memory) for t in exposed.arriving(device) if t.late}
        for transfer in exposed.arriving(device):
            place = exposed.places[transfer.name]
            if transfer.late:
                slots = self.arriving[transfer.name].slots
                self._slots |= {(transfer.name, number): slot for number, slot in enumerate(slots)}
                continue
            for number in range(exposed.depth):
                start = place.slots + number * place.stride
                kind = transfer.type
                flat = self._memory[start : start + transfer.nbytes].view(kind.dtype)
                self._slots[transfer.name, number] = flat.reshape(kind.shape)

    def slot(self, name: str, run: int) -> Array:
        """Return the memory in which a transfer arrives."""
        return self._slots[name, run % self.exposed.depth]

    def arrived(self, name: str, run: int) -> bool:
        """Return True if the tensor has arrived, after reading any announced tensor."""
        if name in self.arriving:
            self._read_announced(self.arriving[name])
            return self.arriving[name].has(run)
        return bool(self._flags[name][run % self.exposed.depth] > run)

    def wait(self, name: str, run: int) -> None:
        """Wait for the tensor. Raises DeviceFailure if it does not arrive, or its sender has ended."""
        if not self.arrived(name, run):
            transfer = self.exposed.transfer[name]
            self._wait_until(lambda: self.arrived(name, run), transfer, run, transfer.source, "")

    def free(self, name: str, run: int) -> bool:
        """Return True if the slot is free."""
        depth = self.exposed.depth
        return run < depth or bool(self._credits[name][run % depth] > run - depth)

    def put(self, name: str, run: int, values: Array) -> None:
        """Write the payload, then the flag. Raises DeviceFailure if the slot does not become free. For a dynamic shape,
        ``values`` have the current shape and are copied to the pool, and their record is written."""
        transfer, place, number = self.exposed.transfer[name], self.exposed.places[name], run % self.exposed.depth
        if not self.free(name, run):
            self._wait_until(lambda: self.free(name, run), transfer, run, transfer.target, " a free slot of")
        if transfer.late:
            self.tell(transfer, run, self._copy_to_pool(transfer, run, values))
            return
        if not values.flags.c_contiguous:
            values = np.ascontiguousarray(values)
            self.counters.allocations += 1
            self.counters.copies += 1
        log = self.log
        with self._watch_write(self._wait_message(transfer, run, transfer.target, " the write of")):
            begin = log.now() if log is not None else 0.0
            if transfer.nbytes:
                self.reach.write(transfer.target, place.slots + number * place.stride, bytes_of(values))
                self.counters.payload_writes += 1
                self.counters.nbytes += transfer.nbytes
            flag_time = log.now() if log is not None else 0.0
            self.flag(transfer.target, place.flags + WORD * number, run + 1)
        if log is not None:
            log.add("write", name, run, begin, flag=flag_time)

    def _copy_to_pool(self, transfer: Transfer, run: int, values: Array) -> TensorRecord:
        """Copy values densely into the pool. Raises DeviceFailure if other devices do not read its content in time."""
        most = transfer.type.shape
        if len(values.shape) != len(most) or any(a > b for a, b in zip(values.shape, most, strict=True)):
            raise ValueError(f"{transfer} is too small for {values.shape}")
        if not values.size:
            return TensorRecord(values.shape, 0)
        found = list[int]()

        def room() -> bool:
            place = self.kept.room(transfer, run, values.nbytes)
            found.extend([] if place is None else [place])
            return bool(found)

        if not room():
            oldest = self.kept.oldest
            what = f" to read {oldest.transfer.name} of run {oldest.run}, for memory of the pool for"
            self._wait_until(lambda: bool(found) or room(), transfer, run, oldest.transfer.target, what)
        place = self._memory[found[0] : found[0] + values.nbytes].view(transfer.type.dtype)
        np.copyto(place.reshape(values.shape), values)
        self.counters.pool_allocations += 1
        self.counters.copies += 1
        self.reach.kept()
        return TensorRecord(values.shape, found[0])

    def tell(self, transfer: Transfer, run: int, record: TensorRecord) -> None:
        """Write the record, then the flag."""
        place, number, log = self.exposed.places[transfer.name], run % self.exposed.depth, self.log
        with self._watch_write(self._wait_message(transfer, run, transfer.target, " the record of")):
            begin = log.now() if log is not None else 0.0
            self.reach.write(transfer.target, place.slots + number * place.stride, bytes_of(record.array()))
            self.counters.metadata_writes += 1
            flag_time = log.now() if log is not None else 0.0
            self.flag(transfer.target, place.flags + WORD * number, run + 1)
        if log is not None:
            log.add("write", transfer.name, run, begin, flag=flag_time)

    def _read_announced(self, arriving: Arriving) -> None:
        """Read all announced tensors: one read and one acknowledgement flag each."""
        transfer = arriving.transfer
        for run in arriving.told():
            record = arriving.record(run)
            into = arriving.into(run, record.shape)
            with self._watch_write(self._wait_message(transfer, run, transfer.source, " the read of")):
                if into.size:
                    self.reach.read(transfer.source, record.place, bytes_of(into))
                    self.counters.reads += 1
                    self.counters.nbytes += into.nbytes
                    acks = self.exposed.places[transfer.name].acks
                    self.flag(transfer.source, acks + WORD * (run % self.exposed.depth), run + 1)
            self.counters.copies += arriving.arrived(run, into)

    def release(self, name: str, run: int) -> None:
        """Send the credit to the sender, one flag."""
        transfer, place = self.exposed.transfer[name], self.exposed.places[name]
        with self._watch_write(self._wait_message(transfer, run, transfer.source, " giving back the slot of")):
            self.flag(transfer.source, place.credits + WORD * (run % self.exposed.depth), run + 1)

    def fail(self, why: str) -> None:
        """Write the reason for failure into other devices' memory, where their waits see it."""
        told = last_words(why)
        self.reach.watched("notifying the other devices", why)
        place = self.exposed.last_words(self.device)
        for other in range(len(self.exposed.devices)):
            if other != self.device:
                with suppress(Exception):
                    self.reach.write(other, place + WORD, told[WORD:])
                    self.reach.write(other, place, told[:WORD])
        self.reach.watched("")

    def flag(self, target: int, place: int, value: int) -> None:
        self._word[0] = value
        self.reach.write(target, place, self._word.view(np.uint8), last=True)
        self.counters.flag_writes += 1

    def _words(self, place: int) -> Array:
        """Return the words of a transfer, one per slot."""
        return view_words(self._memory, place, self.exposed.depth)

    def _wait_until(self, ready: Callable[[], bool], transfer: Transfer, run: int, other: int, what: str) -> None:
        """Wait and count the time. Announced tensors are read meanwhile, so that their senders need not wait. Raises
        DeviceFailure if ``other`` ends or takes too long."""
        begin, said = time.perf_counter(), self._wait_message(transfer, run, other, what)

        def served() -> bool:
            for arriving in self.arriving.values():
                if any(True for _ in arriving.told()):
                    self._read_announced(arriving)
                    self.reach.watched(said)
            return ready()

        self.reach.watched(said)
        since = self.log.now() if self.log is not None else 0.0
        self.reach.until(served if self.arriving else ready, lambda: self._ended_peer() is not None, self.timeout)
        self.reach.watched("")
        if self.log is not None:
            self.log.add("room" if other == transfer.target else "wait", transfer.name, run, since)
        self.counters.waited += time.perf_counter() - begin
        if ready():
            return
        ended = self._ended_peer()
        if ended is not None:
            number, why = ended
            raise DeviceFailure(f"{self.exposed.called(number)} ended: {why}", where=said)
        raise DeviceFailure(
            f"{said}, which did not arrive within {self.timeout:g} s",
            hint="the other process is slow, hangs or has died; --timeout SECONDS lets it take longer",
        )

    @contextmanager
    def _watch_write(self, said: str) -> Iterator[None]:
        """Watch a write in this context. Errors get its description, and the reason of a device that has ended before."""
        self.reach.watched(said)
        try:
            yield
        except DeviceFailure as problem:
            ended = self._ended_peer()
            what = problem.what if ended is None else f"{self.exposed.called(ended[0])} ended: {ended[1]}"
            raise DeviceFailure(what, where=said, hint=problem.hint if ended is None else "") from problem
        self.reach.watched("")

    def _wait_message(self, transfer: Transfer, run: int, other: int, what: str) -> str:
        """Return the message for a wait: the waiting device, the other device, and the object of the wait."""
        called = self.exposed.called
        return f"{called(self.device)} waits for {called(other)}:{what} transfer {transfer.name} of run {run}"

    def _ended_peer(self) -> tuple[int, str] | None:
        """Return a device that has ended, and its reason, or None."""
        for other in range(len(self.exposed.devices)):
            place = self.exposed.last_words(other)
            said = view_words(self._memory, place, 2)
            if other != self.device and said[0] == ENDED:
                text = self._memory[place + 2 * WORD : place + 2 * WORD + int(said[1])].tobytes()
                return other, text.decode(errors="replace")
        return None


def last_words(why: str) -> Array:
    """Return the message that a device leaves in other devices' memory when it ends. ``LAST_WORDS`` bytes, the first of which
    must be written last."""
    text = why.encode()[: LAST_WORDS - 2 * WORD]
    found = np.zeros(LAST_WORDS, np.uint8)
    found[: 2 * WORD].view(np.int64)[:] = ENDED, len(text)
    found[2 * WORD : 2 * WORD + len(text)] = np.frombuffer(text, np.uint8)
    return found
