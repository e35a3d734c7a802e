"""Peer runtimes on the same model, weights and inputs, prepared for timing on a device or on the CPU.

Every peer keeps its inputs resident where it runs. On a GPU, torch peers are timed by events around one call whose launches are
queued after a short delay. Queueing a graph thus costs nothing. Other peers are timed by the wall clock."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import onnx

from rammer.compile_options import PRECISIONS
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable
from rammer.report.peers import Prepared
from rammer_bench.graph import Array
from rammer_bench.to_torch import load_torch, to_torch

Precision: TypeAlias = Literal["float32", "tf32", "float16"]

#: Clock cycles of the delay that hides queueing: about 1 ms. Queueing a graph of 479 kernels takes up to 0.4 ms of it on a busy
#: host. With a delay of 0.1 ms NASNet-A measured 757 us, its kernels 463.
DELAY_CYCLES: Final = 2_000_000


def names(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the outputs of ``model`` in order."""
    return tuple(o.name for o in model.graph.output)


#: Name of a GPU in torch, ONNX Runtime and JAX; not a rammer device.
GPU = "cuda"


def open_peer(
    name: str, model: onnx.ModelProto, inputs: Mapping[str, Array], device: str = GPU, precision: str = "float32"
) -> Prepared:
    """Prepare peer ``name`` (a key of PEERS) on ``device`` (cuda or cpu). Raises DeviceUnavailable if the peer or the device is
    missing, BadInput if it does not support the model or precision."""
    if name not in PEERS:
        raise BadInput(f"unknown peer {name!r}", hint=f"one of: {', '.join(PEERS)}")
    if precision not in PRECISIONS:
        raise BadInput(f"unknown precision {precision!r}", hint=f"one of: {', '.join(PRECISIONS)}")
    if precision not in get_args(Precision):
        raise BadInput(f"no peer computes float32 models in {precision}", hint=f"one of: {', '.join(get_args(Precision))}")
    start = time.perf_counter()
    made = PEERS[name](model, inputs, device, precision)
    return Prepared(made.seconds, made.outputs, time.perf_counter() - start, made.timed, made.close)


def torch_device(device: str) -> Any:
    """Return the torch device. Raises DeviceUnavailable if a GPU is requested but missing."""
    torch = load_torch()
    if device == GPU and not torch.cuda.is_available():
        raise DeviceUnavailable("torch sees no CUDA GPU")
    return torch.device(device)


def gpu_name() -> str:
    """Return the name of torch's first GPU, or "" without torch or GPU."""
    try:
        torch = load_torch()
    except DeviceUnavailable:
        return ""
    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else ""


def delay(stream: Any) -> None:
    """Queue DELAY_CYCLES of idling on a CUDA ``stream`` (``ptr`` is its handle); do nothing elsewhere, or without torch."""
    if not hasattr(stream, "ptr") or not gpu_name():
        return
    torch = load_torch()
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        torch.cuda._sleep(DELAY_CYCLES)


def set_torch_precision(precision: str) -> None:
    """Enable cuDNN autotuning; use tf32 in matrix products, convolutions and recurrences only if ``precision`` requests it."""
    torch = load_torch()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def torch_module(
    model: onnx.ModelProto, inputs: Mapping[str, Array], device: str, dtype: str, channels_last: bool = False
) -> tuple[Any, list[Any]]:
    """Return the module and its resident inputs, with floats as ``dtype``."""
    torch, place = load_torch(), torch_device(device)
    kind = getattr(torch, dtype)
    form = {"memory_format": torch.channels_last} if channels_last else {}
    module = to_torch(model, {n: a.shape for n, a in inputs.items()}).to(place, kind, **form)
    feeds = [torch.from_numpy(np.ascontiguousarray(inputs[i.name])) for i in model.graph.input if i.name in inputs]
    placed = [f.to(place, kind) if f.is_floating_point() else f.to(place) for f in feeds]
    if channels_last:
        if not any(f.dim() == 4 for f in placed):
            raise BadInput("channels-last is for models with an image input")
        placed = [f.contiguous(**form) if f.dim() == 4 else f for f in placed]
    return module, placed


def float64_outputs(model: onnx.ModelProto, inputs: Mapping[str, Array], device: str) -> dict[str, Array]:
    """Return the reference: the same graph in float64 throughout."""
    torch = load_torch()
    module, feeds = torch_module(model, inputs, device, "float64")
    with torch.no_grad():
        return _fetched(model, module(*feeds))


def _fetched(model: onnx.ModelProto, tensors: Any) -> dict[str, Array]:
    return {n: np.asarray(t.detach().cpu().numpy()) for n, t in zip(names(model), tensors, strict=True)}


@dataclass(frozen=True)
class _Mode:
    """A mode of running a torch module: with torch.compile, captured as a CUDA graph, with images as NHWC."""

    compiled: bool = False
    captured: bool = False
    channels_last: bool = False


def _torch(mode: _Mode, model: onnx.ModelProto, inputs: Mapping[str, Array], device: str, precision: str) -> Prepared:
    torch = load_torch()
    set_torch_precision(precision)
    dtype = "float16" if precision == "float16" else "float32"
    module, feeds = torch_module(model, inputs, device, dtype, mode.channels_last)
    if mode.compiled:
        importlib.import_module("torch._dynamo").reset()
        module = torch.compile(module)

    def call() -> Any:
        with torch.no_grad():
            return module(*feeds)

    held = call()
    if mode.captured:
        replay, held = capture(call) if device == GPU else _no_graph()
        return Prepared(partial(event_seconds, replay), lambda: (replay(), _fetched(model, held))[1], 0.0, "GPU events")
    timer = event_seconds if device == GPU else wall_seconds
    timed = "GPU events" if device == GPU else "wall, inputs resident"
    return Prepared(partial(timer, call), lambda: _fetched(model, call()), 0.0, timed)


def _no_graph() -> tuple[Callable[[], Any], Any]:
    raise DeviceUnavailable("CUDA graphs need a GPU")


def capture(call: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """Capture ``call`` as a CUDA graph after warm-up on a side stream.

    Return its replay and the results that replays overwrite."""
    torch = load_torch()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = call()
    return graph.replay, held


def event_seconds(launch: Callable[[], Any]) -> float:
    """Return GPU seconds of the work that ``launch`` queues on torch's current stream."""
    torch = load_torch()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(DELAY_CYCLES)
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def wall_seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of a call that returns when its work is done."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _onnxruntime(model: onnx.ModelProto, inputs: Mapping[str, Array], device: str, precision: str) -> Prepared:
    """Open the CUDA provider with exhaustive convolution search in a CUDA graph, or the CPU provider on all cores."""
    try:
        runtime: Any = importlib.import_module("onnxruntime")
    except ImportError as problem:
        raise DeviceUnavailable("onnxruntime is not installed", hint="pip install onnxruntime") from problem
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    if device != GPU:
        if precision != "float32":
            raise BadInput("ONNX Runtime on the CPU is a float32 peer")
        session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        run = partial(session.run, list(names(model)), dict(inputs))
        return Prepared(
            partial(wall_seconds, run), lambda: dict(zip(names(model), run(), strict=True)), 0.0, "wall, NumPy in and out"
        )
    if "CUDAExecutionProvider" not in runtime.get_available_providers():
        raise DeviceUnavailable("this build of onnxruntime has no CUDA provider", hint="pip install onnxruntime-gpu")
    if precision == "float16":
        raise BadInput("ONNX Runtime takes its precision from the model, which is float32")
    tf32 = str(int(precision == "tf32"))
    settings = {"cudnn_conv_algo_search": "EXHAUSTIVE", "enable_cuda_graph": "1", "use_tf32": tf32}
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=[("CUDAExecutionProvider", settings)])
    return _bound_session(runtime, session, model, inputs)


def _bound_session(runtime: Any, session: Any, model: onnx.ModelProto, inputs: Mapping[str, Array]) -> Prepared:
    """Bind inputs and outputs at fixed device addresses, as ONNX Runtime's CUDA graphs need."""
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, runtime.OrtValue.ortvalue_from_numpy(array, "cuda", 0))
    for output in session.get_outputs():
        binding.bind_output(output.name, "cuda")
    run = partial(session.run_with_iobinding, binding)
    run()

    def outputs() -> dict[str, Array]:
        run()
        found = zip(session.get_outputs(), binding.get_outputs(), strict=True)
        return {o.name: v.numpy() for o, v in found}

    return Prepared(partial(wall_seconds, run), outputs, 0.0, "wall, inputs resident")


def _jax(model: onnx.ModelProto, inputs: Mapping[str, Array], device: str, precision: str) -> Prepared:
    """Open ``jax.jit`` of the whole model."""
    # By default JAX allocates three quarters of the GPU's memory, which the other peers need.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from rammer_bench.to_jax import load_jax, to_jax

    jax = load_jax()
    if device == GPU and jax.default_backend() != "gpu":
        raise DeviceUnavailable("JAX sees no GPU")
    if precision == "float16":
        raise BadInput("the JAX peer covers float32 and tf32")
    jax.config.update("jax_default_matmul_precision", "tensorfloat32" if precision == "tf32" else "highest")
    place = jax.devices("gpu" if device == GPU else "cpu")[0]
    function, weights = to_jax(model)
    weights = jax.device_put(weights, place)
    feeds = [jax.device_put(inputs[n], place) for n in inputs]
    compiled = jax.jit(lambda w, *x: function(w, dict(zip(inputs, x, strict=True)))).lower(weights, *feeds).compile()

    def call() -> Any:
        return jax.block_until_ready(compiled(weights, *feeds))

    call()
    return Prepared(
        partial(wall_seconds, call), lambda: {n: np.asarray(a) for n, a in call().items()}, 0.0, "wall, inputs resident"
    )


_Open: TypeAlias = Callable[[onnx.ModelProto, Mapping[str, Array], str, str], Prepared]

#: Functions that open a peer, by name. The nhwc ones hold images channels-last.
PEERS: Final[Mapping[str, _Open]] = {
    "torch": partial(_torch, _Mode()),
    "torch-graph": partial(_torch, _Mode(captured=True)),
    "torch-graph-nhwc": partial(_torch, _Mode(captured=True, channels_last=True)),
    "torch-compile": partial(_torch, _Mode(compiled=True, captured=True)),
    "torch-compile-nhwc": partial(_torch, _Mode(compiled=True, captured=True, channels_last=True)),
    "onnxruntime": _onnxruntime,
    "jax": _jax,
}


def relative_error(have: Mapping[str, Array], want: Mapping[str, Array]) -> float:
    """Return the largest relative L2 error over the outputs; infinite if a value is not finite or an output is missing."""
    worst = 0.0
    for name, reference in want.items():
        if name not in have or have[name].shape != reference.shape:
            raise DeviceFailure(f"output {name!r} is missing or has another shape")
        difference = have[name].astype(np.float64) - reference
        size = float(np.linalg.norm(reference))
        error = float(np.linalg.norm(difference)) / size if size else float(np.abs(difference).max())
        worst = max(worst, error if np.isfinite(error) else float("inf"))
    return worst
