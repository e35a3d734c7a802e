"""One session, many threads and batch sizes: ``python docs/examples/onnxruntime_threads.py MODEL``. The model adds x and y.

Code for ONNX Runtime with one line changed: the first import was ``import onnxruntime as ort``."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import rammer as ort


def main(path: str) -> None:
    """Run a session from four threads and asynchronously, with a profile, and print the results."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.enable_profiling = True
    options.profile_file_prefix = f"{path}.profile"
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def call(batch: int) -> float:
        x = np.full((batch, 4), batch, np.float32)
        return float(session.run(["z"], {"x": x, "y": x})[0].sum())

    with ThreadPoolExecutor(4) as threads:
        sums = list(threads.map(call, [1, 2, 3, 4] * 5))

    finished, received = threading.Event(), []

    def collect(outputs: list, user_data: object, error: str) -> None:
        received.append([outputs[0].tolist(), user_data, error])
        finished.set()

    x = np.ones((2, 4), np.float32)
    session.run_async(["z"], {"x": x, "y": x}, collect, "token")
    finished.wait(60)
    with open(session.end_profiling()) as file:
        runs = sum(event["name"] == "model_run" for event in json.load(file))
    print(json.dumps({"sums": sums, "received": received, "runs": runs, "providers": session.get_providers()}))


if __name__ == "__main__":
    main(sys.argv[1])
