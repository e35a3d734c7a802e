"""The small model that docs/architecture.md shows at each stage; ``python -m rammer_testing.walkthrough F`` writes it."""

from __future__ import annotations

import sys

import numpy as np
import onnx
from onnx import numpy_helper, parser

_TEXT = """
<ir_version: 9, opset_import: ["" : 21]>
tiny (float[1,2,8,8] x) => (float[1,5] y) {
  [conv] c = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w_conv)
  [norm] n = BatchNormalization (c, w_scale, w_shift, w_mean, w_variance)
  [relu] r = Relu (n)
  [pool] p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (r)
  [down] d = Conv <kernel_shape = [1,1], strides = [2,2]> (r, w_down)
  [both] b = Concat <axis = 1> (p, d)
  [flat] f = Flatten (b)
  [dense] g = Gemm <transB = 1> (f, w_dense, w_bias)
  [probs] y = Softmax <axis = 1> (g)
}
"""

_WEIGHTS = {
    "w_conv": (4, 2, 3, 3),
    "w_scale": (4,),
    "w_shift": (4,),
    "w_mean": (4,),
    "w_variance": (4,),
    "w_down": (4, 4, 1, 1),
    "w_dense": (5, 128),
    "w_bias": (5,),
}


def model() -> onnx.ModelProto:
    """Return the model with fixed weights; variances are positive."""
    rng = np.random.default_rng(0)
    proto = parser.parse_model(_TEXT)
    for name, shape in _WEIGHTS.items():
        # He scale, so that the softmax does not saturate.
        scale = np.sqrt(2 / np.prod(shape[1:])) if len(shape) > 1 else 1.0
        values = (scale * rng.standard_normal(shape)).astype(np.float32)
        if name == "w_variance":
            values = np.abs(values)
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.checker.check_model(proto)
    return proto


if __name__ == "__main__":
    onnx.save(model(), sys.argv[1])
