"""Opening a model over several devices: of this process, or one in each process that a launcher of MPI has started."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rammer.compiled.artifact import is_artifact
from rammer.compiler.compile_options import Progress, Request, check_forms, check_precision, ignore_progress
from rammer.device.arrays import Array
from rammer.device.loader import Registry
from rammer.device.manifest import Backend, Device
from rammer.distributed.distributed_program import DevicePart, Link
from rammer.distributed.runtime.distributed_run import Joined, SpreadRuns
from rammer.distributed.transport import mpi_launch
from rammer.distributed.transport.handshake import check_agreement, component_versions
from rammer.distributed.transport.measure_links import measured_links
from rammer.distributed.transport.protocol import TIMEOUT, Fabric, Party, Site
from rammer.distributed.transport.transport_registry import choose_transport
from rammer.errors import BadInput, DeviceUnavailable
from rammer.ir.formats import to_carrier
from rammer.ir.untrusted_json import whole_number
from rammer.runtime.input_checks import check_inputs, shapes_of
from rammer.runtime.model_source import Head, ModelSource, check_kept, open_source
from rammer.runtime.shape_buckets import Lengths, Span
from rammer.tuning.kernel_store import KernelStore

if TYPE_CHECKING:
    from rammer.compiler.compiler import Compiler
    from rammer.distributed.partition.ranged_model import OpenShapes

#: Units that one device's option may ask for, at most: more is what its plugin refuses.
MOST = 64
#: Why no programs are measured to choose among them: processes compile all devices' parts, and must choose alike.
SEVERAL = "over several devices nothing is measured"
#: Shapes of inputs, and ranges of open dimensions.
SpreadKey: TypeAlias = "tuple[tuple[tuple[str, tuple[int, ...]], ...], tuple[tuple[str, Span], ...]]"


@dataclass(frozen=True)
class Joining:
    """What users say of several devices: the transport (the best one), seconds that one waits for another, runs in flight, what
    the cut is good for, a file that says it by hand, and outputs that are an input of the next run (``OUTPUT=INPUT``)."""

    transport: str = ""
    timeout: float = TIMEOUT
    depth: int = 2
    goal: str = "throughput"
    place: Path | None = None
    states: tuple[str, ...] = ()

    @property
    def kept(self) -> dict[str, str]:
        """Input by output. BadInput for words of another form."""
        found = dict(word.partition("=")[::2] for word in self.states)
        if not all(o and i for o, i in found.items()) or len(found) < len(self.states):
            raise BadInput(f"{' '.join(self.states)} says no states", "--state", "write OUTPUT=INPUT, an output once")
        return found


def resolve_devices(device: str, timeout: float = TIMEOUT, options: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The devices that ``--device`` names for this run, in order, or one as often as its own ``options`` want it; of one alone,
    in one process, nothing. DeviceUnavailable where processes and names do not fit together; processes start within
    ``launch.starting(timeout)``."""
    names = tuple(n.strip() for n in device.split(",")) if "," in device else (device,)
    count = mpi_launch.launched_processes()
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
            f"the launcher started {count} processes, and MPI knows {size}",
            where=f"rank {rank}",
            hint="mpirun and mpi4py must be of the same MPI",
        )
    return names * (count // len(names))


def units_of(device: str, options: Mapping[str, str]) -> tuple[str, ...]:
    """One device's name as often as its own option says (``Device.several``); of one, nothing."""
    own = options_for(device, options)
    manifest = Registry().devices.get(device.partition(":")[0]) if own else None
    count = own.get(manifest.several, "1") if isinstance(manifest, Device) else "1"
    number = whole_number(count, MOST) or 1
    return (device,) * number if number > 1 else ()


@dataclass
class SpreadModel:
    """A model over several devices: ``open_spread`` finds them, ``prepare`` compiles for the shapes of some inputs. Called in
    every process alike."""

    source: ModelSource
    names: tuple[str, ...]
    joining: Joining
    request: Request
    registry: Registry
    fabric: Fabric
    sites: tuple[Site, ...]
    progress: Progress = ignore_progress
    compile_seconds: float = 0.0
    backends: dict[int, Backend] = field(default_factory=dict)  #: By the device's number.
    made: dict[SpreadKey, SpreadRuns] = field(default_factory=dict)  #: By shapes and ranges; what was used last is last.
    links: tuple[Link, ...] | None = None
    failed: bool = False

    def backend(self, number: int) -> Backend:
        """An opened device."""
        name = self.names[number]
        if number not in self.backends:
            options = options_for(name, self.request.device_options)
            made = self.registry.open(name, self.request.require, self.request.target, options)
            self.backends[number] = made
            check_precision(self.request.chosen.precision, name, made.vdevice)
        return self.backends[number]

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """Of each device the first that is the same for the compiler, of this process's own where there is one: the same
        hardware, opened with the same options. One that it does not see is taken for its own: what processes compile is compared.
        """
        own = {self.names[n].partition(":")[0]: n for n in reversed(self.fabric.mine)}
        seen = [
            self._unit_identity(name) or self._unit_identity(self.names[own.get(name.partition(":")[0], 0)]) or name
            for name in self.names
        ]
        order = (*self.fabric.mine, *range(len(seen)))
        return tuple(next(n for n in order if seen[n] == what) for what in seen)

    def _unit_identity(self, name: str) -> tuple[object, ...] | None:
        """What a unit is, without its number; None where this process does not see it."""
        plain, _, index = name.partition(":")
        options = tuple(sorted(options_for(name, self.request.device_options).items()))
        units = [u for u in self.registry.status(plain).hardware if str(u.index) == (index or "0")]
        return (plain, options, replace(units[0], index=0)) if units else None

    def compilers(self) -> list[tuple[str, Compiler]]:
        """Every device's name with its compiler, one for all that are alike."""
        from rammer.compiler.compiler import Compiler

        made = dict[int, Compiler]()
        for number in dict.fromkeys(self.alike):
            plain, store, chosen = self.names[number].partition(":")[0], KernelStore.default(), self.request.chosen
            made[number] = Compiler(self.backend(number), chosen, store, self.registry, self.progress, plain, SEVERAL)
        return [(name, made[n]) for name, n in zip(self.names, self.alike, strict=True)]

    def checked(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """As ``Executable.checked``."""
        return check_inputs(self.source.head.inputs, inputs)

    @cached_property
    def lengths(self) -> Lengths:
        """What the user said of open dimensions. BadInput where that cannot be."""
        return Lengths.of(self.source.head.inputs, self.request.lengths)

    def prepare(self, inputs: Mapping[str, Array]) -> SpreadRuns:
        """Compile for the shapes of ``inputs``, or the range that they lie in, and join the devices, unless that was done. As
        many sets of shapes stay as the request says: what was not used for longest is freed. Refuses processes that would run
        something else."""
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
        """What parts take, as the processes that have the devices measure them and tell each other. Not where devices share a
        processor: their processes would measure each other."""
        from rammer.distributed.partition.measured_links import seconds_of

        if not self.chosen.apart:
            return None
        said = {n: json.dumps(seconds_of(parts[n], self.backend(n))) for n in self.fabric.mine}
        return [json.loads(text) for text in self.fabric.meet(said, mpi_launch.start_timeout(self.joining.timeout))]

    def feeds(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Inputs as devices have them: of types that nothing computes in, their bits."""
        return {n: to_carrier(a) for n, a in inputs.items()}

    @property
    def simulated(self) -> frozenset[int]:
        """The devices that are simulated."""
        manifests = [self.registry.status(n.partition(":")[0]).device for n in self.names]
        return frozenset(n for n, m in enumerate(manifests) if m is not None and m.simulated)

    @property
    def chosen(self) -> Any:
        """The transport."""
        return choose_transport(self.registry, self.sites, self.joining.transport)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """After an error here, nobody is waited for."""
        try:
            yield
        except BaseException:
            self.failed = True
            raise

    def close(self) -> None:
        """Free everything; in all processes together, unless something failed."""
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
    """``model`` for all devices ``names``, joined. BadInput for what only one device can do, DeviceUnavailable for devices
    that are not there or that nothing joins."""
    check_spread(model, request)
    registry = Registry()
    source = open_source(model, registry.operators)
    check_kept(request.chosen, source)
    Lengths.of(source.head.inputs, request.lengths)  # reads and checks the model before any driver is touched
    check_apart(registry, names)
    names = placed_on_hosts(registry, names, joining.timeout)
    sites = tuple(
        Site(name, kind_of(registry, name), n if mpi_launch.launched_processes() > 1 else 0, mpi_launch.is_multi_host())
        for n, name in enumerate(names)
    )
    transport = choose_transport(registry, sites, joining.transport)
    fabric = transport.open(Party(sites, joining.timeout))
    return SpreadModel(source, names, joining, replace(request), registry, fabric, sites, progress)


def placed_on_hosts(registry: Registry, names: tuple[str, ...], timeout: float) -> tuple[str, ...]:
    """With numbers of units, where processes are given units of one host and name none; all processes ask together."""
    if mpi_launch.launched_processes() == 1:
        return names
    own = registry.status(names[mpi_launch.rank_and_size(timeout)[0]].partition(":")[0])
    said = mpi_launch.said_by_ranks([mpi_launch.first_on_host(timeout), len(own.hardware)], timeout)
    return numbered(names, [host for host, _ in said], [units for _, units in said])


def check_spread(model: Path, request: Request) -> None:
    """BadInput for what is asked of several devices and only one can do."""
    check_forms(request.layout, request.batching)
    if is_artifact(model):
        raise BadInput(f"{model} was compiled for one device", "--device", "give the model itself, or one device")
    if request.tune != "off":
        raise BadInput("kernels are not measured for several devices: each would choose others", "--tune", "leave out --tune")


def open_shapes(head: Head, lengths: Lengths, inputs: Mapping[str, Array]) -> OpenShapes:
    """What is compiled for ``inputs``: their shapes, or those of the range that their lengths lie in, at its greatest."""
    from rammer.distributed.partition.ranged_model import OpenShapes

    shapes = shapes_of(head, inputs)
    spans = lengths.spans_of(head.inputs, shapes)
    return OpenShapes(lengths.longest(head.inputs, shapes, spans), spans, lengths.derived)


def read_partition_file(path: Path | None) -> str:
    """What a file says of who computes what. BadInput where it cannot be read."""
    try:
        return path.read_text() if path is not None else ""
    except (OSError, ValueError) as problem:
        raise BadInput(f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}", "--place") from problem


def check_apart(registry: Registry, names: tuple[str, ...]) -> None:
    """DeviceUnavailable where one process would have one unit twice; simulated ones are as many as one likes."""
    full = [n if ":" in n else f"{n}:0" for n in names]
    for name in dict.fromkeys(full):
        device = registry.status(name.partition(":")[0]).device
        if mpi_launch.launched_processes() == 1 and full.count(name) > 1 and not (device is not None and device.simulated):
            raise DeviceUnavailable(
                f"device {name} is named {full.count(name)} times, and is one unit",
                where=f"--device {','.join(names)}",
                hint="name several units, or start a process for each (mpirun)",
            )


def kind_of(registry: Registry, name: str) -> str:
    """cpu, gpu or whatever the unit is; DeviceUnavailable where it is not there."""
    plain, _, index = name.partition(":")
    backend = registry.status(plain)
    units = {str(unit.index): unit.kind for unit in backend.hardware}
    return units.get(index or "0", "")


def options_for(name: str, options: Mapping[str, str]) -> dict[str, str]:
    """The device's own options: ``tiles=8`` is all devices', ``ipu_sim.tiles=8`` one's."""
    plain, found = name.partition(":")[0], dict[str, str]()
    for key, value in options.items():
        owner, dot, rest = key.rpartition(".")
        if not dot or owner in (plain, name):
            found[rest] = value
    return found


__all__ = ["numbered"]


def numbered(names: Sequence[str], hosts: Sequence[int], units: Sequence[int]) -> tuple[str, ...]:
    """``names`` of devices, a process each, with the number of a unit where a process sees several and none is named: those that
    no process of the host names go to its processes in order. Where they are too few they begin again, which whoever joins the
    devices may refuse. ``hosts`` says where each process is, ``units`` how many units of its device it sees."""
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
