"""A distributed program, ready to run: all devices in this process, or this process's device among several."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial

from rammer.device.arrays import Array, HostRoom
from rammer.device.manifest import Backend
from rammer.distributed.distributed_program import DistributedProgram
from rammer.distributed.runtime.device_part import BoundPart
from rammer.distributed.transport.counters import Counters
from rammer.distributed.transport.event_log import Log
from rammer.distributed.transport.handshake import check_agreement, component_versions, gather_counters, said_by_all
from rammer.distributed.transport.measure_links import in_parallel
from rammer.distributed.transport.memory_layout import Exposed
from rammer.distributed.transport.protocol import TIMEOUT, Endpoint, Fabric, Party, Runs, Site, StepRunner, Transport
from rammer.errors import BadInput, DeviceFailure, RammerError
from rammer.ir.graph import Value
from rammer.runtime.shape_buckets import crop_outputs, format_spans, is_within, pad_inputs, point_of


@dataclass(frozen=True)
class Joined:
    """The connection of the devices: their sites, the transport, the runs in flight, and the transfer timeout (seconds)."""

    sites: tuple[Site, ...]
    transport: Transport
    depth: int = 2
    timeout: float = TIMEOUT


@dataclass(frozen=True)
class Timed:
    """Times of runs on device 0: seconds of each from its start to its outputs, and of all together."""

    each: tuple[float, ...]
    whole: float


class SpreadRuns:
    """A distributed program with methods ``run`` and ``run_all``, called in every process alike.

    Outputs are returned in the process of device 0. ``backends`` are those of this process's devices by number. Any error closes
    it here, and in every other process with the error's message."""

    def __init__(
        self,
        spread: DistributedProgram,
        backends: Mapping[int, Backend],
        joined: Joined,
        fabric: Fabric | None = None,
        patience: float = 0.0,
    ) -> None:
        """Load the programs. ``patience`` is the additional time in seconds for other processes, since all have compiled."""
        self.asked, self.spread = spread, spread if joined.transport.reads else spread.fixed
        self.joined, self._next, self.closed, self._first = joined, 0, False, next(iter(backends.values()))
        self.fabric = fabric or joined.transport.open(Party(joined.sites, joined.timeout))
        self._inputs, self._outputs = self.ports(self.spread)
        self.parts: dict[int, StepRunner] = {}
        self.endpoints: Mapping[int, Endpoint] = {}
        self.logs: dict[int, Log] = {}
        names = tuple(site.device for site in joined.sites)
        with self.ending():
            check_agreement(self.fabric, component_versions() | {"program": spread.digest}, names, joined.timeout + patience)
            asked = {d: astuple(backends[d].host_room) for d in self.mine}
            rooms = tuple(HostRoom(*said) for said in said_by_all(self.fabric, asked, joined.timeout + patience))
            self.endpoints = self.fabric.expose(Exposed(names, self.spread.transfers, joined.depth, rooms))
            for device, endpoint in self.endpoints.items():
                self.parts[device] = self.part(device, backends[device], endpoint)
            self.fabric.meet(dict.fromkeys(self.mine, "ready"), joined.timeout + patience)  # runs start after all have loaded

    def part(self, device: int, backend: Backend, endpoint: Endpoint) -> StepRunner:
        """Return a device's part, executed by the host or by the device itself. Raises BadInput for host operators if the device
        runs its steps itself."""
        if endpoint.queues_steps:
            hosted = [s.host.title for s in self.spread.parts[device].steps if s.host is not None]
            if hosted:
                raise BadInput(
                    f"{hosted[0]} runs on the host, and transport {self.joined.transport.name} queues all steps of a device",
                    self.spread.parts[device].device,
                    "name another with --transport, or use one device",
                )
            return endpoint.part(self.spread, device, backend)
        return BoundPart(self.spread, device, backend, endpoint, self.joined.depth)

    @property
    def mine(self) -> tuple[int, ...]:
        """The devices of this process."""
        return self.fabric.mine

    @property
    def notes(self) -> list[str]:
        """The work of this process's devices besides running their steps."""
        late, way = sum(t.late is not None for t in self.asked.transfers), self.joined.transport
        said = [f"transport {way.name} moves {late} tensors of dynamic shape at their greatest size"] * (
            late > 0 and not way.reads
        )
        said += way.played(self.spread, self._first) if way.played is not None else ()
        return said + [f"device {d}: {note}" for d, part in self.parts.items() for note in part.notes]

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run once. Returns the outputs in the process of device 0, an empty dictionary elsewhere."""
        outputs, _ = self.run_all([inputs])
        return outputs[0] if outputs else {}

    def run_all(self, inputs: Sequence[Mapping[str, Array]]) -> tuple[list[dict[str, Array]], Timed]:
        """Run once for each set of inputs, with several runs in flight. Returns the outputs in order on device 0. With states,
        one run at a time is in flight. State inputs are optional: they start with zeros, and explicit values overwrite them."""
        if self.closed:
            raise DeviceFailure(f"{self.spread.whole.name} was closed", hint="open it again")
        for given in inputs:
            self._check_lengths(given)
        first, outputs = self._next, list[dict[str, Array]]()
        started, ended = list[float](), list[float]()

        def feed(run: int) -> Mapping[str, Array]:
            return self._widen_inputs(inputs[run - first])

        def feed_timed(run: int) -> Mapping[str, Array]:
            started.append(time.perf_counter())
            return self._widen_inputs(inputs[run - first])

        def deliver(run: int, found: dict[str, Array]) -> None:
            outputs.append(self._narrow_outputs(found, inputs[run - first]))
            ended.append(time.perf_counter())

        self._next += len(inputs)
        self._all({d: Runs(first, len(inputs), feed if d else feed_timed, deliver) for d in self.mine})
        each = tuple(b - a for a, b in zip(started, ended, strict=True)) if outputs else ()
        return outputs, Timed(each, ended[-1] - started[0] if outputs else 0.0)

    @staticmethod
    def ports(spread: DistributedProgram) -> tuple[list[Value], list[Value]]:
        """Return inputs and outputs, including lengths, by tensor."""
        ins, outs = ([Value(p.tensor, p.type, p.name) for p in ports] for ports in (spread.inputs, spread.outputs))
        return ins, outs

    def _check_lengths(self, inputs: Mapping[str, Array]) -> None:
        """Raise BadInput for lengths outside the program's range."""
        ranged = self.spread.ranged
        if ranged is None:
            return
        point = point_of(ranged, self._inputs, inputs)
        for name, span in ranged.spans.items():
            if not is_within(span, point[name], ranged.steps.get(name, 1)):
                served = format_spans(ranged.spans, ranged.steps)
                raise BadInput(f"{name} is {point[name]}, but these programs are for {served}", "inputs")

    def _widen_inputs(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return ``inputs`` padded to the greatest lengths, as steps read them."""
        ranged = self.spread.ranged
        return inputs if ranged is None else pad_inputs(ranged, self._inputs, inputs)[0]

    def _narrow_outputs(self, outputs: dict[str, Array], inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return ``outputs`` cropped to the lengths of ``inputs``."""
        ranged = self.spread.ranged
        return outputs if ranged is None else crop_outputs(ranged, self._outputs, outputs, point_of(ranged, self._inputs, inputs))

    def _all(self, runs: Mapping[int, Runs]) -> None:
        """Run each of this process's devices in a thread, the first in the current one. Raises the first error."""
        with self.ending():
            in_parallel({d: partial(self._run_device, d, runs[d]) for d in self.mine}, self._report_failure)

    def _run_device(self, device: int, runs: Runs) -> None:
        part, log = self.parts[device], self.logs.get(device)
        begin = log.now() if log is not None else 0.0
        part.go(runs)
        if log is not None and not part.logs_steps:
            log.add("whole", str(runs.count), runs.first, begin)

    @contextmanager
    def logging(self, now: Callable[[], float]) -> Iterator[Mapping[int, Log]]:
        """Log the activity of this process's devices in this context, by the clock ``now``."""
        self.logs = {d: Log(now) for d in self.mine}
        self._attach_logs(self.logs)
        try:
            yield self.logs
        finally:
            self.logs = {}
            self._attach_logs({})

    def _attach_logs(self, logs: Mapping[int, Log]) -> None:
        for device in self.parts:
            for one in (self.parts[device], self.endpoints[device]):
                one.log = logs.get(device)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Close everything after an error in this context, without waiting for other processes."""
        try:
            yield
        except BaseException:
            if not self.closed:
                self.closed = True
                self._free_parts()
                self.fabric.close(failed=True)
            raise

    def _report_failure(self, device: int, problem: BaseException) -> None:
        """Send the reason for this device's failure to all other devices."""
        said = problem.what if isinstance(problem, RammerError) else f"{type(problem).__name__}: {problem}"
        self.endpoints[device].fail(said)

    def counters(self) -> list[Counters]:
        """Return the counters of all devices, in order. All processes must call it."""
        with self.ending():
            return gather_counters(self.fabric, {d: e.counters for d, e in self.endpoints.items()}, self.joined.timeout)

    def _free_parts(self) -> None:
        for part in self.parts.values():
            part.close()
        self.parts, self.endpoints = {}, {}

    def leave(self) -> None:
        """Free the programs but not the fabric. Leaving again does nothing."""
        if not self.closed:
            self.closed = True
            self._free_parts()

    def close(self) -> None:
        """Free everything, in all processes together. Closing again does nothing."""
        if not self.closed:
            self.leave()
            self.fabric.close()
