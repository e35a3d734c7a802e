"""Reference results: outputs of ONNX Runtime, of ONNX's evaluator or of a file, and rounding ties of quantised models."""
