"""Executable: a model on a device. Specialises at the first run of each set of input shapes and caches."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

import numpy as np

from rammer.device.arrays import as_numpy, by_name, dtype_of, shape_of
from rammer.device.loader import Registry
from rammer.device.manifest import Backend, Loaded
from rammer.errors import BadInput
from rammer.ir.collector import collector_paused
from rammer.ir.operator import RKernel
from rammer.ir.port import InputPort
from rammer.profile.store import KernelStore, key_of
from rammer.runtime.artifact import Artifact, load_artifact, save_artifact
from rammer.runtime.bound import ModelBound
from rammer.runtime.options import CompileOptions, Progress, quiet
from rammer.runtime.segments import Compiled, HostSegment, ProgramSegment
from rammer.runtime.source import Head, ModelSource

if TYPE_CHECKING:
    from rammer.compiler import Compiler

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
ShapeKey: TypeAlias = "tuple[tuple[str, tuple[int, ...]], ...]"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run: on the device (simulated where the device is), on the host, and in all."""

    device: float
    host: float
    total: float
    notes: tuple[str, ...] = ()


@dataclass
class Specialised:
    """A compiled model whose programs are loaded on the device."""

    compiled: Compiled
    loaded: dict[int, Loaded]
    compile_seconds: float
    bounds: WeakSet[ModelBound] = field(default_factory=WeakSet)

    @property
    def kernels(self) -> int:
        """Kernel launches (or supersteps) of one run."""
        return sum(p.kernels for p in self.loaded.values())

    def run(self, inputs: Mapping[str, Array],
            watch: Callable[[ProgramSegment, Mapping[str, Array]], None] | None = None
            ) -> tuple[dict[str, Array], Timing]:  # fmt: skip
        """One run through all segments, by ONNX names; ``watch`` is told every program's inputs before it runs."""
        start, device, host, notes = time.perf_counter(), 0.0, 0.0, list[str]()
        graph = self.compiled.graph
        values: dict[str, Array] = {v.name: inputs[v.external or v.name] for v in graph.inputs}
        for number, segment in enumerate(self.compiled.segments):
            if isinstance(segment, HostSegment):
                begin = time.perf_counter()
                known = {n: values[n] if n in values else graph.constants[n] for n in segment.node.inputs if n}
                values.update(segment.node.run(known))
                host += time.perf_counter() - begin
            else:
                feeds = {p.external: values[p.tensor] for p in segment.program.inputs}
                if watch is not None:
                    watch(segment, feeds)
                device += self._device(number, segment, feeds, values, notes)
        outputs = {v.external or v.name: _value(values, graph.constants, v.name) for v in graph.outputs}
        return outputs, Timing(device, host, time.perf_counter() - start, tuple(dict.fromkeys(notes)))

    def _device(self, number: int, segment: ProgramSegment, feeds: Mapping[str, Array], values: dict[str, Array],
                notes: list[str]) -> float:  # fmt: skip
        result = self.loaded[number].run(feeds)
        for port in segment.program.outputs:
            values[port.tensor] = result.outputs[port.external]
        notes += result.notes
        return result.seconds

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> ModelBound:
        """A call with these arrays by ONNX name; inputs have been checked."""
        made = ModelBound(self.compiled, self.loaded, inputs, outputs, stream)
        self.bounds.add(made)
        return made

    def close(self) -> None:
        """Free the device; bound calls are closed, too."""
        for bound in list(self.bounds):
            bound.close()
        for program in self.loaded.values():
            program.close()


def _value(values: Mapping[str, Array], constants: Mapping[str, Array], name: str) -> Array:
    return values[name] if name in values else constants[name]


@dataclass
class Executable:
    """``exe.run({name: array}) -> {name: array}``. Holds one Specialised per set of input shapes.

    ``device`` is the name it was opened by, ``NAME:INDEX``, ``device_options`` its own options. With ``programs``, a
    folder, compiled programs are kept there and found again by the next process.
    """

    source: ModelSource
    backend: Backend
    device: str
    options: CompileOptions = field(default_factory=CompileOptions)
    registry: Registry | None = None
    progress: Progress = quiet
    store: KernelStore | None = None
    programs: Path | None = None
    device_options: Mapping[str, str] = field(default_factory=dict)
    cache: dict[ShapeKey, Specialised] = field(default_factory=dict)
    timing: Timing = Timing(0.0, 0.0, 0.0)

    @cached_property
    def compiler(self) -> Compiler:
        """The compiler; importing it (and ONNX with it) waits until something is compiled."""
        from rammer.compiler import Compiler

        store, name = self.store or KernelStore.default(), self.device.partition(":")[0]
        return Compiler(self.backend, self.options, store, self.registry, self.progress, name)

    @property
    def head(self) -> Head:
        """Name and ports of the model."""
        return self.source.head

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Run once. BadInput for missing, unknown, wrongly typed or wrongly shaped inputs."""
        arrays = self.checked(inputs)
        outputs, self.timing = self.prepare(arrays).run(arrays)
        return outputs

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any] | None = None,
             stream: Any = None) -> ModelBound:  # fmt: skip
        """A call with fixed arrays: ``bound.run()`` reads these inputs and writes these outputs where they are.

        Arrays are the device's (DLPack or ``__cuda_array_interface__``: torch, CuPy, JAX) or the host's; a host array
        bound to a device with memory of its own is copied there once, and ``bound.write`` copies new values. Outputs
        that are not given are allocated: ``bound.outputs``. ``stream`` is a queue of the device's kind to run on (for
        cuda: torch's, CuPy's, or a handle). BadInput for what ``run`` refuses, for an output of the wrong type or shape,
        and for an array that the device cannot reach.
        """
        arrays, given = by_name("input", inputs), by_name("output", outputs or {})
        check_ports(self.head.inputs, {n: (dtype_of(a), shape_of(a)) for n, a in arrays.items()})
        special = self.specialise({n: shape_of(a) for n, a in arrays.items()})
        return special.bind(arrays, given, stream)

    def checked(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """``inputs`` as contiguous arrays of the declared types; BadInput says which one is wrong and how."""
        return check_inputs(self.head.inputs, inputs)

    def prepare(self, inputs: Mapping[str, Array]) -> Specialised:
        """Compile and load for the shapes of ``inputs``, or return what is cached."""
        return self.specialise({name: a.shape for name, a in inputs.items()})

    def specialise(self, shapes: Mapping[str, tuple[int, ...]]) -> Specialised:
        """Compile and load for these input shapes, or return what is cached."""
        key = tuple(sorted(shapes.items()))
        if key not in self.cache:
            start = time.perf_counter()
            with collector_paused():
                compiled = self._kept(key)
            compiled = compiled or self._compile(key, shapes)
            loaded = load_segments(self.backend, compiled)
            self.cache[key] = Specialised(compiled, loaded, time.perf_counter() - start)
        return self.cache[key]

    def adopt(self, compiled: Compiled) -> Specialised:
        """Load a program that was compiled elsewhere; runs of its input shapes use it."""
        key = tuple(sorted((v.external or v.name, v.type.shape) for v in compiled.graph.inputs))
        start = time.perf_counter()
        loaded = load_segments(self.backend, compiled)
        self.cache[key] = Specialised(compiled, loaded, time.perf_counter() - start)
        return self.cache[key]

    def compile_only(self, shapes: Mapping[str, tuple[int, ...]]) -> Compiled:
        """Every step short of loading; ``shapes`` are needed for dynamic inputs only."""
        return self.compiler.compile_model(self.source.model, shapes)

    def resources(self, compiled: Compiled) -> list[RKernel]:
        """The chosen kernel of every operator with the resources that the device's compiler reports."""
        return self.compiler.resources(compiled)

    def artifact(self, compiled: Compiled) -> Artifact:
        """``compiled`` with what a later process needs to run it."""
        return Artifact(compiled, self.device, self.options.target, self.backend.fingerprint, self.options.policy,
                        self.device_options, self.options.precision)  # fmt: skip

    def _compile(self, key: ShapeKey, shapes: Mapping[str, tuple[int, ...]]) -> Compiled:
        compiled = self.compile_only(shapes)
        path = self._path(key)
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                save_artifact(path, self.artifact(compiled))
            except OSError as problem:
                warn(f"compiled program is not kept: {problem}")
        return compiled

    def _kept(self, key: ShapeKey) -> Compiled | None:
        path = self._path(key)
        if path is None or not path.is_file():
            return None
        try:
            return load_artifact(path, proved=True).compiled  # the compiler verified it; the zip's checksums still count
        except BadInput as problem:
            warn(f"{problem.what}; compiling again")
            return None

    def _path(self, key: ShapeKey) -> Path | None:
        if self.programs is None or not self.source.digest:
            return None
        options = self.options
        extensions = self.registry.extension_key() if self.registry else ""
        parts = (self.source.digest, repr(key), self.backend.fingerprint, options.policy, options.tune,
                 options.precision, options.layout, extensions)  # fmt: skip
        return self.programs / f"{key_of(*parts)}.rammer"

    def close(self) -> None:
        """Free the device."""
        for special in self.cache.values():
            special.close()
        self.cache.clear()


def warn(message: str) -> None:
    """One line on stderr."""
    print(f"rammer: warning: {message}", file=sys.stderr)


def load_segments(backend: Backend, compiled: Compiled) -> dict[int, Loaded]:
    """Load every device segment; what was loaded is freed again if a later one fails."""
    loaded: dict[int, Loaded] = {}
    try:
        with collector_paused():
            for number, segment in enumerate(compiled.segments):
                if isinstance(segment, ProgramSegment):
                    loaded[number] = backend.load(segment.program, segment.constants)
    except BaseException:
        for program in loaded.values():
            program.close()
        raise
    return loaded


def check_inputs(ports: tuple[InputPort, ...], given: Mapping[str, Any]) -> dict[str, Array]:
    """The inputs as arrays of exactly the declared types; BadInput says which one is wrong and how."""
    arrays = {name: as_numpy(f"input {name!r}", value) for name, value in by_name("input", given).items()}
    check_ports(ports, {name: (str(a.dtype), a.shape) for name, a in arrays.items()})
    return {p.name: np.asarray(arrays[p.name], order="C") for p in ports}


def check_ports(ports: tuple[InputPort, ...], given: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """BadInput unless ``given`` has an element type and shape for every port, and they are as declared."""
    names = [p.name for p in ports]
    unknown = [n for n in given if n not in names]
    if unknown:
        raise BadInput(f"the model has no input {unknown[0]!r}", hint=f"its inputs are: {', '.join(names)}")
    for port in ports:
        if port.name not in given:
            raise BadInput(f"input {port.name!r} is missing", hint=f"the model needs: {', '.join(names)}")
        _check_port(port, *given[port.name])
    _check_symbols(ports, {name: shape for name, (_, shape) in given.items()})


def _check_port(port: InputPort, dtype: str, shape: tuple[int, ...]) -> None:
    declared = f"{port.dtype}[{','.join('?' if d is None else str(d) for d in port.shape)}]"
    if dtype != port.dtype:
        raise BadInput(f"input {port.name!r} is {dtype}, the model declares {declared}",
                       hint=f"convert it: array.astype({port.dtype!r})")  # fmt: skip
    if len(shape) != len(port.shape):
        raise BadInput(f"input {port.name!r} has rank {len(shape)}, the model declares {declared}")
    for axis, (have, want) in enumerate(zip(shape, port.shape, strict=True)):
        if isinstance(want, int) and have != want:
            raise BadInput(f"input {port.name!r} has {have} elements along axis {axis}, the model declares {declared}")


def _check_symbols(ports: tuple[InputPort, ...], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A named dimension must have one extent everywhere."""
    known: dict[str, tuple[int, str]] = {}
    for port in ports:
        for have, want in zip(shapes[port.name], port.shape, strict=True):
            if isinstance(want, str):
                first, where = known.setdefault(want, (have, port.name))
                if first != have:
                    raise BadInput(f"dimension {want!r} is {first} in input {where!r} but {have} in {port.name!r}")
