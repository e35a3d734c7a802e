"""A deployment of Ray Serve: ``pip install 'ray[serve]'``, then ``python docs/examples/ray_serve.py``.

Ray Serve batches requests that arrive together. The batch is a range, so no batch size is compiled on its own. For a cluster,
give the deployment ``num_replicas``; every replica opens the model in its process."""

import json
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import ray
from ray import serve
from starlette.requests import Request

import rammer

LARGEST, WAIT = 16, 0.02  # requests of a batch, and seconds that the first of them waits for others


def classifier() -> onnx.ModelProto:
    """Return a dense layer and a softmax, for any number of rows."""
    return onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 21]>
        scores (float[batch,8] x) => (float[batch,4] y) {
            values = Constant <value = float[8,4] {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1, 1,1,0,0, 0,1,1,0, 0,0,1,1, 1,0,0,1}> ()
            h = MatMul(x, values)
            y = Softmax <axis = 1> (h)
        }""")


@serve.deployment(max_ongoing_requests=64)
class Scores:
    """A model that answers single rows, each with the number of rows of its run."""

    def __init__(self, model: bytes, device: str) -> None:
        self.executable = rammer.compile(model, device, shapes={"batch": (1, LARGEST)})

    @serve.batch(max_batch_size=LARGEST, batch_wait_timeout_s=WAIT)
    async def scores(self, rows: list[np.ndarray]) -> list[dict[str, object]]:
        """Return the scores of the rows of a batch."""
        found = self.executable.run({"x": np.stack(rows)})["y"]
        return [{"scores": row.tolist(), "rows": len(rows)} for row in found]

    async def __call__(self, request: Request) -> dict[str, object]:
        """Answer a POST of eight numbers."""
        return await self.scores(np.asarray(await request.json(), np.float32))


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def main(device: str = "rocm", requests: int = 48) -> list[int]:
    """Serve ``requests`` from eight clients, check the answers, and return the rows of the run of each request."""
    port, rows = free_port(), np.random.default_rng(0).standard_normal((requests, 8)).astype(np.float32)

    def ask(row: np.ndarray) -> dict[str, list[float]]:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/", json.dumps(row.tolist()).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(Scores.bind(classifier().SerializeToString(), device))
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(ask, rows))
    finally:
        serve.shutdown()
        ray.shutdown()
    with rammer.compile(classifier(), device) as single:
        want = np.concatenate([single.run(row[None])["y"] for row in rows])
    np.testing.assert_allclose([answer["scores"] for answer in answers], want, rtol=1e-5)
    sizes = [answer["rows"] for answer in answers]
    print(f"{requests} requests in runs of up to {max(sizes)} rows")
    return sizes


if __name__ == "__main__":
    main()
