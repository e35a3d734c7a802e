"""Executable: a model on a device. Specialises at the first run of each set of input shapes and caches."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from rammer.compiled.artifact import Artifact, KeptApart, save_artifact
from rammer.compiled.kept import KeptConstants
from rammer.compiled.options import RESIDENT, CompileOptions, Progress, quiet
from rammer.compiled.segments import Compiled, with_contents
from rammer.compiled.unpack import as_refusal, check_device, load_artifact
from rammer.device.arrays import as_numpy, by_name, check_names, dtype_of, mapped, shape_of
from rammer.device.guard import compiling, guarded
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.errors import BadInput, printable
from rammer.ir.collector import collector_paused
from rammer.ir.content import Contents
from rammer.ir.formats import carrier, from_file, name_of
from rammer.ir.operator import RKernel
from rammer.ir.port import OPTIONAL, SEQUENCE, STRING, InputPort
from rammer.profile.store import KernelStore, key_of
from rammer.runtime.bodies import BodyPrograms
from rammer.runtime.bound import ModelBound
from rammer.runtime.continuation import Continuation
from rammer.runtime.lengths import FIXED, Lengths, Span
from rammer.runtime.residents import Residents
from rammer.runtime.source import Head, ModelSource
from rammer.runtime.specialised import NO_RUN, Specialised, Timing, load_segments

if TYPE_CHECKING:
    from rammer.compiler import Compiler
    from rammer.frontend.reader import Model

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"
ShapeKey: TypeAlias = "tuple[tuple[str, tuple[int, ...]], ...]"
#: The folder beside that of programs, of constants by content.
CONSTANTS: Final = "constants"


@dataclass
class Executable:
    """``exe.run({name: array}) -> {name: array}``. Holds one Specialised per set of input shapes, ``resident`` at most: the
    least recently used is freed for a new one, but none that is running or has an open bound call.

    Any thread may call it at any time. Runs of one set of shapes take turns on the device; a set is compiled once, and
    compiling does not stop runs of others. ``close`` waits for the runs in progress; later calls raise DeviceFailure.

    ``device`` is the name it was opened by, ``NAME:INDEX``, ``device_options`` its own options. With ``programs``, a
    folder, compiled programs are kept there and found again by the next process. ``lengths`` are ranges of open dimensions: a
    program serves all lengths of a part of them."""

    source: ModelSource
    backend: Backend
    device: str
    options: CompileOptions = field(default_factory=CompileOptions)
    registry: Registry | None = None
    progress: Progress = quiet
    store: KernelStore | None = None
    programs: Path | None = None
    device_options: Mapping[str, str] = field(default_factory=dict)
    timing: Timing = NO_RUN  #: Of the run that ended last.
    resident: int = RESIDENT
    lengths: Lengths = field(default=FIXED)
    contents: Contents = field(default_factory=Contents, repr=False)  #: Constants of all programs, equal ones once.
    owner: bool = False  #: Whether ``close`` closes ``backend``, too: nobody else has it.

    def __post_init__(self) -> None:
        self.backend = guarded(self.backend, self.device)

    @cached_property
    def residents(self) -> Residents[ShapeKey]:
        """The programs on the device."""
        return Residents(self.head.name, self.resident)

    @cached_property
    def bodies(self) -> BodyPrograms:
        """The bodies of control flow on the device."""
        return BodyPrograms(self._continued, Residents(self.head.name, self.resident))

    @property
    def hosted(self) -> list[str]:
        """Operators that the host has computed so far, a name for each; of control flow those whose bodies it ran, too."""
        from rammer.frontend.control import CONTROL

        specials = (*self.residents.held.values(), *self.bodies.residents.held.values())
        found = [h.node.node.op for special in specials for h in special.host_nodes]
        return [op for op in found if op not in CONTROL or self.bodies.on_host]

    @property
    def cache(self) -> Mapping[ShapeKey, Specialised]:
        """The programs on the device by input shapes, the one used last at the end."""
        return self.residents.held

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.residents.closed

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
        with self._used(shapes_of(self.head, arrays)) as special:
            outputs, self.timing = special.run(arrays)
        return outputs

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any] | None = None, stream: Any = None) -> ModelBound:
        """A call with fixed arrays: ``bound.run()`` reads these inputs and writes these outputs where they are.

        Arrays are the device's (DLPack or ``__cuda_array_interface__``: torch, CuPy, JAX) or the host's; a host array
        bound to a device with memory of its own is copied there once, and ``bound.write`` copies new values. Outputs
        that are not given are allocated: ``bound.outputs``. ``stream`` is a queue of the device's kind to run on (for
        cuda: torch's, CuPy's, or a handle). BadInput for what ``run`` refuses, for an output of the wrong type or shape,
        and for an array that the device cannot reach. Other libraries' arrays of bfloat16 and the like are given as their bits.
        """
        arrays, given = by_name("input", inputs), by_name("output", outputs or {})
        bits = {p.name: p.dtype for p in self.head.inputs if p.name in arrays and dtype_of(arrays[p.name]) == carrier(p.dtype)}
        check_ports(self.head.inputs, {n: (bits.get(n, dtype_of(a)), shape_of(a)) for n, a in arrays.items()})
        with self._used({n: shape_of(a) for n, a in arrays.items()}) as special:
            return special.bind(arrays, given, stream)

    def checked(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """``inputs`` as contiguous arrays of the declared types; BadInput says which one is wrong and how."""
        return check_inputs(self.head.inputs, inputs)

    def prepare(self, inputs: Mapping[str, Array]) -> Specialised:
        """Compile and load for the shapes of ``inputs``, or return what is cached."""
        return self.specialise(shapes_of(self.head, inputs))

    def specialise(self, shapes: Mapping[str, tuple[int, ...]]) -> Specialised:
        """Compile and load for these input shapes, or return what is cached. It may be freed when others are needed."""
        spans = self.lengths.buckets(self.head.inputs, shapes)
        key = tuple(sorted(self.lengths.longest(self.head.inputs, shapes, spans).items()))
        ranged = (*key, *sorted(spans.items()))
        found = self.residents.find(ranged)
        if found is not None:
            return found
        with compiling(self.backend):  # whoever waits here for the same shapes finds them made
            return self.residents.find(ranged) or self._made(ranged, shapes, spans)

    def _made(self, key: ShapeKey, shapes: Shapes, spans: Mapping[str, Span]) -> Specialised:
        """What is kept for the key, or compiled."""
        start = time.perf_counter()
        with collector_paused():
            compiled = self._from_cache(key)
        if compiled is not None:
            try:
                with as_refusal(self._path(key)):
                    return self._load(key, compiled, start)
            except BadInput as problem:
                warn(f"{problem.what}; compiling again")
        compiled = self._compiled(shapes, spans)
        if spans and compiled.ranged is None:
            key = tuple(sorted(shapes.items()))
        self._keep(key, compiled)
        return self._load(key, compiled, start)

    def _compiled(self, shapes: Shapes, spans: Mapping[str, Span]) -> Compiled:
        """One program for the lengths in ``spans``; where there is none, the range ends, and it is one for these shapes."""
        if not spans:
            return self.compiler.compile_model(self.source.model, shapes)
        from rammer.frontend.generalise import NoRange

        try:
            return self.compiler.compile_range(self.source.model, shapes, spans, self.lengths.derived)
        except NoRange as problem:
            warn(f"{problem}")
        self.lengths = FIXED
        return self.compiler.compile_model(self.source.model, shapes)

    def adopt(self, compiled: Compiled) -> Specialised:
        """Load a program that was compiled elsewhere; runs of its input shapes use it."""
        key = tuple(sorted((v.external or v.name, v.type.shape) for v in compiled.graph.inputs))
        with compiling(self.backend):
            return self._load(key, compiled, time.perf_counter())

    def _load(self, key: ShapeKey, compiled: Compiled, start: float) -> Specialised:
        special = self._loaded(compiled, start)
        self.residents.keep(key, special)
        return special

    def _loaded(self, compiled: Compiled, start: float) -> Specialised:
        """``compiled`` on the device. What waits for values is compiled when they are there."""
        compiled = with_contents(compiled, self.contents)
        loaded, following = load_segments(self.backend, compiled), None
        if compiled.rest is not None:
            following = Continuation(compiled.rest, self._continued, Residents(self.head.name, self.resident), self.bodies)
        return Specialised(compiled, loaded, time.perf_counter() - start, following, self.bodies)

    def _continued(self, model: Model) -> Specialised:
        """A part of the model whose shapes are known."""
        with compiling(self.backend):
            start = time.perf_counter()
            return self._loaded(self.compiler.compile_model(model, {}), start)

    def _used(self, shapes: Mapping[str, tuple[int, ...]]) -> AbstractContextManager[Specialised]:
        """The Specialised of these shapes, which is not freed meanwhile."""
        return self.residents.used(lambda: self.specialise(shapes))

    def compile_only(self, shapes: Mapping[str, tuple[int, ...]]) -> Compiled:
        """Every step short of loading; ``shapes`` are needed for dynamic inputs only, and of a range for another length than the
        greatest."""
        shapes = self.lengths.greatest(self.head.inputs, shapes)
        with compiling(self.backend):
            spans = self.lengths.buckets(self.head.inputs, shapes)
            return self._compiled(shapes, spans)

    def resources(self, compiled: Compiled) -> list[RKernel]:
        """The chosen kernel of every operator with the resources that the device's compiler reports."""
        with compiling(self.backend):
            return self.compiler.resources(compiled)

    def artifact(self, compiled: Compiled) -> Artifact:
        """``compiled`` with what a later process needs to run it. BadInput where a part of it waits for values of a run."""
        if compiled.rest is not None:
            why = compiled.rest.why
            raise BadInput(f"a compiled file needs fixed shapes, but {why.what}", why.where, why.hint)
        if compiled.ranged is not None:
            raise BadInput(
                "a compiled file needs fixed shapes", "a program for a range of lengths", "give the shapes of all inputs"
            )
        return self._artifact(compiled)

    def _artifact(self, compiled: Compiled) -> Artifact:
        return Artifact(
            compiled,
            self.device,
            self.options.target,
            self.backend.fingerprint,
            self.options.policy,
            self.device_options,
            self.options.precision,
        )

    def _to_cache(self, compiled: Compiled, path: Path) -> Artifact:
        """``compiled`` under the key that its file's name is: one that lies under another name is not what it says."""
        return replace(self._artifact(compiled), key=path.stem)

    def _keep(self, key: ShapeKey, compiled: Compiled) -> None:
        path = self._path(key) if compiled.rest is None else None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                save_artifact(path, self._to_cache(compiled, path), KeptApart(self._kept(), self.source.model.files))
            except OSError as problem:
                warn(f"compiled program is not kept: {problem}")

    def _from_cache(self, key: ShapeKey) -> Compiled | None:
        path = self._path(key)
        if path is None or not path.is_file():
            return None
        try:
            cached = load_artifact(path, self.registry.operators if self.registry else dict, self._kept())
            bare = Compiled(cached.compiled.graph, ())
            if replace(cached, compiled=bare) != self._to_cache(bare, path) or not self._fits(cached.compiled, key):
                raise BadInput(f"{path} was kept for something else")
            check_device(path, cached.compiled, self.backend)
            return cached.compiled
        except BadInput as problem:
            warn(f"{problem.what}; compiling again")
            return None

    def _kept(self) -> KeptConstants:
        """Where large constants of kept programs are."""
        assert self.programs is not None
        home = self.source.path.parent if self.source.path is not None else None
        return KeptConstants(self.programs.with_name(CONSTANTS), home, self.source.seen)

    def _fits(self, compiled: Compiled, key: ShapeKey) -> bool:
        """Whether a program has the model's ports, at the shapes that it was kept for."""
        lengths = compiled.ranged.lengths if compiled.ranged is not None else {}
        have = {v.external or v.name: v.port for v in compiled.graph.inputs if v.name not in lengths.values()}
        if {*lengths} != {n for n, _ in key} & {*self.lengths.spans} or {n: t.dtype for n, t in have.items()} != {
            p.name: p.dtype for p in self.head.inputs
        }:
            return False
        outputs = tuple(v.external or v.name for v in compiled.graph.outputs)
        return outputs == self.head.outputs and all(have[n].shape == s for n, s in key if n in have and n not in lengths)

    def _path(self, key: ShapeKey) -> Path | None:
        if self.programs is None or not self.source.digest:
            return None
        options = self.options
        extensions = self.registry.extension_key() if self.registry else ""
        parts = (
            self.source.digest,
            repr(key) + "".join(f" {n}={e}" for n, e in self.lengths.derived.items()),
            self.backend.fingerprint,
            options.policy,
            options.tune,
            options.precision,
            options.layout,
            options.batching,
            extensions,
        )
        return self.programs / f"{key_of(*parts)}.rammer"

    def close(self) -> None:
        """Free the device when the runs in progress have ended; further calls raise DeviceFailure."""
        self.residents.close()
        self.bodies.close()
        if self.owner:
            self.backend.close()


def warn(message: str) -> None:
    """One line on stderr."""
    sys.stderr.write(printable(f"rammer: warning: {message}\n"))


def check_inputs(ports: tuple[InputPort, ...], given: Mapping[str, Any]) -> dict[str, Array]:
    """The inputs as arrays of exactly the declared types; BadInput says which one is wrong and how."""
    given = mapped("input", given)
    hosted = {p.name: _on_host(p, given[p.name]) for p in ports if not p.numeric and p.name in given}
    others = by_name("input", {n: v for n, v in given.items() if n not in hosted})
    kinds = {p.name: p.dtype for p in ports}
    arrays = {n: from_file(as_numpy(f"input {n!r}", v), kinds.get(n, "")) for n, v in others.items()}
    check_ports(ports, {**dict.fromkeys(hosted, ("", ())), **{n: (name_of(a.dtype), a.shape) for n, a in arrays.items()}})
    return {p.name: hosted[p.name] if p.name in hosted else np.asarray(arrays[p.name], order="C") for p in ports}


def _on_host(port: InputPort, value: Any) -> Any:
    """A value of an input that no device holds. BadInput where it is of another kind."""
    if port.dtype == SEQUENCE and isinstance(value, list | tuple):
        return [as_numpy(f"input {port.name!r}", v) for v in value]
    if port.dtype == OPTIONAL:
        if value is None or isinstance(value, list | tuple):
            return value
        return as_numpy(f"input {port.name!r}", value)
    array = as_numpy(f"input {port.name!r}", value)
    if port.dtype == STRING and array.dtype.kind in "OUST":
        return array.astype(object)
    wanted = {STRING: "an array of strings", SEQUENCE: "a list of arrays"}[port.dtype]
    raise BadInput(f"input {port.name!r} is {array.dtype}{list(array.shape)}, the model declares {wanted}")


def shapes_of(head: Head, values: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs that a device can hold."""
    return {p.name: values[p.name].shape for p in head.inputs if p.numeric}


def check_ports(ports: tuple[InputPort, ...], given: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """BadInput unless ``given`` has an element type and shape for every port, and they are as declared."""
    names = [p.name for p in ports]
    check_names("input", given, dict.fromkeys(names))
    for port in ports:
        if port.name not in given:
            raise BadInput(f"input {port.name!r} is missing", hint=f"the model needs: {', '.join(names)}")
        if port.numeric:
            _check_port(port, *given[port.name])
    _check_symbols([p for p in ports if p.numeric], {name: shape for name, (_, shape) in given.items()})


def _check_port(port: InputPort, dtype: str, shape: tuple[int, ...]) -> None:
    if dtype == port.dtype and shape == port.shape:
        return
    declared = f"{port.dtype}[{','.join('?' if d is None else str(d) for d in port.shape)}]"
    if dtype != port.dtype:
        raise BadInput(
            f"input {port.name!r} is {dtype}, the model declares {declared}", hint=f"convert it: array.astype({port.dtype!r})"
        )
    if len(shape) != len(port.shape):
        raise BadInput(f"input {port.name!r} has rank {len(shape)}, the model declares {declared}")
    for axis, (have, want) in enumerate(zip(shape, port.shape, strict=True)):
        if isinstance(want, int) and have != want:
            raise BadInput(f"input {port.name!r} has {have} elements along axis {axis}, the model declares {declared}")


def _check_symbols(ports: Sequence[InputPort], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A named dimension must have one extent everywhere."""
    known: dict[str, tuple[int, str]] = {}
    for port in ports:
        for have, want in zip(shapes[port.name], port.shape, strict=True):
            if isinstance(want, str):
                first, where = known.setdefault(want, (have, port.name))
                if first != have:
                    raise BadInput(f"dimension {want!r} is {first} in input {where!r} but {have} in {port.name!r}")
