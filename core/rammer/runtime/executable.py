"""Executable: a model on a device. Specialises at the first run of each set of input shapes and caches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rammer.compiled.artifact import Artifact
from rammer.compiled.artifact_reader import as_refusal
from rammer.compiled.segments import Compiled, ProgramSegment, with_contents, with_needs
from rammer.compiler.compile_options import RESIDENT, CompileOptions, Progress, ignore_progress
from rammer.device.capabilities import ProgramsBeside
from rammer.device.guard import compile_lock, guard_backend
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.errors import BadInput, DeviceFailure, print_warning
from rammer.ir.collector import collector_paused
from rammer.ir.constants.recipes import Contents
from rammer.ir.extent import NoRange
from rammer.ir.operator import RKernel
from rammer.runtime.auto_ranges import Seen
from rammer.runtime.bind_request import Asked, parse_bind_request
from rammer.runtime.bound_call import ModelBound
from rammer.runtime.continuation import Continuation
from rammer.runtime.control_flow import BodyPrograms
from rammer.runtime.input_checks import check_inputs, shapes_of
from rammer.runtime.loaded_model import NO_RUN, LoadedModel, Timing, load_segments
from rammer.runtime.loaded_programs import LoadedPrograms
from rammer.runtime.model_source import Head, ModelSource
from rammer.runtime.operator_check import check_values, is_asked, with_results
from rammer.runtime.program_cache import ProgramCache, fits_part, fits_shapes, part_key
from rammer.runtime.ranged_call import BindSpec
from rammer.runtime.shape_buckets import BOUND, FIXED, MEMORY, Lengths, ShapeKey, Shapes, Span, format_spans, key_for
from rammer.tuning.kernel_store import KernelStore

if TYPE_CHECKING:
    from rammer.compiler.compiler import Compiler
    from rammer.frontend.read.reader import Model

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: Shapes of runs whose program is known without another look at the ranges.
MOST_NOTED = 4096


@dataclass
class Executable:
    """``exe.run({name: array}) -> {name: array}``. Holds one Specialised per set of input shapes, ``resident`` at most: the
    least recently used is freed for a new one, but none that is running or has an open bound call.

    Any thread may call it at any time. Runs of one set of shapes take turns on the device; a set is compiled once, and
    compiling does not stop runs of others. ``close`` waits for the runs in progress; later calls raise DeviceFailure.

    ``device`` is the name it was opened by, ``NAME:INDEX``, ``device_options`` its own options. With ``programs``, a
    folder, compiled programs are kept there and found again by the next process. ``lengths`` are ranges of open dimensions: a
    program serves all lengths of a part of them. Of a model for which none were given, ``seen`` tells them."""

    source: ModelSource
    backend: Backend
    device: str
    options: CompileOptions = field(default_factory=CompileOptions)
    registry: Registry | None = None
    progress: Progress = ignore_progress
    store: KernelStore | None = None
    programs: Path | None = None
    device_options: Mapping[str, str] = field(default_factory=dict)
    timing: Timing = NO_RUN  #: Of the run that ended last.
    resident: int = RESIDENT
    lengths: Lengths = field(default=FIXED)
    seen: Seen = field(default_factory=Seen)
    contents: Contents = field(default_factory=Contents, repr=False)  #: Constants of all programs, equal ones once.
    _numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)
    _ranges: dict[tuple[tuple[str, tuple[int, ...]], ...], ShapeKey] = field(default_factory=dict, repr=False)
    owner: bool = False  #: Whether ``close`` closes ``backend``, too: nobody else has it.

    def __post_init__(self) -> None:
        self.backend = guard_backend(self.backend, self.device)

    @cached_property
    def residents(self) -> LoadedPrograms[ShapeKey]:
        """The programs on the device."""
        return LoadedPrograms(self.head.name, self.resident)

    @cached_property
    def bodies(self) -> BodyPrograms:
        """The bodies of control flow on the device."""
        return BodyPrograms(self._specialise_continuation, LoadedPrograms(self.head.name, self.resident), self._has_part)

    @cached_property
    def kept(self) -> ProgramCache:
        """The programs on disk."""
        about = (self.source, self.backend, self.device, self.options, self.device_options)
        return ProgramCache(*about, self.registry, self.programs)

    @property
    def hosted(self) -> list[str]:
        """Operators that the host has computed so far, a name for each; of control flow those whose bodies it ran, too."""
        from rammer.frontend.loops.control_operators import CONTROL

        specials = (*self.residents.held.values(), *self.bodies.residents.held.values())
        found = [h.node.node.op for special in specials for h in special.host_nodes]
        return [op for op in found if op not in CONTROL or self.bodies.on_host]

    @property
    def cache(self) -> Mapping[ShapeKey, LoadedModel]:
        """The programs on the device by input shapes, the one used last at the end."""
        return self.residents.held

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.residents.closed

    @cached_property
    def compiler(self) -> Compiler:
        """The compiler; importing it (and ONNX with it) waits until something is compiled."""
        from rammer.compiler.compiler import Compiler

        store, name = self.store or KernelStore.default(), self.device.partition(":")[0]
        made = Compiler(self.backend, self.options, store, self.registry, self.progress, name)
        made.tuner.beside = self.beside
        return made

    @cached_property
    def beside(self) -> ProgramsBeside:
        """What is on the device, for a compiler that may come later: to load a kept program imports none."""
        return ProgramsBeside(self.backend)

    @property
    def head(self) -> Head:
        """Name and ports of the model."""
        return self.source.head

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Run once. BadInput for missing, unknown, wrongly typed or wrongly shaped inputs."""
        arrays = self.checked(inputs)
        if is_asked():
            self.check_run(arrays)
        with self.residents.used(lambda: self.specialise(shapes_of(self.head, arrays))) as special:
            outputs, self.timing = special.run(arrays)
        return outputs

    def check_run(self, inputs: Mapping[str, Array]) -> None:
        """Run once with the results of all operators as outputs (``rammer.runtime.operator_check``). BadInput names the first
        operator that reads an index out of range, or makes NaN or an infinity. ``run`` does so, too, where ``RAMMER_CHECK=1`` is
        set."""
        if self.source.known is not None:
            raise BadInput("a compiled file does not have the operators to check", "--check", "give the model")
        model = with_results(self.source.model)
        source = ModelSource(lambda: model, path=self.source.path)
        exe = replace(
            self, source=source, programs=None, lengths=FIXED, seen=Seen(), contents=Contents(), _ranges={}, owner=False
        )
        try:
            special = exe.prepare(inputs)
            outputs, _ = special.run(inputs)
        finally:
            exe.close()
        check_values(model, {**inputs, **outputs})

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any] | None = None, stream: Any = None) -> ModelBound:
        """A call with fixed arrays: ``bound.run()`` reads these inputs and writes these outputs where they are.

        Of a model with ranges, arrays of the greatest lengths are bound for all of them: ``bound.run(past=5)``; where runs
        have shown which change, for all up to the arrays'. Others have a program alone. An output may stay in the memory of an
        input for the next run, ``{"present": "past"}``: such an input need not be given, and begins with zeros; where the
        output continues it, one row is written a run (``rammer.runtime.ranged_call``); of a compiled file it is copied there.

        Arrays are the device's (DLPack or ``__cuda_array_interface__``: torch, CuPy, JAX) or the host's; a host array
        bound to a device with memory of its own is copied there once, and ``bound.write`` copies new values. Outputs
        that are not given are allocated: ``bound.outputs``. ``stream`` is a queue of the device's kind to run on (for
        cuda: torch's, CuPy's, or a handle). BadInput for what ``run`` refuses, for an output of the wrong type or shape,
        and for an array that the device cannot reach. Other libraries' arrays of bfloat16 and the like are given as their bits.
        """
        what = parse_bind_request(self.head, self.lengths, self.seen, inputs, outputs or {})
        if not what.spans and not what.kept:
            with self.residents.used(lambda: self._specialise_shapes(what.shapes, {}, FIXED)) as special:
                return special.bind(what.inputs, what.outputs, stream)
        of_file = self.source.known is not None  # its program is for bound calls, too, and has no states: they are copied
        own = ((MEMORY, next(self._numbers)),) if what.kept and not of_file else ()  # states are no other call's
        key = key_for(what.shapes, what.spans, what.lengths.derived)
        if not of_file and (what.kept or what.found or self.lengths.buckets > 1):
            key = (*key, (BOUND, tuple(sorted(what.kept.items()))), *own)
        terms = BindSpec(what.spans, what.kept, (lambda: self.residents.drop(key)) if own else None)
        if what.found and what.spans and self._try_range(lambda: self._find_bindable(key, what), what.spans) is None:
            return self.bind(inputs, outputs, stream)
        with self.residents.used(lambda: self._find_bindable(key, what)) as special:
            return special.bind(what.inputs, what.outputs, stream, terms)

    def _find_bindable(self, key: ShapeKey, what: Asked) -> LoadedModel:
        """The program of a bound call for a range, or with outputs that stay in their inputs' memory."""
        with compile_lock(self.backend):
            found = self.residents.find(key)
            if found is None:
                kept = tuple(item for item in key if item[0] != MEMORY)
                found = self._made(key, kept, lambda: self._compiled_bound(what))
        return found

    def _compiled_bound(self, what: Asked) -> Compiled:
        """NoRange where a range has no program."""
        if what.spans:
            return self.compiler.compile_range(self.source.model, what.shapes, what.spans, what.lengths.derived, what.kept)
        return self.compiler.compile_model(self.source.model, what.shapes, what.kept)

    def checked(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """``inputs`` as contiguous arrays of the declared types; BadInput says which one is wrong and how."""
        return check_inputs(self.head.inputs, inputs)

    def prepare(self, inputs: Mapping[str, Array]) -> LoadedModel:
        """Compile and load for the shapes of ``inputs``, or return what is cached."""
        return self.specialise(shapes_of(self.head, inputs))

    def specialise(self, shapes: Mapping[str, tuple[int, ...]]) -> LoadedModel:
        """Compile and load for these input shapes, or return what is cached. It may be freed when others are needed."""
        lengths, at = self.lengths, tuple(shapes.items())
        if (key := self._ranges.get(at)) is not None and lengths.spans and (known := self.residents.find(key)) is not None:
            return known
        if not lengths.spans and self.seen.on:
            lengths = self.seen.learned(self.head.inputs, shapes)
            alone = self.residents.find(tuple(sorted(shapes.items())))
            if alone is not None:
                return alone
            path = self.kept.path(tuple(sorted(shapes.items())))
            lengths = FIXED if path is not None and path.is_file() else lengths  # one that an earlier process made for them alone
        spans = lengths.spans_of(self.head.inputs, shapes)
        found = self._try_range(lambda: self._specialise_shapes(shapes, spans, lengths), spans) if spans else None
        return found or self._specialise_shapes(shapes, {}, FIXED)

    def _record_range_key(self, shapes: tuple[tuple[str, tuple[int, ...]], ...], key: ShapeKey) -> None:
        """Runs of these shapes need not ask again which program of the given ranges serves them."""
        if len(self._ranges) >= MOST_NOTED:
            self._ranges.clear()
        self._ranges[shapes] = key

    def _try_range(self, make: Callable[[], LoadedModel], spans: Mapping[str, Span]) -> LoadedModel | None:
        """The program for a range that ``make`` gives; None where there is none, and each shape is compiled on its own now."""
        try:
            return make()
        except NoRange as problem:
            print_warning(f"{problem}")
        except (BadInput, DeviceFailure) as problem:  # nobody asked for the range, and it may ask for more memory
            if self.lengths.spans or self.closed:
                raise
            print_warning(f"no program for {format_spans(spans)}, so each shape is compiled on its own: {problem.what}")
        self.lengths, self.seen.on = FIXED, False
        return None

    def _specialise_shapes(self, shapes: Shapes, spans: Mapping[str, Span], lengths: Lengths) -> LoadedModel:
        """What serves these shapes, of which the lengths in ``spans`` may change. NoRange where there is no such program."""
        longest = lengths.longest(self.head.inputs, shapes, spans)
        key = key_for(longest, spans, lengths.derived)
        found = self.residents.find(key)
        if found is not None:
            if spans and lengths is self.lengths:
                self._record_range_key(tuple(shapes.items()), key)
            return found

        def compiled() -> Compiled:
            if spans and not self.lengths.spans:
                self.progress("range", format_spans(spans))
            return self._compile_shapes(shapes, spans, lengths)

        with compile_lock(self.backend):  # whoever waits here for the same shapes finds them made
            return self.residents.find(key) or self._made(key, key, compiled)

    def _made(self, key: ShapeKey, kept: ShapeKey, compile_it: Callable[[], Compiled]) -> LoadedModel:
        """What is kept on disk as ``kept``, or compiled."""
        found = self._load_or_compile(self.kept.path(kept), lambda c: fits_shapes(c, self.head, kept), compile_it)
        self.residents.keep(key, found)
        return found

    def _load_or_compile(
        self, path: Path | None, fits: Callable[[Compiled], bool], compile_it: Callable[[], Compiled]
    ) -> LoadedModel:
        """What is kept at ``path`` and ``fits``, or is compiled and kept, on the device."""
        start = time.perf_counter()
        with collector_paused():  # once: what was read would be looked through before it is loaded
            compiled = self.kept.found(path, fits)
            if compiled is not None:
                try:
                    with as_refusal(path):
                        return self._load_compiled(compiled, start)
                except BadInput as problem:
                    print_warning(f"{problem.what}; compiling again")
        compiled = with_contents(compile_it(), self.contents)  # from here on nobody has the values that passes have made
        self.kept.keep(path, compiled)
        return self._load_compiled(compiled, start)

    def _compile_shapes(self, shapes: Shapes, spans: Mapping[str, Span], lengths: Lengths) -> Compiled:
        """One program for the lengths in ``spans`` (NoRange where there is none), or for these shapes."""
        if not spans:
            return self.compiler.compile_model(self.source.model, shapes)
        return self.compiler.compile_range(self.source.model, shapes, spans, lengths.derived)

    def adopt(self, compiled: Compiled) -> LoadedModel:
        """Load a program that was compiled elsewhere; runs of its input shapes or lengths use it."""
        hidden, spans = ((), {}) if compiled.ranged is None else (compiled.ranged.lengths.values(), compiled.ranged.spans)
        shapes = sorted((v.external or v.name, v.type.shape) for v in compiled.graph.inputs if v.name not in hidden)
        key = key_for(dict(shapes), spans, self.lengths.derived)
        with compile_lock(self.backend):
            special = self._load_compiled(compiled, time.perf_counter())
            self.residents.keep(key, special)
            return special

    def _load_compiled(self, compiled: Compiled, start: float) -> LoadedModel:
        """``compiled`` on the device. What waits for values is compiled when they are there."""
        compiled = with_contents(compiled, self.contents)
        loaded, following = load_segments(self.backend, compiled, lambda: self.source.check(thoroughly=False)), None
        for segment in (s for s in compiled.segments if isinstance(s, ProgramSegment)):
            for table in segment.tables:
                self.beside.add(table, segment.constants)
        if compiled.rest is not None:
            following = Continuation(
                compiled.rest, self._specialise_continuation, LoadedPrograms(self.head.name, self.resident), self.bodies
            )
        return LoadedModel(compiled, loaded, time.perf_counter() - start, following, self.bodies)

    def _specialise_continuation(self, model: Model) -> LoadedModel:
        """A part of the model whose shapes are known, kept by what it holds."""
        with compile_lock(self.backend):
            path = self._part_path(model)
            return self._load_or_compile(path, lambda c: fits_part(c, model), lambda: self.compiler.compile_model(model, {}))

    def _part_path(self, model: Model) -> Path | None:
        return self.kept.path(part_key(model)) if self.kept.folder is not None and self.source.digest else None

    def _has_part(self, model: Model) -> bool:
        """Whether a part need not be compiled, as an earlier process did."""
        path = self._part_path(model)
        return path is not None and path.is_file()

    def compile_only(self, shapes: Mapping[str, tuple[int, ...]]) -> Compiled:
        """Every step short of loading; ``shapes`` are needed for dynamic inputs only, and of a range for another length than the
        greatest."""
        shapes = self.lengths.greatest(self.head.inputs, shapes)
        with compile_lock(self.backend):
            spans = self.lengths.spans_of(self.head.inputs, shapes)
            try:
                return self._compile_shapes(shapes, spans, self.lengths)
            except NoRange as problem:
                print_warning(f"{problem}")
            return self._compile_shapes(shapes, {}, FIXED)

    def compile_whole(self, shapes: Mapping[str, tuple[int, ...]]) -> Compiled:
        """For a file: as ``compile_only``, of a range one program for all of it. NoRange where there is none."""
        if not self.lengths.spans:
            return self.compile_only(shapes)
        shapes = self.lengths.greatest(self.head.inputs, shapes)
        with compile_lock(self.backend):
            return self.compiler.compile_range(self.source.model, shapes, self.lengths.spans, self.lengths.derived, {})

    def resources(self, compiled: Compiled) -> list[RKernel]:
        """The chosen kernel of every operator with the resources that the device's compiler reports."""
        with compile_lock(self.backend):
            return self.compiler.resources(compiled)

    def with_needs(self, compiled: Compiled) -> Compiled:
        """``compiled``, every candidate kernel with the resources that the device's compiler reports."""
        with compile_lock(self.backend):
            return with_needs(compiled, self.backend)

    def artifact(self, compiled: Compiled) -> Artifact:
        """``compiled`` with what a later process needs to run it. BadInput where a part of it waits for values of a run."""
        if compiled.rest is not None:
            why = compiled.rest.why
            raise BadInput(f"a compiled file needs fixed shapes, but {why.what}", why.where, why.hint)
        return self.kept.artifact(compiled)

    def close(self) -> None:
        """Free the device when the runs in progress have ended; further calls raise DeviceFailure."""
        self.residents.close()
        self.bodies.close()
        if self.owner:
            self.backend.close()
