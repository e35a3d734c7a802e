"""A decoder step with a key-value cache that grows in place: ``python docs/examples/decoder_cache.py``.

Each step reads one token and the cache, and writes one new row of the cache. The cache stays on the device."""

import numpy as np
from onnx import ModelProto, parser

import rammer

WIDTH, LONGEST = 32, 64


def decoder_step() -> ModelProto:
    """Return attention of one token over ``past`` earlier ones."""
    return parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 21]>
        step (float[1,{WIDTH}] x, float[past,{WIDTH}] past_k, float[past,{WIDTH}] past_v,
              float[{WIDTH},{WIDTH}] wq, float[{WIDTH},{WIDTH}] wk, float[{WIDTH},{WIDTH}] wv)
          => (float[1,{WIDTH}] y, float[total,{WIDTH}] present_k, float[total,{WIDTH}] present_v) {{
            q = MatMul(x, wq)
            k = MatMul(x, wk)
            v = MatMul(x, wv)
            present_k = Concat <axis = 0> (past_k, k)
            present_v = Concat <axis = 0> (past_v, v)
            keys = Transpose <perm = [1, 0]> (present_k)
            scores = MatMul(q, keys)
            weights = Softmax <axis = 1> (scores)
            y = MatMul(weights, present_v)
        }}""")


def attention(tokens: np.ndarray, wq: np.ndarray, wk: np.ndarray, wv: np.ndarray) -> np.ndarray:
    """Return the output for the last token, computed from all tokens in float64."""
    tokens = tokens.astype(np.float64)
    scores = (tokens[-1:] @ wq) @ (tokens @ wk).T
    weights = np.exp(scores - scores.max())
    return weights / weights.sum() @ (tokens @ wv)


def main(device: str = "rocm", steps: int = 24) -> float:
    """Decode ``steps`` tokens and return the largest relative error against attention over all tokens."""
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((steps, WIDTH)).astype(np.float32)
    weights = {name: (rng.standard_normal((WIDTH, WIDTH)) / 8).astype(np.float32) for name in ("wq", "wk", "wv")}
    worst = 0.0
    with rammer.compile(decoder_step(), device, shapes={"past": (0, LONGEST - 1)}) as exe:
        states = {"present_k": "past_k", "present_v": "past_v"}  # each output continues the input in its memory
        with exe.bind({"x": tokens[:1].copy(), **weights}, states) as bound:
            for n in range(steps):
                bound.write({"x": tokens[n : n + 1]})
                bound.run(past=n)
                have, want = bound.to_host("y")["y"], attention(tokens[: n + 1], **weights)
                worst = max(worst, float(np.linalg.norm(have - want) / np.linalg.norm(want)))
    print(f"{steps} tokens, largest relative error {worst:.1e}")
    return worst


if __name__ == "__main__":
    main()
