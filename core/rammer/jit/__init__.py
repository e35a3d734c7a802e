"""Models that are compiled while they run: opening of ONNX models, programs for new shapes, control flow on the host."""
