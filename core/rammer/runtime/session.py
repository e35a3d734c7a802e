"""Opening of a model on a device: the only module that joins source, registry and executable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rammer.cache.cache_location import cache_folder
from rammer.compiled.artifact import Artifact, is_artifact
from rammer.compiled.artifact_reader import as_refusal, check_device, load_artifact
from rammer.compiled.segments import Compiled, ProgramSegment
from rammer.compiler.compile_options import (
    ANY,
    CompileOptions,
    Progress,
    Request,
    check_choices,
    check_fixed,
    check_precision,
    ignore_progress,
)
from rammer.device.loader import PLUGINS, Registry
from rammer.device.manifest import Backend
from rammer.errors import BadInput, DeviceUnavailable, print_warning
from rammer.ir.names import quote_text
from rammer.ir.port import InputPort
from rammer.runtime.auto_ranges import Seen
from rammer.runtime.executable import Executable
from rammer.runtime.loaded_programs import check_resident
from rammer.runtime.model_source import Head, ModelSource, check_kept, open_source
from rammer.runtime.shape_buckets import FIXED, Lengths, format_spans
from rammer.tuning.kernel_store import KernelStore

if TYPE_CHECKING:
    import onnx

    from rammer.frontend.read.reader import Model


def open_executable(
    model: str | Path | bytes | onnx.ModelProto,
    device: str,
    request: Request = ANY,
    *,
    registry: Registry | None = None,
    progress: Progress = ignore_progress,
    store: KernelStore | None = None,
) -> Executable:
    """Open a model on a device; see ``rammer.compile``.

    The model is read before the device is opened, so bad input does not load a driver.

    A file written by ``rammer compile -o`` opens on the device that it names. Its policy, tuning, layout, batching and precision
    are fixed. A request for a layout, batching or a different precision is refused.
    """
    check_choices(request)
    check_resident(request.resident)
    registry = registry or Registry()
    if isinstance(model, str | Path) and is_artifact(Path(model)):
        check_fixed(request, str(model))
        return open_artifact(Path(model), device, request, registry)
    source = open_source(model, registry.operators)
    source.head  # noqa: B018 - reads and checks the model before any driver is touched
    check_kept(request.chosen, source)
    spec = device or first_measured(registry)
    backend, chosen = registry.open(spec, request.require, request.target, request.device_options), request.chosen
    with closed_where_refused(backend):
        check_precision(chosen.precision, spec, backend.vdevice)
        lengths = Lengths.of(source.head.inputs, request.lengths)
    name = spec if ":" in spec else f"{spec}:0"
    return Executable(
        source,
        backend,
        name,
        chosen,
        registry,
        progress,
        store,
        cache_folder() / "programs",
        request.device_options,
        resident=request.resident,
        lengths=lengths,
        seen=Seen(on=True),
        owner=True,
    )


@contextmanager
def closed_where_refused(backend: Backend) -> Iterator[None]:
    """Close a device if the block raises an exception."""
    try:
        yield
    except BaseException:
        backend.close()
        raise


def open_artifact(path: Path, device: str, request: Request, registry: Registry) -> Executable:
    """Return the compiled model in ``path``, loaded. Raise BadInput if it is damaged or does not match the request.

    The device opens with the options that the model was compiled with. The request may add or replace options that do not change
    the device's fingerprint, and so the compiled program.

    A model compiled for a named ``--target`` runs on any unit of that device, with a warning: the target hardware has no
    fingerprint to compare. If the unit has fewer vEUs, rows are folded.
    """
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
        return _load_artifact(path, artifact, spec, backend, device_options, registry)


def _load_artifact(
    path: Path, artifact: Artifact, spec: str, backend: Backend, device_options: Mapping[str, str], registry: Registry
) -> Executable:
    """Load the compiled model on an opened device."""
    made_for, compiled = artifact.device.partition(":")[0], artifact.compiled
    recorded = CompileOptions.from_record(artifact.record)
    if recorded.target:
        print_warning(f"{path} was compiled for target {quote_text(recorded.target)}; here is {backend.hardware.name}")
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
    check_precision(recorded.precision, spec, backend.vdevice)
    graph = compiled.graph
    ports, lengths = tuple(InputPort(v.external or v.name, v.port.dtype, v.type.shape) for v in graph.inputs), FIXED
    if compiled.ranged is not None:
        lengths, ports = Lengths.of_file(compiled.ranged, graph.inputs)
    head = Head(graph.name, ports, tuple(v.external or v.name for v in graph.outputs))
    name = spec if ":" in spec else f"{spec}:0"
    # The seal identifies the file, so programs that a run compiles (loop bodies) are cached as for a model.
    source, kept = ModelSource(_no_model(path, lengths), artifact.seal, path, head), cache_folder() / "programs"
    exe = Executable(
        source,
        backend,
        name,
        replace(recorded, target=""),
        registry,
        programs=kept,
        device_options=device_options,
        lengths=lengths,
        owner=True,
    )
    with as_refusal(path):
        exe.adopt(compiled)
    return exe


def _format_options(options: Mapping[str, str]) -> str:
    return "with " + " ".join(f"--option {k}={v}" for k, v in sorted(options.items())) if options else "without --option"


def _fold_compiled(compiled: Compiled, veus: int) -> Compiled:
    """Return ``compiled`` with programs of at most ``veus`` rows."""
    segments = (_folded_one(s, veus) if isinstance(s, ProgramSegment) else s for s in compiled.segments)
    return replace(compiled, segments=tuple(segments))


def _folded_one(segment: ProgramSegment, veus: int) -> ProgramSegment:
    from rammer.schedule.fold_rows import fold

    cases = segment.cases
    cases = replace(cases, tables=tuple(fold(t, veus) for t in cases.tables)) if cases is not None else None
    return replace(segment, program=fold(segment.program, veus), cases=cases)


def _no_model(path: Path, lengths: Lengths) -> Callable[[], Model]:
    def read() -> Model:
        spans = f" for {format_spans(lengths.spans)}" if lengths.spans else ""
        raise BadInput(f"{path} is a compiled model{spans}", hint="this needs the ONNX model that it was compiled from")

    return read


def first_measured(registry: Registry) -> str:
    """Return the first working device that has a clock. Raise DeviceUnavailable with the reasons if none works."""
    reasons = []
    for status in registry.statuses():
        if status.state == "ok" and status.device is not None and not status.device.simulated:
            return status.name
        reasons.append(f"{status.name}: {status.state}{f' ({status.reason})' if status.reason else ''}")
    raise DeviceUnavailable(
        "no device with a clock works here",
        where="; ".join(reasons) or "no plugin is installed",
        hint=f"{PLUGINS}; or name a simulated device with --device",
    )
