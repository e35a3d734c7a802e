"""The device side of one program: its memory, constants, modules and stream. Executors add the launches."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rammer.device.manifest import Array
from rammer.device.shared_constants import ConstantForm, SharedConstants, WantedForm, form_of
from rammer.errors import DeviceFailure
from rammer.ir.constants import ArrayRecipe, Part, digest_array, parts_of, release_pages
from rammer.ir.program import RProgram
from rammer.ir.types import itemsize
from rammer.runtime.host_memory import buffer_image, is_whole_buffer, storage_view

from rammer_cuda.compile import compile_all, compile_cubin
from rammer_cuda.device import device_source
from rammer_cuda.driver import check_result, import_driver
from rammer_cuda.gpu import Gpu
from rammer_cuda.hardware import Unit, import_cupy
from rammer_cuda.pdl import Switches

if TYPE_CHECKING:
    from rammer.codegen import Argument, Packing

    from rammer_cuda.kernels.task import TaskKernel


@dataclass(frozen=True, eq=False)
class OnGpu:
    """A constant on a GPU, which lives as long as a program holds it."""

    array: Any


#: Constants of all programs of this process, by GPU number, since a GPU's context belongs to the process.
SHARED: Final[defaultdict[int, SharedConstants[OnGpu]]] = defaultdict(SharedConstants)
#: Large constants by the digest of their bytes as stored, and the minimum size for which a digest pays.
SAME: Final[defaultdict[int, weakref.WeakValueDictionary[str, OnGpu]]] = defaultdict(weakref.WeakValueDictionary)
LARGE: Final = 32 << 20


@dataclass
class LastRun:
    """The stream of a program's last run, which the next run follows; ``owner`` keeps it alive."""

    last: Any
    owner: Any = None


class Resident:
    """Buffers of ``program`` on GPU ``index`` at fixed addresses, its constants uploaded, and a stream.

    With ``read``, the buffers that kernels read unpacked, other constants are omitted: they are needed packed only. The last
    argument is another program's state, whose stream, ports and arena (if large enough) are shared. The two programs never run at
    the same time. Raises DeviceFailure if the memory does not suffice. Launch state belongs to executors, which share nothing but
    this.
    """

    def __init__(
        self,
        program: RProgram,
        constants: Mapping[str, Array],
        gpu: Gpu,
        index: int,
        read: Collection[str] | None = None,
        arena_of: Resident | None = None,
    ) -> None:
        self.program, self.gpu, self.closed = program, gpu, False
        self.cp = import_cupy()
        self.device = Unit(index)
        self.modules: list[Any] = []
        self._unload = weakref.finalize(self, _unload_modules, self.device, self.modules)  # closing a program is optional
        self._unload.atexit = False  # the driver may be gone by then
        self.shared = SHARED[index]
        self.constants: list[OnGpu] = []
        self.packed: dict[tuple[str, str], Any] = {}
        self.keep: list[Any] = []
        with self.device:
            self.stream: Any = arena_of.stream if arena_of is not None else self.cp.cuda.Stream(non_blocking=True)
            self.order: LastRun = arena_of.order if arena_of is not None else LastRun(self.stream)
            self.arena: Any = arena_of.arena if arena_of is not None else None
            self.buffers = self._allocate_buffers(constants, read, self._common_ports(arena_of) if arena_of is not None else {})

    def with_buffers(self, buffers: Mapping[str, Any]) -> Resident:
        """Return the same program with other arrays (CuPy, dense) for some buffers: for addresses only."""
        other = copy(self)
        other.buffers = {**self.buffers, **buffers}
        return other

    def _common_ports(self, arena_of: Resident) -> dict[str, Any]:
        """Return the buffers of ports that another program shares."""
        others = {b.name: b for b in arena_of.program.buffers}
        ports = [b for b in self.program.buffers if b.kind not in ("arena", "constant") and others.get(b.name) == b]
        return {b.name: arena_of.buffers[b.name] for b in ports}

    def _allocate_buffers(
        self, constants: Mapping[str, Array], read: Collection[str] | None, common: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return buffer name -> device bytes: one arena, one allocation for each other buffer but those in ``common``."""
        cp, program = self.cp, self.program
        values, parts = {program.storage[n].buffer: n for n in constants}, parts_of(constants)
        kept = [b for b in program.buffers if b.kind != "constant" or read is None or b.name in read]
        plain = {b.name: self._plain(values[b.name], parts[values[b.name]]) for b in kept if b.name in values}
        there = {name for name, how in plain.items() if how.form in self.shared.held} | common.keys()
        fits = self.arena is not None and self.arena.nbytes >= program.arena_bytes
        need = program.arena_bytes * (not fits) + sum(b.nbytes for b in kept if b.kind != "arena" and b.name not in there)
        free = int(cp.cuda.runtime.memGetInfo()[0])
        if need > free:
            raise DeviceFailure(
                f"out of memory: program {program.name} needs {need} bytes, {free} are free",
                hint="a smaller batch or input, or a GPU with more memory",
            )
        try:
            self.arena = arena = self.arena if fits else self._allocate_poisoned(program.arena_bytes)
            result: dict[str, Any] = dict(common)
            # All at once: separate calls would each start and end threads.
            wanted = {b.name: plain[b.name] for b in kept if b.kind != "arena" and b.name in plain and b.name not in common}
            held = self._acquire_forms({how.form: how for how in wanted.values()})
            for b in kept:
                if b.kind == "arena":
                    result[b.name] = arena[b.offset : b.offset + b.nbytes]
                elif b.name in common:
                    continue
                elif b.name in plain:
                    result[b.name] = held[wanted[b.name].form].array
                else:
                    result[b.name] = self._allocate_poisoned(b.nbytes)
            return result
        except cp.cuda.memory.OutOfMemoryError as problem:
            raise DeviceFailure(f"out of memory: {problem}", where=f"program {program.name}") from problem

    def _allocate_poisoned(self, nbytes: int) -> Any:
        """Return device bytes that are NaN in every float type. (``cupy.full`` would load a kernel for it.)"""
        result = self.cp.empty(max(nbytes, 1), self.cp.uint8)
        result.data.memset(0xFF, result.nbytes)
        return result

    def pack(self, arguments: Iterable[Argument], constants: Mapping[str, Array]) -> None:
        """Upload every constant that a kernel needs packed, once for each arrangement."""
        wanted = {(a.tensor, a.packing.key): a.packing for a in arguments if a.packing is not None}
        parts = parts_of(constants)
        forms = {key: _packed_form(parts[key[0]], packing) for key, packing in wanted.items()}
        held = self._acquire_forms({how.form: how for how in forms.values()})
        self.packed |= {key: held[how.form].array for key, how in forms.items()}

    def _acquire_forms(self, wanted: Mapping[ConstantForm, WantedForm]) -> dict[ConstantForm, OnGpu]:
        """Return forms of constants on the device, which stay there as long as this program."""
        found = self.shared.take(wanted, self._upload_forms)
        self.constants += found.values()
        return found

    def _upload_forms(self, wanted: Mapping[ConstantForm, WantedForm]) -> dict[ConstantForm, OnGpu]:
        # NumPy releases Python's lock for copies and hashes; few at a time keep their memory small.
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            arranged, result = pool.map(lambda how: how.given(_with_digest), wanted.values()), dict[ConstantForm, OnGpu]()
            for (form, how), told in zip(wanted.items(), arranged, strict=True):
                result[form] = self._upload_once(*told)
                if not isinstance(how.values, ArrayRecipe):
                    release_pages(how.values)  # a form may be the mapped values unchanged
            return result

    def _upload_once(self, values: Array, key: str) -> OnGpu:
        """Return values on the GPU; upload large ones, which have a ``key``, once, whatever they were arranged from. An embedding
        matrix, for example, equals a product's packed transpose of it."""
        if not key:
            return OnGpu(self._on_gpu(values))
        same = SAME[self.device.id]
        found = same.get(key)
        if found is None:
            found = same[key] = OnGpu(self._on_gpu(values))
        return found

    def _on_gpu(self, values: Array) -> Any:
        return self.cp.asarray(values) if values.size else self.cp.zeros(1, self.cp.uint8)

    def _plain(self, tensor: str, values: Part) -> WantedForm:
        """Return a constant as stored in its buffer."""
        storage = self.program.storage[tensor]
        buffer = self.program.buffer[storage.buffer]
        key = "" if is_whole_buffer(storage, buffer) else f"{storage.strides} {storage.offset} {buffer.size}"
        return WantedForm(
            form_of(values, key, buffer.nbytes), values, lambda given: buffer_image(storage, buffer, given).view(np.uint8)
        )

    def load(self, kernels: Iterable[TaskKernel]) -> dict[str, Any]:
        """Return functions by entry point; every distinct kernel is compiled separately, in parallel."""
        from rammer_cuda.source import translation_unit

        distinct = {k.entry: k for k in kernels}
        cubins = compile_all({e: translation_unit([k]) for e, k in distinct.items()}, self.gpu.architecture)
        return {e: self.function(cubins[e].code, e, k.dynamic) for e, k in distinct.items()}

    def switches(self, functions: Mapping[str, Any]) -> Switches:
        """Return the switches of loaded kernels, by entry point."""
        return Switches(
            {e: check_result(import_driver().cuFuncGetModule(f), f"finding the module of {e}") for e, f in functions.items()}
        )

    def function(self, code: bytes, entry: str, dynamic: int) -> Any:
        """Load a cubin and return its kernel ``entry``, allowed ``dynamic`` bytes of shared memory per block."""
        api = import_driver()
        self.modules.append(check_result(api.cuModuleLoadData(code), "loading a module"))
        found = check_result(api.cuModuleGetFunction(self.modules[-1], entry.encode()), f"finding {entry}")
        if dynamic:
            key = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check_result(api.cuFuncSetAttribute(found, key, dynamic), "reserving shared memory")
        return found

    def address(self, argument: Argument) -> int:
        """Return the device address of a kernel's pointer argument: a tensor's first element, or a packed constant."""
        if argument.packing is not None:
            return int(self.packed[argument.tensor, argument.packing.key].data.ptr)
        storage = self.program.storage[argument.tensor]
        item = itemsize(self.program.types[argument.tensor].dtype)
        return int(self.buffers[storage.buffer].data.ptr) + storage.offset * item

    def table(self, values: Array) -> int:
        """Return the address of a device copy of ``values``, which lives as long as the program."""
        self.keep.append(self.cp.asarray(values))
        return int(self.keep[-1].data.ptr)

    def ready(self) -> None:
        """Wait for the uploads: they use another stream than runs, which do not wait for it."""
        with self.device:
            self.cp.cuda.get_current_stream().synchronize()

    def follow(self, stream: Any, owner: Any = None) -> None:
        """Order the next work on ``stream`` after all runs on other streams: runs of one program share its arena. ``owner`` is
        kept alive as long as the stream may be waited for."""
        if self.closed:
            raise DeviceFailure(f"program {self.program.name} was closed")
        if stream.ptr != self.order.last.ptr:
            with self.device:
                stream.wait_event(self.order.last.record())
            self.order.last, self.order.owner = stream, owner

    def leave(self, stream: Any) -> None:
        """Forget a stream that may be destroyed; its work must have been waited for."""
        if stream.ptr == self.order.last.ptr:
            self.order.last, self.order.owner = self.stream, None

    def copy_in(self, inputs: Mapping[str, Array]) -> None:
        """Queue copies of the program's inputs, by ONNX name. Raises DeviceFailure once closed."""
        self.follow(self.stream)
        for port in self.program.inputs:
            self.write(port.tensor, inputs[port.external])

    def write(self, tensor: str, values: Array) -> None:
        """Queue a copy of one input."""
        with self.device, self.stream:
            data = self._buffer_image(tensor, values)
            if data.size:
                self.buffers[self.program.storage[tensor].buffer].set(data, stream=self.stream)

    def _buffer_image(self, tensor: str, values: Array) -> Array:
        """Return the bytes of a tensor's buffer, zero between the elements of a strided tensor."""
        storage = self.program.storage[tensor]
        return buffer_image(storage, self.program.buffer[storage.buffer], values).view(np.uint8)

    def copy_out(self) -> dict[str, Array]:
        """Return the program's outputs by ONNX name, after all queued work."""
        with self.device, self.stream:
            return {p.external: self._fetch_tensor(p.tensor) for p in self.program.outputs}

    def _fetch_tensor(self, tensor: str) -> Array:
        storage = self.program.storage[tensor]
        raw = self.cp.asnumpy(self.buffers[storage.buffer], stream=self.stream)
        self.stream.synchronize()
        size = self.program.buffer[storage.buffer].nbytes
        return np.array(storage_view(raw[:size].view(self.program.types[tensor].dtype), storage), order="C")

    def timed(self, launch: Callable[[], None], stream: Any = None) -> float:
        """Return the GPU seconds of the work that ``launch`` queues on ``stream`` (None: the program's), by events. Raises
        DeviceFailure if it fails there."""
        if stream is None:
            stream = self.stream
            self.follow(stream)
        with self.device:
            events = self.cp.cuda.Event(), self.cp.cuda.Event()
            events[0].record(stream)
            launch()
            events[1].record(stream)
            self.wait(events[1])
            return float(self.cp.cuda.get_elapsed_time(*events)) * 1e-3

    def wait(self, queued: Any) -> None:
        """Wait for a stream or event. Raises DeviceFailure if its work failed."""
        try:
            with self.device:
                queued.synchronize()
        except self.cp.cuda.runtime.CUDARuntimeError as problem:
            raise DeviceFailure(f"program {self.program.name} failed on the GPU: {problem}") from problem

    def poison(self) -> None:
        """Write NaN to every buffer but constants, and to the shared memory of every SM."""
        with self.device:
            for b in self.program.buffers:
                if b.kind != "constant":
                    self.buffers[b.name].data.memset(0xFF, self.buffers[b.name].nbytes)
            shared = self.gpu.shared
            function = self.function(compile_cubin(device_source("poison"), self.gpu.architecture).code, "rm_poison", shared)
            values = [ctypes.c_int(shared // 4)]
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(values[0]))
            blocks = 2 * self.device.multiprocessors()
            check_result(
                import_driver().cuLaunchKernel(function, blocks, 1, 1, 1024, 1, 1, shared, 0, ctypes.addressof(pointers), 0),
                "launching the kernel that fills shared memory",
            )
            self.cp.cuda.runtime.deviceSynchronize()

    def close(self) -> None:
        """Unload the modules and free all memory; closing again does nothing."""
        if not self.closed:
            self.closed = True
            self.wait(self.order.last)  # memory returned to the pool may be reused at once
            self._unload()
            self.buffers.clear()
            self.arena = None
            self.packed.clear()
            self.constants.clear()
            self.keep.clear()


def _with_digest(values: Array) -> tuple[Array, str]:
    """Return values, and their digest if they are large."""
    return values, digest_array(values.reshape(-1).view(np.uint8)) if values.nbytes >= LARGE else ""


def _packed_form(values: Part, packing: Packing) -> WantedForm:
    nbytes = packing.size * itemsize(packing.dtype)
    return WantedForm(form_of(values, packing.key, nbytes), values, lambda given: packing.make(given).reshape(-1))


def _unload_modules(unit: Unit, modules: list[Any]) -> None:
    with unit:  # any thread may collect them
        while modules:
            check_result(import_driver().cuModuleUnload(modules.pop()), "unloading a module")
