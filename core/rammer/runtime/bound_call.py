"""A model with fixed arrays for its inputs and outputs: the bound calls of its programs and its host operators, in sequence."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rammer.compiled.segments import Compiled, HostSegment, ProgramSegment
from rammer.device.arrays import Array, check_distinct, check_names, check_type, dtype_of, host_view, on_host
from rammer.device.bound import Bound, check_values
from rammer.device.manifest import Loaded
from rammer.errors import BadInput
from rammer.ir.extent import Point
from rammer.ir.formats import from_carrier, to_carrier
from rammer.ir.graph import Value
from rammer.runtime.call_lengths import PLAIN, BindSpec, CallLengths, LoadedVariants
from rammer.runtime.executable_text import bound_line

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from rammer.frontend.loops.control_operators import BodyRunner


class BoundProgram:
    """One program of a bound call. With length variants, each table is bound to the arrays of the longest, ``whole``;
    ``current`` is the table that runs."""

    def __init__(
        self, program: Loaded | LoadedVariants, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any
    ) -> None:
        self.variants = program if isinstance(program, LoadedVariants) else None
        tables = (program,) if not isinstance(program, LoadedVariants) else program.tables
        self.whole = self.current = tables[-1].bind(inputs, outputs, stream)
        self.calls = [self.whole]
        try:
            for table in reversed(tables[:-1]):
                self.calls.insert(0, table.bind(self.whole.inputs, self.whole.outputs, self.whole.stream))
        except BaseException:
            self.close()
            raise
        self._select(inputs)

    def write(self, values: Mapping[str, Any]) -> None:
        """Copy values into the inputs. A length selects the table of later runs."""
        self._select(values)
        self.whole.write(values)

    def read(self, name: str) -> Array:
        """Return a copy of an output after the queued runs of all tables."""
        if self.variants is not None:
            self.wait()
        return self.whole.to_host(name)[name]

    def _select(self, values: Mapping[str, Any]) -> None:
        if self.variants is not None and self.variants.port in values:
            self.current = self.calls[self.variants.cases.at(int(np.asarray(values[self.variants.port])))]

    def wait(self) -> None:
        """Wait for every queued run of all tables."""
        for call in self.calls:
            call.synchronize()

    def close(self) -> None:
        """Release the bound arrays of all tables."""
        for call in self.calls:
            call.close()


class BoundCall(Bound):
    """The result of ``Executable.bind``: a bound call with the model's ONNX names.

    Values stay in device memory between programs. Host operators fetch their inputs and write back their results in every run;
    ``notes`` states this. Any thread may call it; calls are serialised.

    With ranges, arrays have the greatest lengths. ``run(past=5)`` sets the current length, and ``to_host`` returns outputs of
    that length. Host arrays in ``write`` may be shorter; zeros are appended. ``rammer.runtime.call_lengths`` describes outputs
    that alias inputs."""

    def __init__(
        self,
        compiled: Compiled,
        loaded: Mapping[int, Loaded | LoadedVariants],
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        spec: BindSpec = PLAIN,
        bodies: BodyRunner | None = None,
    ) -> None:
        graph = self.graph = compiled.graph
        self._bodies, self._closing = bodies, spec.closing
        self._lengths = CallLengths(compiled, spec) if spec != PLAIN or compiled.ranged is not None else None
        self.programs: list[BoundProgram] = []
        self._runs: list[Callable[[], None]] = []  # steps of a run
        self._timed: list[Callable[[], float]] = []  # the same steps, which return their seconds
        self._hosted: dict[str, Array] = {}  # host operators' tensors, in fixed arrays
        self._fed: list[tuple[BoundProgram, str, str]] = []  # (program, its input, tensor)
        self._made: dict[str, tuple[BoundProgram, str]] = {}  # tensor -> its producer
        self._read = {v.external or v.name: v for v in graph.inputs}
        self._written = {v.external or v.name: v for v in graph.outputs}
        self._values: dict[str, Any] = {}
        numbers = dict[str, Array]()
        if self._lengths is not None:
            inputs, numbers = self._lengths.initial_inputs(inputs), self._lengths.numbers
        shown = [v for v in graph.inputs if v.name not in numbers]
        self._values |= numbers | {v.name: _to_program_array("input", v, inputs[v.external or v.name]) for v in shown}
        given = self._outputs_given(outputs)
        try:
            for number, segment in enumerate(compiled.segments):
                if isinstance(segment, ProgramSegment):
                    self._bind_program(segment, loaded[number], given, spec.stream)
                else:
                    self._bind_host_operator(segment, given)
        except BaseException:
            for program in self.programs:
                program.close()
            raise
        self._host_nodes = len(compiled.host_nodes)
        super().__init__(
            {v.external or v.name: _to_user_array(v, self._input_array(v.name)) for v in shown},
            {name: _to_user_array(v, self._values[v.name]) for name, v in self._written.items()},
            clock=self._clock_names(),
            stream=self.programs[0].whole.stream if self.programs else None,
        )

    # --- binding ------------------------------------------------------------------------------

    def _outputs_given(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the user's arrays by tensor. Raises BadInput for a wrong name, type or shape."""
        ports = self._written
        check_names("output", outputs, ports)
        given = {name: _to_program_array("output", ports[name], array) for name, array in outputs.items()}
        for name, array in given.items():
            check_type(f"output {name!r}", array, ports[name].type)
            check_distinct(f"output {name!r}", array)
        return {ports[name].name: array for name, array in given.items()}

    def _bind_program(
        self, segment: ProgramSegment, loaded: Loaded | LoadedVariants, given: Mapping[str, Any], stream: Any
    ) -> None:
        """Bind one program; host operators' results are written into its inputs before every run."""
        ports = segment.program.inputs
        inputs = {p.external: self._values[p.tensor] for p in ports}
        outputs = {p.external: given[p.tensor] for p in segment.program.outputs if p.tensor in given}
        program = BoundProgram(loaded, inputs, outputs, stream)
        self.programs.append(program)
        fresh = {p.external: self._hosted[p.tensor] for p in ports if p.tensor in self._hosted}
        self._fed += [(program, p.external, p.tensor) for p in ports]
        for port in segment.program.outputs:
            self._values[port.tensor] = program.whole.outputs[port.external]
            self._made[port.tensor] = program, port.external
        if fresh:
            self._add_host_step(lambda: program.write(fresh))
        if len(program.calls) == 1:
            self._runs.append(program.whole.run)
            self._timed.append(program.whole.seconds)
        else:
            self._runs.append(lambda: program.current.run())
            self._timed.append(lambda: program.current.seconds())

    def _bind_host_operator(self, segment: HostSegment, given: Mapping[str, Any]) -> None:
        node, constants = segment.node, self.graph.constants
        reads = [n for n in node.inputs if n]
        for name in reads:
            if name in self._values and name not in self._made and name not in self._hosted:
                self._hosted[name] = self._host_input(name)
        for name, kind in node.types.items():
            array = host_view(f"output {name!r}", given[name]) if name in given else np.zeros(kind.shape, kind.dtype)
            self._hosted[name] = self._values[name] = array

        def run() -> None:
            known = {n: self._fetched(n) for n in reads}
            for name, values in node.run(known, self._bodies, constants).items():
                np.copyto(self._hosted[name], values)

        self._add_host_step(run)

    def _add_host_step(self, step: Callable[[], None]) -> None:
        self._runs.append(step)
        self._timed.append(partial(_time_call, step))

    def _host_input(self, tensor: str) -> Array:
        """Return a model input that a host operator reads. It must be a host array, which is read in every run."""
        what = next(f"input {v.external or v.name!r}" for v in self.graph.inputs if v.name == tensor)
        if not on_host(self._values[tensor]):
            raise BadInput(f"{what} is on the device, but an operator on the host reads it", hint="bind a host array")
        return host_view(what, self._values[tensor])

    def _fetched(self, tensor: str) -> Array:
        """Return the current value of a tensor for a host operator."""
        if tensor in self._made:
            program, name = self._made[tensor]
            return program.read(name)
        return self._hosted[tensor] if tensor in self._hosted else self.graph.constants[tensor]

    def _input_array(self, tensor: str) -> Any:
        """Return the array that runs read: a program's, which may be a copy of a host array, or the host's."""
        if tensor in self._hosted:
            return self._hosted[tensor]
        return next((p.whole.inputs[name] for p, name, t in self._fed if t == tensor), self._values[tensor])

    def _clock_names(self) -> str:
        """Return the programs' clocks and, with host operators, that of the host."""
        clocks = dict.fromkeys(p.whole.clock for p in self.programs)
        return " + ".join([*clocks, "wall on the host"] if self._host_nodes else clocks) or "wall on the host"

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on additional work in each run."""
        found = dict.fromkeys(n for p in self.programs for n in p.whole.notes)
        if self._host_nodes:
            found[f"{self._host_nodes} operators run on the host: their inputs and outputs are copied in every run"] = None
        return (*found, *(self._lengths.notes if self._lengths is not None else ()))

    @property
    def lengths(self) -> Point:
        """The lengths of the next run."""
        return {} if self._lengths is None else dict(self._lengths.point)

    @property
    def closed(self) -> bool:
        """True once the call is closed."""
        return self.guard.closed

    # --- calls --------------------------------------------------------------------------------

    def set_lengths(self, lengths: Mapping[str, Any]) -> None:
        """Set lengths for the next run. Raises BadInput for a length outside its range."""
        if self._lengths is None:
            super().set_lengths(lengths)
        else:
            self._put(self._lengths.set(lengths))

    def launch(self) -> None:
        """Run once, queued if the device has a queue and all operators run on the device."""
        if self._lengths is None:
            for run in self._runs:
                run()
            return
        self._clear_states(self._lengths)
        for run in self._runs:
            run()
        self._copy_states(self._lengths)

    def submit(self, inputs: Mapping[str, Any] | None = None, **lengths: int) -> Future[dict[str, Array]]:
        """Write ``inputs``, run once and return a future of copies of the outputs. Submitted calls execute one after another, and
        no other call of any thread comes between their steps. The future has the errors of ``write`` and ``run``."""
        return self._threads.submit(self._call, inputs, lengths)

    def _call(self, inputs: Mapping[str, Any] | None, lengths: Mapping[str, int]) -> dict[str, Array]:
        with self.guard:
            if inputs:
                self.write(inputs)
            self.run(**lengths)
            return self.to_host()

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        from concurrent.futures import ThreadPoolExecutor

        return ThreadPoolExecutor(1, "rammer-bound")

    def __enter__(self) -> BoundCall:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return bound_line(self.graph.name, self.inputs, self.outputs, ", closed" if self.closed else "")

    def wait(self) -> None:
        """Wait for every queued run. Raises DeviceFailure if one failed."""
        for program in self.programs:
            program.wait()

    def measure(self) -> float:
        """Run once, wait, and return the seconds of its parts by ``clock``, without the copies of states."""
        if self._lengths is None:
            return sum(step() for step in self._timed)
        self._clear_states(self._lengths)
        seconds = sum(step() for step in self._timed)
        self._copy_states(self._lengths)
        return seconds

    def accept(self, name: str, value: Any) -> Any:
        """Return a value in the form that programs accept, padded to its full shape. Raises BadInput for a wrong one."""
        port = self._read[name]
        value = _to_program_array("input", port, value)
        if self._lengths is not None:
            value = self._lengths.pad(name, value)
        check_values(name, value, _to_program_array("input", port, self.inputs[name]))
        check_distinct(f"input {name!r}", self.inputs[name])
        return host_view(f"input {name!r}", value) if port.name in self._hosted else value

    def store(self, values: Mapping[str, Any]) -> None:
        """Copy values into the inputs."""
        self._put({self._read[name].name: value for name, value in values.items()})
        if self._lengths is not None:
            self._lengths.mark_filled(values)

    def _put(self, values: Mapping[str, Any]) -> None:
        """Copy values by tensor into the inputs of the programs and host operators that read them."""
        for tensor, value in values.items():
            for program, port, read in self._fed:
                if read == tensor:
                    program.write({port: value})
            if tensor in self._hosted:
                np.copyto(self._hosted[tensor], value)

    def fetch(self, names: Sequence[str]) -> dict[str, Array]:
        """Return copies of outputs after the queued runs, at the lengths of the last one."""
        ports = self._written
        found = {n: from_carrier(np.array(self._fetched(ports[n].name)), ports[n].port.dtype) for n in names}
        return found if self._lengths is None else {n: self._lengths.crop(n, a) for n, a in found.items()}

    def _clear_states(self, lengths: CallLengths) -> None:
        """Clear elements of states past the current length of this run."""
        for output, name in lengths.shortened_states():
            values = lengths.cleared_state(name, partial(self._fetched, self._written[output].name))
            self._put({self._read[name].name: values})

    def _copy_states(self, lengths: CallLengths) -> None:
        """Copy outputs that do not alias their inputs into the inputs."""
        for output, name in lengths.copied.items():
            value, shape = self.outputs[output], lengths.state_shape(name)
            if tuple(value.shape) != shape:
                value = np.ascontiguousarray(self._fetched(self._written[output].name)[tuple(map(slice, shape))])
            self.store({name: self.accept(name, value)})

    def close(self) -> None:
        """Release the arrays, and the program if only this call uses it, after the running and submitted calls have returned."""
        if "_threads" in self.__dict__:
            self._threads.shutdown()
        super().close()
        closing, self._closing = self._closing, None
        if closing is not None:
            closing()

    def release(self) -> None:
        """Release the arrays of all programs. Raises DeviceFailure within a call of one of them; the call then stays open."""
        try:
            for program in self.programs:
                program.close()
        except BaseException:
            self.guard.closed = False
            raise


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
