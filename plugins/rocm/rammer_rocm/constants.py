"""Constants on an OpenCL device: each form is stored once for all loaded programs.

A program reuses forms that are already on the device. All other forms are stored in one new buffer, so kernels need few buffer
arguments. A constant is addressed by the number of its buffer and an offset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.cache.parallel_io import by_bytes, reader_pool
from rammer.device.manifest import Array
from rammer.device.shared_constants import ConstantForm, SharedConstants, WantedForm, form_of
from rammer.ir.constants import Part
from rammer.ir.program import Buffer, Storage
from rammer.ir.types import itemsize
from rammer.runtime.host_memory import buffer_image, is_whole_buffer

from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.program_kernels import Packed

#: Bytes of alignment between parts of a buffer: a page, so that parts share no cache line or TLB entry by accident. Constants use
#: LINE.
PART: Final = 4096
LINE: Final = 64
#: Bytes past the end that vector kernels may read but never use: wider than any vector.
SLACK: Final = 4096
#: Bytes of forms that one thread writes per job.
SHARE: Final = 4 << 20
#: Maximum number of constant buffers of one program: OpenCL guarantees 128 pointer arguments, and kernels select among the
#: buffers.
MOST: Final = 8
#: A constant of a program: its buffer or its tensor, and the key of its packing.
Name: TypeAlias = tuple[str, str]


def round_up(size: int, unit: int) -> int:
    """Round ``size`` up to a multiple of ``unit``."""
    return -(-size // unit) * unit


@dataclass(frozen=True, eq=False)
class PlacedForm:
    """A constant form on the device: its buffer and start byte. The buffer lives as long as any of its parts."""

    buffer: Any
    start: int


@dataclass(frozen=True)
class PlacedConstants:
    """Locations of a program's constants: the number of the buffer (counted from 1 in ``buffers``) and the first byte."""

    buffers: tuple[Any, ...]
    places: Mapping[Name, tuple[int, int]]
    parts: tuple[PlacedForm, ...]


def packed_form(values: Part, packing: Packed) -> WantedForm:
    """Return the form of a constant that a kernel needs in packed arrangement."""
    nbytes = packing.size * itemsize(packing.dtype)
    return WantedForm(form_of(values, packing.key, nbytes), values, lambda given: np.asarray(packing.make(given), packing.dtype))


def plain_form(values: Part, storage: Storage, buffer: Buffer) -> WantedForm:
    """Return the form of a constant that equals its buffer's contents."""
    key = "" if is_whole_buffer(storage, buffer) else f"{storage.strides} {storage.offset} {buffer.size}"
    return WantedForm(form_of(values, key, buffer.nbytes), values, lambda given: buffer_image(storage, buffer, given))


@dataclass(frozen=True)
class DeviceConstants:
    """A store of constants that the programs of one device share. Programs are loaded one at a time. ``on_cpu``: the device
    memory is host memory."""

    queue: Any
    on_cpu: bool
    shared: SharedConstants[PlacedForm] = field(default_factory=SharedConstants)
    pool: list[ThreadPoolExecutor] = field(default_factory=list)
    jobs: list[Future[None]] = field(default_factory=list)
    fresh: list[ConstantForm] = field(default_factory=list)

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Run the threads that write the ``placed`` constants. On exit all constants are written. After an error the store drops
        all of them."""
        with reader_pool() as pool:
            self.pool.append(pool)
            try:
                yield
                for job in self.jobs:
                    job.result()
            except BaseException:
                self.shared.forget(self.fresh)
                raise
            finally:
                self.pool.pop()
                self.jobs.clear()
                self.fresh.clear()

    def placed(self, wanted: Mapping[Name, WantedForm]) -> PlacedConstants:
        """Store all wanted constants on the device; they are complete when ``filling`` exits. OpenCL raises MemoryError if memory
        is insufficient."""
        ways = {w.form: w for w in wanted.values()}
        found = self.shared.take(ways, self._upload_forms)
        size = Counter[int]()
        for form, part in found.items():
            size[id(part.buffer)] += form.nbytes
        near = {number for number, _ in size.most_common(MOST - 1)}
        far = {form: ways[form] for form, part in found.items() if id(part.buffer) not in near}
        if len(size) > MOST:
            found |= self.shared.renew(far, self._upload_forms)
        buffers = list(dict.fromkeys(part.buffer for part in found.values()))
        numbers = {id(buffer): i + 1 for i, buffer in enumerate(buffers)}
        places = {name: (numbers[id(found[w.form].buffer)], found[w.form].start) for name, w in wanted.items()}
        return PlacedConstants(tuple(buffers), places, tuple(found.values()))

    def _upload_forms(self, wanted: Mapping[ConstantForm, WantedForm]) -> dict[ConstantForm, PlacedForm]:
        cl, context = import_opencl(), self.queue.context
        starts, end = dict[ConstantForm, int](), 0
        for form in wanted:
            starts[form] = end
            end += round_up(form.nbytes, LINE)
        if self.on_cpu:  # host memory: forms are written in place
            host = host_bytes(end + SLACK)
            shares = by_bytes(wanted.items(), lambda item: item[0].nbytes, SHARE)

            def fill(share: list[tuple[ConstantForm, WantedForm]]) -> None:
                for form, how in share:
                    how.fill(host[starts[form] : starts[form] + form.nbytes])

            self.fresh.extend(wanted)
            self.jobs.extend(self.pool[-1].submit(fill, share) for share in shares)
            buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR, hostbuf=host)
            return {form: PlacedForm(buffer, start) for form, start in starts.items()}
        buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, end + SLACK)
        for form, how in wanted.items():
            if form.nbytes:
                how.given(partial(self._copy_form, buffer, starts[form]))
        return {form: PlacedForm(buffer, start) for form, start in starts.items()}

    def _copy_form(self, buffer: Any, start: int, made: Array) -> None:
        import_opencl().enqueue_copy(self.queue, buffer, np.ascontiguousarray(made), dst_offset=start, is_blocking=True)


#: Bytes of the smallest page.
PAGE: Final = 4096


def host_bytes(nbytes: int) -> Array:
    """Return page-aligned host memory of ``nbytes`` bytes. For large arrays NumPy requests huge pages from the operating system,
    unlike the runtimes. Panels read one line of each channel, and 4 KiB pages of all channels exceed a core's TLB."""
    whole = np.empty(nbytes + PAGE, np.uint8)
    start = -whole.ctypes.data % PAGE
    return whole[start : start + nbytes]
