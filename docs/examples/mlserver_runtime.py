"""A runtime for MLServer: ``pip install mlserver``, then ``python docs/examples/mlserver_runtime.py``.

MLServer batches requests that arrive together along their first axis. The batch is a range, so no batch size is compiled on its
own. For a server of your own, put ``RammerRuntime`` into a module on the import path, and name it in ``model-settings.json``::

    {"name": "scores", "implementation": "my_module.RammerRuntime", "max_batch_size": 16, "max_batch_time": 0.005,
     "parameters": {"uri": "model.onnx", "extra": {"device": "rocm", "batch": "batch"}}}
"""

import asyncio
import json
import socket
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

import rammer


class RammerRuntime(MLModel):
    """A model or a compiled file. ``extra`` may have a ``device``, the dimension ``batch``, and ``trust`` for a compiled file."""

    sizes: ClassVar[list[int]] = []  # of the batches of all models

    async def load(self) -> bool:
        """Open the model, and compile it for the batches that MLServer forms."""
        parameters = self.settings.parameters
        extra = dict(parameters.extra or {})
        largest, batch = self.settings.max_batch_size, extra.pop("batch", "")
        shapes = {batch: (1, largest)} if batch and largest > 1 else {}
        self.executable = rammer.compile(parameters.uri, extra.pop("device", ""), shapes=shapes, **extra)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Run one request or one batch of requests. Others wait in the device's queue, not in the event loop."""
        inputs = {tensor.name: NumpyCodec.decode_input(tensor) for tensor in payload.inputs}
        outputs = await asyncio.wrap_future(self.executable.submit(inputs))
        self.sizes.append(len(next(iter(outputs.values()))))
        encoded = [NumpyCodec.encode_output(name, np.asarray(array)) for name, array in outputs.items()]
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=encoded)

    async def unload(self) -> bool:
        """Free the device."""
        self.executable.close()
        return True


def classifier() -> onnx.ModelProto:
    """Return a dense layer and a softmax, for any number of rows."""
    return onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 21]>
        scores (float[batch,8] x) => (float[batch,4] y) {
            values = Constant <value = float[8,4] {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1, 1,1,0,0, 0,1,1,0, 0,0,1,1, 1,0,0,1}> ()
            h = MatMul(x, values)
            y = Softmax <axis = 1> (h)
        }""")


def free_ports(count: int) -> list[int]:
    """Return free ports of this machine."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def ask(port: int, row: np.ndarray) -> list[float]:
    """Return the scores of one row, by the Open Inference Protocol."""
    tensor = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": row.tolist()}
    url = f"http://127.0.0.1:{port}/v2/models/scores/infer"
    request = urllib.request.Request(url, json.dumps({"inputs": [tensor]}).encode(), headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["outputs"][0]["data"]


def is_ready(port: int) -> bool:
    """Return True if the server answers requests to the model."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/scores/ready", timeout=60):
            return True
    except OSError:
        return False


async def serve(folder: Path, device: str, rows: np.ndarray) -> np.ndarray:
    """Serve the rows from eight clients. Return the answers."""
    onnx.save(classifier(), folder / "model.onnx")
    http, grpc, metrics = free_ports(3)
    server = MLServer(Settings(host="127.0.0.1", http_port=http, grpc_port=grpc, metrics_port=metrics, parallel_workers=0))
    parameters = {"uri": str(folder / "model.onnx"), "extra": {"device": device, "batch": "batch"}}
    model = ModelSettings(
        name="scores", implementation=RammerRuntime, max_batch_size=16, max_batch_time=0.01, parameters=parameters
    )
    running = asyncio.create_task(server.start([model]))
    try:
        with ThreadPoolExecutor(8) as clients:
            loop = asyncio.get_running_loop()
            while not running.done() and not await loop.run_in_executor(clients, is_ready, http):
                await asyncio.sleep(0.05)
            answers = await asyncio.gather(*(loop.run_in_executor(clients, ask, http, row) for row in rows))
        await server.stop()
        await running
    finally:
        running.cancel()
    return np.array(answers)


def main(device: str = "rocm", requests: int = 48) -> list[int]:
    """Serve ``requests``, check the answers, and return the sizes of the batches."""
    sizes = RammerRuntime.sizes
    sizes.clear()
    rows = np.random.default_rng(0).standard_normal((requests, 8)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        answers = asyncio.run(serve(Path(folder), device, rows))
    with rammer.compile(classifier(), device) as single:
        np.testing.assert_allclose(answers, np.concatenate([single.run(row[None])["y"] for row in rows]), rtol=1e-5)
    print(f"{requests} requests in {len(sizes)} runs of up to {max(sizes)} rows")
    return sizes


if __name__ == "__main__":
    main()
