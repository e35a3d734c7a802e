"""A model with fixed arrays for its inputs and outputs: the bound calls of its programs, run in sequence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Any

import numpy as np

from rammer.compiled.segments import Compiled, HostSegment, ProgramSegment
from rammer.device.arrays import Array, by_name, check_distinct, check_names, check_type, dtype_of, host_view, on_host
from rammer.device.manifest import Bound, Loaded
from rammer.errors import BadInput, DeviceFailure
from rammer.ir.formats import from_carrier, to_carrier
from rammer.ir.graph import Value
from rammer.runtime.host_bound import check_values


class ModelBound(Bound):
    """The result of ``Executable.bind``: a ``rammer.device.manifest.Bound`` with the model's ONNX names.

    Values stay in device memory between programs. Host operators fetch their inputs and write back their results in every run;
    ``notes`` states this. Any thread may call it; calls are serialised."""

    def __init__(
        self,
        compiled: Compiled,
        loaded: Mapping[int, Loaded],
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        stream: Any = None,
    ) -> None:
        self.graph, self.closed, self._lock = compiled.graph, False, RLock()
        self.bounds: list[Bound] = []
        self._steps: list[Callable[[], float]] = []
        self._runs: list[Callable[[], None]] = []
        self._hosted: dict[str, Array] = {}  # host operators' tensors, in fixed arrays
        self._fed: list[tuple[Bound, str, str]] = []  # (bound call, its input, tensor)
        self._made: dict[str, tuple[Bound, str]] = {}  # tensor -> its producer
        self._values: dict[str, Any] = {
            v.name: _to_program_array("input", v, inputs[v.external or v.name]) for v in self.graph.inputs
        }
        given = self._outputs_given(outputs)
        try:
            for number, segment in enumerate(compiled.segments):
                if isinstance(segment, ProgramSegment):
                    self._bind_program(segment, loaded[number], given, stream)
                else:
                    self._bind_host_operator(segment, given)
        except BaseException:
            self.close()
            raise
        ports = [(v.external or v.name, v) for v in self.graph.inputs]
        self.inputs: dict[str, Any] = {name: _to_user_array(v, self._input_array(v.name)) for name, v in ports}
        self.outputs = {v.external or v.name: _to_user_array(v, self._values[v.name]) for v in self.graph.outputs}
        self._host_nodes = len(compiled.host_nodes)

    def _outputs_given(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the user's arrays by tensor. Raises BadInput for a wrong name, type or shape."""
        ports = {v.external or v.name: v for v in self.graph.outputs}
        check_names("output", outputs, ports)
        given = {name: _to_program_array("output", ports[name], array) for name, array in outputs.items()}
        for name, array in given.items():
            check_type(f"output {name!r}", array, ports[name].type)
            check_distinct(f"output {name!r}", array)
        return {ports[name].name: array for name, array in given.items()}

    def _bind_program(self, segment: ProgramSegment, loaded: Loaded, given: Mapping[str, Any], stream: Any) -> None:
        """Bind one program; host operators' results are written into its inputs before every run."""
        program = segment.program
        inputs = {p.external: self._values[p.tensor] for p in program.inputs}
        outputs = {p.external: given[p.tensor] for p in program.outputs if p.tensor in given}
        bound = loaded.bind(inputs, outputs, stream)
        self.bounds.append(bound)
        fresh = [(p.external, self._hosted[p.tensor]) for p in program.inputs if p.tensor in self._hosted]
        self._fed += [(bound, p.external, p.tensor) for p in program.inputs]
        for port in program.outputs:
            self._values[port.tensor] = bound.outputs[port.external]
            self._made[port.tensor] = bound, port.external
        if fresh:
            self._runs.append(lambda: bound.write(dict(fresh)))
            self._steps.append(lambda: _time_call(lambda: bound.write(dict(fresh))))
        self._runs.append(bound.run)
        self._steps.append(bound.seconds)

    def _bind_host_operator(self, segment: HostSegment, given: Mapping[str, Any]) -> None:
        node = segment.node
        reads = [n for n in node.inputs if n]
        for name in reads:
            if name in self._values and name not in self._made and name not in self._hosted:
                self._hosted[name] = self._host_input(name)
        for name, kind in node.types.items():
            array = host_view(f"output {name!r}", given[name]) if name in given else np.zeros(kind.shape, kind.dtype)
            self._hosted[name] = self._values[name] = array

        def run() -> None:
            known = {n: self.fetched(n) for n in reads}
            for name, values in node.run(known).items():
                np.copyto(self._hosted[name], values)

        self._runs.append(run)
        self._steps.append(lambda: _time_call(run))

    def _host_input(self, tensor: str) -> Array:
        """Return a model input that a host operator reads. It must be a host array, which is read in every run."""
        what = next(f"input {v.external or v.name!r}" for v in self.graph.inputs if v.name == tensor)
        if not on_host(self._values[tensor]):
            raise BadInput(f"{what} is on the device, but an operator on the host reads it", hint="bind a host array")
        return host_view(what, self._values[tensor])

    def fetched(self, tensor: str) -> Array:
        """Return the current value of a tensor for a host operator."""
        if tensor in self._made:
            bound, name = self._made[tensor]
            return bound.to_host(name)[name]
        return self._hosted[tensor] if tensor in self._hosted else self.graph.constants[tensor]

    def _input_array(self, tensor: str) -> Any:
        """Return the array that runs read: a program's, which may be a copy of a host array, or the host's."""
        if tensor in self._hosted:
            return self._hosted[tensor]
        found = [bound.inputs[name] for bound, name, t in self._fed if t == tensor]
        return found[0] if found else self._values[tensor]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on additional work in each run."""
        found = dict.fromkeys(n for b in self.bounds for n in b.notes)
        if self._host_nodes:
            found[f"{self._host_nodes} operators run on the host: their inputs and outputs are copied in every run"] = None
        return tuple(found)

    @property
    def clock(self) -> str:
        """The programs' clock; with host operators, which are measured in wall time, both clocks."""
        clocks = list(dict.fromkeys(b.clock for b in self.bounds))
        return " + ".join([*clocks, "wall on the host"] if self._host_nodes else clocks) or "wall on the host"

    @property
    def stream(self) -> Any:
        """The queue of the programs, or None if runs are not queued."""
        return self.bounds[0].stream if self.bounds else None

    def run(self) -> None:
        """Run once, queued if the device has a queue and all operators run on the device."""
        with self.turn():
            for run in self._runs:
                run()

    def synchronize(self) -> None:
        """Wait for every queued run. Raises DeviceFailure if one failed."""
        with self._lock:
            for bound in self.bounds:
                bound.synchronize()

    def seconds(self) -> float:
        """Run once, wait, and return the seconds of its parts by ``clock``."""
        with self.turn():
            return sum(step() for step in self._steps)

    def write(self, inputs: Mapping[str, Any]) -> None:
        """Copy values into the bound inputs. Raises BadInput for a wrong name, type or shape."""
        inputs = by_name("input", inputs)
        check_names("input", inputs, self.inputs)
        ports = {v.external or v.name: v for v in self.graph.inputs}
        tensors = {name: v.name for name, v in ports.items()}
        with self.turn():
            for name, given in inputs.items():
                value = _to_program_array("input", ports[name], given)
                check_values(name, value, _to_program_array("input", ports[name], self.inputs[name]))
                check_distinct(f"input {name!r}", self.inputs[name])
                self.put(tensors[name], value)
                if tensors[name] in self._hosted:
                    np.copyto(self._hosted[tensors[name]], host_view(f"input {name!r}", value))

    def put(self, tensor: str, value: Any) -> None:
        """Copy a value into an input of the programs that read it."""
        for bound, port, read in self._fed:
            if read == tensor:
                bound.write({port: value})

    def to_host(self, *names: str) -> dict[str, Array]:
        """Return copies of the outputs (all, or the named ones) after the queued runs."""
        check_names("output", dict.fromkeys(names), self.outputs)
        ports = {v.external or v.name: v for v in self.graph.outputs}
        with self.turn():
            return {n: from_carrier(np.array(self.fetched(ports[n].name)), ports[n].port.dtype) for n in names or self.outputs}

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Exclude other calls in this context. Raises DeviceFailure if closed."""
        with self._lock:
            if self.closed:
                raise DeviceFailure("the bound call was closed", hint="bind the arrays again")
            yield

    def close(self) -> None:
        """Release the arrays when the running call has returned."""
        with self._lock:
            self.closed = True
            for bound in self.bounds:
                bound.close()


def _to_program_array(what: str, port: Value, array: Any) -> Any:
    """Return an array in the form that programs accept: NumPy arrays of a type in ``FORMATS`` as codes in the same memory."""
    if isinstance(array, np.ndarray):
        return to_carrier(array)
    if port.outside and dtype_of(array) == port.outside:
        raise BadInput(
            f"{what} {port.external or port.name!r} is an array of {port.outside}, which libraries exchange by its bits only",
            hint=f"give a view of it as {port.type.dtype}",
        )
    return array


def _to_user_array(port: Value, array: Any) -> Any:
    """Return an array for users: NumPy arrays in the type that the model declares."""
    return from_carrier(array, port.port.dtype) if isinstance(array, np.ndarray) else array


def _time_call(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
