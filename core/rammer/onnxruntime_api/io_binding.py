"""IOBinding: the arrays from which a session reads its inputs and into which it writes its outputs.

Arrays on the host are those of ordinary runs, so their shapes may change from run to run. With an array on a device, the run is a
bound call of these arrays, which is kept until another array is bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rammer.device.arrays import Array, dtype_of, on_host, shape_of
from rammer.errors import BadInput
from rammer.onnxruntime_api.metadata import NodeArg
from rammer.onnxruntime_api.ort_value import HOST, OrtDevice, OrtValue, memory_at

if TYPE_CHECKING:
    from rammer.runtime.bound_call import BoundCall
    from rammer.runtime.executable import Executable


class Session(Protocol):
    """The part of a session that a binding reads."""

    def get_inputs(self) -> Sequence[NodeArg]:
        """Return the inputs in the model's order."""
        ...


class IOBinding:
    """The bound inputs and outputs of a session. ``session.run_with_iobinding`` runs them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._inputs: dict[str, OrtValue] = {}
        #: The value of each output, or the place for a new one.
        self._outputs: dict[str, OrtValue | OrtDevice] = {}
        self._results: list[OrtValue] = []
        self._call: BoundCall | None = None

    def bind_cpu_input(self, name: str, arr_on_cpu: Array) -> None:
        """Bind an input to an array on the host. Each run reads its current elements."""
        if not isinstance(arr_on_cpu, np.ndarray):
            raise RuntimeError("Unable to create OrtValue from the given python object")
        self._bind_input(name, OrtValue(arr_on_cpu))

    def bind_input(self, name: str, device_type: str, device_id: int, element_type: Any, shape: Any, buffer_ptr: int) -> None:
        """Bind an input to memory at an address, which must stay valid."""
        device = OrtDevice.make(device_type, device_id)
        self._bind_input(name, OrtValue(memory_at(buffer_ptr, shape, element_type, device), device))

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Bind an input to a value."""
        self._bind_input(name, ortvalue)

    def bind_output(
        self,
        name: str,
        device_type: str = HOST,
        device_id: int = 0,
        element_type: Any = None,
        shape: Any = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Bind an output to memory at an address, or to a place where each run allocates it."""
        device = OrtDevice.make(device_type, device_id)
        if buffer_ptr is None:
            self._bind_output(name, device)
        elif element_type is None or shape is None:
            raise ValueError("`element_type` and `shape` are to be provided if pre-allocated memory is provided")
        else:
            self._bind_output(name, OrtValue(memory_at(buffer_ptr, shape, element_type, device), device))

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Bind an output to a value, which each run overwrites."""
        self._bind_output(name, ortvalue)

    def synchronize_inputs(self) -> None:
        """Return at once: a run waits for its inputs."""

    def synchronize_outputs(self) -> None:
        """Return at once: a run has finished when ``run_with_iobinding`` returns."""

    def get_outputs(self) -> list[OrtValue]:
        """Return the outputs of the last run, in the order in which they were bound."""
        return list(self._results)

    def copy_outputs_to_cpu(self) -> list[Array]:
        """Return the outputs of the last run as arrays on the host."""
        return [value.numpy() for value in self._results]

    def clear_binding_inputs(self) -> None:
        """Unbind all inputs."""
        self._inputs.clear()
        self._drop_call()

    def clear_binding_outputs(self) -> None:
        """Unbind all outputs."""
        self._outputs.clear()
        self._results.clear()
        self._drop_call()

    def _bind_input(self, name: str, value: OrtValue) -> None:
        if all(name != arg.name for arg in self.session.get_inputs()):
            raise RuntimeError(f"Failed to find NodeArg with name: {name} in the def list")
        self._inputs[name] = value
        self._drop_call()

    def _bind_output(self, name: str, target: OrtValue | OrtDevice) -> None:
        self._outputs[name] = target
        self._drop_call()

    def _drop_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.close()

    # --- runs ---------------------------------------------------------------------------------

    def run(self, executable: Executable) -> None:
        """Run once and wait. Raises BadInput for arrays that do not fit the model."""
        known = executable.head.output_names
        for name in self._outputs:
            if name not in known:
                raise BadInput(f"Invalid output name: {name}", hint=f"the outputs are: {', '.join(known)}")
        if not self._outputs:
            raise BadInput("At least one output should be requested.")
        places = [v.array for v in (*self._inputs.values(), *self._outputs.values()) if isinstance(v, OrtValue)]
        if all(map(on_host, places)) and all(d.is_host for d in self._outputs.values() if isinstance(d, OrtDevice)):
            found = executable.run({name: value.array for name, value in self._inputs.items()})
            self._results = [self._store(name, found) for name in self._outputs]
        else:
            self._run_bound(executable)

    def _store(self, name: str, found: Mapping[str, Array]) -> OrtValue:
        """Return an output in the array that it is bound to, or as a new value."""
        target = self._outputs[name]
        if not isinstance(target, OrtValue):
            return OrtValue(found[name])
        have, want = (dtype_of(target.array), shape_of(target.array)), (dtype_of(found[name]), found[name].shape)
        if have != want:
            raise BadInput(f"output {name!r} is bound to {have[0]}{list(have[1])}, the result is {want[0]}{list(want[1])}")
        np.copyto(target.array, found[name])
        return target

    def _run_bound(self, executable: Executable) -> None:
        given = {n: v.array for n, v in self._outputs.items() if isinstance(v, OrtValue) and not on_host(v.array)}
        if self._call is None:
            self._call = executable.bind({n: v.array for n, v in self._inputs.items()}, given)
        call = self._call
        call.write({n: v.array for n, v in self._inputs.items() if on_host(v.array)})
        call.run()
        call.synchronize()
        results = list[OrtValue]()
        for name, target in self._outputs.items():
            if name in given and isinstance(target, OrtValue):
                results.append(target)
            elif isinstance(target, OrtDevice) and not target.is_host:
                results.append(OrtValue(call.outputs[name], target))
            else:
                results.append(self._store(name, call.to_host(name)))
        self._results = results
