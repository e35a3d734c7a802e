"""A session with its inputs, outputs and metadata: ``python docs/examples/onnxruntime_quickstart.py MODEL``.

Code for ONNX Runtime with one line changed: the first import was ``import onnxruntime as ort``."""

import json
import sys

import numpy as np

import rammer as ort


def main(path: str) -> None:
    """Run a model on arrays of ones, with open dimensions of three elements, and print what the session returns."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = ort.InferenceSession(path, sess_options=options, providers=ort.get_available_providers())
    feeds = {}
    for node in session.get_inputs():
        shape = [n if isinstance(n, int) else 3 for n in node.shape]
        feeds[node.name] = np.ones(shape, {"tensor(float)": np.float32, "tensor(int64)": np.int64}[node.type])
    outputs = session.run(None, feeds)
    (first,) = session.run([session.get_outputs()[0].name], feeds)
    meta = session.get_modelmeta()
    report = {
        "inputs": [(node.name, node.type, node.shape) for node in session.get_inputs()],
        "outputs": [(node.name, node.type, node.shape) for node in session.get_outputs()],
        "values": [array.tolist() for array in outputs],
        "first": first.tolist(),
        "model": [meta.graph_name, meta.producer_name, meta.domain, meta.version, meta.description, meta.custom_metadata_map],
        "device": ort.get_device(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
