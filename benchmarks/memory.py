"""Peak memory and cached bytes of a model, cold and warm, compared with ONNX Runtime.

    python benchmarks/memory.py --device rocm --model matmul --megabytes 400

Every figure is the peak resident size (VmHWM) of a new process. ``floor`` is that of a process that opens the device and runs a
model of a few bytes, plus the size of the weights: a lower bound for any way of loading. ``shapes`` is the number of input shapes
that one Executable runs in sequence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run

#: Text of a measured process: it opens a model, runs it at every extent of its open dimension and prints its peak.
_CHILD = """
import json, resource, sys
path, device, extents, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
import numpy as np
if device == "onnxruntime":
    import onnxruntime
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    ports = [(i.name, [d if isinstance(d, int) else None for d in i.shape]) for i in session.get_inputs()]
    call = lambda feeds: session.run(None, feeds)
else:
    import rammer
    exe = rammer.compile(path, device, options=options)
    ports = [(p.name, [d if isinstance(d, int) else None for d in p.shape]) for p in exe.head.inputs]
    call = exe.run
for extent in extents:
    call({n: np.ones([d or extent for d in s], np.int64 if n == "ids" else np.float32) for n, s in ports})
usage = resource.getrusage(resource.RUSAGE_SELF)
status = open("/proc/self/status").read()  # ru_maxrss would begin with what the parent had when it forked
print(json.dumps([int(status.split("VmHWM:")[1].split()[0]) * 1024, usage.ru_utime + usage.ru_stime]))
"""
#: Device options that keep a simulation short.
OPTIONS = {"ipu_sim": {"tiles": "16", "sram": "268435456"}}
Graph = tuple[list[onnx.NodeProto], dict[str, np.ndarray], str]


def matmul(megabytes: float, width: int = 2048) -> onnx.ModelProto:
    """Return a chain of products with ``megabytes`` of weights in total."""
    count = max(1, round(megabytes * 1e6 / (width * width * 4)))
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((width, width), np.float32) / np.float32(width**0.5) for i in range(count)}
    nodes = [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"]) for i in range(count)]
    return _model(nodes, weights, ("x0", TensorProto.FLOAT, ["n", width]), f"x{count}")


def bert(megabytes: float, width: int = 512) -> onnx.ModelProto:
    """Return BERT layers (an attention and two dense layers) after an embedding with a quarter of the weights."""
    rng, nodes, weights = np.random.default_rng(0), list[onnx.NodeProto](), dict[str, np.ndarray]()

    def constant(name: str, *shape: int) -> str:
        weights[name] = rng.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5)
        return name

    def node(op: str, *inputs: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op, inputs, [f"t{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    weights |= {"heads": np.array([1, -1, 8, width // 8]), "whole": np.array([1, -1, width])}
    x = node("Gather", constant("words", int(megabytes * 1e6 / 4 / 4 / width), width), "ids")
    for i in range(max(1, round(megabytes * 1e6 * 0.75 / (12 * width * width * 4)))):
        q, k, v = (node("MatMul", x, constant(f"{n}{i}", width, width)) for n in "qkv")
        turns = {q: [0, 2, 1, 3], k: [0, 2, 3, 1], v: [0, 2, 1, 3]}
        q, k, v = (node("Transpose", node("Reshape", t, "heads"), perm=p) for t, p in turns.items())
        seen = node("MatMul", node("Softmax", node("MatMul", q, k)), v)
        flat = node("Reshape", node("Transpose", seen, perm=[0, 2, 1, 3]), "whole")
        x = node("Add", x, node("MatMul", flat, constant(f"o{i}", width, width)))
        inner = node("Relu", node("MatMul", x, constant(f"up{i}", width, 4 * width)))
        x = node("Add", x, node("MatMul", inner, constant(f"down{i}", 4 * width, width)))
        x = node("LayerNormalization", x, constant(f"scale{i}", width))
    return _model(nodes, weights, ("ids", TensorProto.INT64, [1, "n"]), x)


def _model(
    nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], port: tuple[str, int, list], last: str
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "measured",
        [helper.make_tensor_value_info(*port)],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a, n) for n, a in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


MODELS = {"matmul": matmul, "bert": bert}


def peak(path: Path, device: str, extents: list[int], cache: Path) -> tuple[int, float]:
    """Return peak bytes and CPU seconds of a new process that runs ``path`` at ``extents``."""
    environment = {**os.environ, "RAMMER_CACHE": str(cache)}
    arguments = [str(path), device, json.dumps(extents), json.dumps(OPTIONS.get(device, {}))]
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CHILD, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    return found[0], found[1]


def kept(cache: Path) -> int:
    """Return the bytes in the cache folder."""
    return sum(p.stat().st_size for p in cache.rglob("*") if p.is_file())


@click.command()
@click.option("--device", "devices", multiple=True, default=("rocm", "ipu_sim"))
@click.option("--model", "models", multiple=True, default=tuple(MODELS), type=click.Choice(list(MODELS)))
@click.option("--megabytes", default=400.0, help="Of weights.")
@click.option("--shapes", "counts", multiple=True, default=(1, 5), type=int, help="Input shapes in one process.")
@click.option("--external/--internal", "external", default=None, help="Where weights are (both, unless it is said).")
def main(
    devices: tuple[str, ...], models: tuple[str, ...], megabytes: float, counts: tuple[int, ...], external: bool | None
) -> None:
    """Measure memory and print the table, line by line."""
    show(["model", "data", "weights MB", "shapes", "what", "peak MB", "CPU s", "kept MB"])
    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(folder) / "tiny.onnx"
        onnx.save(matmul(1e-3, 16), tiny)
        for name in models:
            for outside in (False, True) if external is None else (external,):
                path = Path(folder) / f"{name}{outside}.onnx"
                proto = MODELS[name](megabytes)
                weights = sum(len(t.raw_data) for t in proto.graph.initializer)
                onnx.save(proto, path, save_as_external_data=outside, location=f"{path.stem}.data")
                del proto
                for count in counts:
                    extents = [8 * (i + 1) for i in range(count)]
                    title = [name, "external" if outside else "internal", f"{weights / 1e6:.0f}", str(count)]
                    show([*title, "onnxruntime", *_figures(peak(path, "onnxruntime", extents, Path(folder)))])
                    for device in devices:
                        _device(title, path, tiny, device, extents, weights)


def show(cells: list[str]) -> None:
    """Print one row of the table."""
    click.echo("  ".join(f"{c:<12}" for c in cells))


def _device(title: list[str], path: Path, tiny: Path, device: str, extents: list[int], weights: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        least, seconds = peak(tiny, device, [8], cache / "tiny")
        show([*title, f"{device} floor", *_figures((least + weights, seconds))])
        for what in ("cold", "warm"):
            found = peak(path, device, extents, cache / "own")
            show([*title, f"{device} {what}", *_figures(found), f"{kept(cache / 'own') / 1e6:.1f}"])


def _figures(found: tuple[int, float]) -> list[str]:
    return [f"{found[0] / 1e6:.0f}", f"{found[1]:.1f}"]


if __name__ == "__main__":
    run(main)
