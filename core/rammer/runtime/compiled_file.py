"""Opening of a compiled file on a device, without the compiler: ``pyproject.toml`` has the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rammer.cache.cache_location import cache_folder
from rammer.compile_options import CompileOptions, Request, check_choices, check_fixed, check_precision
from rammer.compiled.artifact import Artifact
from rammer.compiled.artifact_reader import Plugins, Variant, as_refusal, check_device, load_artifact
from rammer.compiled.segments import Compiled, ProgramSegment, without_code
from rammer.compiled.signature import check_signature
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.errors import BadInput, DeviceFailure, print_warning
from rammer.ir.constants.mapped_files import state_of
from rammer.ir.fold_rows import fold
from rammer.ir.names import quote_text
from rammer.runtime.executable import Executable
from rammer.runtime.model_source import Head, ModelSource
from rammer.runtime.program_cache import describe_unit
from rammer.runtime.shape_buckets import FIXED, Lengths, format_spans, ports_of
from rammer.runtime.specialiser import SpecialiserFactory

if TYPE_CHECKING:
    from rammer.frontend.read.reader import Model


@contextmanager
def closed_where_refused(backend: Backend) -> Iterator[None]:
    """Close a device if the block raises an exception."""
    try:
        yield
    except BaseException:
        backend.close()
        raise


def open_artifact(path: Path, device: str, request: Request, registry: Registry, specialise: SpecialiserFactory) -> Executable:
    """Return the compiled model in ``path``, loaded. Raise BadInput if it is damaged or does not match the request.

    The device opens with the options that the model was compiled with. The request may add or replace options that do not change
    the device's fingerprint, and so the compiled program.

    Machine code for the opened unit is loaded if the request trusts the file: then nothing is compiled. Otherwise the kernels are
    compiled from the verified program, which needs the compiler on most devices.

    A model compiled for other hardware, or for a named ``--target``, runs on any unit of that device, with a warning. If the unit
    has fewer vEUs, rows are folded.

    ``specialise`` creates the compiler of control-flow bodies on the host; a file without them never calls it.
    """
    check_choices(request)
    check_fixed(request, str(path))
    return _Opening(path, device, request, registry, specialise).open()


@dataclass
class _Opening:
    """The opening of a compiled file. ``backend`` is set if the device was opened to choose a variant of the file."""

    path: Path
    device: str
    request: Request
    registry: Registry
    specialise: SpecialiserFactory
    backend: Backend | None = None
    run_only: bool = field(default=False, init=False)

    def open(self) -> Executable:
        """Return the model in the file, loaded."""
        try:
            artifact, trusted = self._read()
        except BaseException:
            if self.backend is not None:
                self.backend.close()
            raise
        spec = self.device or artifact.device
        if _device_name(spec) != _device_name(artifact.device):
            raise _other_device(self.path, artifact.device, spec)
        recorded = CompileOptions.from_record(artifact.record)
        if self.request.precision not in (None, recorded.precision):
            raise BadInput(
                f"{self.path} was compiled in {recorded.precision}, not in {self.request.precision}",
                "--precision",
                "leave out --precision, or compile the model again with it",
            )
        options = {**artifact.options, **self.request.device_options}
        usable = trusted and bool(artifact.code_target)
        backend = self._open_device(spec, options, usable and not artifact.compiled.host_nodes)
        if usable:
            if backend.code_target == artifact.code_target:
                try:
                    return self._load(backend, spec, options, artifact)
                except DeviceFailure as problem:
                    print_warning(f"{self.path}: {problem.what}; its kernels are compiled again")
            backend.close()
            backend = self._open_device(spec, options, False)
        return self._load(backend, spec, options, replace(artifact, compiled=without_code(artifact.compiled), code_target=""))

    def _read(self) -> tuple[Artifact, bool]:
        """Return the variant of the file for the device, and whether its machine code is trusted."""
        request, path = self.request, self.path
        before = path.stat()
        if request.trust_key:
            check_signature(path, Path(request.trust_key))
        trusted = request.trust or bool(request.trust_key)
        artifact = load_artifact(path, self.registry.operators, choose=lambda v: self._choose(v, trusted), trusted=trusted)
        if state_of(path.stat()) != state_of(before):
            raise BadInput(f"{path} was written to while it was opened", hint="open it again")
        if artifact.compiled.ranged is not None and artifact.key:
            raise BadInput(f"{path} is cached for a part of a range of its model", hint="run the model itself")
        return artifact, trusted

    def _choose(self, variants: Sequence[Variant], trusted: bool) -> int:
        """Return the variant whose machine code the unit runs, else the one that was compiled for it, else the first one."""
        spec = self.device or variants[0].device
        mine = [n for n, v in enumerate(variants) if _device_name(v.device) == _device_name(spec)]
        if not mine:
            raise _other_device(self.path, variants[0].device, spec)
        if len(mine) > 1:
            options = {**variants[mine[0]].options, **self.request.device_options}
            self.backend = self._open_device(spec, options, trusted and any(variants[n].code_target for n in mine))
            target, unit = self.backend.code_target, describe_unit(self.backend)
            fits = [n for n in mine if target and variants[n].code_target == target]
            fits += [n for n in mine if variants[n].hardware == unit]
            return fits[0] if fits else mine[0]
        return mine[0]

    def _open_device(self, spec: str, options: Mapping[str, str], run_only: bool) -> Backend:
        """Return the opened device: that which chose the variant, if it was opened in the same way."""
        opened, self.backend = self.backend, None
        if opened is not None:
            if run_only == self.run_only:
                return opened
            opened.close()
        self.run_only = run_only
        return self.registry.open(spec, self.request.require, "", options, run_only)

    def _load(self, backend: Backend, spec: str, options: Mapping[str, str], artifact: Artifact) -> Executable:
        """Return the model, loaded on an opened device. The device is closed if that fails."""
        path, recorded = self.path, CompileOptions.from_record(artifact.record)
        with closed_where_refused(backend):
            compiled = _fit_hardware(path, artifact, backend, options)
            check_precision(recorded.precision, spec, backend.vdevice)
            source, lengths = _source_of(path, artifact, self.specialise)
            exe = Executable(
                source,
                backend,
                spec if ":" in spec else f"{spec}:0",
                replace(recorded, target=""),
                self.registry,
                cache_root=cache_folder(),
                device_options=options,
                memory=self.request.memory,
                copies=self.request.copies,
                lengths=lengths,
                owner=True,
            )
            with as_refusal(path):
                exe.adopt(compiled)
            return exe


def compiled_source(path: Path, plugins: Plugins, specialise: SpecialiserFactory) -> ModelSource:
    """Return a source with the ports of a compiled file. It has no model: reading that raises BadInput."""
    return _source_of(path, load_artifact(path, plugins), specialise)[0]


def _source_of(path: Path, artifact: Artifact, specialise: SpecialiserFactory) -> tuple[ModelSource, Lengths]:
    """Return the source of a compiled model, and its lengths. The seal identifies the file, so programs that a run compiles (loop
    bodies) are cached as for a model."""
    graph, ranged, lengths = artifact.compiled.graph, artifact.compiled.ranged, FIXED
    if ranged is not None:
        lengths = Lengths.of_file(ranged, graph.inputs)
    head = Head(graph.name, ports_of(graph.inputs, ranged), ports_of(graph.outputs, ranged))
    return ModelSource(_no_model(path, lengths), specialise, artifact.seal, path, head), lengths


def _device_name(spec: str) -> str:
    return spec.partition(":")[0]


def _other_device(path: Path, made_for: str, spec: str) -> BadInput:
    return BadInput(
        f"{path} was compiled for device {_device_name(made_for)}, not for {_device_name(spec)}",
        hint="leave out --device, or compile the model for that device",
    )


def _fit_hardware(path: Path, artifact: Artifact, backend: Backend, device_options: Mapping[str, str]) -> Compiled:
    """Return the compiled model for an opened device. Raise BadInput if the device cannot run it."""
    compiled = artifact.compiled
    if artifact.code_target:
        return compiled  # its machine code is for this unit
    target = CompileOptions.from_record(artifact.record).target
    if target:
        print_warning(f"{path} was compiled for target {quote_text(target)}; here is {backend.hardware.name}")
        compiled = _fold_compiled(compiled, backend.vdevice.veus)
    elif backend.fingerprint != artifact.fingerprint:
        if device_options != artifact.options:
            raise BadInput(
                f"{path} was compiled {_format_options(artifact.options)}, not {_format_options(device_options)}",
                f"compiled for {artifact.fingerprint}; here is {backend.fingerprint}",
                "leave out --option, or compile the model again with it",
            )
        # Another version of the plugin: its kernels compute the same program. Files of format 9 do not describe the unit.
        if artifact.hardware not in ("", unit := describe_unit(backend)):
            print_warning(f"{path} was compiled for {quote_text(artifact.hardware)}; here is {unit}")
        compiled = _fold_compiled(compiled, backend.vdevice.veus)
    check_device(path, compiled, backend)
    return compiled


def _format_options(options: Mapping[str, str]) -> str:
    return "with " + " ".join(f"--option {k}={v}" for k, v in sorted(options.items())) if options else "without --option"


def _fold_compiled(compiled: Compiled, veus: int) -> Compiled:
    """Return ``compiled`` with programs of at most ``veus`` rows."""
    segments = (_folded_one(s, veus) if isinstance(s, ProgramSegment) else s for s in compiled.segments)
    return replace(compiled, segments=tuple(segments))


def _folded_one(segment: ProgramSegment, veus: int) -> ProgramSegment:
    cases = segment.cases
    cases = replace(cases, tables=tuple(fold(t, veus) for t in cases.tables)) if cases is not None else None
    return replace(segment, program=fold(segment.program, veus), cases=cases)


def _no_model(path: Path, lengths: Lengths) -> Callable[[], Model]:
    def read() -> Model:
        spans = f" for {format_spans(lengths.spans, lengths.steps)}" if lengths.spans else ""
        raise BadInput(f"{path} is a compiled model{spans}", hint="this needs the ONNX model that it was compiled from")

    return read
