"""Executable: a model on a device, specialised at the first run of each set of input shapes and cached.

This module loads and runs programs. It reaches the compiler through ``rammer.runtime.specialiser`` alone."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rammer.compile_options import RESIDENT, CompileOptions, Progress, ignore_progress
from rammer.compiled.artifact import Artifact
from rammer.compiled.artifact_reader import as_refusal
from rammer.compiled.segments import Compiled, ProgramSegment, with_code, with_contents, with_needs
from rammer.device.guard import compile_lock, guard_backend
from rammer.device.loader import Registry
from rammer.device.manifest import Array, Backend
from rammer.device.shared_constants import LoadedArrangements
from rammer.errors import BadInput, DeviceFailure, logger, print_warning
from rammer.ir.collector import collector_paused
from rammer.ir.constants.recipes import Contents
from rammer.ir.extent import NoRange
from rammer.ir.operator import RKernel
from rammer.ir.port import ModelPort
from rammer.ir.untrusted_json import whole_number
from rammer.runtime.auto_ranges import LengthHistory
from rammer.runtime.bind_request import BindRequest, parse_bind_request
from rammer.runtime.bound_call import BoundCall
from rammer.runtime.call_lengths import BindSpec
from rammer.runtime.executable_text import executable_html, executable_line, programs_state
from rammer.runtime.input_checks import check_inputs, is_host_value, name_inputs, shapes_of
from rammer.runtime.loaded_model import NO_RUN, LoadedModel, Programs, Timing, bytes_of, load_segments
from rammer.runtime.loaded_programs import LoadedPrograms
from rammer.runtime.model_source import Head, ModelSource
from rammer.runtime.program_cache import ProgramCache, describe_unit, fits_part, fits_shapes, part_key
from rammer.runtime.shape_buckets import BOUND, FIXED, MEMORY, Lengths, ShapeKey, Shapes, Span, format_spans, key_for
from rammer.runtime.specialiser import CompileSite, Specialiser

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from rammer.compiler.compiler import Compiler
    from rammer.frontend.loops.control_operators import BodyRunner
    from rammer.frontend.read.reader import Model
    from rammer.tuning.kernel_store import KernelStore

#: Maximum cached shapes of runs whose program is selected without a search of the ranges.
MOST_NOTED = 4096
#: If set to 1, every run of ``Executable.run`` is checked.
VARIABLE: Final = "RAMMER_CHECK"


def is_check_requested() -> bool:
    """Return True if the environment requests checked runs."""
    return bool(whole_number(os.environ.get(VARIABLE, "0")))


@dataclass(repr=False)
class Executable:
    """A model on a device: ``exe.run({name: array}) -> {name: array}``. As a context manager, it is closed at the end.

    It caches one LoadedModel per set of input shapes, at most ``resident``. The least recently used is freed for a new one,
    unless it is running or has an open bound call.

    Any thread may call it at any time. A set of shapes is compiled once, and compiling does not stop runs of others. At most
    ``copies`` runs of one set execute side by side, and programs take at most ``memory`` bytes (0: any number). ``close`` waits
    for the runs in progress; later calls raise DeviceFailure.

    ``device`` is the name it was opened by, ``NAME:INDEX``, and ``device_options`` are its options. Compiled
    programs are cached for later processes in the cache folder ``cache_root``, if given. ``lengths`` are ranges of open
    dimensions: a program serves all lengths of a sub-range. If none are specified, ``length_history`` infers them from runs."""

    source: ModelSource
    backend: Backend
    device: str
    options: CompileOptions = field(default_factory=CompileOptions)
    registry: Registry | None = None
    progress: Progress = ignore_progress
    store: KernelStore | None = None
    cache_root: Path | None = None
    device_options: Mapping[str, str] = field(default_factory=dict)
    timing: Timing = NO_RUN  #: Times of the last completed run.
    resident: int = RESIDENT
    memory: int = 0
    copies: int = 1
    lengths: Lengths = field(default=FIXED)
    length_history: LengthHistory = field(default_factory=LengthHistory)
    contents: Contents = field(default_factory=Contents, repr=False)  #: Deduplicated constants of all programs.
    _numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)
    _ranges: dict[tuple[tuple[str, tuple[int, ...]], ...], ShapeKey] = field(default_factory=dict, repr=False)
    owner: bool = False  #: True if ``close`` also closes ``backend``.

    def __post_init__(self) -> None:
        self.backend = guard_backend(self.backend, self.device)

    @cached_property
    def residents(self) -> LoadedPrograms[ShapeKey]:
        """The programs on the device."""
        return LoadedPrograms(self.head.name, self.resident, self.memory)

    @cached_property
    def body_programs(self) -> LoadedPrograms[Any]:
        """The programs of control-flow bodies on the device."""
        return LoadedPrograms(self.head.name, self.resident)

    @cached_property
    def specialiser(self) -> Specialiser:
        """The compiler of further programs. Loading a program does not create it."""
        return self.source.specialise(
            CompileSite(
                self.backend,
                self.device,
                self.options,
                self.registry,
                self.progress,
                self.store,
                self.arrangements,
                self.body_programs,
                self._specialise_continuation,
                self._specialise_open_part,
                self._has_part,
            )
        )

    @property
    def compiler(self) -> Compiler:
        """The compiler. It is imported (and ONNX with it) when something must be compiled."""
        return self.specialiser.compiler

    @property
    def bodies(self) -> BodyRunner:
        """The bodies of control flow on the device."""
        return self.specialiser.bodies

    @cached_property
    def kept(self) -> ProgramCache:
        """The programs on disk."""
        about = (self.source, self.backend, self.device, self.options, self.device_options)
        return ProgramCache(*about, self.registry, self.cache_root)

    @property
    def hosted(self) -> list[str]:
        """Names of operators that the host has computed, including control flow whose bodies it ran."""
        specials = (*self.residents.held.values(), *self.body_programs.held.values())
        found = [h.node.node.op for special in specials for h in special.host_nodes]
        return self.specialiser.hosted(found) if found else []

    @property
    def cache(self) -> Mapping[ShapeKey, LoadedModel]:
        """The programs on the device by input shapes, most recently used last."""
        return self.residents.held

    @property
    def closed(self) -> bool:
        """True if ``close`` was called."""
        return self.residents.closed

    @cached_property
    def arrangements(self) -> LoadedArrangements:
        """The programs on the device, for a later compiler: loading a cached program does not import the compiler."""
        return LoadedArrangements(self.backend)

    @property
    def head(self) -> Head:
        """Name and ports of the model."""
        return self.source.head

    @property
    def inputs(self) -> tuple[ModelPort, ...]:
        """The inputs with their types and shapes."""
        return self.head.inputs

    @property
    def outputs(self) -> tuple[ModelPort, ...]:
        """The outputs with their types and shapes, as far as these are known before a run."""
        return self.head.outputs

    def run(self, *inputs: Any) -> dict[str, Array]:
        """Run once on ``inputs``: a mapping of arrays by name, one list of all arrays in the model's order, or the arrays.

        Arrays are NumPy's or of any library with DLPack. Arrays on the device are used in place. Raises BadInput for missing,
        unknown, wrongly typed or wrongly shaped inputs."""
        named = name_inputs(self.head.inputs, inputs[0] if len(inputs) == 1 else inputs)
        if not all(map(is_host_value, named.values())):
            with closing(self.bind(named)) as bound:
                bound.run()
                return bound.to_host()
        arrays = self.checked(named)
        if is_check_requested():
            self.check_run(arrays)
        with self.residents.used(lambda: self.specialise(shapes_of(self.head, arrays))) as special:
            outputs, self.timing = special.run_entered(arrays)
        return outputs

    def submit(self, *inputs: Any) -> Future[dict[str, Array]]:
        """Run in another thread, and return a future of the outputs. ``inputs`` are those of ``run``. At most ``copies`` of
        them execute at a time."""
        return self._threads.submit(self.run, *inputs)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        from concurrent.futures import ThreadPoolExecutor

        return ThreadPoolExecutor(self.copies, "rammer-run")

    def __enter__(self) -> Executable:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return executable_line(*self._description)

    def _repr_html_(self) -> str:
        return executable_html(*self._description)

    @property
    def _description(self) -> tuple[str, tuple[ModelPort, ...], tuple[ModelPort, ...], str]:
        head = self.head
        state = "closed" if self.closed else programs_state(len(self.cache), self.timing.total)
        return f"{head.name} on {self.device} in {self.options.precision}", head.inputs, head.outputs, state

    def check_run(self, inputs: Mapping[str, Array]) -> None:
        """Run once with the results of all operators as outputs (``rammer.jit.operator_check``).

        Raises BadInput with the first operator that reads an index out of range or computes NaN or an infinity. ``run`` also does
        this if ``RAMMER_CHECK=1`` is set."""
        if self.source.known is not None:
            raise BadInput("a compiled file does not have the operators to check", "--check", "give the model")
        model = self.specialiser.with_results(self.source.model)
        source = ModelSource(lambda: model, self.source.specialise, path=self.source.path)
        exe = replace(
            self,
            source=source,
            cache_root=None,
            lengths=FIXED,
            length_history=LengthHistory(),
            contents=Contents(),
            _ranges={},
            owner=False,
        )
        try:
            special = exe.prepare(inputs)
            outputs, _ = special.run(inputs)
        finally:
            exe.close()
        self.specialiser.check_values(model, {**inputs, **outputs})

    def bind(
        self, inputs: Mapping[str, Any] | Sequence[Any], outputs: Mapping[str, Any] | None = None, stream: Any = None
    ) -> BoundCall:
        """Return a call with fixed arrays: ``bound.run()`` reads these inputs and writes these outputs in place.

        With ranges, arrays of the greatest lengths are bound for all lengths: ``bound.run(past=5)``. If runs have shown which
        dimensions change, the ranges extend to the arrays' lengths. Other arrays get a separate program. An output may alias an
        input for the next run, ``{"present": "past"}``. That input may be omitted and starts with zeros. If the output extends
        it, one row is written per run (``rammer.runtime.call_lengths``); with a compiled file, the output is copied.

        Arrays are the device's (DLPack or ``__cuda_array_interface__``: torch, CuPy, JAX) or the host's. A host array bound to a
        device with separate memory is copied there once, and ``bound.write`` copies new values. Omitted outputs are allocated:
        ``bound.outputs``. ``stream`` is a queue of the device's kind to run on (for cuda: torch's, CuPy's, or a handle). Other
        libraries' arrays of bfloat16 and similar types are passed as their bits.

        Raises BadInput for inputs that ``run`` rejects and for an output of the wrong type or shape. It is also raised for an
        array that the device cannot access.
        """
        inputs = name_inputs(self.head.inputs, inputs)
        what = parse_bind_request(self.head, self.lengths, self.length_history, inputs, outputs or {})
        if not what.spans and not what.kept:
            with self.residents.used(lambda: self._specialise_shapes(what.shapes, {}, FIXED)) as special:
                return special.bind(what.inputs, what.outputs, BindSpec(stream=stream))
        of_file = self.source.known is not None  # also for bound calls; it copies states
        own = ((MEMORY, next(self._numbers)),) if what.kept and not of_file else ()  # states are private to this call
        key = key_for(what.shapes, what.spans, what.lengths)
        if not of_file and (what.kept or what.found or self.lengths.buckets > 1):
            key = (*key, (BOUND, tuple(sorted(what.kept.items()))), *own)
        spec = BindSpec(what.spans, what.kept, what.lengths.steps, (lambda: self.residents.drop(key)) if own else None, stream)
        if what.found and what.spans:
            tried = self._try_range(lambda: self._find_bindable(key, what), what.lengths)
            if isinstance(tried, str):
                print_warning(tried)
                self.length_history.binds = False
                return self.bind(inputs, outputs, stream)
        with self.residents.used(lambda: self._find_bindable(key, what)) as special:
            return special.bind(what.inputs, what.outputs, spec)

    def _find_bindable(self, key: ShapeKey, what: BindRequest) -> LoadedModel:
        """Return the program of a bound call for a range, or with outputs that alias inputs."""
        with compile_lock(self.backend):
            found = self.residents.find(key)
            if found is None:
                kept = tuple(item for item in key if item[0] != MEMORY)
                found = self._made(key, kept, lambda: self._compiled_bound(what))
        return found

    def _compiled_bound(self, what: BindRequest) -> Compiled:
        """Compile a bound call's program. Raises NoRange if no single program covers the range."""
        if what.spans:
            lengths = what.lengths
            return self.compiler.compile_range(
                self.source.model, what.shapes, what.spans, lengths.derived, what.kept, lengths.steps
            )
        return self.compiler.compile_model(self.source.model, what.shapes, what.kept)

    def checked(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Return ``inputs`` as contiguous arrays of the declared types. Raises BadInput with the wrong input and the reason."""
        return check_inputs(self.head.inputs, inputs)

    def prepare(self, inputs: Mapping[str, Array]) -> LoadedModel:
        """Return the loaded program for the shapes of ``inputs``, compiling it if it is not cached."""
        return self.specialise(shapes_of(self.head, inputs))

    def specialise(self, shapes: Mapping[str, tuple[int, ...]]) -> LoadedModel:
        """Return the loaded program for these input shapes, compiling it if it is not cached. It may be freed for others."""
        lengths, at, history = self.lengths, tuple(shapes.items()), self.length_history
        if (key := self._ranges.get(at)) is not None and lengths.spans and (known := self.residents.find(key)) is not None:
            return known
        if not lengths.spans and history.on:
            history.learned(self.head.inputs, shapes)
            alone = self.residents.find(tuple(sorted(shapes.items())))
            if alone is not None:
                return alone
            if not self.kept.has(self.kept.key(tuple(sorted(shapes.items())))):  # else compiled for these shapes earlier
                found = history.serve(self.head.inputs, shapes, lambda at, spans: self._specialise_shapes(shapes, spans, at))
                if found is not None:
                    return found
        elif spans := lengths.spans_of(self.head.inputs, shapes):
            tried = self._try_range(lambda: self._specialise_shapes(shapes, spans, lengths), lengths)
            if isinstance(tried, LoadedModel):
                return tried
            print_warning(tried)
        return self._specialise_shapes(shapes, {}, FIXED)

    def _record_range_key(self, shapes: tuple[tuple[str, tuple[int, ...]], ...], key: ShapeKey) -> None:
        """Cache the program key for these shapes, so that later runs skip the search of the ranges."""
        if len(self._ranges) >= MOST_NOTED:
            self._ranges.clear()
        self._ranges[shapes] = key

    def _try_range(self, make: Callable[[], LoadedModel], lengths: Lengths) -> LoadedModel | str:
        """Return the program for a range of ``lengths`` from ``make``. If it does not exist, ignore the user's ranges from then
        on, and return the reason."""
        try:
            return make()
        except NoRange as problem:
            why = str(problem)
        except (BadInput, DeviceFailure) as problem:  # an inferred range may need more memory
            if self.lengths.spans or self.closed:
                raise
            served = format_spans(lengths.spans, lengths.steps)
            why = f"no program for {served}, so each shape is compiled on its own: {problem.what}"
        if self.lengths.spans:
            self.lengths, self.length_history.on = FIXED, False
        return why

    def _specialise_shapes(self, shapes: Shapes, spans: Mapping[str, Span], lengths: Lengths) -> LoadedModel:
        """Return the program for these shapes, with ``spans`` as dynamic lengths. Raises NoRange if it does not exist."""
        longest = lengths.longest(self.head.inputs, shapes, spans)
        key = key_for(longest, spans, lengths)
        found = self.residents.find(key)
        if found is not None:
            if spans and lengths is self.lengths:
                self._record_range_key(tuple(shapes.items()), key)
            return found

        def compiled() -> Compiled:
            if spans and not self.lengths.spans:
                self.progress("range", format_spans(spans, lengths.steps))
            return self._compile_shapes(shapes, spans, lengths)

        with compile_lock(self.backend):  # waiting threads reuse the program
            return self.residents.find(key) or self._made(key, key, compiled)

    def _made(self, key: ShapeKey, kept: ShapeKey, compile_it: Callable[[], Compiled]) -> LoadedModel:
        """Return the loaded program, from disk by the key ``kept`` or compiled."""
        found = self._load_or_compile(self.kept.key(kept), lambda c: fits_shapes(c, self.head, kept), compile_it)
        self.residents.keep(key, found)
        return found

    def _load_or_compile(
        self, key: str | None, fits: Callable[[Compiled], bool], compile_it: Callable[[], Compiled]
    ) -> LoadedModel:
        """Return the loaded program, from the cache if it ``fits``, else compiled and cached."""
        start = time.perf_counter()
        with collector_paused():  # avoids a scan of all objects that were read
            compiled = self.kept.found(key, fits)
            if compiled is not None:
                assert key is not None
                try:
                    with as_refusal(self.kept.entries.path(key)):
                        return self._load_compiled(compiled, start)
                except BadInput as problem:
                    print_warning(f"{problem.what}; compiling again")
        compiled = with_contents(compile_it(), self.contents)  # releases values that passes created
        logger().info("compiled %s for %s in %.3f s", self.head.name, self.device, time.perf_counter() - start)
        self.kept.keep(key, compiled)
        return self._load_compiled(compiled, start)

    def _compile_shapes(self, shapes: Shapes, spans: Mapping[str, Span], lengths: Lengths) -> Compiled:
        """Return a program for the lengths in ``spans`` or, without these, for these shapes. Raises
        NoRange if it does not exist."""
        if not spans:
            return self.compiler.compile_model(self.source.model, shapes)
        return self.compiler.compile_range(self.source.model, shapes, spans, lengths.derived, steps=lengths.steps)

    def adopt(self, compiled: Compiled) -> LoadedModel:
        """Load a program that was compiled elsewhere; runs of its input shapes or lengths use it."""
        hidden, spans = ((), {}) if compiled.ranged is None else (compiled.ranged.lengths.values(), compiled.ranged.spans)
        shapes = sorted((v.external or v.name, v.type.shape) for v in compiled.graph.inputs if v.name not in hidden)
        key = key_for(dict(shapes), spans, self.lengths)
        with compile_lock(self.backend):
            special = self._load_compiled(compiled, time.perf_counter())
            self.residents.keep(key, special)
            return special

    def _load_compiled(self, compiled: Compiled, start: float) -> LoadedModel:
        """Return ``compiled`` loaded on the device. Deferred parts are compiled at run time."""
        compiled = with_contents(compiled, self.contents)
        loaded = self._load_programs(compiled)
        for segment in (s for s in compiled.segments if isinstance(s, ProgramSegment)):
            for table in segment.tables:
                self.arrangements.add(table, segment.constants)
        following = self.specialiser.continuation(compiled.rest) if compiled.rest is not None else None
        bodies = self.bodies if compiled.host_nodes else None
        load_copy = partial(self._load_programs, compiled) if self.copies > 1 else None
        seconds = time.perf_counter() - start
        return LoadedModel(compiled, loaded, seconds, following, bodies, self.copies - 1, load_copy)

    def _load_programs(self, compiled: Compiled) -> Programs:
        """Load the programs once. Raises DeviceFailure if they do not fit into ``memory``."""
        self.residents.reserve(bytes_of(compiled))
        with compile_lock(self.backend):
            return load_segments(self.backend, compiled, lambda: self.source.check(thoroughly=False))

    def _specialise_continuation(self, model: Model) -> LoadedModel:
        """Return the loaded program of a model part with static shapes, cached by its content."""
        with compile_lock(self.backend):
            key = self._part_key(model)
            return self._load_or_compile(key, lambda c: fits_part(c, model), lambda: self.compiler.compile_model(model, {}))

    def _specialise_open_part(self, model: Model, shapes: Shapes, spans: Mapping[str, Span], lengths: Lengths) -> LoadedModel:
        """Return the loaded program of a model part for the lengths in ``spans``, cached by its content. ``shapes`` are the
        greatest. Raises NoRange if no program serves the range."""
        with compile_lock(self.backend):
            part = self._part_key(model)
            return self._load_or_compile(
                self.kept.key(f"{part} {key_for(shapes, spans, lengths)}") if part is not None else None,
                lambda c: c.ranged is not None and (c.ranged.spans, c.ranged.steps) == (spans, lengths.steps),
                lambda: self.compiler.compile_range(model, shapes, spans, lengths.derived, steps=lengths.steps),
            )

    def _part_key(self, model: Model) -> str | None:
        return self.kept.key(part_key(model)) if self.kept.root is not None and self.source.digest else None

    def _has_part(self, model: Model) -> bool:
        """Return True if an earlier process compiled this part."""
        return self.kept.has(self._part_key(model))

    def compile_only(self, shapes: Mapping[str, tuple[int, ...]]) -> Compiled:
        """Return the compiled model without loading it. ``shapes`` are needed for dynamic inputs only; for a range, they select a
        length other than the greatest."""
        shapes = self.lengths.greatest(self.head.inputs, shapes)
        with compile_lock(self.backend):
            spans = self.lengths.spans_of(self.head.inputs, shapes)
            try:
                return self._compile_shapes(shapes, spans, self.lengths)
            except NoRange as problem:
                print_warning(f"{problem}")
            return self._compile_shapes(shapes, {}, FIXED)

    def compile_whole(self, shapes: Mapping[str, tuple[int, ...]]) -> Compiled:
        """Return the compiled model for a file: like ``compile_only``, but one program per range. Raises NoRange if it does not
        exist."""
        if not self.lengths.spans:
            return self.compile_only(shapes)
        shapes = self.lengths.greatest(self.head.inputs, shapes)
        with compile_lock(self.backend):
            lengths = self.lengths
            return self.compiler.compile_range(self.source.model, shapes, lengths.spans, lengths.derived, {}, lengths.steps)

    def resources(self, compiled: Compiled) -> list[RKernel]:
        """Return the chosen kernel of every operator with the resources that the device's compiler reports."""
        with compile_lock(self.backend):
            return self.compiler.resources(compiled)

    def with_needs(self, compiled: Compiled) -> Compiled:
        """Return ``compiled`` with the resources of every candidate kernel that the device's compiler reports."""
        with compile_lock(self.backend):
            return with_needs(compiled, self.backend)

    def artifact(self, compiled: Compiled) -> Artifact:
        """Return ``compiled`` as an artifact that a later process can run. Raises BadInput if a part is deferred."""
        if compiled.rest is not None:
            why = compiled.rest.why
            raise BadInput(f"a compiled file needs fixed shapes, but {why.what}", why.where, why.hint)
        has_code = any(s.code for s in compiled.segments if isinstance(s, ProgramSegment))
        code_target = self.backend.code_target if has_code else ""
        return replace(self.kept.artifact(compiled), hardware=describe_unit(self.backend), code_target=code_target)

    def with_code(self, compiled: Compiled) -> Compiled:
        """Return ``compiled`` with its machine code for the device, unless compiled files have none for it."""
        with compile_lock(self.backend):
            return with_code(compiled, self.backend) if self.backend.code_target else compiled

    def close(self) -> None:
        """Free the device when the runs in progress and submitted ones have ended; later calls raise DeviceFailure."""
        if "_threads" in self.__dict__:
            self._threads.shutdown()
        self.residents.close()
        self.body_programs.close()
        if self.owner:
            self.backend.close()
