"""Opening of a compiled file on a device, without the compiler: ``pyproject.toml`` has the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rammer.cache.cache_location import cache_folder
from rammer.compile_options import CompileOptions, Request, check_choices, check_fixed, check_precision
from rammer.compiled.artifact import Artifact
from rammer.compiled.artifact_reader import as_refusal, check_device, load_artifact
from rammer.compiled.segments import Compiled, ProgramSegment
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.errors import BadInput, print_warning
from rammer.ir.fold_rows import fold
from rammer.ir.names import quote_text
from rammer.runtime.executable import Executable
from rammer.runtime.model_source import Head, ModelSource
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

    A model compiled for a named ``--target`` runs on any unit of that device, with a warning: the target hardware has no
    fingerprint to compare. If the unit has fewer vEUs, rows are folded.

    ``specialise`` creates the compiler of control-flow bodies on the host; a file without them never calls it.
    """
    check_choices(request)
    check_fixed(request, str(path))
    artifact = load_artifact(path, registry.operators)
    if artifact.compiled.ranged is not None and artifact.key:
        raise BadInput(f"{path} is cached for a part of a range of its model", hint="run the model itself")
    spec = device or artifact.device
    made_for, asked = artifact.device.partition(":")[0], spec.partition(":")[0]
    if made_for != asked:
        raise BadInput(
            f"{path} was compiled for device {made_for}, not for {asked}",
            hint="leave out --device, or compile the model for that device",
        )
    recorded = CompileOptions.from_record(artifact.record)
    if request.precision not in (None, recorded.precision):
        raise BadInput(
            f"{path} was compiled in {recorded.precision}, not in {request.precision}",
            "--precision",
            "leave out --precision, or compile the model again with it",
        )
    device_options = {**artifact.options, **request.device_options}
    backend = registry.open(spec, request.require, "", device_options)
    with closed_where_refused(backend):
        compiled = _fit_hardware(path, artifact, backend, device_options)
        check_precision(recorded.precision, spec, backend.vdevice)
        graph, lengths = compiled.graph, FIXED
        if compiled.ranged is not None:
            lengths = Lengths.of_file(compiled.ranged, graph.inputs)
        head = Head(graph.name, ports_of(graph.inputs, compiled.ranged), ports_of(graph.outputs, compiled.ranged))
        exe = Executable(
            # The seal identifies the file, so programs that a run compiles (loop bodies) are cached as for a model.
            ModelSource(_no_model(path, lengths), specialise, artifact.seal, path, head),
            backend,
            spec if ":" in spec else f"{spec}:0",
            replace(recorded, target=""),
            registry,
            cache_root=cache_folder(),
            device_options=device_options,
            memory=request.memory,
            copies=request.copies,
            lengths=lengths,
            owner=True,
        )
        with as_refusal(path):
            exe.adopt(compiled)
        return exe


def _fit_hardware(path: Path, artifact: Artifact, backend: Backend, device_options: Mapping[str, str]) -> Compiled:
    """Return the compiled model for an opened device. Raise BadInput if the device cannot run it."""
    made_for, compiled = artifact.device.partition(":")[0], artifact.compiled
    target = CompileOptions.from_record(artifact.record).target
    if target:
        print_warning(f"{path} was compiled for target {quote_text(target)}; here is {backend.hardware.name}")
        compiled = _fold_compiled(compiled, backend.vdevice.veus)
    elif backend.fingerprint != artifact.fingerprint:
        where = f"compiled for {artifact.fingerprint}; here is {backend.fingerprint}"
        if device_options != artifact.options:
            raise BadInput(
                f"{path} was compiled {_format_options(artifact.options)}, not {_format_options(device_options)}",
                where,
                "leave out --option, or compile the model again with it",
            )
        raise BadInput(
            f"{path} was compiled for other hardware or by another version of the {made_for} plugin",
            where,
            "compile the model again",
        )
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
        spans = f" for {format_spans(lengths.spans)}" if lengths.spans else ""
        raise BadInput(f"{path} is a compiled model{spans}", hint="this needs the ONNX model that it was compiled from")

    return read
