"""ONNX's own tests (``onnx.backend.test``) on a device: what passes, what needs the host, what is declined, what is wrong."""
