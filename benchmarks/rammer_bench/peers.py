"""The entry points of ``rammer bench --peer``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from rammer.frontend.read.reader import Model
from rammer.reference.outputs import onnxruntime_session
from rammer.report.peers import OpenPeer, Prepared
from rammer.runtime.host_bound import WHOLE
from rammer_bench.graph import Array
from rammer_bench.prepare import GPU, gpu_name, names, open_peer, wall_seconds


def onnxruntime(model: Model, inputs: Mapping[str, Array], precision: str = "float32") -> Prepared:
    """Open ONNX Runtime's CPU provider on all cores. A run is timed with NumPy arrays in and out."""
    begin = time.perf_counter()
    session = onnxruntime_session(model)
    opened = time.perf_counter() - begin
    run = partial(session.run, None, dict(inputs))
    return Prepared(partial(wall_seconds, run), lambda: dict(zip(names(model.whole), run(), strict=True)), opened, WHOLE)


def _framework(name: str, model: Model, inputs: Mapping[str, Array], precision: str) -> Prepared:
    """Open a mode of torch or JAX: on the GPU if torch finds one, otherwise on the CPU."""
    gpu = gpu_name()
    return replace(open_peer(name, model.whole, inputs, GPU if gpu else "cpu", precision), hardware=gpu)


torch: OpenPeer = partial(_framework, "torch")
torch_graph: OpenPeer = partial(_framework, "torch-graph")
torch_graph_nhwc: OpenPeer = partial(_framework, "torch-graph-nhwc")
torch_compile: OpenPeer = partial(_framework, "torch-compile")
torch_compile_nhwc: OpenPeer = partial(_framework, "torch-compile-nhwc")
jax: OpenPeer = partial(_framework, "jax")
