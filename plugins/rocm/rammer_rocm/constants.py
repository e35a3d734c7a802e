"""Constants on an OpenCL unit: each form of each constant once, for all programs that the unit was given.

What a program finds there already stays where it is; all else that it wants goes into one new buffer. So a program's kernels take
few buffers as arguments, and a constant is known by the number of its buffer and a place in it.
"""

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
from rammer.codegen.task_parameters import Packing
from rammer.device.manifest import Array
from rammer.device.shared_constants import ConstantForm, SharedConstants, WantedForm, form_of
from rammer.ir.constants.recipes import Part
from rammer.ir.program import Buffer, Storage
from rammer.ir.types import itemsize
from rammer.runtime.host_memory import buffer_image, is_whole_buffer

from rammer_rocm.opencl_runtime import import_opencl

#: Bytes between parts of a buffer: a page, so that parts share no cache line or TLB entry by accident; between constants.
PART: Final = 4096
LINE: Final = 64
#: Bytes past the end that vector kernels may read (never use): wider than any vector.
SLACK: Final = 4096
#: Bytes of forms that one thread makes in a row.
SHARE: Final = 4 << 20
#: Most buffers with constants of one program: OpenCL promises room for 128 pointers, and kernels choose among these.
MOST: Final = 8
#: A constant of a program: the buffer that it fills, or its tensor, and the key of its arrangement.
Name: TypeAlias = tuple[str, str]


def round_up(size: int, unit: int) -> int:
    """``size`` as whole units."""
    return -(-size // unit) * unit


@dataclass(frozen=True, eq=False)
class PlacedForm:
    """A form on the device: the buffer that it is in, and where it begins. The buffer lives as long as any of its parts."""

    buffer: Any
    start: int


@dataclass(frozen=True)
class PlacedConstants:
    """Where the constants of a program are: the number of a buffer, of ``buffers`` from 1, and the first byte in it."""

    buffers: tuple[Any, ...]
    places: Mapping[Name, tuple[int, int]]
    parts: tuple[PlacedForm, ...]


def packed_form(values: Part, packing: Packing) -> WantedForm:
    """A constant as kernels want it arranged."""
    nbytes = packing.size * itemsize(packing.dtype)
    return WantedForm(form_of(values, packing.key, nbytes), values, lambda given: np.asarray(packing.make(given), packing.dtype))


def plain_form(values: Part, storage: Storage, buffer: Buffer) -> WantedForm:
    """A constant as it is in its buffer."""
    key = "" if is_whole_buffer(storage, buffer) else f"{storage.strides} {storage.offset} {buffer.size}"
    return WantedForm(form_of(values, key, buffer.nbytes), values, lambda given: buffer_image(storage, buffer, given))


@dataclass(frozen=True)
class DeviceConstants:
    """The constants that programs of one unit share, of which one is loaded at a time. ``on_cpu``: its memory is the host's."""

    queue: Any
    on_cpu: bool
    shared: SharedConstants[PlacedForm] = field(default_factory=SharedConstants)
    pool: list[ThreadPoolExecutor] = field(default_factory=list)
    jobs: list[Future[None]] = field(default_factory=list)
    fresh: list[ConstantForm] = field(default_factory=list)

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Meanwhile threads make what is ``placed``; at the end all of it is there, or none of it is known."""
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
        """Each on the device, where ``filling`` ends. MemoryError of OpenCL's where there is no room."""
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
        if self.on_cpu:  # it is the host's memory: forms are made where they stay
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
        """Copy a form to byte ``start`` of a buffer."""
        import_opencl().enqueue_copy(self.queue, buffer, np.ascontiguousarray(made), dst_offset=start, is_blocking=True)


#: Bytes of the smallest page.
PAGE: Final = 4096


def host_bytes(nbytes: int) -> Array:
    """So many bytes, from the beginning of a page on. For much memory NumPy asks the operating system for large pages, as no
    runtime does: panels read a line of each channel, and channels are on more pages of 4 KiB than a core remembers."""
    whole = np.empty(nbytes + PAGE, np.uint8)
    start = -whole.ctypes.data % PAGE
    return whole[start : start + nbytes]
