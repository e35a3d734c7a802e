"""Peer runtimes that ``rammer bench --peer`` compares with: ONNX Runtime, PyTorch and JAX."""
