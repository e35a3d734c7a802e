"""Setup of a distributed model: devices of this process, or one device in each process of an MPI launch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rammer.compile_options import Progress, Request, check_choices, check_precision, ignore_progress
from rammer.compiled.artifact import is_artifact
from rammer.device.arrays import Array
from rammer.device.loader import Registry
from rammer.device.manifest import Backend, Device
from rammer.distributed.distributed_program import DevicePart, Link
from rammer.distributed.joining import TIMEOUT, Joining, launched_processes, options_for
from rammer.distributed.runtime.distributed_run import Joined, SpreadRuns
from rammer.distributed.transport import mpi_launch
from rammer.distributed.transport.handshake import check_agreement, component_versions
from rammer.distributed.transport.measure_links import measured_links
from rammer.distributed.transport.protocol import Fabric, Party, Site
from rammer.distributed.transport.transport_registry import choose_transport
from rammer.errors import BadInput, DeviceUnavailable
from rammer.ir.formats import to_carrier
from rammer.ir.untrusted_json import whole_number
from rammer.jit.onnx_source import check_kept, open_source
from rammer.runtime.input_checks import check_inputs, shapes_of
from rammer.runtime.model_source import Head, ModelSource
from rammer.runtime.shape_buckets import Lengths, Span
from rammer.tuning.kernel_store import KernelStore

if TYPE_CHECKING:
    from rammer.compiler.compiler import Compiler
    from rammer.distributed.partition.ranged_model import OpenShapes

#: Maximum number of units that one device's option may request; plugins refuse larger numbers.
MOST = 64
#: Reason for unmeasured programs: processes compile the parts of all devices, and must make equal choices.
SEVERAL = "nothing is measured for several devices"
#: Shapes of inputs, and ranges of dynamic dimensions.
SpreadKey: TypeAlias = "tuple[tuple[tuple[str, tuple[int, ...]], ...], tuple[tuple[str, Span], ...]]"


def resolve_devices(device: str, timeout: float = TIMEOUT, options: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the devices that ``--device`` names for this run, in order, or one device repeated as its ``options`` request.

    Returns an empty tuple for one device in one process. Raises DeviceUnavailable if processes and names do not match. Processes
    must start within ``mpi_launch.start_timeout(timeout)``."""
    names = tuple(n.strip() for n in device.split(",")) if "," in device else (device,)
    count = launched_processes()
    if not all(names) and len(names) > 1:
        raise BadInput(f"--device {device!r} has an empty name", hint="write NAME[:INDEX],NAME[:INDEX]")
    if count == 1:
        return names if len(names) > 1 else units_of(device, options or {})
    if len(names) not in (1, count):
        raise DeviceUnavailable(
            f"{len(names)} devices for {count} processes: {device}",
            where=f"mpirun -n {count}",
            hint=f"start mpirun -n {len(names)}, or name one device for all",
        )
    if not device:
        raise BadInput("several processes need a device by name", hint="name one with --device")
    rank, size = mpi_launch.rank_and_size(timeout)
    if size != count:
        raise DeviceUnavailable(
            f"the launcher started {count} processes, but MPI reports {size}",
            where=f"rank {rank}",
            hint="mpirun and mpi4py must be of the same MPI",
        )
    return names * (count // len(names))


def units_of(device: str, options: Mapping[str, str]) -> tuple[str, ...]:
    """Return one device's name, repeated as its option requests (``Device.several``), or an empty tuple for a single unit."""
    own = options_for(device, options)
    manifest = Registry().devices.get(device.partition(":")[0]) if own else None
    count = own.get(manifest.several, "1") if isinstance(manifest, Device) else "1"
    number = whole_number(count, MOST) or 1
    return (device,) * number if number > 1 else ()


@dataclass
class SpreadModel:
    """A model over several devices. ``open_spread`` opens it, ``prepare`` compiles for the shapes of inputs. Called in every
    process alike."""

    source: ModelSource
    names: tuple[str, ...]
    joining: Joining
    request: Request
    registry: Registry
    fabric: Fabric
    sites: tuple[Site, ...]
    progress: Progress = ignore_progress
    compile_seconds: float = 0.0
    backends: dict[int, Backend] = field(default_factory=dict)  #: By device number.
    made: dict[SpreadKey, SpreadRuns] = field(default_factory=dict)  #: By shapes and ranges, least recently used first.
    links: tuple[Link, ...] | None = None
    failed: bool = False

    def backend(self, number: int) -> Backend:
        """Return the opened device, opening it if necessary."""
        name = self.names[number]
        if number not in self.backends:
            options = options_for(name, self.request.device_options)
            made = self.registry.open(name, self.request.require, self.request.target, options)
            self.backends[number] = made
            check_precision(self.request.chosen.precision, name, made.vdevice)
        return self.backends[number]

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each device the first equivalent one for the compiler, preferably of this process.

        Equivalent devices have the same hardware and options. A device that this process does not see is assumed to equal this
        process's device: compiled programs are compared between processes."""
        own = {self.names[n].partition(":")[0]: n for n in reversed(self.fabric.mine)}
        seen = [
            self._unit_identity(name) or self._unit_identity(self.names[own.get(name.partition(":")[0], 0)]) or name
            for name in self.names
        ]
        order = (*self.fabric.mine, *range(len(seen)))
        return tuple(next(n for n in order if seen[n] == what) for what in seen)

    def _unit_identity(self, name: str) -> tuple[object, ...] | None:
        """Return the properties of a unit without its number, or None if this process does not see it."""
        plain, _, index = name.partition(":")
        options = tuple(sorted(options_for(name, self.request.device_options).items()))
        units = [u for u in self.registry.status(plain).hardware if str(u.index) == (index or "0")]
        return (plain, options, replace(units[0], index=0)) if units else None

    def compilers(self) -> list[tuple[str, Compiler]]:
        """Return every device's name with its compiler, shared by equivalent devices."""
        from rammer.compiler.compiler import Compiler

        made = dict[int, Compiler]()
        for number in dict.fromkeys(self.alike):
            plain, store, chosen = self.names[number].partition(":")[0], KernelStore.default(), self.request.chosen
            made[number] = Compiler(self.backend(number), chosen, store, self.registry, self.progress, plain, SEVERAL)
        return [(name, made[n]) for name, n in zip(self.names, self.alike, strict=True)]

    def checked(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Check inputs like ``Executable.checked``."""
        return check_inputs(self.source.head.inputs, inputs)

    @cached_property
    def lengths(self) -> Lengths:
        """The user's ranges of dynamic dimensions. Raises BadInput if they are invalid."""
        return Lengths.of(self.source.head.inputs, self.request.lengths)

    def prepare(self, inputs: Mapping[str, Array]) -> SpreadRuns:
        """Compile for the shapes of ``inputs``, or the range that contains them, and load the programs, unless cached.

        The cache size is an option of the request; the least recently used programs are freed. Raises an error if the processes
        would run different programs."""
        with self.ending():
            at = replace(open_shapes(self.source.head, self.lengths, inputs), states=self.joining.kept)
            key = tuple(sorted(at.shapes.items())), tuple(sorted(at.spans.items()))
            runs = self.made.pop(key, None) or self._join_devices(at)
            self.made[key] = runs
            for old in list(self.made)[: -max(self.request.resident, 1)]:
                self.made.pop(old).leave()
            return runs

    def _join_devices(self, at: OpenShapes) -> SpreadRuns:
        from rammer.distributed.partition.measured_links import MeasuredDevices
        from rammer.distributed.partition.search import compile_open

        read_partition_file(self.joining.place)
        if self.links is None:
            said = component_versions() | {"device list": ",".join(self.names), "transport": self.chosen.name}
            for asked in (self.request, self.joining):
                said |= {f"option {f.name}": str(getattr(asked, f.name)) for f in fields(asked)}
            starting = mpi_launch.start_timeout(self.joining.timeout)
            check_agreement(self.fabric, said, self.names, starting)
            way, names = self.chosen, self.names
            known = way.links(len(names)) if way.links is not None else ()
            self.links = tuple(known or measured_links(self.fabric, names, starting, f"measured by {way.name}"))
        begin = time.perf_counter()
        goal, place = self.joining.goal, read_partition_file(self.joining.place)
        measured = MeasuredDevices(self.links, self.clock)
        spread = compile_open(self.compilers(), self.source.model, at, measured, goal, place)
        self.source.check()
        self.compile_seconds = time.perf_counter() - begin
        own = {n: self.backend(n) for n in self.fabric.mine}
        joined = Joined(self.sites, self.chosen, self.joining.depth, self.joining.timeout)
        return SpreadRuns(spread, own, joined, self.fabric, 4 * self.compile_seconds)

    def clock(self, parts: Sequence[DevicePart]) -> list[list[float]] | None:
        """Return the measured times of parts, exchanged between the processes that drive the devices. Returns None if devices
        share a processor, since concurrent measurements would interfere."""
        from rammer.distributed.partition.measured_links import seconds_of

        if not self.chosen.separate_hardware:
            return None
        said = {n: json.dumps(seconds_of(parts[n], self.backend(n))) for n in self.fabric.mine}
        return [json.loads(text) for text in self.fabric.meet(said, mpi_launch.start_timeout(self.joining.timeout))]

    def feeds(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return inputs in the types of the devices; values of types without arithmetic are passed as bits."""
        return {n: to_carrier(a) for n, a in inputs.items()}

    @property
    def simulated(self) -> frozenset[int]:
        """The numbers of the simulated devices."""
        manifests = [self.registry.status(n.partition(":")[0]).device for n in self.names]
        return frozenset(n for n, m in enumerate(manifests) if m is not None and m.simulated)

    @property
    def chosen(self) -> Any:
        """The transport that connects the devices."""
        return choose_transport(self.registry, self.sites, self.joining.transport)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Record an error in this context, so that closing does not wait for other processes."""
        try:
            yield
        except BaseException:
            self.failed = True
            raise

    def close(self) -> None:
        """Free everything, in all processes together unless one has failed."""
        self.failed |= any(runs.closed for runs in self.made.values())
        for runs in self.made.values():
            runs.leave()
        self.made = {}
        self.fabric.close(self.failed)
        for backend in self.backends.values():
            backend.close()
        self.backends = {}


def open_spread(
    model: Path, names: tuple[str, ...], request: Request, joining: Joining, progress: Progress = ignore_progress
) -> SpreadModel:
    """Open ``model`` for all devices ``names`` and connect them. Raises BadInput for options that need a single device,
    DeviceUnavailable for devices that are missing or cannot be connected."""
    check_spread(model, request)
    registry = Registry()
    source = open_source(model, registry.operators)
    check_kept(request.chosen, source)
    Lengths.of(source.head.inputs, request.lengths)  # reads and checks the model before any driver is loaded
    check_apart(registry, names)
    names = placed_on_hosts(registry, names, joining.timeout)
    sites = tuple(
        Site(name, kind_of(registry, name), n if launched_processes() > 1 else 0, mpi_launch.is_multi_host())
        for n, name in enumerate(names)
    )
    transport = choose_transport(registry, sites, joining.transport)
    fabric = transport.open(Party(sites, joining.timeout))
    return SpreadModel(source, names, joining, replace(request), registry, fabric, sites, progress)


def placed_on_hosts(registry: Registry, names: tuple[str, ...], timeout: float) -> tuple[str, ...]:
    """Return names with unit numbers if processes share a host and name none. All processes must call it."""
    if launched_processes() == 1:
        return names
    own = registry.status(names[mpi_launch.rank_and_size(timeout)[0]].partition(":")[0])
    said = mpi_launch.said_by_ranks([mpi_launch.first_on_host(timeout), len(own.hardware)], timeout)
    return numbered(names, [host for host, _ in said], [units for _, units in said])


def check_spread(model: Path, request: Request) -> None:
    """Raise BadInput for options that only a single device supports."""
    check_choices(request)
    if is_artifact(model):
        raise BadInput(f"{model} was compiled for one device", "--device", "give the model itself, or one device")
    if request.tune != "off":
        raise BadInput("kernels cannot be measured for several devices", "--tune", "leave out --tune")


def open_shapes(head: Head, lengths: Lengths, inputs: Mapping[str, Array]) -> OpenShapes:
    """Return the shapes to compile for ``inputs``: theirs, or the greatest of the range that contains their lengths."""
    from rammer.distributed.partition.ranged_model import OpenShapes

    shapes = shapes_of(head, inputs)
    spans = lengths.spans_of(head.inputs, shapes)
    return OpenShapes(lengths.longest(head.inputs, shapes, spans), spans, lengths.derived, steps=lengths.steps)


def read_partition_file(path: Path | None) -> str:
    """Return the content of a manual placement file, "" without a file. Raises BadInput if it cannot be read."""
    try:
        return path.read_text() if path is not None else ""
    except (OSError, ValueError) as problem:
        raise BadInput(f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}", "--place") from problem


def check_apart(registry: Registry, names: tuple[str, ...]) -> None:
    """Raise DeviceUnavailable if one process would use one unit twice. Simulated units are unlimited."""
    full = [n if ":" in n else f"{n}:0" for n in names]
    for name in dict.fromkeys(full):
        device = registry.status(name.partition(":")[0]).device
        if launched_processes() == 1 and full.count(name) > 1 and not (device is not None and device.simulated):
            raise DeviceUnavailable(
                f"device {name} is named {full.count(name)} times, but is one unit",
                where=f"--device {','.join(names)}",
                hint="name several units, or start a process for each (mpirun)",
            )


def kind_of(registry: Registry, name: str) -> str:
    """Return the kind of a unit (cpu, gpu, ...), or "" if this process does not see it."""
    plain, _, index = name.partition(":")
    backend = registry.status(plain)
    units = {str(unit.index): unit.kind for unit in backend.hardware}
    return units.get(index or "0", "")


__all__ = ["numbered"]


def numbered(names: Sequence[str], hosts: Sequence[int], units: Sequence[int]) -> tuple[str, ...]:
    """Return ``names`` of devices, one a process, with unit numbers added where a process sees several units and names none.

    Units that no process of the host names are assigned to its processes in order. If too few, they repeat, which the transport
    may refuse. ``hosts`` is the host of each process, ``units`` the number of units of its device that it sees."""
    return tuple(_numbered(number, names, hosts, units[number]) for number in range(len(names)))


def _numbered(number: int, names: Sequence[str], hosts: Sequence[int], units: int) -> str:
    name = names[number]
    if ":" in name or units < 2:
        return name
    here = [(k, n) for k, n in enumerate(names) if hosts[k] == hosts[number]]
    taken = {place for _, n in here for plain, _, place in [n.partition(":")] if plain == name}
    free = [str(u) for u in range(units) if str(u) not in taken] or [str(u) for u in range(units)]
    before = sum(k < number and n == name for k, n in here)
    return f"{name}:{free[before % len(free)]}"
