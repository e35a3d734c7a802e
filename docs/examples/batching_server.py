"""A server that batches requests: ``python docs/examples/batching_server.py``.

Requests that arrive together are one run. The batch is a range, so no batch size is compiled on its own. The server uses the
standard library only; behind another server, ``Batcher`` alone is of interest."""

import json
import queue
import threading
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from onnx import ModelProto, parser

import rammer

LARGEST, WAIT = 16, 0.005  # requests of a batch, and seconds that the first of them waits for others


def classifier() -> ModelProto:
    """Return a dense layer and a softmax, for any number of rows."""
    return parser.parse_model("""<ir_version: 9, opset_import: ["" : 21]>
        scores (float[batch,8] x) => (float[batch,4] y) {
            values = Constant <value = float[8,4] {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1, 1,1,0,0, 0,1,1,0, 0,0,1,1, 1,0,0,1}> ()
            h = MatMul(x, values)
            y = Softmax <axis = 1> (h)
        }""")


class Batcher:
    """Collects single rows into runs of at most ``LARGEST`` rows. Any thread may call ``submit``."""

    def __init__(self, model: ModelProto, device: str) -> None:
        self.executable = rammer.compile(model, device, shapes={"batch": (1, LARGEST)})
        self.sizes: list[int] = []
        self._waiting: queue.Queue[tuple[np.ndarray, Future] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name="batcher")
        self._thread.start()

    def submit(self, row: np.ndarray) -> Future:
        """Return a future of the scores of one row."""
        future: Future = Future()
        self._waiting.put((row, future))
        return future

    def _serve(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch, end = [first], time.monotonic() + WAIT
            while len(batch) < LARGEST:
                try:
                    entry = self._waiting.get(timeout=max(0.0, end - time.monotonic()))
                except queue.Empty:
                    break
                if entry is None:
                    self._waiting.put(None)
                    break
                batch.append(entry)
            try:
                scores = self.executable.run(np.stack([row for row, _ in batch]))["y"]
                for (_, future), row in zip(batch, scores, strict=True):
                    future.set_result(row)
            except Exception as problem:  # each caller gets the error of its batch
                for _, future in batch:
                    future.set_exception(problem)
            self.sizes.append(len(batch))

    def close(self) -> None:
        """Answer the requests that wait, and free the device."""
        self._waiting.put(None)
        self._thread.join()
        self.executable.close()


def make_server(batcher: Batcher) -> ThreadingHTTPServer:
    """Return a server on a free port: POST a list of eight numbers, receive four scores."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                row = np.asarray(json.loads(body), np.float32)
                if row.shape != (8,):
                    raise ValueError("eight numbers are needed")
            except (ValueError, TypeError) as problem:
                return self._answer(400, {"error": str(problem)})
            self._answer(200, batcher.submit(row).result().tolist())

        def _answer(self, status: int, value: object) -> None:
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Print nothing per request."""

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def main(device: str = "rocm", requests: int = 64) -> list[int]:
    """Serve ``requests`` from eight clients, check the answers, and return the sizes of the batches."""
    batcher = Batcher(classifier(), device)
    server = make_server(batcher)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rows = np.random.default_rng(0).standard_normal((requests, 8)).astype(np.float32)

    def ask(row: np.ndarray) -> list[float]:
        asked = urllib.request.Request(f"http://127.0.0.1:{server.server_port}", json.dumps(row.tolist()).encode())
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)

    with ThreadPoolExecutor(8) as clients:
        answers = np.array(list(clients.map(ask, rows)))
    with rammer.compile(classifier(), device) as single:
        np.testing.assert_allclose(answers, np.concatenate([single.run(row[None])["y"] for row in rows]), rtol=1e-5)
    server.shutdown()
    server.server_close()
    batcher.close()
    print(f"{requests} requests in {len(batcher.sizes)} runs of up to {max(batcher.sizes)} rows")
    return batcher.sizes


if __name__ == "__main__":
    main()
