"""Inputs and outputs bound to memory: ``python docs/examples/onnxruntime_io_binding.py MODEL``. The model adds x and y.

Code for ONNX Runtime with one line changed: the first import was ``import onnxruntime as ort``."""

import json
import sys

import numpy as np

import rammer as ort


def main(path: str, device: str = "cpu") -> None:
    """Run with arrays of the host, values on a device and allocated outputs, and print the results."""
    session = ort.InferenceSession(path, providers=ort.get_available_providers())
    x, y = np.arange(8, dtype=np.float32).reshape(2, 4), np.ones((2, 4), np.float32)
    results = {}

    binding = session.io_binding()  # arrays of the host; the runtime allocates the output
    binding.bind_cpu_input("x", x)
    binding.bind_cpu_input("y", y)
    binding.bind_output("z")
    session.run_with_iobinding(binding)
    results["allocated"] = binding.copy_outputs_to_cpu()[0].tolist()
    x += 1  # the next run reads the new values
    session.run_with_iobinding(binding)
    results["again"] = binding.get_outputs()[0].numpy().tolist()

    values = [ort.OrtValue.ortvalue_from_numpy(array, device, 0) for array in (x, y)]
    target = ort.OrtValue.ortvalue_from_shape_and_type([2, 4], np.float32, device, 0)
    binding = session.io_binding()  # values on a device, in place
    binding.bind_input("x", values[0].device_name(), 0, np.float32, values[0].shape(), values[0].data_ptr())
    binding.bind_ortvalue_input("y", values[1])
    binding.bind_ortvalue_output("z", target)
    session.run_with_iobinding(binding)
    results["value"] = [target.numpy().tolist(), target.shape(), target.data_type(), target.device_name(), target.is_tensor()]

    host = np.empty((3, 4), np.float32)
    binding.clear_binding_outputs()
    for name in ("x", "y"):
        binding.bind_cpu_input(name, np.full((3, 4), 2, np.float32))  # another batch
    binding.bind_output("z", "cpu", 0, np.float32, host.shape, host.ctypes.data)
    session.run_with_iobinding(binding)
    results["memory"] = host.tolist()

    results["feeds"] = session.run(None, {"x": values[0], "y": values[1]})[0].tolist()
    results["values"] = [v.numpy().tolist() for v in session.run_with_ort_values(["z"], {"x": values[0], "y": values[1]})]
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
