"""Rulings on the ONNX specification where implementations disagree."""
