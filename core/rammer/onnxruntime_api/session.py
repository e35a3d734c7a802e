"""InferenceSession: a model on a device, with ONNX Runtime's interface."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rammer.cache.whole_files import write_whole
from rammer.errors import BadInput, RammerError, logger
from rammer.ir.formats import numpy_type
from rammer.onnxruntime_api.errors import Fail, InvalidArgument, InvalidProtobuf, NoSuchFile, as_errors_of_run, as_runtime_error
from rammer.onnxruntime_api.io_binding import IOBinding
from rammer.onnxruntime_api.metadata import ModelMetadata, NodeArg
from rammer.onnxruntime_api.ort_value import OrtValue
from rammer.onnxruntime_api.providers import CPU, ProviderOptions, normalize_providers, select_device, takes_cores
from rammer.onnxruntime_api.session_options import RunOptions, SessionOptions, set_default_logger_severity, warn_once
from rammer.opening import open_model
from rammer.runtime.executable import Executable

Providers = Sequence[str | tuple[str, Mapping[Any, Any]]]


class InferenceSession:
    """A model on a device. ``path_or_bytes`` is an ONNX model, or the path of a file that ``rammer compile`` wrote.

    The device is that of the first provider in ``providers`` that works here. Any thread may run the session. Shapes may change
    from run to run; ``rammer.compile`` describes how programs follow.

    Raises InvalidProtobuf, NoSuchFile, and the errors of ``rammer.compile``."""

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: SessionOptions | None = None,
        providers: Providers | None = None,
        provider_options: Sequence[Mapping[Any, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(path_or_bytes, str | bytes | os.PathLike):
            raise TypeError(f"Unable to load from type '{type(path_or_bytes)}'")
        self._model = path_or_bytes if isinstance(path_or_bytes, bytes) else Path(path_or_bytes)
        self._options = sess_options or SessionOptions()
        self._options.report_ignored()
        if self._options.log_severity_level >= 0:
            set_default_logger_severity(self._options.log_severity_level)
        self._profile = Profile(self._options.profile_file_prefix) if self._options.enable_profiling else None
        self._executable: Executable | None = None
        self._open(providers, provider_options, enable_fallback=int(kwargs.get("enable_fallback", 1)) == 1)

    def _open(self, providers: Providers | None, options: Sequence[Mapping[Any, Any]] | None, enable_fallback: bool) -> None:
        try:
            requested = normalize_providers(providers, options)
            selected = select_device(requested)
        except (ValueError, RuntimeError) as problem:
            if not enable_fallback:
                raise
            logger().warning("%s (providers: %s); using the default device", problem, providers)
            requested = {}
            selected = select_device(requested)
        provider, device, parameters = selected
        threads = self._options.intra_op_num_threads
        if threads and takes_cores(device):
            parameters["cores"] = threads
        elif threads:
            warn_once("intra_op_num_threads")
        start = time.perf_counter()
        if isinstance(self._model, Path) and not self._model.exists():
            raise NoSuchFile(f"Load model from {self._model} failed: the file does not exist", str(self._model))
        try:
            executable = open_model({"model": self._model, "device": device, **parameters})
        except BadInput as problem:
            if problem.what.startswith("not an ONNX model"):
                raise InvalidProtobuf(problem.what, problem.where, problem.hint) from problem
            raise
        self._add_event("session_initialization", start)
        if self._executable is not None:
            self._executable.close()
        self._executable = executable
        self._providers = list(dict.fromkeys([provider, CPU]))
        self._provider_options: dict[str, ProviderOptions] = {n: requested.get(n, {}) for n in self._providers}
        self._inputs, self._outputs = (
            [NodeArg.of(port, self._options.dimensions) for port in ports]
            for ports in (executable.head.inputs, executable.head.outputs)
        )

    @property
    def executable(self) -> Executable:
        """The model on the device, in rammer's own interface."""
        assert self._executable is not None
        return self._executable

    # --- metadata -----------------------------------------------------------------------------

    def get_inputs(self) -> list[NodeArg]:
        """Return the inputs in the model's order."""
        return list(self._inputs)

    def get_outputs(self) -> list[NodeArg]:
        """Return the outputs in the model's order."""
        return list(self._outputs)

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Return an empty list: initialisers are constants."""
        return []

    def get_modelmeta(self) -> ModelMetadata:
        """Return the properties that the model's producer recorded."""
        return ModelMetadata.of(self.executable)

    def get_session_options(self) -> SessionOptions:
        """Return the session's options."""
        return self._options

    def get_providers(self) -> list[str]:
        """Return the providers in use: that of the device, and the CPU for operators on the host."""
        return list(self._providers)

    def get_provider_options(self) -> dict[str, ProviderOptions]:
        """Return the options of each provider in use."""
        return dict(self._provider_options)

    def set_providers(
        self, providers: Providers | None = None, provider_options: Sequence[Mapping[Any, Any]] | None = None
    ) -> None:
        """Open the model again, on the device of the first provider that works here."""
        self._open(providers, provider_options, enable_fallback=True)

    def enable_fallback(self) -> None:
        """Return at once: a failed run raises its error, and is not repeated elsewhere."""

    def disable_fallback(self) -> None:
        """Return at once: a failed run raises its error, and is not repeated elsewhere."""

    # --- runs ---------------------------------------------------------------------------------

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: RunOptions | None = None
    ) -> list[Any]:
        """Return the outputs named, or all in the model's order. Values are NumPy arrays, lists, OrtValues or arrays of other
        libraries on the host. Raises ValueError for a missing input, and InvalidArgument for another fault of the arguments."""
        names, feeds = self._checked(output_names, input_feed)
        return self._run(names, feeds, run_options)

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[OrtValue]:
        """Return the outputs as values on the host, like ``run``."""
        return [OrtValue(array) for array in self.run(output_names, input_dict_ort_values, run_options)]

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Any], Any, str], None],
        user_data: Any,
        run_options: RunOptions | None = None,
    ) -> None:
        """Run in another thread, and then call ``callback(outputs, user_data, error)``, where ``error`` is "" after success."""
        names, feeds = self._checked(output_names, input_feed, unknown=False)

        def call() -> None:
            results, error = list[Any](), ""
            try:
                results = self._run(names, feeds, run_options)
            except RammerError as problem:
                error = str(problem)
            callback(results, user_data, error)

        self._threads.submit(call)

    def io_binding(self) -> IOBinding:
        """Return a binding of arrays to inputs and outputs."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None) -> None:
        """Run once with bound arrays, and wait. Raises RuntimeError for arrays that do not fit the model."""
        if iobinding.session is not self:
            raise ValueError("IOBinding must be used with the session that created it.")
        start = time.perf_counter()
        with as_runtime_error():
            _check_not_terminated(run_options)
            iobinding.run(self.executable)
        self._add_event("model_run", start)

    def create_ortvalue_from_shape_and_type(
        self, shape: Sequence[int], element_type: Any, device_type: str, device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """Return a value of zeros on a device."""
        return OrtValue.ortvalue_from_shape_and_type(shape, element_type, device_type, device_id)

    def _checked(
        self, output_names: Sequence[str] | None, feed: Mapping[str, Any], unknown: bool = True
    ) -> tuple[list[str], dict[str, Any]]:
        """Return the names of outputs, and the arrays of inputs."""
        feeds, given = dict[str, Any](), list(feed.keys())
        missing = [a.name for a in self._inputs if a.name not in feed and not a.type.startswith("optional")]
        if missing:
            raise ValueError(f"Required inputs ({missing}) are missing from input feed ({given}).")
        ports = {p.name: p for p in self.executable.head.inputs}
        for name, value in feed.items():
            if isinstance(value, OrtValue):
                feeds[name] = value.numpy()
            elif isinstance(value, list) and name in ports and ports[name].numeric:
                feeds[name] = np.asarray(value, numpy_type(ports[name].dtype))
            else:
                feeds[name] = value
        feeds |= {a.name: None for a in self._inputs if a.name not in feed}
        if self._options.dimensions:
            self._check_fixed_dimensions(feeds)
        known = self.executable.head.output_names
        names = list(output_names or known)
        for name in names:
            if name not in known:
                raise InvalidArgument(f"Invalid output name: {name}", hint=f"the outputs are: {', '.join(known)}")
        return names, feeds

    def _check_fixed_dimensions(self, feeds: Mapping[str, Any]) -> None:
        """Raise InvalidArgument for an extent that differs from an override of the options."""
        for arg in self._inputs:
            have = np.shape(feeds[arg.name])
            for axis, (got, want) in enumerate(zip(have, arg.shape, strict=False)):
                if isinstance(want, int) and got != want:
                    raise InvalidArgument(f"input {arg.name!r} has {got} elements along axis {axis}, not {want}")

    def _run(self, names: Sequence[str], feeds: Mapping[str, Any], run_options: RunOptions | None) -> list[Any]:
        start = time.perf_counter()
        _check_not_terminated(run_options)
        with as_errors_of_run():
            found = self.executable.run(feeds)
        self._add_event("model_run", start)
        return [found[name] for name in names]

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(thread_name_prefix="rammer-run")

    # --- profiling ----------------------------------------------------------------------------

    def _add_event(self, name: str, start: float) -> None:
        if self._profile is not None:
            timing = self._executable.timing if self._executable is not None and name == "model_run" else None
            seconds = {} if timing is None else {"device_seconds": timing.device, "host_seconds": timing.host}
            self._profile.add(name, start, seconds)

    def get_profiling_start_time_ns(self) -> int:
        """Return the start of profiling by ``time.monotonic_ns``, or 0 without profiling."""
        return self._profile.start if self._profile is not None else 0

    def end_profiling(self) -> str:
        """Write the profile as a trace for Chrome and Perfetto, and return its file name; "" without profiling."""
        profile, self._profile = self._profile, None
        return profile.write() if profile is not None else ""


class Profile:
    """The events of a session: its opening and its runs, with their seconds on the device."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.start, self._begin = prefix, time.monotonic_ns(), time.perf_counter()
        self._events: list[dict[str, Any]] = []

    def add(self, name: str, start: float, args: Mapping[str, float]) -> None:
        """Add an event that started at ``start`` by ``time.perf_counter`` and ends now."""
        now, microseconds = time.perf_counter(), 1e6
        self._events.append(
            {
                "cat": "Session",
                "pid": os.getpid(),
                "tid": threading.get_native_id(),
                "dur": round((now - start) * microseconds),
                "ts": round((start - self._begin) * microseconds),
                "ph": "X",
                "name": name,
                "args": dict(args),
            }
        )

    def write(self) -> str:
        """Write all events to a new file in the working folder, and return its name."""
        path = Path(f"{self.prefix}_{time.strftime('%Y-%m-%d_%H-%M-%S')}_{time.time_ns() // 10**6 % 1000:03}.json")
        text = json.dumps(self._events).encode()
        write_whole(path, lambda file: file.write(text))
        return str(path)


def _check_not_terminated(options: RunOptions | None) -> None:
    if options is not None and options.terminate:
        raise Fail("Exiting due to terminate flag being set to true.")
