"""One model on every device that works here: ``python docs/examples/several_devices.py``.

Each device runs the same table of tasks, so results differ by rounding only. For one model spread over several devices, see
docs/design/distributed.md."""

import numpy as np
from onnx import ModelProto, parser

import rammer


def attention() -> ModelProto:
    """Return products around a softmax."""
    return parser.parse_model("""<ir_version: 9, opset_import: ["" : 21]>
        attention (float[16,32] q, float[16,32] k, float[16,32] v) => (float[16,32] y) {
            t = Transpose <perm = [1, 0]> (k)
            s = MatMul(q, t)
            w = Softmax <axis = 1> (s)
            y = MatMul(w, v)
        }""")


def main() -> dict[str, float]:
    """Return the relative error of each device against float64."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 16, 32)).astype(np.float32)
    scores = q.astype(np.float64) @ k.T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    want = weights / weights.sum(axis=1, keepdims=True) @ v
    errors = {}
    for status in rammer.devices():
        if status.state != "ok":
            print(f"{status.name}: {status.state}, {status.reason}")
            continue
        options = {"tiles": "16"} if status.name == "ipu_sim" else {}
        with rammer.compile(attention(), status.name, options=options) as exe, exe.bind([q, k, v]) as bound:
            seconds = bound.seconds()
            have = bound.to_host()["y"]
        errors[status.name] = float(np.linalg.norm(have - want) / np.linalg.norm(want))
        print(f"{status.name}: error {errors[status.name]:.1e}, {seconds * 1e6:.1f} us by {bound.clock}")
    return errors


if __name__ == "__main__":
    main()
